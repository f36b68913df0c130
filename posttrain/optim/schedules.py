"""Learning-rate schedules as pure functions of the step, with transformers' names and values.

Warm-up starts at 0, as in transformers, or at the first step's share: a step that costs a full rollout should train
something. Stateless, so that a resumed run has the same rates.
"""

from __future__ import annotations

import math


def warmup_count(warmup_steps: float, total: int) -> int:
    """Steps of warm-up: a share of the run below 1 (rounded up, as in transformers), else a number of steps.

    A share leaves at least one step: the first step's rate may be 0, and a run of one step would train nothing.
    """
    return min(math.ceil(total * warmup_steps), max(total - 1, 0)) if warmup_steps < 1 else int(warmup_steps)


def schedule(kind: str, step: int, total: int, warmup: int, *, from_zero: bool = True) -> float:
    """The factor on the learning rate at step `step` (0 is the first) of `total`.

    `kind` is one of transformers' lr_scheduler_type: constant, constant_with_warmup, linear, cosine (to zero). The k-th
    of w steps of warm-up, k from 1, has the factor (k - 1) / w as in transformers; k / w unless `from_zero`.
    """
    if kind != "constant" and step < warmup:
        return (step if from_zero else step + 1) / warmup
    if kind in ("constant", "constant_with_warmup"):
        return 1.0
    progress = (step - warmup) / max(1, total - warmup)
    if kind == "linear":
        return max(0.0, 1.0 - progress)
    if kind == "cosine":
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
    raise ValueError(f"unknown lr_scheduler_type {kind!r}")
