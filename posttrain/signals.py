"""Signal handlers for a while."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from posttrain.errors import Stopped

log = logging.getLogger("posttrain")


@contextmanager
def handling(handler: Callable[[int, object], None] | signal.Handlers, *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals so inside the block. Outside the main thread, where Python allows no handlers, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def leave(number: int, frame: object) -> None:
    """End the process in good order, as Ctrl-C does: folders are closed and their state is written."""
    raise Stopped(number)


@contextmanager
def deferring(doing: str) -> Iterator[list[int]]:
    """Finish the block in spite of SIGINT and SIGTERM, whose numbers it gives; a second SIGINT leaves it at once."""
    came: list[int] = []

    def note(number: int, frame: object) -> None:
        if came and number == signal.SIGINT:
            raise KeyboardInterrupt
        came.append(number)
        log.warning("%s: %s first (again to leave at once)", signal.Signals(number).name, doing)

    with handling(note, signal.SIGINT, signal.SIGTERM):
        yield came
