"""Progress display: a live bar on a terminal, an occasional line elsewhere, so that a log file is not flooded."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from posttrain.base.console import PlainConsole
from posttrain.base.terminal import visible

PATIENCE_S = 2.0  # shorter work shows nothing
LINE_EVERY_S = 30.0  # without a terminal
Item = TypeVar("Item")


def progress(
    items: Iterable[Item], description: str, total: int | None = None, console: Console | None = None
) -> Iterator[Item]:
    """Iterate over `items` and show the progress after the first two seconds.

    `total` is the number of items, by default the length of `items` if it has one. Without a terminal: a line every 30
    seconds.
    """
    total = len(items) if total is None and isinstance(items, Sized) else total
    with counter(description, total, console) as count:
        for item in items:
            yield item
            count()


@contextlib.contextmanager
def counter(description: str, total: int | None, console: Console | None = None) -> Iterator[Callable[[], None]]:
    """Context with a function to call after every item; shows as `progress` does."""
    console, description = console or PlainConsole(stderr=True), visible(description)
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
    """A bar with a name, a count and further columns; as wide as the console unless `width` is given."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=width),
        MofNCompleteColumn(),
        *columns,
        console=console,
        expand=True,
    )
