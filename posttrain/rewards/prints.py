"""What a reward function prints becomes lines of the log with its name: above a live bar, which it would tear."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO, cast

log = logging.getLogger("posttrain")

# Whose prints these are, in whatever thread or task; PASSING while a line of theirs is on its way through the log.
_speaker: ContextVar[str | None] = ContextVar("speaker", default=None)
PASSING = ""


@contextmanager
def speaking(name: str) -> Iterator[None]:
    """Log, line by line, what is written to `sys.stdout` and `sys.stderr` in this context, as "name: line".

    Other threads, a live bar among them, write where they did. Without a log of ours (posttrain/store/logs.py), as in a
    notebook, nothing changes.
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
        if sys.stdout is lines[0]:  # else the function has put a stream of its own there
            sys.stdout = before[0]
        if sys.stderr is lines[1]:
            sys.stderr = before[1]
        for stream in lines:
            stream.end()
        _speaker.reset(token)


class _Lines:
    """In place of a stream: takes what a speaker writes, and lets others through."""

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
        """Whether it is not in use any more, but in a logger of the user's, who would be told of the line twice."""
        return self is not sys.stdout and self is not sys.stderr

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if not _speaker.get() and self._stream is not None:
            self._stream.flush()

    def end(self) -> None:
        """Log the line that was begun last."""
        self.write("\n")

    @property
    def rich_proxied_file(self) -> object:
        """The stream that rich draws a live bar on."""
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
