"""The effect of a signal on the current work: it is finished, or abandoned if that takes too long."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from posttrain.memory import return_free_pages
from posttrain.models.sharding import whole
from posttrain.training.saving import Saver
from posttrain.training.stopping import GivenUpError, Stop

log = logging.getLogger("posttrain")

Batch = TypeVar("Batch")


class Interruption:
    """Ends a run on a signal; an abandoned step counts as never started."""

    def __init__(self, stop: Stop, saver: Saver):
        self._stop, self._saver = stop, saver

    def while_patient(self, packs: Sequence[Batch]) -> Iterator[Batch]:
        """The packs of an update. Between packs, abandons the update if a signal came more than PATIENCE_S ago."""
        for pack in packs:
            if self._stop.overdue:
                self.abandon("takes too long to finish")
            yield pack

    @contextmanager
    def sampling(self, evaluating: bool = False) -> Iterator[None]:
        """A context for sampling and scoring with the whole model, on each rank by itself: nothing has changed yet, so
        a signal abandons the work at once."""
        return_free_pages()
        try:
            with whole(self._saver.policy), self._stop.giving_up():
                yield
                return_free_pages()
        except GivenUpError:
            self.abandon("" if evaluating else "takes too long to finish")

    def abandon(self, why: str = "") -> None:
        """Leave a step or an evaluation unfinished, and save a checkpoint of the last finished step."""
        if why:
            log.warning("step %d %s: it is abandoned", self._saver.finished_step + 1, why)
        self._saver.save_finished()
        self._stop.leave_if_asked()
