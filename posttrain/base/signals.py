"""Temporary signal handlers, work in threads, and a wait that signals interrupt."""

import concurrent.futures
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from posttrain.base.errors import Stopped
from posttrain.base.log import log

T = TypeVar("T")
SLICE_S = 0.2  # seconds of one wait for a future
RESEND_S = 0.01  # seconds until a signal is sent again: by then the code that dropped the exception has returned

ENDS = (KeyboardInterrupt, Stopped)  # what handlers raise to end the program; code may catch subclasses of them
_outer: list[dict[int, BaseException]] = []  # of the blocks that the main thread is in: what their handlers raised


def result_of(future: Future[T]) -> T:
    """The future's result. Waits in slices, because a signal just before a wait is handled only when the wait ends."""
    while not future.done():
        concurrent.futures.wait([future], SLICE_S)
    return future.result()


def in_thread(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a thread that does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _raise(error: BaseException) -> None:
    raise error


@contextmanager
def handling(
    handler: Callable[[int, object], None] | signal.Handlers,
    *numbers: signal.Signals,
    again: Callable[[BaseException], None] = _raise,
) -> Iterator[None]:
    """Use `handler` for the signals inside the block. Only the main thread can; in other threads, does nothing.

    Python drops an exception that is raised in a `__del__`, in a weak reference's callback or in a callback from C. If
    Python drops an exception of `handler` there, the signal is sent again, and `again` is called with that exception
    instead of `handler`; by default, `again` raises it. Other code may catch it (`except: pass` in a library that is
    being imported): the next `handling` block for the signal inside this one then raises it at its beginning.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    for outer in _outer:
        for number in set(numbers) & outer.keys():
            if type(error := outer.pop(number)) in ENDS and not _is_handled(error):
                raise error
    raised: dict[int, BaseException] = {}  # signal number -> what its handler raised last
    dropped: list[BaseException] = []

    def call(number: int, frame: object) -> None:
        try:
            if dropped:
                again(dropped.pop())
            elif callable(handler):
                handler(number, frame)
        except BaseException as error:
            raised[number] = error
            raise

    def resend(unraisable: Any) -> None:
        for number, error in raised.items():
            if unraisable.exc_value is error:
                dropped.append(error)
                threading.Timer(RESEND_S, _send, [number]).start()
                return
        hook(unraisable)

    hook, sys.unraisablehook = sys.unraisablehook, resend
    installed = call if callable(handler) else handler
    before = {number: signal.signal(number, installed) for number in numbers}
    _outer.append(raised)
    try:
        yield
    finally:
        _outer.pop()
        for number, old in before.items():
            signal.signal(number, old)
        sys.unraisablehook = hook


def _is_handled(error: BaseException) -> bool:
    """Whether this runs in an `except` or `finally` block, or in an `__exit__`, because of the exception."""
    current = sys.exception()
    while current is not None and current is not error:
        current = current.__context__
    return current is error


def _send(number: int) -> None:
    """Send a signal to the main thread, which handles signals, so that it interrupts a blocking call there."""
    if hasattr(signal, "pthread_kill") and (main := threading.main_thread().ident):
        signal.pthread_kill(main, number)
    else:
        signal.raise_signal(number)


def leave(number: int, frame: object) -> None:
    """End the process cleanly, as Ctrl-C does: folders are closed and their state is written."""
    raise Stopped(number)


@contextmanager
def deferring(doing: str) -> Iterator[list[int]]:
    """Finish the block despite SIGINT and SIGTERM, and yield the list of received signal numbers. A SIGINT after the
    first signal interrupts the block."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        log.warning("%s: %s first (again to leave at once)", signal.Signals(number).name, doing)

    with handling(note, signal.SIGINT, signal.SIGTERM):
        yield received
