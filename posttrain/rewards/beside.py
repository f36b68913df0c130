"""Calls beside the main thread: those with a deadline, and those of async functions.

The main thread waits, so that a signal is answered at once. Threads cannot be ended from outside: a call that is given
up runs on, in a daemon thread, which does not keep the process from ending.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextvars import Context, copy_context
from queue import SimpleQueue
from typing import Any

from posttrain.errors import RewardError

MOST_LATE = 4  # calls of a function that run on after their deadline at a time
GRACE_S = 0.25  # in which an async function has to end once it is cancelled


class OverdueError(RewardError):
    """A reward function has given no answer in time."""


class Beside:
    """The calls of one function, one at a time, in one thread with one event loop while deadlines are kept.

    So what the function has opened there, such as a client's connections, serves the next call too.
    """

    def __init__(self, name: str):
        self._name = name
        self._worker: _Worker | None = None
        self._late: set[Future[Any]] = set()

    def call(self, function: Callable[[], Any], timeout: float | None) -> Any:
        """What the function returns, or comes to if that is awaitable; what it raises is raised here.

        Raises OverdueError after `timeout` seconds. What is awaited is cancelled then; anything else runs on. Beside
        MOST_LATE such calls there is no further one: this one waits for an end of theirs, within its own deadline.
        """
        until = None if timeout is None else time.monotonic() + timeout
        self._wait_for_room(until)
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
            raise OverdueError(f"{self._name} gave no answer within {timeout:g} s")
        return call.result()

    def _wait_for_room(self, until: float | None) -> None:
        if len(self._late) >= MOST_LATE:
            wait(self._late, timeout=_left(until), return_when=FIRST_COMPLETED)
        self._late = {call for call in self._late if not call.done()}

    def close(self) -> None:
        """Let the thread end."""
        if self._worker is not None:
            self._worker.leave()
            self._worker = None


def _left(until: float | None) -> float | None:
    return None if until is None else max(until - time.monotonic(), 0.0)


class _Worker(threading.Thread):
    """Makes calls in their order until it is left. Started by the first."""

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
        """Whether the call has ended, or never began: what is awaited is cancelled, and given a moment."""
        if call.cancel():
            return True
        if self._cancel_task():
            wait([call], timeout=GRACE_S)
        return call.done()

    def leave(self) -> None:
        """Cancel what is awaited, and end after the call under way."""
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
                except BaseException as error:  # raised where the answer is waited for
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
