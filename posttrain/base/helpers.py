"""Helper processes: kept idle for the next task, as one takes half a second or more to start; none outlives us."""

import atexit
import os
import sys
import threading
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

from posttrain.base.system import has_input

IDLE_SECONDS = 60.0  # how long an idle process is kept


class Helper(Protocol):
    """A process that can be reused."""

    @property
    def is_free(self) -> bool:
        """Whether it is alive and idle."""
        ...

    def end(self) -> None:
        """Kill it. May be called again."""
        ...


P = TypeVar("P", bound=Helper)


class HelperPool(Generic[P]):
    """Keeps idle processes by their kind, the arguments they were started with. Thread-safe; one pool per program.

    All are terminated at interpreter exit, and none outlives a killed program.
    """

    def __init__(self) -> None:
        self._forget()
        atexit.register(self.end_all)
        if hasattr(os, "register_at_fork"):  # a fork shares the parent's pipes, so it starts its own processes
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[P, tuple[Hashable, threading.Timer]] = {}

    def take(self, kind: Hashable) -> P | None:
        """The process of this kind that was put last, or None."""
        while (process := self._pop(kind)) is not None:
            if process.is_free:
                return process
            process.end()
        return None

    def put(self, kind: Hashable, process: P, seconds: float | None = None) -> None:
        """Keep it for some seconds, by default IDLE_SECONDS; end it now if it is not free."""
        if not process.is_free:
            process.end()
            return
        timer = threading.Timer(IDLE_SECONDS if seconds is None else seconds, self._drop, [process])
        timer.daemon = True
        with self._lock:
            self._kept[process] = (kind, timer)
        try:
            timer.start()
        except RuntimeError:  # the interpreter is exiting
            self._drop(process)

    def end_all(self) -> None:
        """End all kept processes."""
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
        if timer is not None:  # else `take` has just returned it
            timer.cancel()
            process.end()


def end_with_parent(parent: int | None = None) -> None:
    """End this process when its standard input is closed or its parent has changed, also if the parent was killed."""
    parent = os.getppid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == parent:
            if has_input(sys.stdin.fileno(), 1.0) and not os.read(sys.stdin.fileno(), 1):
                break
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
