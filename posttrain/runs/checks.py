"""The checks of a run, as recorded in run.json and shown in lists, pages and reports; and the alarms."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from posttrain.base.files import table_beside
from posttrain.config.schema.base import MethodSettings
from posttrain.config.schema.methods import METHODS

# The names of the checks in run.json; each name means the same for every method.
PACKED, START, RATIO, SAMPLER = "packed = one by one", "policy = reference", "ratio = 1", "sampler = trainer"
MOVED, STEPS, SAVED = "weights move", "steps are finite", "saved weights are finite"
PASSED, FAILED, WAITING, ABSENT, UNRECORDED = "passed", "failed", "waiting", "does not apply", "not recorded"
MESSAGES = table_beside(__file__, "alarms.yaml")  # what each alarm of an online run means, and its remedy


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: a value and its upper limit, in `unit`; or an observation in words."""

    check: str
    value: float | None = None
    limit: float | None = None
    unit: str = "nats"
    seen: str = ""
    failed: bool = False

    def facts(self) -> dict[str, Any]:
        """The check's entry in run.json, which is stored under the check's name; non-finite values become None."""
        known = {name: value for name, value in asdict(self).items() if name != "check" and value not in (None, "")}
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in known.items()}


@dataclass(frozen=True, slots=True)
class Check:
    """A check of a run for display."""

    what: str
    outcome: str  # passed, failed, waiting, does not apply, not recorded
    found: str


# Name of a check, what it proves, when it is made, and the property of the methods that make it (None: all methods).
FIRST = "the first step"
KNOWN = (
    (PACKED, "A pack gives the results of plain transformers, one sequence at a time", FIRST, None),
    (START, "The policy equals its reference before the first update", FIRST, "starts_as_reference"),
    (RATIO, "Ratios are 1 before the first update", FIRST, "has_ratio"),
    (MOVED, "The first update changes trained tensors, and no frozen one", "the first update", None),
    (SAMPLER, "The engine samples from the weights of the trainer", "every step", "samples_completions"),
    (STEPS, "Loss and gradient are finite", "every step", None),
    (SAVED, "Saved weights are finite", "every checkpoint", None),
)


def advice(alarm: str) -> str:
    """The meaning of an alarm, and its remedy."""
    return MESSAGES.get(alarm, "an alarm of another version of posttrain")


def checks_of(recorded: Mapping[str, Any] | None, method: str, step: int) -> list[Check]:
    """Every check of the method, with its result. `recorded`: the checks in `run.json`; None if it has none."""
    checks, settings = [], METHODS.get(method, MethodSettings)
    for name, what, when, needed in KNOWN:
        facts = (recorded or {}).get(name)
        if needed is not None and not getattr(settings, needed):
            continue
        if isinstance(facts, Mapping):
            checks.append(Check(what, FAILED if facts.get("failed") else PASSED, f"{when}: {described(facts)}"))
        elif recorded is None and step > 0:
            checks.append(Check(what, UNRECORDED, f"{when}: the run's version recorded no checks"))
        else:
            checks.append(Check(what, ABSENT if when == FIRST and step > 0 else WAITING, when))
    return checks


def described(facts: Mapping[str, Any]) -> str:
    """The result of a check, such as `3e-07 ≤ 0.0005 nats`; of several values, the largest."""
    value, limit = facts.get("value"), facts.get("limit")
    parts = [str(facts["seen"])] if facts.get("seen") else []
    if isinstance(value, int | float) and isinstance(limit, int | float):
        sign = ">" if value > limit else "≤"
        parts.append(" ".join(filter(None, (f"{value:.2g} {sign} {limit:.2g}", str(facts.get("unit") or "")))))
    elif value is None and limit is not None:
        parts.append("not a number")
    times = facts.get("times")
    return ", ".join(parts) + (f" (largest of {times:,})" if isinstance(times, int) and times > 1 else "")
