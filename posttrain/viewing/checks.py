"""The vital checks of a run and what they found, as far as its files tell: a check that fails ends the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from posttrain.config.schema.methods import METHODS
from posttrain.reports.series import Series
from posttrain.viewing.runs import Row


@dataclass(frozen=True, slots=True)
class Check:
    what: str
    outcome: str  # passed, failed, waiting
    found: str


@dataclass(frozen=True, slots=True)
class _Known:
    what: str
    fails: str  # how the reason of a failed run starts, or continues
    when: str
    is_of: Callable[[str], bool] = lambda method: True


def _samples(method: str) -> bool:
    return method in METHODS and METHODS[method].samples_completions


KNOWN = (
    _Known("A pack gives what plain transformers gives one sequence at a time", "packed = unpacked", "the first step"),
    _Known("Margins are 0 before the first update", "margins are not 0", "the first step",
           lambda method: method in ("dpo", "kto", "grpo", "rloo", "reinforce_plus_plus", "ppo")),
    _Known("Ratios are 1 before the first update", "ratio = 1 fails", "the first step",
           lambda method: _samples(method) and method != "distill"),
    _Known("The first update changes trained tensors, and no frozen one", "tensor moved", "the first update"),
    _Known("The engine samples from the weights of the trainer", "sampler = trainer", "every step", _samples),
    _Known("Loss and gradient are finite", "in a row", "every step"),
    _Known("Saved weights are finite", "weights are not finite", "every checkpoint"),
)  # fmt: skip


def checks_of(row: Row, series: Series) -> list[Check]:
    """Every check of the run's method. Passed: the run has made a step, and did not end by this check."""
    found = []
    for known in KNOWN:
        if known.is_of(row.method):
            failed = row.state == "failed" and known.fails in row.problem
            outcome = "failed" if failed else "passed" if row.step > 0 else "waiting"
            measured = row.problem if failed else _measured(known, series)
            found.append(Check(known.what, outcome, f"{known.when}{f': {measured}' if measured else ''}"))
    return found


def _measured(known: _Known, series: Series) -> str:
    """What the metrics say about it."""
    if known.fails == "sampler = trainer":
        rms, sizes = (
            _finite(series, f"sampling/{name}") for name in ("sampling_logp_difference/rms", "effective_sample_size")
        )
        if rms:
            least = f", effective sample size at least {min(sizes):.4f}" if sizes else ""
            return f"log-probabilities differ by at most {max(rms):.2g} nats (root mean square of a step){least}"
    if known.fails == "in a row":
        skipped = _finite(series, "skipped_steps")
        return (
            f"{skipped[-1]:.0f} steps were skipped" if skipped else "no step was skipped" if len(series.steps) else ""
        )
    return ""


def _finite(series: Series, metric: str) -> list[float]:
    return [value for value in series.points(metric)[1] if math.isfinite(value)]
