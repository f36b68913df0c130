"""A run's schedule: the order of its data, the learning rate, the rows evaluated at each step.

Learning rates are pure functions of the step, with transformers' names and values, so that a resumed run has the same.
Warm-up starts at 0, as in transformers, or at the first step's share: a step that costs a full rollout should train
something.
"""

import logging
import math
import zlib

import numpy as np

from posttrain.config import RunConfig

log = logging.getLogger("posttrain")


def total_steps(config: RunConfig, rows: int) -> int:
    """The number of steps of a run over this number of training examples."""
    training = config.training
    return training.max_steps or math.ceil(training.num_train_epochs * math.ceil(rows / training.batch_size))


def epoch_order(config: RunConfig, rows: int, epoch: int) -> np.ndarray:
    """The order of the rows in an epoch.

    A pure function of seed and epoch, so that the step alone gives a resumed run its position in the data.
    """
    return np.random.default_rng([config.seed, epoch]).permutation(rows) if config.data.shuffle else np.arange(rows)


def place_of(config: RunConfig, rows: int, step: int) -> tuple[int, slice]:
    """The epoch of a step, from 1, and the part of the epoch's order that is its batch."""
    size = config.training.batch_size
    epoch, batch = divmod(step - 1, math.ceil(rows / size))
    return epoch, slice(batch * size, (batch + 1) * size)


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


def evaluated_rows(config: RunConfig, step: int, name: str, size: int) -> np.ndarray:
    """The rows of a validation set of `size` rows to evaluate at `step`: all, the first, or a sample with replacement.

    The sample is a function of seed, step and name, so that a resumed run evaluates the same rows.
    """
    common = config.evaluation
    own = next((entry for entry in common.datasets if entry.name == name), common)
    batches = own.num_batches or common.num_batches
    if batches is None:
        return np.arange(size)
    rows = batches * config.training.batch_size
    if not (common.with_replacement if own.with_replacement is None else own.with_replacement):
        return np.arange(min(size, rows))
    return np.random.default_rng([config.seed, step, zlib.crc32(name.encode())]).integers(size, size=rows)


def learning_rate_at(config: RunConfig, peak: float, step: int, total: int) -> float:
    """The learning rate after `step` of `total` steps; `peak` is its maximum."""
    training = config.training
    return peak * schedule(
        training.lr_scheduler_type,
        step,
        total,
        warmup_count(training.warmup_steps, total),
        from_zero=config.method.warmup_from_zero,
    )


def report_schedule_change(config: RunConfig, peak: float, step: int, before: int, total: int) -> None:
    """Warn if a resumed run has another number of steps, which stretches the schedule of the remaining steps."""
    if before == total or step >= total:
        return
    old = learning_rate_at(config, peak, min(step, before), before)
    new = learning_rate_at(config, peak, step, total)
    if new != old:
        log.warning(
            "%d steps in total instead of %d: the %s schedule is stretched, the learning rate of step %d is %.2e "
            "instead of %.2e. This differs from a run of %d steps from the start",
            total, before, config.training.lr_scheduler_type, step + 1, new, old, total,
        )  # fmt: skip
