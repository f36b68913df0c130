"""Helper processes between two tasks. One takes half a second or more to start, so it stays a while for the next."""

from __future__ import annotations

import os
import threading
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

IDLE_SECONDS = 60.0  # how long a process waits for the next task; each holds some 60 MB


class Helper(Protocol):
    """A process that can be handed on."""

    @property
    def is_free(self) -> bool:
        """Whether it lives and owes no answer."""
        ...

    def end(self) -> None:
        """Kill it, whatever it is doing. May be called again."""
        ...


P = TypeVar("P", bound=Helper)


class Idle(Generic[P]):
    """Keeps processes that are free, by their kind: what they were started with. One for all threads, made once."""

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):  # what was forked has the parent's pipes: it starts processes of its own
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[P, tuple[Hashable, threading.Timer]] = {}

    def take(self, kind: Hashable) -> P | None:
        """A process of this kind, the one used last, if there is one."""
        while (process := self._pop(kind)) is not None:
            if process.is_free:
                return process
            process.end()
        return None

    def put(self, kind: Hashable, process: P) -> None:
        """Keep it for some time; end it now if it is not free."""
        if not process.is_free:
            process.end()
            return
        timer = threading.Timer(IDLE_SECONDS, self._drop, [process])
        timer.daemon = True
        with self._lock:
            self._kept[process] = (kind, timer)
        try:
            timer.start()
        except RuntimeError:  # this program is ending
            self._drop(process)

    def _pop(self, kind: Hashable) -> P | None:
        with self._lock:
            for process in reversed(self._kept):
                if self._kept[process][0] == kind:
                    self._kept.pop(process)[1].cancel()
                    return process
        return None

    def _drop(self, process: P) -> None:
        with self._lock:
            if self._kept.pop(process, None) is None:
                return  # it has just been taken
        process.end()
