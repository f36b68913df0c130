"""The main metrics of each method, which lists, reports and tables show first. Imports no torch."""

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


def lower_is_better(metric: str) -> bool:
    return metric.endswith("loss")


def headlines(method: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """The method's main metrics and the loss, from the validation if available, by display name."""
    found: dict[str, float] = {}
    for name in (*OF_METHOD.get(method, ()), "loss"):
        label = LABELS.get(name, name)
        for key, shown in ((f"eval_{name}", f"validation {label}"), (name, label)):
            if metrics.get(key) is not None:
                found[shown] = metrics[key]
                break
    return found
