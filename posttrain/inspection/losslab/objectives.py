"""The loss of a batch for each method, by the recipes' own functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from posttrain.batch import Pack
from posttrain.config.schema.methods import AnyMethod
from posttrain.inspection.losslab.batches import Rows, StoredStep
from posttrain.inspection.losslab.weights import Weights
from posttrain.models.experts import RouterLoss
from posttrain.optim.update import AdamW, Objective, balanced
from posttrain.recipes import OFFLINE, ONLINE, REWARDED
from posttrain.recipes.models import Models, scorer_of
from posttrain.recipes.online import Step, sampled_prompts
from posttrain.scoring import Scorer
from posttrain.training.job import Job
from posttrain.training.reference import is_reference_free, make_reference, no_reference


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss of the batch; `step` has what its forward passes record, for methods that sample."""

    packs: Sequence[Any]
    objective: Objective
    step: Step | None = None


class Bench:
    """A model with a batch: makes the loss of any method that fits them. Every model is loaded once.

    `given` has the rows of the step, for a run that also trains on the data's completions.
    """

    def __init__(self, job: Job, weights: Weights, batch: Rows | StoredStep, given: Rows | None = None):
        self.job, self.weights, self.batch, self.given = job, weights, batch, given
        method = job.config.method
        self.policy = job.policy(method.head)
        self.scorer = scorer_of(job, method, self.policy)
        trained = self.scorer if method.trains_values else self.policy
        self.optimizer = AdamW(trained, job.dtype)  # for its float32 gradients
        self.routers = RouterLoss(self.policy, job.router_aux_loss_coef, is_asked=False)
        trained.train(method.dropout)
        self._references: dict[str | None, Any] = {}

    def loss(self, method: AnyMethod) -> Loss:
        """The loss of the batch under these settings, for one update over all of it."""
        made = self._of_rows(method, self.batch) if isinstance(self.batch, Rows) else self._of_step(method, self.batch)
        return replace(made, objective=balanced(made.objective, self.routers, len(made.packs)))

    def _of_rows(self, method: AnyMethod, batch: Rows) -> Loss:
        job, reference = self.job, no_reference
        if not is_reference_free(job.config, method):
            reference = self._reference(method, lambda: make_reference(job, method, self.scorer, batch.data, None))
        in_order = method.joins_completions and method.kind != "pair" and job.config.behavior_version >= 2
        more = {"previous": [batch.previous, *batch.examples[:-1]]} if in_order else {}
        return Loss(*OFFLINE[method.type].objectives(self._models(method, reference))(batch.examples, **more))

    def _of_step(self, method: AnyMethod, batch: StoredStep) -> Loss:
        job, recipe, number, reference = self.job, ONLINE[method.type], self.weights.step, None
        if method.has_reference:
            reference = self._reference(method, lambda: recipe.reference_of(job, method, self.policy))
        more: dict[str, Any] = {}
        if method.has_ratio and not self.weights.exact:
            more["old_R"] = batch.old_R.to(job.device)
        if self.given is not None:
            prompts, share = self.given.examples, method.completed_share
            more["others"] = sampled_prompts(job.config.seed, number, prompts, share)[1]
        models = self._models(method, reference)
        step = recipe.step_of(models, batch.rollout, **more)
        for packs, objective in recipe.updates(models, number, step):
            return Loss(packs, objective, step)
        return Loss((), Objective(lambda pack: (torch.zeros(()), {}), 0), step)  # nothing is in the loss

    def _models(self, method: AnyMethod, reference: Any) -> Models[Any, Any, Any]:
        is_own = method.trains_values == self.job.config.method.trains_values
        scorer = self.scorer if is_own else Scorer(self.policy)
        return Models(self.job, method, scorer, reference, self.weights.state)

    def _reference(self, method: AnyMethod, load: Callable[[], Any]) -> Any:
        path = method.reference_path
        if path not in self._references:
            reference = load()
            self._references[path] = remembered(reference) if callable(reference) else reference  # or a teacher
        return self._references[path]


def remembered(score: Callable[..., Any]) -> Callable[..., Tensor]:
    """A reference that scores each pack once: all losses pack the batch alike."""
    known: dict[tuple[bytes, ...], Tensor] = {}

    def score_once(pack: Pack, *rest: Any) -> Tensor:
        facts = (pack.tokens_T, pack.end_T, pack.source_N, pack.target_N, pack.sequence_N)
        key = tuple(fact.cpu().numpy().tobytes() for fact in facts)
        if key not in known:
            known[key] = score(pack, *rest)
        return known[key]

    return score_once


def clipped(method: AnyMethod, loss: Loss) -> float | None:
    """The share of tokens that the loss clipped in its last forward pass; None if it clips nothing."""
    if loss.step is None or not method.clips:
        return None
    return _mean(loss.step.clipped_R.cpu()[_inside(loss.step)])


def clipped_at_last_update(method: AnyMethod, loss: Loss, batch: StoredStep) -> float | None:
    """The share of tokens that the loss would clip at the run's last update of the step, by its stored numbers."""
    if loss.step is None or not method.clips:
        return None
    inside_R, length_S = _inside(loss.step), batch.rollout.length_S[loss.step.in_loss_S]
    numbers = batch.new_R[inside_R], batch.old_R[inside_R], loss.step.advantage_R.cpu()[inside_R]
    sequence_N = torch.arange(len(length_S)).repeat_interleave(length_S)
    return _mean(REWARDED[method.type].surrogate(method, *numbers, sequence_N, length_S)[1])


def _inside(step: Step) -> Tensor:
    return torch.isin(step.rollout.sequence_R, step.in_loss_S)


def _mean(clipped_N: Tensor) -> float | None:
    return clipped_N.float().mean().item() if len(clipped_N) else None
