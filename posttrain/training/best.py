"""The best model so far, and early stopping once evaluations stop improving."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from posttrain.config import RunConfig
from posttrain.errors import RunError
from posttrain.store.run import Run
from posttrain.training.state import State

log = logging.getLogger("posttrain")


class Best:
    """Saves `best/` when checkpoint.best_metric improves, and decides on early stopping."""

    def __init__(self, config: RunConfig, run: Run, write_model: Callable[[Path], None]):
        self._metric, self._patience = config.best_metric, config.checkpoint.early_stopping_patience
        self._run, self._write_model = run, write_model

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
        elif best is None or (value < best if name.endswith("loss") else value > best):
            state.best, state.evaluations_since_best = value, 0
            self._run.save_model(self._run.best, state.step, self._write_model)
            return
        state.evaluations_since_best += 1

    def is_overdue(self, state: State) -> bool:
        """Whether the last `early_stopping_patience` evaluations brought no improvement."""
        return self._patience is not None and state.evaluations_since_best >= self._patience

    def report(self, state: State) -> None:
        """Log that training ends early."""
        log.info(
            "stopped early: %s no longer improves on %s. best/ has that model, final/ the last one",
            self._metric,
            state.best,
        )
