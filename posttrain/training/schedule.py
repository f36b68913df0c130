"""A run's schedule: the order of its data, the learning rate, the rows evaluated at each step."""

from __future__ import annotations

import logging
import math
import zlib

import numpy as np

from posttrain.config import RunConfig
from posttrain.optim.schedules import schedule, warmup_count

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
