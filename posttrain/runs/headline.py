"""The main metrics of each method, which lists, reports and tables show first. Imports no torch."""

import functools
from collections.abc import Mapping
from typing import Any

PAIRS = ("rewards/accuracies", "rewards/margins")
ONLINE = ("reward",)
OF_METHOD = {
    "reward": ("accuracy", "margin"),
    **dict.fromkeys(("dpo", "orpo", "cpo", "simpo"), PAIRS),
    "kto": ("rewards/margins",),
    **dict.fromkeys(("ppo", "grpo", "rloo", "reinforce_plus_plus", "distill"), ONLINE),
}
LABELS = {"rewards/accuracies": "accuracy", "rewards/margins": "margin"}


def headlines(method: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """The method's main metrics and the loss, from the validation if available, by display name."""
    found: dict[str, float] = {}
    for either in _by_choice(method):
        for key, shown in either.items():
            if metrics.get(key) is not None:
                found[shown] = metrics[key]
                break
    return found


@functools.cache
def headline_metrics(method: str) -> dict[str, str]:
    """The metrics of which the first that a run has is its headline, with their display names."""
    return {key: shown for either in _by_choice(method) for key, shown in either.items()}


def _by_choice(method: str) -> list[dict[str, str]]:
    """Main metrics with their display names: each of the validation, or else of the training."""
    labels = {name: LABELS.get(name, name) for name in (*OF_METHOD.get(method, ()), "loss")}
    return [{f"eval_{name}": f"validation {label}", name: label} for name, label in labels.items()]
