"""Alarms of online runs, for problems that keep every number finite. Counted in the metrics, logged as warnings."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from posttrain.config.schema.base import MethodSettings
from posttrain.reports.advice import MESSAGES

log = logging.getLogger("posttrain")

COLLAPSED = 0.05  # share of the entropy at the first step
WITHOUT_VERDICT = 0.005  # share of the completions
EFFECTIVE = 0.9  # effective sample size / tokens; below it the engine's policy is not the trainer's
EVERY = 20  # an alarm is logged the first time and then every 20th time


class Alarms:
    """Checks a step's metrics. Counts alarms in `memory`, which checkpoints save, under alarms/{name}."""

    def __init__(self, memory: dict[str, float], method: MethodSettings):
        self.memory, self._method = memory, method

    def look(self, step: int, metrics: Mapping[str, float], all_equal: bool) -> None:
        """`all_equal`: all completions of the step with a reward have the same."""
        entropy = metrics.get("entropy")
        if entropy is not None:
            self.memory.setdefault("first_entropy", entropy)
        without, method = metrics.get("rewards/left_out_ratio", 0.0), self._method
        no_spread = metrics.get("frac_reward_zero_std", 0.0) == 1.0 and without < 1.0
        raised = {
            "no_spread": method.compares_groups and no_spread,
            "equal_rewards": method.needs_rewards and not method.compares_groups and all_equal,
            "truncated": metrics.get("completions/clipped_ratio", 0.0) == 1.0,
            "no_reward": without == 1.0,
            "no_verdict": metrics.get("rewards/no_verdict_ratio", 0.0) > WITHOUT_VERDICT and without < 1.0,
            "entropy": entropy is not None and entropy < COLLAPSED * self.memory["first_entropy"],
            "sampler": metrics.get("sampling/effective_sample_size", 1.0) < EFFECTIVE,
        }
        for name in (name for name, is_raised in raised.items() if is_raised):
            count = self.memory[f"alarms/{name}"] = self.memory.get(f"alarms/{name}", 0.0) + 1
            if count % EVERY == 1:
                log.warning("step %d: %s", step, MESSAGES[name])
