"""Output without a reader: the reader of a pipe has ended (`posttrain train … | head`), or a terminal was closed.

    with enduring(): ...      # discards further output and continues
    with quitting(): ...      # ends the process silently, as other tools do

Both wrap `sys.stdout` and `sys.stderr`. Once a write fails, the file descriptor is redirected to the null device, so
that no other user of it fails.
"""

import errno
import logging
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from posttrain.base.signals import handling
from posttrain.base.system import HANGUP

log = logging.getLogger("posttrain")

# A pipe's reader (Windows calls it an invalid argument), a terminal, a socket's peer.
GONE = {errno.EPIPE, errno.EIO, errno.ESHUTDOWN, errno.ECONNRESET} | ({errno.EINVAL} if os.name == "nt" else set())
QUIT = 141  # exit status of a shell for a process that SIGPIPE ended


class _Stream:
    """A text stream that survives the loss of its reader; with `quits` it ends the process instead."""

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
    # A stream is None if the process was started without it.
    sys.stdout, sys.stderr = (cast(TextIO, stream and _Stream(stream, quits)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def enduring() -> Iterator[None]:
    """Continue without output when its reader ends or the terminal is closed (SIGHUP)."""

    def note(number: int, frame: object) -> None:
        log.warning("the terminal was closed: continuing without it")

    hang_up = [HANGUP] if HANGUP is not None and signal.getsignal(HANGUP) is signal.SIG_DFL else []
    with _wrapped(quits=False), handling(note, *hang_up):
        yield


@contextmanager
def quitting() -> Iterator[None]:
    """End silently when the reader of the output ends."""
    with _wrapped(quits=True):
        yield
