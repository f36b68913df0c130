"""Calls outside the main thread: those with a deadline, and those of async functions.

The main thread waits, so that it handles signals at once. Threads cannot be killed: an abandoned call continues in a
daemon thread, which does not prevent the process from ending.
"""

import asyncio
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextvars import Context, copy_context
from queue import SimpleQueue
from typing import Any

from posttrain.base.errors import RewardError

MOST_LATE = 4  # maximum number of a function's calls that run beyond their deadline
GRACE_S = 0.25  # time for a cancelled async function to end


class OverdueError(RewardError):
    """A reward function has exceeded its deadline."""


class Beside:
    """The calls of one function, one at a time, in one thread with one event loop as long as deadlines are met.

    So resources of the function, such as a client's connections, stay usable for the next call.
    """

    def __init__(self, name: str):
        self._name = name
        self._worker: _Worker | None = None
        self._late: set[Future[Any]] = set()

    def call(self, function: Callable[[], Any], timeout: float | None) -> Any:
        """The function's result, awaited if necessary; its exceptions are raised here.

        Raises OverdueError after `timeout` seconds. A coroutine is cancelled then; a plain call continues. While
        MOST_LATE such calls are running, a further call waits for one of them to end, within its own deadline.
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
        """End the thread."""
        if self._worker is not None:
            self._worker.leave()
            self._worker = None


def _left(until: float | None) -> float | None:
    return None if until is None else max(until - time.monotonic(), 0.0)


class _Worker(threading.Thread):
    """Makes calls in order until it is abandoned. Started by the first call."""

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
        """Whether the call has ended or never started; cancels a coroutine and waits a moment."""
        if call.cancel():
            return True
        if self._cancel_task():
            wait([call], timeout=GRACE_S)
        return call.done()

    def leave(self) -> None:
        """Cancel the coroutine, and end after the current call."""
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
