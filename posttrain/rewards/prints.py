"""Output of a reward function becomes lines of the log with its name, so that it does not break a progress bar."""

import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO, cast

log = logging.getLogger("posttrain")

# The function that prints, in any thread or task; PASSING while one of its lines goes through the log.
_speaker: ContextVar[str | None] = ContextVar("speaker", default=None)
PASSING = ""


@contextmanager
def speaking(name: str) -> Iterator[None]:
    """Log, line by line, what is written to `sys.stdout` and `sys.stderr` in this context, as "name: line".

    Other threads, such as a progress bar's, write as before. Without our log handlers (posttrain/runs/logs.py), as in
    a notebook, nothing changes.
    """
    if not any(handler.level <= logging.INFO for handler in log.handlers):
        yield
        return
    before = sys.stdout, sys.stderr
    lines = [_Lines(stream) for stream in before]
    token = _speaker.set(name)
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in lines)
    try:
        yield
    finally:
        if sys.stdout is lines[0]:  # else the function has replaced the stream
            sys.stdout = before[0]
        if sys.stderr is lines[1]:
            sys.stderr = before[1]
        for stream in lines:
            stream.end()
        _speaker.reset(token)


class _Lines:
    """Replaces a stream: captures the output of a reward function, and passes on that of others."""

    def __init__(self, stream: TextIO | None):
        self._stream, self._begun = stream, ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        speaker = _speaker.get()
        if speaker:
            with self._lock:
                *lines, self._begun = (self._begun + text).split("\n")
            for line in lines:
                _log(speaker, line)
        elif self._stream is not None and not (speaker == PASSING and self._is_kept):
            self._stream.write(text)
        return len(text)

    @property
    def _is_kept(self) -> bool:
        """Whether it is still used only by a logger of the user's, which would log the line twice."""
        return self is not sys.stdout and self is not sys.stderr

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if not _speaker.get() and self._stream is not None:
            self._stream.flush()

    def end(self) -> None:
        """Log the unfinished last line."""
        self.write("\n")

    @property
    def rich_proxied_file(self) -> object:
        """The stream on which rich shows a live bar."""
        return self if _speaker.get() else getattr(self._stream, "rich_proxied_file", self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _log(speaker: str, line: str) -> None:
    if not line.strip():
        return
    token = _speaker.set(PASSING)
    try:
        log.info("%s: %s", speaker, line)
    finally:
        _speaker.reset(token)
