"""What is said to nobody: the reader of a pipe has gone (`posttrain train … | head`), or a terminal was closed.

    with enduring(): ...      # output goes nowhere from then on, and the work goes on
    with quitting(): ...      # the process ends without a word, as other tools do

Python code writes to `sys.stdout` and `sys.stderr`, which are wrapped here. Once one fails, its file descriptor leads
to the null device, so that nothing that has it can fail again.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from posttrain.signals import handling

log = logging.getLogger("posttrain")

# A pipe's reader (Windows calls it an invalid argument), a terminal, a socket's peer.
GONE = {errno.EPIPE, errno.EIO, errno.ESHUTDOWN, errno.ECONNRESET} | ({errno.EINVAL} if os.name == "nt" else set())
QUIT = 141  # what a shell says of a process that SIGPIPE has ended


class _Stream:
    """A text stream that survives the loss of its reader, or with `quits` ends the process then."""

    def __init__(self, stream: TextIO, quits: bool):
        self._stream, self._quits = stream, quits

    def write(self, text: str) -> int:
        with self._survived():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        with self._survived():
            self._stream.writelines(lines)

    def flush(self) -> None:
        with self._survived():
            self._stream.flush()

    @contextmanager
    def _survived(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in GONE:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
            if self._quits:
                raise SystemExit(QUIT) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _wrapped(quits: bool) -> Iterator[None]:
    before = sys.stdout, sys.stderr
    # None where a process was started without one.
    sys.stdout, sys.stderr = (cast(TextIO, stream and _Stream(stream, quits)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def enduring() -> Iterator[None]:
    """Go on when nobody reads any more, and when the terminal is closed (SIGHUP)."""

    def note(number: int, frame: object) -> None:
        log.warning("the terminal was closed: going on without it")

    hang_up = [signal.SIGHUP] if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL else []
    with _wrapped(quits=False), handling(note, *hang_up):
        yield


@contextmanager
def quitting() -> Iterator[None]:
    """End without a word when nobody reads any more."""
    with _wrapped(quits=True):
        yield
