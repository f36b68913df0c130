"""Results of the models on held-out problems."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from posttrain.quickstart.replies import Reply


@dataclass(frozen=True, slots=True)
class Share:
    """`count` of `total`, and the 95 % interval of the share behind it (Wilson's score interval, 1927)."""

    count: int
    total: int

    @property
    def value(self) -> float:
        return self.count / self.total

    @property
    def interval(self) -> tuple[float, float]:
        z2 = 1.959964**2
        n, p = self.total, self.value
        centre = (p + z2 / (2 * n)) / (1 + z2 / n)
        half = math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n))) / (1 + z2 / n)
        return max(0.0, centre - half), min(1.0, centre + half)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.1%} ({100 * low:.1f}–{100 * high:.1f})"


@dataclass(frozen=True, slots=True)
class Measured:
    """One model on the held-out problems."""

    right: Share
    right_greedy: Share
    formatted: Share
    worked: Share
    reward: float  # mean


def measure(replies: Sequence[Reply], greedy: Sequence[Reply], rewards: Sequence[float]) -> Measured:
    """Count right replies, sampled and greedy; `rewards` are those of the sampled ones."""
    total = len(replies)
    return Measured(
        right=Share(sum(reply.right for reply in replies), total),
        right_greedy=Share(sum(reply.right for reply in greedy), total),
        formatted=Share(sum(reply.formatted for reply in replies), total),
        worked=Share(sum(reply.worked for reply in replies), total),
        reward=sum(rewards) / total,
    )


def paired(before: Sequence[Reply], after: Sequence[Reply]) -> tuple[int, int]:
    """The numbers of problems that only the first model solves, and only the second."""
    both = list(zip(before, after, strict=True))
    return sum(b.right and not a.right for b, a in both), sum(a.right and not b.right for b, a in both)


COLUMNS = ("right answer", "right, greedy", "working", "format", "reward")


def rows(measured: Mapping[str, Measured]) -> list[list[str]]:
    """The table of results: a row per model, in COLUMNS."""
    return [
        [
            name,
            str(model.right),
            str(model.right_greedy),
            f"{model.worked.value:.1%}",
            f"{model.formatted.value:.1%}",
            f"{model.reward:+.2f}",
        ]
        for name, model in measured.items()
    ]


def telling(replies: Mapping[str, Sequence[Reply]], first: str, second: str) -> list[int]:
    """Indices of a few problems to show: solved only by the second model, by both, only by the first, by neither."""
    kinds = ((False, True), (True, True), (True, False), (False, False))
    pairs = [(b.right, a.right) for b, a in zip(replies[first], replies[second], strict=True)]
    return [pairs.index(kind) for kind in kinds if kind in pairs]
