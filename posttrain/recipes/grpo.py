"""GRPO and its kin: completions of the policy are rewarded and compared, and the better ones are made likelier.

    A = (r - mean of the group) / std of the group              (GRPO, arXiv 2402.03300, section 4.1)
    loss = - min(ratio A, clip(ratio, 1 - eps, 1 + eps) A) + beta KL(policy || reference)      ratio = pi / pi_old

`loss_type` says how tokens become a loss (posttrain/losses/policy.py), `type` how rewards become advantages: `rloo`
holds each against the others of its prompt, `reinforce_plus_plus` normalises every token's return over the step. A step
is one rollout of batch_size prompts, then num_iterations x num_minibatches updates. Dropout is off.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from posttrain.batch import Pack
from posttrain.config import GRPOMethod, PolicyGradientMethod, ReinforcePlusPlusMethod, RLOOMethod
from posttrain.data import Prepared
from posttrain.losses import (
    POLICY_LOSSES,
    Counts,
    group_advantages,
    kl_penalty,
    leave_one_out,
    normalized,
    policy_loss,
    rewards_to_go,
    token_weights,
    truncated_weights,
)
from posttrain.optim.update import Objective
from posttrain.recipes.online import Step, evaluate, in_packs, look_at_sampler, minibatches, scored
from posttrain.rollout import Part
from posttrain.scoring import Scorer
from posttrain.training.alarms import Alarms
from posttrain.training.checks import check_margins, check_packing, check_ratio
from posttrain.training.evaluation import rollout_store, sampler_of
from posttrain.training.job import Job
from posttrain.training.loop import Loop
from posttrain.training.reference import token_reference

EPS = 1e-4  # beside the spread that advantages are divided by, as in TRL


def train(job: Job, data: Prepared) -> Loop:
    method = job.config.method
    assert isinstance(method, PolicyGradientMethod)
    policy = job.policy("lm")
    optimizer = job.optimizer(policy)
    scorer = Scorer(policy)
    temperature = job.config.rollout.temperature
    reference = token_reference(job, method.ref_model, scorer, temperature)[1] if method.needs_reference else None
    loss = POLICY_LOSSES[method.loss_type if isinstance(method, GRPOMethod) else method.type]
    level = method.importance_sampling_level if isinstance(method, GRPOMethod) else None
    kl_in_loss, kl_in_reward = (reference is not None and method.kl_in == where for where in ("loss", "reward"))

    def logprobs(pack: Pack) -> Tensor:
        return scorer(pack, temperature).logprob_N

    def objective_of(step: Step, counts: Counts, first: bool) -> Objective[Part]:
        def share(part: Part):
            part = part.to(job.device)
            pack, at_N = part.pack, part.token_N
            scores = scorer(pack, temperature)
            if step.old_R is None:
                step.trainer_R[at_N] = scores.logprob_N.detach()
            old_N = step.trainer_R[at_N]
            if first:
                check_ratio(scores.logprob_N.detach() - old_N, job.dtype)
            advantage_N = step.advantage_R[at_N]
            length_S = pack.length_S
            loss_N, clipped_N = policy_loss(
                loss,
                scores.logprob_N,
                old_N,
                advantage_N,
                pack.sequence_N,
                length_S,
                level=level,
                epsilon=method.epsilon,
                epsilon_high=method.epsilon_high,
            )
            step.new_R[at_N], step.clipped_R[at_N] = scores.logprob_N.detach(), clipped_N
            if method.importance_sampling_cap is not None:
                loss_N = loss_N * truncated_weights(old_N, step.sampler_R[at_N], cap=method.importance_sampling_cap)
            metrics = {
                "entropy": scores.entropy_N.detach().sum() / counts.tokens,
                "clip_ratio/low_mean": (clipped_N & (advantage_N < 0)).sum() / counts.tokens,
                "clip_ratio/high_mean": (clipped_N & (advantage_N > 0)).sum() / counts.tokens,
                "max_ratio": (scores.logprob_N.detach() - old_N).amax().exp(),
            }
            if step.reference_R is not None:
                reference_N = step.reference_R[at_N]
                kl_N = kl_penalty(scores.logprob_N, reference_N, estimator=method.kl_estimator)
                metrics["kl"] = kl_N.detach().sum() / counts.tokens
                if kl_in_loss:
                    loss_N = loss_N + method.beta * kl_N
                if first and method.ref_model is None:
                    check_margins(pack.sum_by_sequence(old_N - reference_N), length_S, job.dtype)
            if method.entropy_coef:
                loss_N = loss_N - method.entropy_coef * scores.entropy_N
            return (token_weights(loss.average, length_S, pack.sequence_N, counts) * loss_N).sum(), metrics

        return Objective(share, counts.sequences, check=partial(look_at_sampler, job, sample, step))

    def updates_of(step: Step, number: int) -> Iterator[tuple[list[Part], Objective[Part]]]:
        """Every update of a step, minibatch by minibatch; the rollout is packed once where there is one."""
        rollout = step.rollout
        tokens = int(rollout.length_S[step.in_loss_S].sum())
        for iteration in range(method.num_iterations):
            key = (job.config.seed, number, iteration)
            made = minibatches(step, method.num_minibatches, key)
            for place, (chosen, counted) in enumerate(made):
                counts = Counts(
                    sequences=counted,
                    tokens=int(rollout.length_S[chosen].sum()),
                    rollout_tokens=tokens / len(made),
                    max_length=job.config.rollout.max_completion_length,
                )
                parts = step.parts if method.num_minibatches == 1 else in_packs(job, rollout, chosen)
                first = number == 1 and iteration == place == 0
                yield parts, objective_of(step, counts, first)

    loop = Loop(job, policy, optimizer, data)
    with sampler_of(job, policy, data, job.keeps_engine) as sample, rollout_store(job, loop) as store:
        alarms = Alarms(loop.state.memory)
        sample.engine.load(policy, loop.state.step)
        if loop.evaluation_due:
            evaluate(loop, sample, store)
        for number, prompts in loop.steps():
            with loop.drawing():
                rollout = sample(number, prompts, method.num_generations, method.resampling_rounds, number - 1)
                step = Step(job, rollout, method.mask_truncated_completions)
                if method.updates > 1 or kl_in_reward:
                    step.trainer_R = step.old_R = scored(job, rollout, step.parts, logprobs)[:, 0]
                if reference is not None:
                    step.reference_R = scored(job, rollout, step.parts, reference)[:, 0]
                step.advantage_R = advantages(method, step).to(job.device)
                if number == 1 and step.parts:
                    check_packing(scorer, rollout.examples(step.in_loss_S[:2], 1 << 30)[0], job.pack)

            def measure(metrics: Mapping[str, float], step=step, number=number) -> dict[str, float]:
                found = step.rollout.metrics() | (step.signs or {})
                alarms.look(number, {**metrics, **found})
                if store is not None:
                    store.add(number, number / loop.steps_per_epoch, *step.stored())
                return found

            loop.updates(updates_of(step, number), measure)
            sample.engine.load(policy, number)
            if loop.evaluation_due:
                evaluate(loop, sample, store)
    return loop


def advantages(method: PolicyGradientMethod, step: Step) -> Tensor:
    """The advantage of each token (R), 0 for those of completions that are left out."""
    rollout, chosen = step.rollout, step.counted_S
    penalty_R = torch.zeros(rollout.num_tokens)
    if method.kl_in == "reward" and step.reference_R is not None and step.old_R is not None:
        penalty_R = method.beta * kl_penalty(step.old_R, step.reference_R, estimator=method.kl_estimator).cpu()
    if isinstance(method, ReinforcePlusPlusMethod):
        inside_R = torch.isin(rollout.sequence_R, chosen)
        reward_R = -penalty_R
        reward_R[rollout.start_S + rollout.length_S - 1] += rollout.reward_S
        advantage_R = torch.zeros(rollout.num_tokens)
        if inside_R.any():
            returns_N = rewards_to_go(reward_R[inside_R], rollout.sequence_R[inside_R])
            advantage_R[inside_R] = normalized(returns_N, eps=EPS)
        return advantage_R
    reward_S = rollout.reward_S - step.sums(penalty_R)
    advantage_S = torch.zeros(len(rollout.completions))
    advantage_S[chosen] = compared(method, reward_S[chosen], rollout.group_S[chosen])
    return advantage_S[rollout.sequence_R]


def compared(method: PolicyGradientMethod, reward_S: Tensor, group_S: Tensor) -> Tensor:
    """Each completion's advantage (S) from its reward and those of its prompt's others; REINFORCE++: from the mean."""
    if isinstance(method, GRPOMethod) and method.loss_type == "no_baseline":
        return reward_S
    if isinstance(method, RLOOMethod):
        return leave_one_out(reward_S, group_S)
    scale = method.scale_rewards if isinstance(method, GRPOMethod) else "none"
    return group_advantages(reward_S, group_S, scale_rewards=scale, eps=EPS)
