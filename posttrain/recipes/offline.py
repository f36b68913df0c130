"""The steps of recipes that learn from given completions.

run = Offline(job, data, objectives)
for examples in run.steps():
    packs, objective = run.objective_of(examples)
    run.loop.update(packs, objective)
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from posttrain.batch import Example
from posttrain.data import Prepared
from posttrain.recipes.models import Models, scorer_of
from posttrain.training.checks import check_packing, check_reward_packing
from posttrain.training.job import Job
from posttrain.training.loop import Loop, ObjectiveOf
from posttrain.training.reference import PortionsOf, make_reference, whole_sets


class Offline:
    """A run over given completions. `evaluation` makes the objective of validation sets, if it is another."""

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
        reference = make_reference(job, method, scorer, data, portions_of)
        self.loop = Loop(job, policy, optimizer, data)
        self.models: Models[Any, Any, Any] = Models(job, method, scorer, reference, self.loop.state)
        self.objective_of = objectives(self.models)
        self._evaluation_of = self.objective_of if evaluation is None else evaluation(self.models)

    def steps(self, with_previous: bool = False) -> Iterator[list[Example]]:
        """Each step's examples, after a check of the packs of the first. Around its body: `Loop.evaluated_steps`."""
        job, scorer, scores_rewards = self.models.job, self.models.scorer, self.models.method.head == "reward"
        for step, examples in self.loop.evaluated_steps(self._evaluation_of, with_previous):
            if step == 1 and scores_rewards:
                check_reward_packing(scorer, examples, partial(job.pack_together, keep_last=True), job.record)
            elif step == 1:
                check_packing(scorer, examples, job.pack_together, job.record)
            yield examples
