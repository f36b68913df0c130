"""On-policy distillation: the student samples completions, and a teacher scores every token (GKD, arXiv 2306.13649).

    loss = (1 / N) sum_n D(student(. | x, y_<n), teacher(. | x', y_<n))     D over the vocabulary, y from the student

D is the reverse KL, the forward KL or a Jensen-Shannon divergence (posttrain/distillation.py); N counts the
tokens of the step. For a share of the prompts, y is the data's completion instead. No gradient flows through the
sampling. Dropout is off.

In self-distillation the teacher is the policy, and its prompt x' has what the student's lacks: a demonstration (SDFT,
arXiv 2601.19897), or another completion of the prompt that was successful (SDPO, arXiv 2601.20802).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from posttrain.batch import Example
from posttrain.config import DistillMethod
from posttrain.data import Prepared
from posttrain.distillation import Head, Taught, compare_distributions, divergence_of
from posttrain.optim.update import Objective
from posttrain.recipes.offline import Models
from posttrain.recipes.online import Step, Updates, given_completions, in_packs, online, split_prompts
from posttrain.rollout import Rollout, RolloutPack
from posttrain.scoring import Scorer, scored_states
from posttrain.training.job import Job
from posttrain.training.loop import Loop
from posttrain.training.reference import Teacher

Distillation = Models[DistillMethod, Scorer, Teacher]
reference_of = Teacher


def train(job: Job, data: Prepared) -> Loop:
    with online(job, data, reference_of) as run:
        method: DistillMethod = run.models.method
        run.models.reference.check(data)
        for number, prompts in run.steps():
            with run.sampling():
                sampled, others = split_prompts(job.config.seed, number, prompts, method.on_policy_fraction)
                rollout = run.sample(number, sampled, method.num_generations, version=number - 1)
                step = step_of(run.models, rollout, others)
                run.check_packing(number, step)
            run.update(number, step, updates(run.models, number, step), step.taught)
    return run.loop


class DistillStep(Step):
    """Completions, each with the teacher's prompt; `from_data`: those that the data has of the step's other prompts."""

    from_data: DistillStep

    def __init__(self, models: Distillation, rollout: Rollout, mask_truncated: bool):
        super().__init__(models.job, rollout, mask_truncated)
        method, self.successful = models.method, None
        if method.use_successful_as_teacher:
            self.successful = successful_others(rollout, method.success_reward_threshold)
        self.top = None if method.teacher_logprobs is None else models.reference.top(rollout)
        self.prompts = models.reference.taught(rollout, self.successful)
        if method.use_successful_as_teacher:
            has_prompt_S = torch.tensor([prompt is not None for prompt in self.prompts], dtype=torch.bool)
            self.in_loss_S = self.scored_S = self.in_loss_S[has_prompt_S[self.in_loss_S]]
            self.parts = in_packs(models.job, rollout, self.in_loss_S)
        self.reference_R = torch.zeros_like(self.new_R)
        self.assign(self.parts)

    def taught(self) -> dict[str, float]:
        """With successful completions as context: the share of completions in the loss, and of those that have one."""
        if self.successful is None or not self.prompts:
            return {}
        has_one = sum(context is not None for context in self.successful)
        return {
            "self_distillation/success_sample_fraction": has_one / len(self.prompts),
            "self_distillation/reprompt_sample_fraction": len(self.in_loss_S) / len(self.prompts),
        }


@dataclass(frozen=True, slots=True)
class StepPack:
    """A pack of a step's completions."""

    step: DistillStep
    part: RolloutPack

    @property
    def num_tokens(self) -> int:
        return self.part.num_tokens


def successful_others(rollout: Rollout, threshold: float) -> list[str | None]:
    """For each completion, the text of the first other completion of its prompt whose reward reaches the threshold."""
    best: dict[int, list[int]] = {}  # by prompt: at most two successful completions
    for index, (completion, reward) in enumerate(zip(rollout.completions, rollout.reward_S.tolist(), strict=True)):
        if reward >= threshold and len(found := best.setdefault(completion.group, [])) < 2:
            found.append(index)
    others = (
        [other for other in best.get(completion.group, ()) if other != index]
        for index, completion in enumerate(rollout.completions)
    )
    return [rollout.completions[other[0]].text if other else None for other in others]


def step_of(models: Distillation, rollout: Rollout, others: Sequence[Example] = ()) -> DistillStep:
    """The step of a rollout and of `others`, which are prompts with the data's completions."""
    step = DistillStep(models, rollout, models.method.mask_truncated_completions)
    step.from_data = DistillStep(models, given_completions(others), mask_truncated=False)
    return step


def updates(models: Distillation, number: int, step: DistillStep) -> Updates:
    """Yield the packs and the loss of the step's only update; nothing if no completion is in the loss."""
    job, method, teacher, policy = models.job, models.method, models.reference, models.scorer.model
    divergence = divergence_of(method.divergence, method.jsd_beta)
    sampled, tokens = max(step.num_tokens, 1), step.num_tokens + step.from_data.num_tokens

    def share(pack: StepPack) -> tuple[Tensor, dict[str, Tensor]]:
        part, source = pack.part.to(job.device), pack.step
        if source.top is None:
            taught: Taught = teacher.outputs(source.rollout, source.prompts, part)
        else:
            taught = source.top.at(part.token_N)
        hidden_N = scored_states(policy, part.pack)
        compared = compare_distributions(
            (Head.of(policy, job.config.rollout.temperature), hidden_N),
            taught,
            part.pack.target_N,
            torch.full_like(hidden_N[:, 0], 1 / tokens, dtype=torch.float32),
            divergence,
        )
        at_N = part.token_N
        assert source.reference_R is not None
        source.trainer_R[at_N] = source.new_R[at_N] = compared.logprob_N
        source.reference_R[at_N], source.advantage_R[at_N] = compared.teacher_logprob_N, -compared.divergence_N
        source.entropy_R[at_N] = compared.entropy_N
        metrics = {"entropy": compared.entropy_N.sum() / tokens}
        if source is step:
            metrics["kl"] = (compared.logprob_N - compared.teacher_logprob_N).sum() / sampled
        return compared.loss, metrics

    packs = [StepPack(source, part) for source in (step, step.from_data) for part in source.parts]
    if packs:
        yield packs, Objective(share, tokens)
