"""Alarms of online runs, for problems that keep every number finite. Counted in the metrics, logged as warnings."""

from __future__ import annotations

import logging
from collections.abc import Mapping

log = logging.getLogger("posttrain")

COLLAPSED = 0.05  # share of the entropy at the first step
WITHOUT_VERDICT = 0.005  # share of the completions
EFFECTIVE = 0.9  # effective sample size / tokens; below it the engine's policy is not the trainer's
EVERY = 20  # an alarm is logged the first time and then every 20th time

MESSAGES = {
    "no_spread": "no group has completions with different rewards, so nothing can be learned from this step: the "
    "task is too hard or too easy for this model, or the reward is broken",
    "no_reward": "no completion has a reward, so this step trained nothing: check whether the data has the answers "
    "that the rewards need (posttrain why RUN --step 1 --prompt 0), or why your own function returns None or takes "
    "longer than its timeout, or a judge does not answer",
    "truncated": "every completion reached rollout.max_completion_length: raise it, or check whether the stop token is "
    "the one that the model was trained with",
    "no_verdict": "more than 0.5 % of the completions have no verdict (timeout, crashed, bad_gold) and are dropped",
    "entropy": "the entropy has fallen below 5 % of the first step's: the policy hardly explores; lower "
    "training.learning_rate, or raise method.beta or method.entropy_coef",
    "sampler": "the engine's probabilities differ from the trainer's: the effective sample size is below 90 % of the "
    "number of tokens",
}


class Alarms:
    """Checks a step's metrics. Counts alarms in `memory`, which checkpoints save, under alarms/{name}."""

    def __init__(self, memory: dict[str, float]):
        self.memory = memory

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        entropy = metrics.get("entropy")
        if entropy is not None:
            self.memory.setdefault("first_entropy", entropy)
        without = metrics.get("rewards/left_out_ratio", 0.0)
        raised = {
            "no_spread": metrics.get("frac_reward_zero_std", 0.0) == 1.0 and without < 1.0,
            "truncated": metrics.get("completions/clipped_ratio", 0.0) == 1.0,
            "no_reward": without == 1.0,
            "no_verdict": WITHOUT_VERDICT < without < 1.0,
            "entropy": entropy is not None and entropy < COLLAPSED * self.memory["first_entropy"],
            "sampler": metrics.get("sampling/effective_sample_size", 1.0) < EFFECTIVE,
        }
        for name in (name for name, is_raised in raised.items() if is_raised):
            count = self.memory[f"alarms/{name}"] = self.memory.get(f"alarms/{name}", 0.0) + 1
            if count % EVERY == 1:
                log.warning("step %d: %s", step, MESSAGES[name])
