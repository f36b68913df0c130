"""On-policy distillation: the student samples completions, and a teacher scores every token (GKD, arXiv 2306.13649).

    loss = (1 / N) sum_n D(student(. | x, y_<n), teacher(. | x, y_<n))      D over the vocabulary, y from the student

D is the reverse KL, the forward KL or a Jensen-Shannon divergence (posttrain/distillation.py); N counts the
tokens of the step. For a share of the prompts, y is the data's completion instead. No gradient flows through the
sampling. Dropout is off.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from posttrain.batch import Example
from posttrain.config import DistillMethod
from posttrain.data import Prepared
from posttrain.distillation import compare_distributions, divergence_of
from posttrain.optim.update import Objective
from posttrain.recipes.offline import Models
from posttrain.recipes.online import Step, StepPack, Updates, given_completions, online, split_prompts
from posttrain.rollout import Rollout
from posttrain.scoring import Scorer, scored_states
from posttrain.training.job import Job
from posttrain.training.loop import Loop
from posttrain.training.reference import Teacher

Distillation = Models[DistillMethod, Scorer, Teacher]
reference_of = Teacher


def train(job: Job, data: Prepared) -> Loop:
    with online(job, data, reference_of) as run:
        method: DistillMethod = run.models.method
        for number, prompts in run.steps():
            with run.sampling():
                sampled, others = split_prompts(job.config.seed, number, prompts, method.on_policy_fraction)
                rollout = run.sample(number, sampled, method.num_generations, version=number - 1)
                step = step_of(run.models, rollout, others)
                run.check_packing(number, step)
            run.update(number, step, updates(run.models, number, step))
    return run.loop


class DistillStep(Step):
    """A step that also has the data's completions of prompts that the student does not complete."""

    from_data: Step


def step_of(models: Distillation, rollout: Rollout, others: Sequence[Example] = ()) -> DistillStep:
    """The step of a rollout and of `others`, which are prompts with the data's completions."""
    step = DistillStep(models.job, rollout, models.method.mask_truncated_completions)
    step.reference_R = torch.zeros_like(step.new_R)
    step.assign(step.parts)
    step.from_data = Step(models.job, given_completions(others), mask_truncated=False)
    return step


def updates(models: Distillation, number: int, step: DistillStep) -> Updates:
    """Yield the packs and the loss of the step's only update; nothing if no completion is in the loss."""
    job, method, teacher, policy = models.job, models.method, models.reference, models.scorer.model
    divergence = divergence_of(method.divergence, method.jsd_beta)
    sampled, tokens = max(step.num_tokens, 1), step.num_tokens + step.from_data.num_tokens

    def share(pack: StepPack) -> tuple[Tensor, dict[str, Tensor]]:
        part = pack.part.to(job.device)
        teacher_states_N = teacher.states(pack.step.rollout, part)
        compared = compare_distributions(
            (policy, scored_states(policy, part.pack)),
            (teacher.model, teacher_states_N),
            part.pack.target_N,
            torch.full_like(teacher_states_N[:, 0], 1 / tokens, dtype=torch.float32),
            divergence,
            job.config.rollout.temperature,
        )
        pack.step.record(
            part.token_N, compared.logprob_N, compared.teacher_logprob_N, -compared.divergence_N, compared.entropy_N
        )
        metrics = {"entropy": compared.entropy_N.sum() / tokens}
        if pack.step is step:
            metrics["kl"] = (compared.logprob_N - compared.teacher_logprob_N).sum() / sampled
        return compared.loss, metrics

    packs = [StepPack(source, part) for source in (step, step.from_data) for part in source.parts]
    if packs:
        yield packs, Objective(share, tokens)
