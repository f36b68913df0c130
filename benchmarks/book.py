"""An environment for TRL and for posttrain: a book that is read page by page. It imports nothing slow."""

PAGES = 7


class Book:
    """A book whose pages are read by a tool."""

    def reset(self, **row) -> None:
        self.calls = 0

    def read(self, page: int) -> str:
        """
        Read a page of the book.

        Args:
            page: number of the page
        """
        self.calls += 1
        return f"Page {page} of {PAGES}. The cat sleeps." + (f" Go on with page {page + 1}." if page < PAGES else "")


def by_turns(completions, environments, **columns):
    """A reward that differs between the episodes of a prompt, so that there is something to learn."""
    return [environment.calls + number % 2 for number, environment in enumerate(environments)]
