"""What a token did to the gradient, from the stored numbers of its completion.

The policy loss of a token is -A r, with the ratio r = π_new / π_old. Its derivative with respect to the logit of the
sampled token is -A r (1 - p), where p = π_new is the token's probability: the *push*. It is 0 where the ratio was
clipped, and near 0 where the token was certain anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Numbers:
    """Per token; zeros where the method or an earlier version has no such number."""

    advantage: np.ndarray
    ratio: np.ndarray
    push: np.ndarray
    mismatch: np.ndarray  # log-probability of the sampler minus the trainer's
    clipped: np.ndarray  # bool
    entropy: np.ndarray | None
    reference: np.ndarray | None  # log-probability of the policy minus the reference's

    @classmethod
    def of(cls, one: Mapping[str, Any]) -> Numbers:
        """From a row of `StoredRun.rollouts`."""
        count = len(one["tokens"])

        def array(name: str) -> np.ndarray | None:
            found = one.get(name)
            return None if found is None or len(found) != count else np.asarray(found, dtype=np.float64)

        zeros = np.zeros(count)
        new, old, sampler = array("new_logprobs"), array("old_logprobs"), array("sampler_logprobs")
        reference, advantage = array("ref_logprobs"), array("advantages")
        flags = array("clipped")
        clipped = zeros.astype(bool) if flags is None else flags != 0
        ratio = np.ones(count) if new is None or old is None else np.exp(np.clip(new - old, -50, 50))
        certain = zeros if new is None else np.exp(np.minimum(new, 0))
        pushed = zeros if advantage is None else advantage * ratio * (1 - certain)
        return cls(
            advantage=zeros if advantage is None else advantage,
            ratio=ratio,
            push=np.where(clipped, 0.0, np.nan_to_num(pushed)),
            mismatch=zeros if sampler is None or old is None else np.nan_to_num(sampler - old),
            clipped=clipped,
            entropy=array("entropies"),
            reference=None if reference is None or new is None else new - reference,
        )

    @property
    def furthest_ratio(self) -> float:
        """The ratio furthest from 1, as a factor: 0.5 is as far as 2."""
        return float(max(self.ratio, key=factor, default=1.0))


@dataclass(frozen=True, slots=True)
class Group:
    """The completions of a prompt in a step, with their numbers; `push` is the sum of the absolute pushes."""

    prompt: int
    members: list[tuple[Mapping[str, Any], Numbers]]
    push: float

    @property
    def clipped(self) -> int:
        return sum(int(numbers.clipped.sum()) for _, numbers in self.members)

    @property
    def furthest_ratio(self) -> float:
        return max((numbers.furthest_ratio for _, numbers in self.members), key=factor)


def groups_of(rollouts: Iterable[Mapping[str, Any]]) -> list[Group]:
    """The groups of a step, from its rows of `StoredRun.rollouts`: the one with the largest push first."""
    members: dict[int, list[tuple[Mapping[str, Any], Numbers]]] = {}
    for one in rollouts:
        members.setdefault(one["prompt_index"], []).append((one, Numbers.of(one)))
    groups = [
        Group(prompt, group, sum(float(np.abs(numbers.push).sum()) for _, numbers in group))
        for prompt, group in members.items()
    ]
    return sorted(groups, key=lambda group: -group.push)


def factor(ratio: float) -> float:
    """The distance of a ratio from 1 as a factor of at least 1."""
    return float(max(ratio, 1 / max(ratio, 1e-30)))
