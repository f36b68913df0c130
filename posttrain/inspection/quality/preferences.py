"""Whether the length of a reply tells which one is preferred."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.evaluation.statistics import Estimate, mean_by_prompt


@dataclass(frozen=True, slots=True)
class LengthBias:
    """`longer`: the share of pairs in which the longer reply is chosen, with its interval, clustered by prompt.

    `auc`: the probability that a random chosen reply is longer than a random rejected one, ties counted half.
    """

    pairs: int
    equal: int  # of the same length; not in `longer`
    longer: Estimate | None
    auc: float
    chosen_mean: float
    rejected_mean: float


def length_bias(chosen: np.ndarray, rejected: np.ndarray, prompts: Sequence[int] | np.ndarray) -> LengthBias:
    """From the numbers of tokens of both replies of each pair, and a key of its prompt."""
    by_prompt: dict[int, list[float]] = {}
    for one, other, prompt in zip(chosen.tolist(), rejected.tolist(), map(int, prompts), strict=True):
        if one != other:
            by_prompt.setdefault(prompt, []).append(float(one > other))
    longer = mean_by_prompt(list(by_prompt.values())) if by_prompt else None
    equal = int((chosen == rejected).sum())
    return LengthBias(len(chosen), equal, longer, auc(chosen, rejected), float(chosen.mean()), float(rejected.mean()))


def auc(positive: np.ndarray, negative: np.ndarray) -> float:
    """P(positive > negative) + P(equal) / 2, the area under the ROC curve (Mann-Whitney)."""
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, side="left") + np.searchsorted(ordered, positive, side="right")
    return float(below.sum() / (2 * len(positive) * len(negative)))
