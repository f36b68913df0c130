"""The console for tables and strings, and progress display: a live bar on a terminal, an occasional line elsewhere."""

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sized
from typing import Any, TypeVar

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from posttrain.base.terminal import harmless


class PlainConsole(Console):
    """rich's console for untrusted strings: no markup or emoji, secrets hidden, control characters shown as escapes."""

    def __init__(self, stderr: bool = False):
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **settings: Any) -> Text:
        """As in rich, but makes the text harmless first, so that a table's column widths fit it."""
        return super().render_str(harmless(text), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As in rich, but also escapes `Text` objects, which do not pass through `render_str`."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


def numbers_table(*columns: str) -> Table:
    """A narrow table: a first column of names, which wraps, and right-aligned columns of numbers, which do not wrap."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(columns[0], overflow="fold")
    for name in columns[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def text_table(*columns: str, left: Collection[str], title: str | None = None) -> Table:
    """A table whose cells wrap. The columns in `left` have text; the others are right-aligned, as numbers are."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    return table


def cells_of(table: Table) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of a rich table, as strings."""
    header = [str(column.header) for column in table.columns]
    rows = zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True)
    return header, [list(row) for row in rows]


PATIENCE_S = 2.0  # seconds before any progress is shown
LINE_EVERY_S = 30.0  # seconds between two lines, without a terminal
Item = TypeVar("Item")


def progress(
    items: Iterable[Item], description: str, total: int | None = None, console: Console | None = None
) -> Iterator[Item]:
    """Iterate over `items` and show the progress after the first two seconds; `total` is by default their number."""
    total = len(items) if total is None and isinstance(items, Sized) else total
    with counter(description, total, console) as count:
        for item in items:
            yield item
            count()


@contextlib.contextmanager
def counter(description: str, total: int | None, console: Console | None = None) -> Iterator[Callable[[], None]]:
    """Context manager that yields a function to call after every item, and shows the progress as `progress` does."""
    console, description = console or PlainConsole(stderr=True), harmless(description)
    next_line = time.monotonic() + PATIENCE_S
    shown: Progress | None = None
    done = 0

    def count() -> None:
        nonlocal shown, done, next_line
        done += 1
        now = time.monotonic()
        if shown:
            shown.update(shown.task_ids[0], completed=done)
        elif now >= next_line and console.is_terminal:
            shown = bar(console, TimeRemainingColumn())
            shown.add_task(description, total=total, completed=done)
            shown.start()
        elif now >= next_line:
            next_line = now + LINE_EVERY_S
            share = f" of {total} ({done / total:.0%})" if total else ""
            console.print(f"{description}: {done}{share}", soft_wrap=True)

    try:
        yield count
    finally:
        if shown:
            shown.stop()


def bar(console: Console, *columns: TextColumn | TimeRemainingColumn, width: int | None = None) -> Progress:
    """A progress bar with a name, a count and further columns; as wide as the console unless `width` is given."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=width),
        MofNCompleteColumn(),
        *columns,
        console=console,
        expand=True,
    )
