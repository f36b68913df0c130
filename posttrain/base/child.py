"""Child processes that exchange lines with this program, with deadlines, and never outlive it.

A child ends when its standard input closes, which also happens when this program is killed. For this to work, the
child must read its input to the end or call `end_with_parent`. (Workers with hostile code: grading/process.py.)
"""

import atexit
import contextlib
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from tempfile import TemporaryFile
from typing import Generic, Protocol, Self, TypeVar

IDLE_SECONDS = 60.0  # seconds that an idle process is kept
SLICE_S = 0.1  # longest single wait in `line`: Windows handles Ctrl-C only between waits


class Child:
    """A running command. Its lines are bytes that include the line break. Any thread may end it or query its state.

    `errors`: keep the child's stderr for `last_words`; otherwise it goes to this program's stderr. `session`: start the
    child in a new session, which Ctrl-C in the terminal does not reach; killing the child kills the whole session.
    `grace`: seconds that the child has to end after its input is closed, before it is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        errors: bool = True,
        session: bool = False,
        grace: float = 0.0,
    ):
        self._errors = TemporaryFile() if errors else None  # noqa: SIM115 (open as long as the process)
        self._session, self._grace = session, grace
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
            start_new_session=session,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.end()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def status(self, seconds: float) -> int | None:
        """The child's exit status, negative for a signal; None if it is still running after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def send(self, lines: Iterable[bytes]) -> None:
        """Write lines to the child's standard input, in another thread because a full pipe blocks the writer."""
        threading.Thread(target=self._write, args=[lines], daemon=True).start()

    def line(self, seconds: float, start: bytes = b"") -> bytes:
        """Return the next line that begins with `start`.

        Raises TimeoutError after `seconds`, and EOFError if the child has ended. Any exception during the wait also
        ends the child, because a late line would be taken for the next reply.
        """
        until = time.monotonic() + seconds
        try:
            while True:
                left = until - time.monotonic()
                try:
                    line = self._lines.get(timeout=min(max(left, 0.0), SLICE_S))
                except queue.Empty:
                    if left <= 0:
                        raise TimeoutError from None
                    continue
                if not line:
                    break
                if line.startswith(start):
                    return line
        except BaseException:
            self.end()
            raise
        self._lines.put(line)
        raise EOFError

    def output(self, seconds: float) -> bytes:
        """Close the child's input and return all its output. Ends it after `seconds`, and raises TimeoutError."""
        until, lines = time.monotonic() + seconds, list[bytes]()
        self._close_input()
        with contextlib.suppress(EOFError):
            while True:
                lines.append(self.line(until - time.monotonic()))
        return b"".join(lines)

    def last_words(self) -> str:
        """The child's stderr so far; empty after `end`."""
        if self._errors is None or self._errors.closed:
            return ""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip()

    def kill(self) -> None:
        """Kill the child without waiting for its end."""
        if not self.is_alive:
            return
        if self._session and hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile, and another thread reaped it
                os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()

    def end(self) -> None:
        """Close the child's input, and kill the child if it does not end in time. May be called again."""
        if self._grace:
            self._close_input()
            self.status(self._grace)
        self.kill()
        self._process.wait()
        self._close_input()
        if self._errors is not None:
            self._errors.close()

    def _close_input(self) -> None:
        with contextlib.suppress(OSError):  # unread input is discarded
            self._input.close()

    def _write(self, lines: Iterable[bytes]) -> None:
        with contextlib.suppress(OSError, ValueError):  # the child has ended, which `line` reports
            self._input.writelines(lines)
            self._input.flush()

    def _read(self) -> None:
        with self._output:
            for line in self._output:
                self._lines.put(line)
        self._lines.put(b"")


class Helper(Protocol):
    """A process that can be reused while it `is_free`: alive and idle."""

    @property
    def is_free(self) -> bool: ...

    def end(self) -> None: ...


P = TypeVar("P", bound=Helper)


class HelperPool(Generic[P]):
    """Keeps idle processes for reuse, by kind: the arguments they were started with. Thread-safe; one per program. All
    processes are terminated at interpreter exit, and none outlives a killed program."""

    def __init__(self) -> None:
        self._forget()
        atexit.register(self.end_all)
        if hasattr(os, "register_at_fork"):  # a forked process shares the parent's pipes, so it starts its own helpers
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[P, tuple[Hashable, threading.Timer]] = {}

    def take(self, kind: Hashable) -> P | None:
        """Take the most recently added process of this kind out of the pool; None if there is none."""
        while True:
            with self._lock:
                process = next((kept for kept in reversed(self._kept) if self._kept[kept][0] == kind), None)
                if process is not None:
                    self._kept.pop(process)[1].cancel()
            if process is None or process.is_free:
                return process
            process.end()

    def put(self, kind: Hashable, process: P, seconds: float | None = None) -> None:
        """Keep the process for `seconds`, by default IDLE_SECONDS. A process that is not free is ended at once."""
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

    def _drop(self, process: P) -> None:
        with self._lock:
            _, timer = self._kept.pop(process, (None, None))
        if timer is not None:  # otherwise `take` has just returned the process
            timer.cancel()
            process.end()


def end_with_parent(parent: int | None = None) -> None:
    """End this process when its standard input closes or its parent changes, which also detects a killed parent."""
    parent = os.getppid() if parent is None else parent

    def watch() -> None:
        while os.getppid() == parent:
            can_read = os.name == "nt" or select.select([sys.stdin], [], [], 1.0)[0]  # Windows selects only sockets
            if can_read and not os.read(sys.stdin.fileno(), 1):
                break
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
