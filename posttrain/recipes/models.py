"""The models of a method: what the objectives of every recipe are computed with."""

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import nn

from posttrain.config.schema.base import MethodSettings
from posttrain.scoring import RewardScorer, Scorer, ValueScorer
from posttrain.training.job import Job
from posttrain.training.state import State

Method = TypeVar("Method")
Scoring = TypeVar("Scoring")
Compared = TypeVar("Compared")


@dataclass(frozen=True, slots=True)
class Models(Generic[Method, Scoring, Compared]):
    """The models of a method, and what else its objectives are computed with."""

    job: Job
    method: Method
    scorer: Scoring  # of the policy: a Scorer, RewardScorer or ValueScorer
    reference: Compared  # a Reference, a function of tokens, or a Teacher
    state: State  # of the loop


def scorer_of(job: Job, method: MethodSettings, policy: nn.Module) -> Any:
    """The scorer of a policy. One that trains values has a value head of its own, which is trained too."""
    if method.trains_values:
        return ValueScorer.of(policy, job.checkpoint)
    return RewardScorer(policy) if method.head == "reward" else Scorer(policy)
