"""The best model so far, and early stopping: when evaluations stop improving, or when a watcher ends the run."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from posttrain.base.distributions import t_quantile
from posttrain.base.errors import RunError
from posttrain.base.log import log
from posttrain.base.words import counted
from posttrain.config import RunConfig
from posttrain.config.schema.evaluation import is_one_of
from posttrain.evaluation.statistics import wilson
from posttrain.runs.run import Run
from posttrain.training.state import State

FEW = 20  # number of evaluation rows below which a warning is logged


class Watch(Protocol):
    """Receives every evaluation of a run but the last, and may end the run after step N by setting `stop_at` to N."""

    stop_at: int | None

    def look(self, step: int, metrics: Mapping[str, float]) -> None: ...


def set_of(config: RunConfig, metric: str) -> str:
    """The name of the validation set that `metric` is measured on."""
    named = {entry.name for entry in config.evaluation.datasets} - {"validation"}
    sets = sorted(named, key=len, reverse=True)
    return next((name for name in sets if metric.startswith(prefix_of(name))), "validation")


def prefix_of(name: str) -> str:
    """The prefix of the metrics of a validation set: `eval_`, or `eval_{set}_` if it has a name of its own."""
    return "eval_" if name == "validation" else f"eval_{name}_"


class Best:
    """Saves `best/` when checkpoint.best_metric improves, and decides on early stopping.

    `rows` is the number of rows that an evaluation measures the metric on; if it is small, a warning is logged.
    """

    def __init__(
        self,
        config: RunConfig,
        run: Run,
        save: Callable[[Path, int], None],
        watch: Watch | None = None,
        rows: int | None = None,
    ):
        self._watch = watch
        self._metric, self._patience = config.best_metric, config.checkpoint.early_stopping_patience
        self.half_loss: dict[str, float | None] = {}  # half the 95 % interval of a validation set's loss, where known
        self._run, self._save, self._rows = run, save, rows
        if self._metric is None:
            return
        self._lower, self._ties = bool(config.lower_is_better(self._metric)), config.behavior_version >= 2
        self._set = set_of(config, self._metric)
        self._loss = f"{prefix_of(self._set)}loss"
        ties = "; the lower loss breaks ties" if self._ties and self._metric != self._loss else ""
        reason = "" if config.checkpoint.best_direction == "auto" else " (checkpoint.best_direction)"
        extreme = "lowest" if self._lower else "highest"
        log.info("best/ has the model with the %s %s%s%s", extreme, self._metric, reason, ties)
        if rows is not None and rows < FEW:
            what = "best/" if self._patience is None else "best/ and early stopping"
            low, high = wilson(0.5, rows)
            log.warning(
                "%s decides %s on %s, fewer than %d: a share of 0.5 then has a 95 %% interval of %.2f to %.2f. "
                "Hold out more rows (data.validation)",
                self._metric, what, counted(rows, "row"), FEW, low, high,
            )  # fmt: skip

    def look(self, metrics: Mapping[str, float], state: State) -> None:
        """Process an evaluation's metrics. Raises RunError if best_metric is not among them."""
        name = self._metric
        if name is None:
            return
        if name not in metrics:
            raise RunError(
                f"checkpoint.best_metric is {name}, but the evaluation measures only {', '.join(sorted(metrics))}"
            )
        value, best, loss = metrics[name], state.best, metrics.get(self._loss)
        state.evaluations_since_best += 1
        if not math.isfinite(value):
            log.warning("step %d: %s is not finite, so it is not the best", state.step, name)
            return
        better = best is None or (value < best if self._lower else value > best)
        closer = self._ties and loss is not None and state.best_loss is not None and loss < state.best_loss
        if better:
            state.evaluations_since_best = 0
            log.info("step %d: the best %s so far: %.4g%s", state.step, name, value, self._interval(metrics))
        if better or (value == best and closer):
            state.best, state.best_loss = value, loss
            self._save(self._run.best, state.step)

    def _interval(self, metrics: Mapping[str, float]) -> str:
        """The metric's 95 % interval as text; empty if the evaluation's numbers do not determine it."""
        name, rows = str(self._metric), self._rows
        value, low, high = metrics[name], metrics.get(f"{name}_low"), metrics.get(f"{name}_high")
        if low is None and rows and 0 <= value <= 1 and is_one_of("shares", name):
            low, high = wilson(value, rows)
        elif low is None and rows and rows > 1 and f"{name}_std" in metrics:
            half = t_quantile(0.95, rows - 1) * metrics[f"{name}_std"] / math.sqrt(rows)
            low, high = value - half, value + half
        elif name == self._loss and (half := self.half_loss.get(self._set)) is not None:
            low, high = value - half, value + half
        if low is None or high is None:
            return ""
        of = f" of {counted(rows, 'row')}" if rows else ""
        return f" (95 % interval {low:.3g} to {high:.3g}{of})"

    def is_overdue(self, state: State) -> bool:
        """Whether the watcher ends the run, or `early_stopping_patience` evaluations in a row did not improve."""
        return self._is_stopped(state) or (
            self._patience is not None and state.evaluations_since_best >= self._patience
        )

    def _is_stopped(self, state: State) -> bool:
        return self._watch is not None and self._watch.stop_at is not None and state.step >= self._watch.stop_at

    def report(self, state: State) -> None:
        """Log that training ends early; a watcher gives its own reason."""
        if self._is_stopped(state):
            return
        improves = "stopped early: %s no longer improves on %s. best/ has that model, and final/ has the last one"
        log.info(improves, self._metric, state.best)
