"""PPO: completions of the policy are rewarded, and returns are compared token by token with predicted values.

    r_t = -kl_coef KL_t, and the completion's reward at its last token        (arXiv 1909.08593, section 2)
    A_t = sum_k (gamma lam)^k delta_{t+k}     delta_t = r_t + gamma V_{t+1} - V_t      (GAE, arXiv 1506.02438, eq. 16)
    loss = - min(ratio A, clip(ratio, 1 - eps, 1 + eps) A) + vf_coef max((V - R)^2, (V_clip - R)^2) / 2

(PPO, arXiv 1707.06347, eq. 7 and 9.) The value head reads the policy's last hidden states and starts at 0. It predicts
returns normalised by their running mean and standard deviation, so that its loss has the scale of the advantages, since
value head and policy share the backbone. A step is one rollout of batch_size prompts, then num_ppo_epochs x
num_minibatches updates; means are over tokens. Dropout is off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from posttrain.base.errors import RunError
from posttrain.batch import Pack
from posttrain.config import PPOMethod
from posttrain.data import Prepared
from posttrain.losses.advantage import ReturnScale, Turns, gae, normalized, rewards_to_go, value_loss, whitened
from posttrain.losses.policy import adapted_kl_coef, grpo_clip, kl_penalty, sampling_weights
from posttrain.optim.update import Objective
from posttrain.recipes.offline import Models
from posttrain.recipes.online import Minibatch, Step, Updates, minibatches, online, reference_of, scored
from posttrain.rollout import Rollout, RolloutPack, stored_turns
from posttrain.scoring import ValueScorer
from posttrain.training.checks import check_margins, check_ratio
from posttrain.training.job import Job
from posttrain.training.loop import Loop
from posttrain.training.reference import TokenReference

PPO = Models[PPOMethod, ValueScorer, TokenReference | None]
EPS = 1e-8  # added to the standard deviation that divides advantages


def train(job: Job, data: Prepared) -> Loop:
    with online(job, data, reference_of) as run:
        method: PPOMethod = run.models.method
        for number, prompts in run.steps():
            with run.sampling():
                rollout = run.sample(number, prompts, method.num_generations, version=number - 1)
                step = step_of(run.models, rollout)
                run.check_packing(number, step)
                if number == 1 and step.parts and step.reference_R is not None and method.ref_model is None:
                    logratio_S = step.sums(step.trainer_R - step.reference_R)
                    check_margins(logratio_S, rollout.length_S.to(job.device), job.dtype, job.record)
            finish = partial(finish_step, method, step, run.loop.state.memory)
            run.update(number, step, updates(run.models, number, step), finish)
    return run.loop


def step_of(models: PPO, rollout: Rollout, old_R: Tensor | None = None) -> PPOStep:
    """The step of a rollout: its log-probabilities, values and advantages, which depend on state from previous steps.

    `old_R`: the log-probabilities under the policy that sampled; None: the current policy sampled.
    """
    job, method, memory = models.job, models.method, models.state.memory

    def logprobs_and_outputs(pack: Pack) -> Tensor:
        scores, output_N = models.scorer(pack, job.config.rollout.temperature)
        return torch.stack([scores.logprob_N, output_N], dim=1)

    step = PPOStep(job, rollout, method.mask_truncated_completions)
    parts = step.score_truncated(job) if job.config.behavior_version >= 2 else step.parts
    step.trainer_R, step.output_R = scored(job, rollout, parts, logprobs_and_outputs, 2).unbind(1)
    if old_R is not None:
        step.trainer_R = old_R
    if models.reference is not None:
        step.reference_R = scored(job, rollout, parts, models.reference)[:, 0]
    step.kl_coef = memory.get("kl_coef", method.kl_coef)
    mean, std = memory.get("returns/mean", 0.0), memory.get("returns/std", 1.0)
    estimate_advantages(method, step, ReturnScale(mean, std, int(memory.get("returns/steps", 0))))
    return step


def updates(models: PPO, number: int, step: PPOStep) -> Updates:
    """Yield the packs and the loss of each update of step `number`."""
    job, method = models.job, models.method
    for minibatch in minibatches(job, step, number, method.num_ppo_epochs, method.num_minibatches):
        loss = ActorCriticLoss(job, method, models.scorer, step, minibatch)
        yield minibatch.parts, Objective(loss, len(minibatch.chosen))


class ActorCriticLoss:
    """PPO's loss of a minibatch: maps a pack to its share of the loss and its metrics."""

    def __init__(self, job: Job, method: PPOMethod, actor_critic: ValueScorer, step: PPOStep, minibatch: Minibatch):
        self.job, self.method, self.actor_critic, self.step = job, method, actor_critic, step
        self.is_first, self.tokens = minibatch.is_first, int(step.rollout.length_S[minibatch.chosen].sum())

    def __call__(self, part: RolloutPack) -> tuple[Tensor, dict[str, Tensor]]:
        method, step = self.method, self.step
        part = part.to(self.job.device)
        at_N = part.token_N
        scores, output_N = self.actor_critic(part.pack, self.job.config.rollout.temperature)
        old_N, advantage_N = step.trainer_R[at_N], step.advantage_R[at_N]
        change_N = scores.logprob_N.detach() - old_N
        if self.is_first:
            check_ratio(change_N, self.job.dtype, self.job.record)
        policy_N, clipped_N = surrogate(method, scores.logprob_N, old_N, advantage_N)
        step.new_R[at_N], step.clipped_R[at_N] = scores.logprob_N.detach(), clipped_N
        step.entropy_R[at_N] = scores.entropy_N.detach()
        if method.importance_sampling is not None:
            where, settings = (part.pack.sequence_N, part.pack.length_S), dict(method.importance_sampling)
            policy_N = policy_N * sampling_weights(old_N, step.sampler(at_N, old_N), *where, **settings)[0]
        value_loss_N, value_clipped_N = value_loss(
            output_N,
            step.output_R[at_N],
            step.scale.outputs(step.return_R[at_N]),
            cliprange_value=method.cliprange_value,
        )
        loss_N = policy_N + method.vf_coef * value_loss_N - method.entropy_coef * scores.entropy_N
        means = {
            "loss/policy": policy_N,
            "loss/value": value_loss_N,
            "entropy": scores.entropy_N,
            "clip_ratio": clipped_N.float(),
            "value_clip_ratio": value_clipped_N.float(),
            "approx_kl": 0.5 * change_N**2,  # KL from the old policy, as in TRL
        }
        metrics = {name: value_N.detach().sum() / self.tokens for name, value_N in means.items()}
        return loss_N.sum() / self.tokens, metrics | {"max_ratio": change_N.amax().exp()}


def surrogate(
    method: PPOMethod, logprob_N: Tensor, old_N: Tensor, advantage_N: Tensor, *_sequences: Tensor
) -> tuple[Tensor, Tensor]:
    """The policy loss of each token under these settings, and whether the token is clipped (both N)."""
    return grpo_clip(logprob_N, old_N, advantage_N, epsilon=method.cliprange)


def finish_step(method: PPOMethod, step: PPOStep, memory: dict[str, float]) -> dict[str, float]:
    """Return the step's PPO metrics, and save the scale of its returns and the next KL coefficient in `memory`."""
    metrics = value_metrics(step)
    memory.update({f"returns/{name}": float(value) for name, value in asdict(step.scale).items()})
    if step.kl_S is not None:
        metrics |= {"kl": step.kl_S.mean().item(), "kl_coef": step.kl_coef}
        if method.target_kl is not None:
            memory["kl_coef"] = adapted_kl_coef(
                step.kl_coef,
                metrics["kl"],
                target=method.target_kl,
                horizon=method.kl_horizon,
                completions=len(step.kl_S),
            )
    return metrics


class PPOStep(Step):
    """A step with its values and the results of GAE."""

    output_R: Tensor  # the value head's output before each token, at the start of the step
    scale: ReturnScale  # turns outputs into values
    value_R: Tensor  # the outputs on the scale of returns
    return_R: Tensor
    kl_coef: float  # the weight of the KL in the step's rewards
    kl_S: Tensor | None = None  # KL of each scored completion, nats; None without a reference or completions

    def per_token(self) -> dict[str, Tensor | None]:
        return super().per_token() | {"old_values": self.value_R, "returns": self.return_R}


def estimate_advantages(method: PPOMethod, step: PPOStep, scale: ReturnScale) -> None:
    """Set the step's values, returns, and advantages normalised over its scored tokens; all are 0 for other tokens.

    `scale` is the scale after the previous steps. It is first updated with this step's rewards, so that values have the
    right scale from the first step on.
    """
    rollout, chosen = step.rollout, step.scored_S
    step.penalty_R = torch.zeros_like(step.output_R)
    if step.reference_R is not None:
        kl_R = kl_penalty(step.trainer_R, step.reference_R, estimator=method.kl_estimator)
        step.penalty_R = step.kl_coef * kl_R
        if len(chosen):
            step.kl_S = step.sums(kl_R)[chosen.to(kl_R.device)]
    inside_R = torch.isin(rollout.sequence_R, chosen).to(step.penalty_R.device)
    step.scale, step.value_R, step.return_R = scale, torch.zeros_like(step.output_R), torch.zeros_like(step.output_R)
    if inside_R.any():
        reward_N, sequence_N = token_rewards(method, rollout.turns(chosen), step.penalty_R[inside_R])
        if method.normalize_returns:
            step.scale = scale.after(rewards_to_go(reward_N, sequence_N, gamma=method.gamma))
        value_N = step.scale.values(step.output_R[inside_R])
        step.advantage_R[inside_R], step.return_R[inside_R] = of_tokens(method, reward_N, value_N, sequence_N)
        step.value_R[inside_R] = value_N


def token_rewards(method: PPOMethod, turns: Turns, penalty_N: Tensor) -> tuple[Tensor, Tensor]:
    """The reward of each token of completions, and the index of the token's completion (both N)."""
    reward_N, sequence_N = turns.token_rewards(penalty_N), turns.sequence_N.to(penalty_N.device)
    return whitened(reward_N) if method.whiten_rewards else reward_N, sequence_N


def of_tokens(method: PPOMethod, reward_N: Tensor, value_N: Tensor, sequence_N: Tensor) -> tuple[Tensor, Tensor]:
    """The advantage of each token, normalised over all tokens, and the token's return (both N)."""
    advantage_N, return_N = gae(reward_N, value_N, sequence_N, gamma=method.gamma, lam=method.lam)
    return normalized(advantage_N, eps=EPS), return_N


def value_metrics(step: PPOStep) -> dict[str, float]:
    """The mean value, and the share of the returns' variance that values explain: 1 is perfect, 0 is no better than the
    mean return."""
    inside_R = torch.isin(step.rollout.sequence_R, step.scored_S).to(step.value_R.device)
    return_N, value_N = step.return_R[inside_R], step.value_R[inside_R]
    if len(return_N) < 2 or return_N.var() == 0:
        return {}
    explained = 1 - (return_N - value_N).var() / return_N.var()
    return {"value": value_N.mean().item(), "explained_variance": explained.item()}


def regraded(method: PPOMethod, rollouts: Sequence[Mapping[str, Any]], rewards: Sequence[float]) -> list[float | None]:
    """The mean advantage of each stored completion of a step under these rewards; None outside the loss.

    The run's stored values are used. Raises RunError if none were stored.
    """
    inside = [(row, reward) for row, reward in zip(rollouts, rewards, strict=True) if row["returns"] is not None]
    if any(row["returns"] is None and row["advantages"] is not None for row in rollouts):
        raise RunError(
            "this run's rollouts were stored by an earlier version, without values and returns: PPO cannot be regraded"
        )
    if not inside:
        return [None] * len(rollouts)
    lengths = [len(row["returns"]) for row, _ in inside]
    value_N = torch.cat([torch.tensor(row["old_values"]) for row, _ in inside])
    penalty_N = torch.cat([_stored_penalty(method, row) for row, _ in inside])
    turns = stored_turns([row for row, _ in inside], [reward for _, reward in inside])
    reward_N, sequence_N = token_rewards(method, turns, penalty_N)
    advantage_N, _ = of_tokens(method, reward_N, value_N, sequence_N)
    means = iter([float(part_N.mean()) for part_N in advantage_N.double().split(lengths)])
    means = [None if row["returns"] is None else next(means) for row in rollouts]
    return [None if row["advantages"] is None else mean for row, mean in zip(rollouts, means, strict=True)]


def _stored_penalty(method: PPOMethod, row: Mapping[str, Any]) -> Tensor:
    """The penalty of each token. If an earlier version did not store it, it is computed from values and returns.

    r_t = delta_t + V_t - gamma V_{t+1}, delta_t = A_t - gamma lam A_{t+1}, A = return - V. This is exact without
    whiten_rewards.
    """
    if row.get("penalties") is not None:
        return torch.tensor(row["penalties"])
    value_N = torch.tensor(row["old_values"], dtype=torch.float64)
    advantage_N, nothing = torch.tensor(row["returns"]) - value_N, torch.zeros(1)
    after_N, value_after_N = (torch.cat([all_N[1:], nothing]) for all_N in (advantage_N, value_N))
    reward_N = advantage_N - method.gamma * (method.lam * after_N + value_after_N) + value_N
    reward_N[-1] -= row["reward"]
    return -reward_N.float()
