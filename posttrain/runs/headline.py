"""The main metrics of each method, which lists, reports and tables show first.

They are not on the methods' settings classes, whose import would double the time of `posttrain runs list`.
"""

import functools
from collections.abc import Mapping
from typing import Any

PAIRS = ("rewards/accuracies", "rewards/margins")
OF_METHOD = {
    "sft": (),
    "reward": ("accuracy", "margin"),
    **dict.fromkeys(("dpo", "orpo", "cpo", "simpo"), PAIRS),
    "kto": ("rewards/margins",),
}
LABELS = {"rewards/accuracies": "accuracy", "rewards/margins": "margin"}


def of_method(method: str) -> tuple[str, ...]:
    """The main metrics of a method, besides the loss: the reward, for methods that sample."""
    return OF_METHOD.get(method, ("reward",))


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
    labels = {name: LABELS.get(name, name) for name in (*of_method(method), "loss")}
    return [{f"eval_{name}": f"validation {label}", name: label} for name, label in labels.items()]
