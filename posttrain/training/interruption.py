"""What a signal does to the work under way: it is finished, or abandoned where that takes too long."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from posttrain.memory import return_free_pages
from posttrain.training.saving import Saver
from posttrain.training.stopping import GivenUpError, Stop

log = logging.getLogger("posttrain")

Batch = TypeVar("Batch")


class Interruption:
    """Ends a run that a signal asks to end; an abandoned step counts as never started."""

    def __init__(self, stop: Stop, saver: Saver):
        self._stop, self._saver = stop, saver

    def while_patient(self, packs: Sequence[Batch]) -> Iterator[Batch]:
        """The packs of an update, which is abandoned where it is far from done some seconds after a signal."""
        for pack in packs:
            if self._stop.overdue:
                self.abandon("takes too long to finish")
            yield pack

    @contextmanager
    def sampling(self, evaluating: bool = False) -> Iterator[None]:
        """While completions are sampled and scored: nothing has changed yet, so a signal abandons that at once."""
        return_free_pages()
        try:
            with self._stop.giving_up():
                yield
                return_free_pages()
        except GivenUpError:
            self.abandon("" if evaluating else "takes too long to finish")

    def abandon(self, why: str = "") -> None:
        """Leave in the middle of a step, or of an evaluation; the checkpoint is of the last finished step."""
        if why:
            log.warning("step %d %s: it is given up", self._saver.finished_step + 1, why)
        self._saver.save_finished()
        self._stop.leave_if_asked()
