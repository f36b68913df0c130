"""On-policy distillation: the student samples completions, and a teacher scores every token (GKD, arXiv 2306.13649).

    loss = (1 / N) sum_n D(student(. | x, y_<n), teacher(. | x, y_<n))      D over the vocabulary, y the student's

D is the reverse KL, the forward KL or a Jensen-Shannon divergence (posttrain/losses/distillation.py); N counts the
tokens of the step. For a share of the prompts, y is the data's completion instead. No gradient flows through the
sampling. Dropout is off.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from posttrain.config import DistillMethod
from posttrain.data import Prepared
from posttrain.distillation import compare
from posttrain.losses import divergence_of
from posttrain.optim.update import Objective
from posttrain.recipes.online import Step, StepPack, given_completions, measure_mismatch, online, sampled_prompts
from posttrain.scoring import Scorer, scored_states
from posttrain.training.checks import check_packing
from posttrain.training.job import Job
from posttrain.training.loop import Loop
from posttrain.training.reference import Teacher


def train(job: Job, data: Prepared) -> Loop:
    method = job.config.method
    assert isinstance(method, DistillMethod)
    policy = job.policy("lm")
    optimizer = job.optimizer(policy)
    teacher = Teacher(job, method, policy)
    loop = Loop(job, policy, optimizer, data)

    with online(job, loop, policy, data) as run:
        for number, prompts in run.steps():
            with loop.interruption.sampling():
                asked, others = sampled_prompts(job.config.seed, number, prompts, method.on_policy_fraction)
                rollout = run.sample(number, asked, method.num_generations, version=number - 1)
                step = Step(job, rollout, method.mask_truncated_completions)
                step.reference_R = torch.zeros_like(step.new_R)
                step.assign(step.parts)
                given = Step(job, given_completions(others), mask_truncated=False)
                if number == 1 and step.parts:
                    first_two = rollout.examples(step.in_loss_S[:2], 1 << 30)[0]
                    check_packing(Scorer(policy), first_two, job.pack_together, job.record)
            packs = [StepPack(one, part) for one in (step, given) for part in one.parts]
            tokens = step.num_tokens + given.num_tokens
            check = partial(measure_mismatch, job, run.sample, step)
            objective = objective_of(job, method, policy, teacher, step, tokens, check)
            run.update(number, step, [(packs, objective)] if packs else [])
    return loop


def objective_of(
    job: Job,
    method: DistillMethod,
    policy: nn.Module,
    teacher: Teacher,
    step: Step,
    tokens: int,
    check: Callable[[], None] = lambda: None,
) -> Objective[StepPack]:
    """The loss of the packs of a step and of given completions, `tokens` tokens in all."""
    divergence = divergence_of(method.divergence, method.jsd_beta)
    sampled = max(step.num_tokens, 1)

    def share(one: StepPack) -> tuple[Tensor, dict[str, Tensor]]:
        part = one.part.to(job.device)
        teacher_states_N = teacher.states(one.step.rollout, part)
        found = compare(
            (policy, scored_states(policy, part.pack)),
            (teacher.model, teacher_states_N),
            part.pack.target_N,
            torch.full_like(teacher_states_N[:, 0], 1 / tokens, dtype=torch.float32),
            divergence,
            job.config.rollout.temperature,
        )
        one.step.record(part.token_N, found.logprob_N, found.teacher_logprob_N, -found.divergence_N, found.entropy_N)
        metrics = {"entropy": found.entropy_N.sum() / tokens}
        if one.step is step:
            metrics["kl"] = (found.logprob_N - found.teacher_logprob_N).sum() / sampled
        return found.loss, metrics

    return Objective(share, tokens, check=check)
