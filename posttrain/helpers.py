"""Helper processes between two tasks. One takes half a second or more to start, so it stays a while for the next."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

IDLE_SECONDS = 60.0  # how long a process waits for the next task


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


class HelperPool(Generic[P]):
    """Keeps processes that are free, by their kind: what they were started with. One for all threads, made once.

    None outlives the program; one that ends in peace ends them first.
    """

    def __init__(self) -> None:
        self._forget()
        atexit.register(self.end_all)
        if hasattr(os, "register_at_fork"):  # what was forked has the parent's pipes: it starts processes of its own
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[P, tuple[Hashable, threading.Timer]] = {}

    def take(self, kind: Hashable) -> P | None:
        """A process of this kind, the one put last, if there is one."""
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

    def end_all(self) -> None:
        """End all that are kept."""
        for process in list(self._kept):
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
            _, timer = self._kept.pop(process, (None, None))
        if timer is not None:  # else it has just been taken
            timer.cancel()
            process.end()
