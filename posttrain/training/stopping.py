"""Ending a run on a signal: after the current step, or sooner if that takes too long."""

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from posttrain.base.errors import Stopped
from posttrain.base.signals import handling
from posttrain.parallel.ranks import Ranks

log = logging.getLogger("posttrain")

PATIENCE_S = 3.0  # how long a step may run after a signal; schedulers kill 10 s after SIGTERM at the earliest


class GivenUpError(KeyboardInterrupt):
    """A signal came while nothing had changed yet.

    A KeyboardInterrupt, so that neither an `except Exception` in a reward's code nor asyncio's event loop catches it.
    """


class LeaveAtOnceError(KeyboardInterrupt):
    """A second Ctrl-C: nothing is saved."""


class Stop:
    """Records SIGINT and SIGTERM, which ask the run to end, and ends it."""

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._when = 0.0
        self._may_give_up = False

    @property
    def asked(self) -> bool:
        return self._signal is not None

    @property
    def overdue(self) -> bool:
        """Whether the current work has taken too long since the signal."""
        return self.asked and time.monotonic() - self._when > PATIENCE_S

    def agree(self, ranks: Ranks) -> None:
        """A signal that one rank has received asks all of them to end."""
        found = next((number for number in ranks.gather(self._signal) if number is not None), None)
        if found is not None and self._signal is None:
            self._signal, self._when = found, time.monotonic()

    def listening(self) -> AbstractContextManager[None]:
        """Record signals inside the block; a second SIGINT leaves at once."""
        return handling(self._note, signal.SIGINT, signal.SIGTERM, again=self._raise_again)

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """A context for work that changes nothing: a signal raises GivenUpError inside it, or at its end if the code
        inside has caught the error."""
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
        """End the process cleanly, with the exit status of the signal."""
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt("stopped by Ctrl-C; continue with --resume")
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
        if self._may_give_up or not isinstance(error, GivenUpError):  # else the `giving_up` block has ended already
            raise error
