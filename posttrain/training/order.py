"""The rows of each step, by the settings, the seed and the step; with a curriculum, also by the loop's state."""

import math
import zlib

import numpy as np

from posttrain.config import RunConfig
from posttrain.config.schema.rollout import Curriculum
from posttrain.data import Dataset
from posttrain.data.reading import parts_of
from posttrain.rollout import Rollout
from posttrain.training.state import State, total_steps

ROUNDING = 1e-6  # a mean reward may differ from a threshold by rounding


def epoch_order(config: RunConfig, train: Dataset, epoch: int) -> np.ndarray:
    """The order of the rows in an epoch. With `data.mixing: interleave`, the whole run is one epoch."""
    if config.data.mixing == "interleave":
        return _interleaved(config, train)
    if config.data.shuffle:
        return np.random.default_rng([config.seed, epoch]).permutation(len(train))
    return np.arange(len(train))


def batch_of(config: RunConfig, rows: int, step: int) -> tuple[int, slice]:
    """The epoch of step `step` (the first step is 1), and the slice of the epoch's order that is the step's batch."""
    size, mixed = config.training.batch_size, config.data.mixing == "interleave"
    epoch, batch = (0, step - 1) if mixed else divmod(step - 1, math.ceil(rows / size))
    return epoch, slice(batch * size, (batch + 1) * size)


def _interleaved(config: RunConfig, train: Dataset) -> np.ndarray:
    """The rows of all steps. The source of each is sampled with probabilities proportional to the weights; the row is
    the source's next one, in an order that is new for every pass. A run with more steps begins with the same rows."""
    source, count = train.sources, total_steps(config, len(train)) * config.training.batch_size
    present = np.unique(source)
    weights = np.array([part.weight for part in parts_of(config.data)])[present]
    rng = np.random.default_rng([config.seed, zlib.crc32(b"interleave")])
    sampled = np.searchsorted(np.cumsum(weights)[:-1] / weights.sum(), rng.random(count), side="right")
    order = np.empty(count, np.int64)
    for index, number in enumerate(present.tolist()):
        own, at = np.flatnonzero(source == number), np.flatnonzero(sampled == index)
        passes = [own] * math.ceil(len(at) / len(own))
        if config.data.shuffle:
            keys = ([config.seed, number, each, zlib.crc32(b"pass")] for each in range(len(passes)))
            passes = [np.random.default_rng(key).permutation(own) for key in keys]
        order[at] = np.concatenate([*passes, own])[: len(at)]
    return order


class Resting:
    """The prompts of a run with `method.curriculum`. An epoch samples every prompt that does not rest once. If these do
    not fill its last batch, those that would return first are added, so that there are always prompts to sample."""

    def __init__(self, config: RunConfig, settings: Curriculum, train: Dataset, state: State):
        self._config, self._settings, self._train, self._state = config, settings, train, state
        state.awake_from = state.awake_from or [0] * len(train)

    def batch(self) -> np.ndarray:
        """The prompts of the next step. An epoch's first step decides which prompts the epoch samples."""
        state, size = self._state, self._config.training.batch_size
        if not state.queue:
            state.epoch += 1
            order = epoch_order(self._config, self._train, state.epoch)
            awake_from = np.maximum(state.awake_from, state.epoch)[order]
            count = max(1, int((awake_from == state.epoch).sum()))
            chosen = np.argsort(awake_from, kind="stable")[: math.ceil(count / size) * size]
            state.queue = order[np.sort(chosen)].tolist()
        return np.array(state.queue[:size])

    def learn(self, rollout: Rollout) -> dict[str, float]:
        """Decide, after a step, which of its prompts rest; one without rewards does not. Returns metrics: the shares of
        easy and hard prompts in the step, and the number of all prompts that rest in the next epoch."""
        state, settings, size = self._state, self._settings, len(rollout.prompts)
        sampled, state.queue, following = state.queue[:size], state.queue[size:], state.epoch + 1
        mean_G = np.array([rollout.rewards_of(group).mean().item() for group in range(size)])  # NaN without rewards
        easy_G, hard_G = mean_G >= settings.easy_threshold - ROUNDING, mean_G <= settings.hard_threshold + ROUNDING
        awake_from = np.array(state.awake_from)
        awake_from[sampled] = following + settings.rest_epochs * (easy_G | hard_G)
        state.awake_from = awake_from.tolist()
        numbers = {"easy": easy_G.mean(), "hard": hard_G.mean(), "resting": (awake_from > following).sum()}
        return {f"curriculum/{name}": float(number) for name, number in numbers.items()}
