"""Ending a run when a signal asks for it: after the step under way, or sooner where that takes too long."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from posttrain.errors import Stopped
from posttrain.signals import handling

log = logging.getLogger("posttrain")

PATIENCE_S = 3.0  # how long a step may go on after a signal; what sends SIGTERM kills 10 s later at the earliest


class GivenUpError(KeyboardInterrupt):
    """A signal came while nothing had changed yet.

    A KeyboardInterrupt, so that neither an `except Exception` in a reward's code nor asyncio's event loop keeps it.
    """


class LeaveAtOnceError(KeyboardInterrupt):
    """A second Ctrl-C: nothing is to be saved."""


class Stop:
    """Whether SIGINT or SIGTERM asks the run to end, and what follows from that."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._when = 0.0
        self._may_give_up = False

    @property
    def asked(self) -> bool:
        return self._signal is not None

    @property
    def overdue(self) -> bool:
        """Whether what is under way has gone on for too long since the signal."""
        return self.asked and time.monotonic() - self._when > PATIENCE_S

    def listening(self) -> AbstractContextManager[None]:
        """Take note of signals inside the block; a second SIGINT leaves at once."""
        return handling(self._note, signal.SIGINT, signal.SIGTERM, again=self._raise_again)

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """For work that changes nothing: a signal raises GivenUpError in the middle of it, or at its end at the latest,
        where the code inside has kept the error to itself."""
        self._may_give_up = True
        try:
            if self.asked:
                raise GivenUpError
            yield
            self._may_give_up = False
            if self.asked:
                raise GivenUpError
        finally:
            self._may_give_up = False

    def leave_if_asked(self) -> None:
        """End the process in good order, with a status that says by which signal."""
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt("stopped by Ctrl-C; go on with --resume")
        if self._signal is not None:
            raise Stopped(self._signal)

    def _note(self, number: int, frame: object) -> None:
        if self.asked and number == signal.SIGINT:
            raise LeaveAtOnceError
        first = not self.asked
        self._signal, self._when = signal.Signals(number), time.monotonic()
        if self._may_give_up and first:
            raise GivenUpError
        log.warning("%s: finishing the step, then saving a checkpoint (again to leave at once)", self._signal.name)

    def _raise_again(self, error: BaseException) -> None:
        if self._may_give_up or not isinstance(error, GivenUpError):  # else the block that was to be left has ended
            raise error
