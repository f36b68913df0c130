"""The loss of a batch for each method, by the recipes' own functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from posttrain.batch import Pack
from posttrain.config import (
    CPOMethod,
    DistillMethod,
    DPOMethod,
    KTOMethod,
    ORPOMethod,
    PolicyGradientMethod,
    PPOMethod,
    RewardMethod,
    SFTMethod,
    SimPOMethod,
)
from posttrain.config.schema.methods import AnyMethod
from posttrain.inspection.losslab.batches import Rows, StoredStep
from posttrain.inspection.losslab.weights import Weights
from posttrain.losses.policy import grpo_clip, policy_loss
from posttrain.models.experts import RouterLoss
from posttrain.optim.update import AdamW, Objective, balanced
from posttrain.recipes import distill, grpo, kto, ppo, preference, reference_free, reward, sft
from posttrain.recipes.online import Step, StepPack, given_completions, minibatches, sampled_prompts
from posttrain.rollout import Rollout
from posttrain.scoring import RewardScorer, Scorer, ValueScorer
from posttrain.training.job import Job
from posttrain.training.reference import Teacher, is_reference_free, make_reference, no_reference, token_reference


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss of the batch; `step` has what its forward passes record, for methods that sample."""

    packs: Sequence[Any]
    objective: Objective
    step: Step | None = None


class Bench:
    """A model with a batch: makes the loss of any method that fits them. Every model is loaded once."""

    def __init__(self, job: Job, weights: Weights, batch: Rows | StoredStep, given: Rows | None = None):
        self.job, self.weights, self.batch, self.given = job, weights, batch, given
        method = job.config.method
        self.policy = job.policy(method.head)
        self.values = ValueScorer.of(self.policy, job.checkpoint) if isinstance(method, PPOMethod) else None
        trained = self.policy if self.values is None else self.values
        self.optimizer = AdamW(trained, job.dtype)  # for its float32 gradients
        self.routers = RouterLoss(self.policy, job.router_aux_loss_coef, is_asked=False)
        trained.train(method.dropout)
        self.scorer = RewardScorer(self.policy) if method.head == "reward" else Scorer(self.policy)
        self._loaded: dict[tuple[str, str | None], Any] = {}

    def loss(self, method: AnyMethod) -> Loss:
        """The loss of the batch under these settings, for one update over all of it."""
        made = self._of_rows(method, self.batch) if isinstance(self.batch, Rows) else self._of_step(method, self.batch)
        return replace(made, objective=balanced(made.objective, self.routers, len(made.packs)))

    def _of_rows(self, method: AnyMethod, batch: Rows) -> Loss:
        job, state, examples = self.job, self.weights.state, batch.examples
        if isinstance(method, RewardMethod):
            assert isinstance(self.scorer, RewardScorer)
            return Loss(*reward.objectives(job, method, self.scorer)(examples))
        assert isinstance(self.scorer, Scorer)
        if isinstance(method, ORPOMethod | CPOMethod | SimPOMethod):
            return Loss(*reference_free.objectives(job, method, self.scorer)(examples))
        if isinstance(method, DPOMethod):
            free = is_reference_free(job.config, method)
            reference = no_reference if free else self._reference(method, batch)
            return Loss(*preference.objectives(job, method, self.scorer, reference, state)(examples))
        if isinstance(method, KTOMethod):
            reference = self._reference(method, batch)
            previous = [batch.previous, *examples[:-1]] if job.config.behavior_version >= 2 else None
            found = kto.levels(job, method, self.scorer, reference, examples, state.memory, previous, training=True)
            return Loss(*kto.objectives(job, method, self.scorer, reference, state)(examples, found))
        assert isinstance(method, SFTMethod)
        return Loss(*sft.objectives(job, self.scorer)(examples))

    def _reference(self, method: DPOMethod | KTOMethod, batch: Rows) -> Callable[..., Tensor]:
        assert isinstance(self.scorer, Scorer)
        scorer = self.scorer
        return self._once(
            "reference", method.ref_model, lambda: remembered(make_reference(self.job, method, scorer, batch.data, ()))
        )

    def _once(self, kind: str, path: str | None, load: Callable[[], Any]) -> Any:
        if (kind, path) not in self._loaded:
            self._loaded[kind, path] = load()
        return self._loaded[kind, path]

    # Methods that sample

    def _of_step(self, method: AnyMethod, batch: StoredStep) -> Loss:
        if isinstance(method, DistillMethod):
            return self._distilled(method, batch.rollout)
        assert isinstance(method, PolicyGradientMethod | PPOMethod) and isinstance(self.scorer, Scorer)
        job, scorer, reference = self.job, self.scorer, None
        if method.needs_reference:
            path, temperature = method.ref_model, job.config.rollout.temperature
            reference = self._once(
                "tokens", path, lambda: remembered(token_reference(job, path, scorer, temperature)[1])
            )
        old_R = None if self.weights.exact else batch.old_R.to(job.device)
        if isinstance(method, PPOMethod):
            assert self.values is not None
            step = ppo.step_of(job, method, batch.rollout, self.values, reference, self.weights.state.memory, old_R)
        else:
            assert isinstance(method, grpo.AnyMethod)
            step = grpo.step_of(job, method, batch.rollout, scorer, reference, old_R)
        for minibatch in minibatches(job, step, self.weights.step, epochs=1, count=1):
            if isinstance(method, PPOMethod):
                assert self.values is not None and isinstance(step, ppo.PPOStep)
                share = ppo.ActorCriticLoss(job, method, self.values, step, minibatch)
            else:
                share = grpo.Surrogate(job, method, scorer, step, minibatch)
            return Loss(minibatch.parts, Objective(share, minibatch.counted), step)
        return Loss((), Objective(lambda pack: (torch.zeros(()), {}), 0), step)  # nothing is in the loss

    def _distilled(self, method: DistillMethod, rollout: Rollout) -> Loss:
        job = self.job
        teacher = self._once("teacher", method.teacher, lambda: Teacher(job, method, self.policy))
        steps = [Step(job, rollout, method.mask_truncated_completions)]
        if self.given is not None:
            asked = self.given.examples
            _, others = sampled_prompts(job.config.seed, self.weights.step, asked, method.on_policy_fraction)
            steps.append(Step(job, given_completions(others), mask_truncated=False))
        packs = [StepPack(one, part) for one in steps for part in one.parts]
        tokens = sum(one.num_tokens for one in steps)
        return Loss(packs, distill.objective_of(job, method, self.policy, teacher, steps[0], tokens), steps[0])


def remembered(score: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A reference that scores each pack once: all losses pack the batch alike."""
    known: dict[tuple[bytes, ...], Tensor] = {}

    def look(pack: Pack, *rest: Any) -> Tensor:
        facts = (pack.tokens_T, pack.end_T, pack.source_N, pack.target_N, pack.sequence_N)
        key = tuple(fact.cpu().numpy().tobytes() for fact in facts)
        if key not in known:
            known[key] = score(pack, *rest)
        return known[key]

    return look


def clipped(method: AnyMethod, loss: Loss) -> float | None:
    """The share of tokens that the loss clipped in its last forward pass; None if it clips nothing."""
    if loss.step is None or not _clips(method):
        return None
    inside_R = _inside(loss.step)
    return _mean(loss.step.clipped_R.cpu()[inside_R])


def clipped_at_last_update(method: AnyMethod, loss: Loss, batch: StoredStep) -> float | None:
    """The share of tokens that the loss would clip at the run's last update of the step, by its stored numbers."""
    if loss.step is None or not _clips(method):
        return None
    inside_R, length_S = _inside(loss.step), batch.rollout.length_S[loss.step.in_loss_S]
    new_N, old_N = batch.new_R[inside_R], batch.old_R[inside_R]
    advantage_N = loss.step.advantage_R.cpu()[inside_R]
    if isinstance(method, PPOMethod):
        return _mean(grpo_clip(new_N, old_N, advantage_N, epsilon=method.cliprange)[1])
    assert isinstance(method, grpo.AnyMethod)
    _, clipped_N = policy_loss(
        grpo.loss_of(method),
        new_N,
        old_N,
        advantage_N,
        torch.arange(len(length_S)).repeat_interleave(length_S),
        length_S,
        level=grpo.level_of(method),
        epsilon=method.epsilon,
        epsilon_high=method.epsilon_high,
    )
    return _mean(clipped_N)


def _clips(method: AnyMethod) -> bool:
    if isinstance(method, grpo.AnyMethod):
        return grpo.loss_of(method).surrogate != "plain"
    return isinstance(method, PPOMethod)


def _inside(step: Step) -> Tensor:
    return torch.isin(step.rollout.sequence_R, step.in_loss_S)


def _mean(clipped_N: Tensor) -> float | None:
    return clipped_N.float().mean().item() if len(clipped_N) else None
