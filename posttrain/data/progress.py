"""A progress bar for work that turns out to take longer than two seconds."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

SECONDS = 2.0


class Progress:
    """Shows on stderr how many rows are done, once two seconds have passed."""

    def __init__(self, title: str, shown: bool):
        self.title = title
        self.shown = shown
        self.done = 0
        self.begin = time.monotonic()
        self.bar: RichProgress | None = None

    def __enter__(self) -> Progress:
        return self

    def advance(self, rows: int) -> None:
        """Count rows."""
        self.done += rows
        if self.shown and self.bar is None and time.monotonic() - self.begin > SECONDS:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} rows"))
            console = Console(file=sys.stderr)
            self.bar = RichProgress(*columns, TimeElapsedColumn(), console=console, transient=True)
            self.bar.add_task(self.title, total=None)
            self.bar.start()
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=self.done)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
