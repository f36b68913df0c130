"""Signal handlers for a while."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from posttrain.errors import Stopped


@contextmanager
def handling(handler: Callable[[int, object], None], *numbers: signal.Signals) -> Iterator[None]:
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
