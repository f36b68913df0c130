"""The best model so far, and early stopping: once evaluations stop improving, or because a watcher says so."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from posttrain.config import RunConfig
from posttrain.errors import RunError
from posttrain.reports.headline import lower_is_better
from posttrain.store.run import Run
from posttrain.training.state import State

log = logging.getLogger("posttrain")


class Watch(Protocol):
    """Sees every evaluation of a run but the last, and may end it after a step by setting `stop_at` to its number."""

    stop_at: int | None

    def look(self, step: int, metrics: Mapping[str, float]) -> None: ...


class Best:
    """Saves `best/` when checkpoint.best_metric improves, and decides on early stopping."""

    def __init__(self, config: RunConfig, run: Run, save: Callable[[Path, int], None], watch: Watch | None = None):
        self._watch = watch
        self._metric, self._patience = config.best_metric, config.checkpoint.early_stopping_patience
        self._run, self._save = run, save

    def look(self, metrics: Mapping[str, float], state: State) -> None:
        """Process an evaluation's metrics. Raises RunError if best_metric is not among them."""
        name = self._metric
        if name is None:
            return
        if name not in metrics:
            raise RunError(
                f"checkpoint.best_metric is {name}, but the evaluation measures only {', '.join(sorted(metrics))}"
            )
        value, best = metrics[name], state.best
        if not math.isfinite(value):
            log.warning("step %d: %s is not finite, so it is not the best", state.step, name)
        elif best is None or (value < best if lower_is_better(name) else value > best):
            state.best, state.evaluations_since_best = value, 0
            self._save(self._run.best, state.step)
            return
        state.evaluations_since_best += 1

    def is_overdue(self, state: State) -> bool:
        """Whether the last `early_stopping_patience` evaluations brought no improvement, or the watcher ends the
        run."""
        return self._is_stopped(state) or (
            self._patience is not None and state.evaluations_since_best >= self._patience
        )

    def _is_stopped(self, state: State) -> bool:
        return self._watch is not None and self._watch.stop_at is not None and state.step >= self._watch.stop_at

    def report(self, state: State) -> None:
        """Log that training ends early; a watcher gives its own reason."""
        if self._is_stopped(state):
            return
        log.info(
            "stopped early: %s no longer improves on %s. best/ has that model, final/ the last one",
            self._metric,
            state.best,
        )
