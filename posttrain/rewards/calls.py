"""Calls to the user's functions: deadlines and coroutines, output, and settings that functions must not change.

Calls with a deadline and calls to async functions run in another thread. The main thread waits, so that it handles
signals at once. Threads cannot be killed: an abandoned call continues in a daemon thread, which does not prevent the
process from ending.
"""

import asyncio
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from queue import SimpleQueue
from typing import Any, TextIO, cast

from posttrain.base.errors import RewardError
from posttrain.base.log import log

MOST_LATE = 4  # maximum number of a function's calls that run beyond their deadline
GRACE_S = 0.25  # time for a cancelled async function to end
# The function that writes output in this thread or task; PASSING while a line of its output is being logged.
_writer: ContextVar[str | None] = ContextVar("writer", default=None)
PASSING = ""


class OverdueError(RewardError):
    """A reward function has exceeded its deadline."""


class ChangedError(RewardError):
    """A user's function has changed a process setting that training relies on."""


class Caller:
    """Calls one function in another thread, one call at a time. As long as deadlines are met, all calls run in the same
    thread and event loop, so that resources of the function, such as a client's connections, remain usable."""

    def __init__(self, name: str):
        self._name = name
        self._worker: _Worker | None = None
        self._late: set[Future[Any]] = set()

    def call(self, function: Callable[[], Any], timeout: float | None) -> Any:
        """Return the function's result, awaited if necessary; exceptions of the function are raised here.

        Raises OverdueError after `timeout` seconds. A coroutine is then cancelled, but a plain call continues. While
        MOST_LATE late calls are running, a new call waits for one of them to end, within the new call's deadline.
        """
        until = None if timeout is None else time.monotonic() + timeout
        if len(self._late) >= MOST_LATE:
            wait(self._late, timeout=_left(until), return_when=FIRST_COMPLETED)
        self._late = {call for call in self._late if not call.done()}
        if len(self._late) >= MOST_LATE:
            raise OverdueError(f"{self._name} was not called: {MOST_LATE} earlier calls have not ended yet")
        worker, self._worker = self._worker or _Worker(), None
        call = worker.begin(function)
        ended = False
        try:
            wait([call], timeout=_left(until))
            late = not call.done()
            ended = not late or worker.cancel(call)
        finally:
            if ended:
                self._worker = worker
            else:
                worker.leave()
                self._late.add(call)
        if late:
            raise OverdueError(f"{self._name} did not return within {timeout:g} s")
        return call.result()

    def close(self) -> None:
        """End the thread."""
        if self._worker is not None:
            self._worker.leave()
            self._worker = None


def _left(until: float | None) -> float | None:
    return None if until is None else max(until - time.monotonic(), 0.0)


class _Worker(threading.Thread):
    """A thread that makes calls in order until it is abandoned. The first call starts it."""

    def __init__(self) -> None:
        super().__init__(name="posttrain-reward", daemon=True)
        self._calls: SimpleQueue[tuple[Context, Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._runner = asyncio.Runner()
        self._task: asyncio.Task[Any] | None = None

    def begin(self, function: Callable[[], Any]) -> Future[Any]:
        call: Future[Any] = Future()
        self._calls.put((copy_context(), function, call))
        if self.ident is None:
            self.start()
        return call

    def cancel(self, call: Future[Any]) -> bool:
        """Cancel a call; a coroutine has GRACE_S seconds to end. Returns whether the call ended or never started."""
        if call.cancel():
            return True
        if self._cancel_task():
            wait([call], timeout=GRACE_S)
        return call.done()

    def leave(self) -> None:
        """Cancel a running coroutine, and end the thread after the current call."""
        self._cancel_task()
        self._calls.put(None)

    def _cancel_task(self) -> bool:
        task = self._task
        if task is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)
        return task is not None

    def run(self) -> None:
        for context, function, call in iter(self._calls.get, None):
            if call.set_running_or_notify_cancel():
                try:
                    call.set_result(context.run(self._made, function))
                except BaseException as error:  # raised in the waiting thread
                    call.set_exception(error)
        self._runner.close()

    def _made(self, function: Callable[[], Any]) -> Any:
        made = function()
        return self._runner.run(self._awaited(made), context=copy_context()) if inspect.isawaitable(made) else made

    async def _awaited(self, made: Awaitable[Any]) -> Any:
        self._task = asyncio.current_task()
        try:
            return await made
        finally:
            self._task = None


# --- output -----------------------------------------------------------------------------------------------------------


@contextmanager
def output_logged(name: str) -> Iterator[None]:
    """Log what this context writes to `sys.stdout` or `sys.stderr` as lines "name: line", to keep progress bars intact.
    Other threads write as before. Without the handlers of posttrain/runs/logs.py, as in a notebook, nothing changes."""
    if not any(handler.level <= logging.INFO for handler in log.handlers):
        yield
        return
    before = sys.stdout, sys.stderr
    lines = [_Lines(stream) for stream in before]
    token = _writer.set(name)
    sys.stdout, sys.stderr = (cast(TextIO, stream) for stream in lines)
    try:
        yield
    finally:
        if sys.stdout is lines[0]:  # otherwise the function has replaced the stream
            sys.stdout = before[0]
        if sys.stderr is lines[1]:
            sys.stderr = before[1]
        for stream in lines:
            stream.write("\n")  # ends an unfinished last line
        _writer.reset(token)


class _Lines:
    """Replaces a stream: captures the output of a reward function, and passes on other output."""

    def __init__(self, stream: TextIO | None):
        self._stream, self._begun = stream, ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        writer = _writer.get()
        if writer:
            with self._lock:
                *lines, self._begun = (self._begun + text).split("\n")
            for line in filter(str.strip, lines):
                token = _writer.set(PASSING)
                try:
                    log.info("%s: %s", writer, line)
                finally:
                    _writer.reset(token)
        # A stream that only a user's logger still holds would log the line twice.
        elif self._stream is not None and (writer != PASSING or self in (sys.stdout, sys.stderr)):
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if not _writer.get() and self._stream is not None:
            self._stream.flush()

    @property
    def rich_proxied_file(self) -> object:
        """The stream on which rich shows a live bar."""
        return self if _writer.get() else getattr(self._stream, "rich_proxied_file", self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# --- settings of the process ------------------------------------------------------------------------------------------


@contextmanager
def unchanged(name: str, home: str | None = None, over: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Run a user's code in this context: restores the working directory (to `home`), and ends a forked child that
    returns.

    If `over()` is true at the end, the call ended long after its deadline; the directory, which may be right by then,
    is left unchanged.

    Settings of Python and torch with which the run would compute different numbers or fail far from the cause are
    restored as well; then ChangedError is raised.
    """
    process, folder, before = os.getpid(), home or os.getcwd(), _state()
    failed = True
    try:
        yield
        failed = False
    finally:
        if os.getpid() != process:  # the child would continue as a second trainer in the same folder
            said = f"{name} has forked a process that returned; it is ended here (it should call os._exit)\n"
            os.write(2, said.encode())
            os._exit(1)
        if (now := folder_of_process()) != folder and not over():
            os.chdir(folder)
            log.warning("%s changed the working directory to %s: it is restored", name, now or "a deleted folder")
        after = _state()
        changed = [what for what in before if after[what][0] != before[what][0]]
        for what in changed:
            before[what][1](before[what][0])
    if changed and not failed:
        raise ChangedError(
            f"{name} changed "
            + ", ".join(f"{what} from {before[what][0]} to {after[what][0]}" for what in changed)
            + ", which the run relies on: restore it in the function, or run that code in a separate process"
        )


def folder_of_process() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _state() -> dict[str, tuple[Any, Callable[[Any], Any]]]:
    """Settings of the process and thread, each with its setter."""
    state: dict[str, Any] = {"the recursion limit": (sys.getrecursionlimit(), sys.setrecursionlimit)}
    torch: Any = sys.modules.get("torch")
    if hasattr(torch, "get_default_device"):
        state["torch's default dtype"] = torch.get_default_dtype(), torch.set_default_dtype
        device = torch.get_default_device()
        state["torch's default device"] = device, lambda to: torch.set_default_device(None if to.type == "cpu" else to)
        state["torch's gradient mode"] = torch.is_grad_enabled(), torch._C._set_grad_enabled
    return state
