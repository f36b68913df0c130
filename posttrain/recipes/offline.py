"""Code shared by recipes: the inputs of objectives, and the steps of recipes that learn from given completions.

run = Offline(job, data, objectives)
for examples in run.steps():
    run.loop.update(*run.objective_of(examples))
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from torch import nn

from posttrain.batch import Example
from posttrain.config.schema.base import MethodSettings
from posttrain.data import Prepared
from posttrain.scoring import RewardScorer, Scorer, ValueScorer
from posttrain.training.checks import check_packing
from posttrain.training.job import Job
from posttrain.training.loop import Loop, ObjectiveOf
from posttrain.training.reference import PortionsOf, make_reference, token_reference, whole_sets
from posttrain.training.state import State

Method = TypeVar("Method")
Scoring = TypeVar("Scoring")
Reference = TypeVar("Reference")


@dataclass(frozen=True, slots=True)
class Models(Generic[Method, Scoring, Reference]):
    """The inputs of a method's objectives: models, settings and state."""

    job: Job
    method: Method
    scorer: Scoring  # the policy's Scorer, RewardScorer or ValueScorer
    reference: Reference  # a Reference of training/reference.py, a TokenReference, or a Teacher
    state: State  # the state of the loop


def scorer_of(job: Job, method: MethodSettings, policy: nn.Module) -> Any:
    """The scorer of a policy, with a value head if the method trains values."""
    if method.trains_values:
        return ValueScorer.of(policy, job.checkpoint)
    return RewardScorer(policy) if method.head == "reward" else Scorer(policy)


class Offline:
    """A run over given completions. `evaluation` makes the objective of validation sets; None: as in training."""

    def __init__(
        self,
        job: Job,
        data: Prepared,
        objectives: Callable[[Models[Any, Any, Any]], ObjectiveOf],
        portions_of: PortionsOf = whole_sets,
        evaluation: Callable[[Models[Any, Any, Any]], ObjectiveOf] | None = None,
    ):
        method = job.config.method
        policy = job.policy(method.head)
        optimizer = job.optimizer(policy)
        scorer = scorer_of(job, method, policy)
        tokens = token_reference(job, method, scorer)
        reference = make_reference(job, tokens, data, portions_of)
        self.loop = Loop(job, policy, optimizer, data, tokens)
        self.models: Models[Any, Any, Any] = Models(job, method, scorer, reference, self.loop.state)
        self.objective_of = objectives(self.models)
        self._evaluation_of = self.objective_of if evaluation is None else evaluation(self.models)

    def steps(self, with_previous: bool = False) -> Iterator[list[Example]]:
        """Yield each step's examples, and evaluate when due. The packs of the first step are checked before."""
        job, scorer, loop = self.models.job, self.models.scorer, self.loop
        if loop.evaluation_due:
            loop.evaluate(self._evaluation_of, with_previous)
        for step, examples in loop.steps():
            if step == 1:
                pack_of = partial(job.pack_together, keep_last=self.models.method.head == "reward")
                check_packing(scorer, examples, pack_of, job.record)
            yield examples
            if loop.evaluation_due:
                loop.evaluate(self._evaluation_of, with_previous)
