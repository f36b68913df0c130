"""GRPO and its variants: completions of the policy are rewarded and compared, and the better ones become more likely.

    A = (r - mean of the group) / std of the group              (GRPO, arXiv 2402.03300, section 4.1)
    loss = - min(ratio A, clip(ratio, 1 - eps, 1 + eps) A) + beta KL(policy || reference)      ratio = pi / pi_old

`loss_type` selects the loss per token (posttrain/losses/policy.py), and `type` how rewards become advantages: `rloo`
uses a leave-one-out baseline, `reinforce_plus_plus` normalises every token's return over the step. A step is one
rollout of batch_size prompts, then num_iterations x num_minibatches updates. Dropout is off.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from posttrain.base.errors import RunError
from posttrain.batch import Pack
from posttrain.config.schema.online import GRPOMethod, PolicyGradientMethod, ReinforcePlusPlusMethod, RLOOMethod
from posttrain.data import Prepared
from posttrain.environments.episode import Forest
from posttrain.losses.advantage import Turns, decoupled, group_advantages, leave_one_out, normalized, rewards_to_go
from posttrain.losses.policy import (
    LEAST_LOG_W,
    Counts,
    PolicyLoss,
    cispo,
    grpo_clip,
    kl_penalty,
    logratio,
    off_policy_kept,
    policy_loss,
    policy_loss_named,
    sampling_weights,
    token_weights,
    vespo,
)
from posttrain.optim.update import Objective
from posttrain.recipes.offline import Models
from posttrain.recipes.online import Minibatch, Step, Updates, minibatches, online, reference_of, scored
from posttrain.rollout import Rollout, RolloutPack, stored_turns
from posttrain.scoring import Scorer
from posttrain.training.checks import check_margins, check_ratio
from posttrain.training.evaluation import parts_of
from posttrain.training.job import Job
from posttrain.training.loop import Loop
from posttrain.training.reference import TokenReference

AnyMethod = GRPOMethod | RLOOMethod | ReinforcePlusPlusMethod
PolicyGradient = Models[AnyMethod, Scorer, TokenReference | None]
Parts = Mapping[str, Mapping[str, Any]]  # of a completion's reward, as stored
EPS = 1e-4  # added to the standard deviation that divides advantages, as in TRL


def train(job: Job, data: Prepared) -> Loop:
    with online(job, data, reference_of) as run:
        method: AnyMethod = run.models.method
        for number, prompts in run.steps():
            with run.sampling():
                how = method.num_generations, method.resampling_rounds, number - 1, forest_of(method)
                rollout = run.sample(number, prompts, *how)
                step = step_of(run.models, rollout)
                run.check_packing(number, step)
            finish = partial(adapt_entropy, method, step, run.loop.state.memory)
            run.update(number, step, updates(run.models, number, step), finish)
    return run.loop


def step_of(models: PolicyGradient, rollout: Rollout, old_R: Tensor | None = None) -> Step:
    """The step of a rollout: its log-probabilities and advantages.

    `old_R`: the log-probabilities under the policy that sampled; None: the current policy sampled.
    """
    job, method, scorer, reference = models.job, models.method, models.scorer, models.reference
    temperature = job.config.rollout.temperature
    step = Step(job, rollout, method.mask_truncated_completions)
    parts, penalised = step.parts, reference is not None and method.kl_in == "reward"
    if penalised and job.config.behavior_version >= 2:
        parts = step.score_truncated(job)  # their rewards have the penalty too
    if old_R is not None:
        step.trainer_R = step.old_R = old_R
    elif method.updates > 1 or penalised:
        logprobs = scored(job, rollout, parts, lambda pack: scorer(pack, temperature).logprob_N)
        step.trainer_R = step.old_R = logprobs[:, 0]
    if isinstance(method, GRPOMethod) and method.top_entropy_quantile < 1:
        entropy_R = scored(job, rollout, step.parts, lambda pack: scorer(pack, temperature).entropy_N)[:, 0]
        step.top_R = entropy_R >= entropy_R[step.in_loss_R].quantile(1 - method.top_entropy_quantile)
    if reference is not None:
        step.reference_R = scored(job, rollout, parts, reference)[:, 0]
    if penalised and step.old_R is not None and step.reference_R is not None:
        penalty_R = method.beta * kl_penalty(step.old_R, step.reference_R, estimator=method.kl_estimator)
        inside_R = torch.isin(rollout.sequence_R, step.scored_S).to(job.device)
        step.penalty_R = penalty_R.where(inside_R, 0.0)
    step.advantage_R = advantages(method, step).to(job.device)
    return step


def updates(models: PolicyGradient, number: int, step: Step) -> Updates:
    """Yield the packs and the loss of each update of step `number`."""
    job, method = models.job, models.method
    for minibatch in minibatches(job, step, number, method.num_iterations, method.num_minibatches):
        loss = PolicyGradientLoss(models, step, minibatch)
        yield minibatch.parts, Objective(loss, minibatch.counted)


class PolicyGradientLoss:
    """The clipped surrogate of a minibatch: maps a pack to its share of the loss and its metrics."""

    def __init__(self, models: PolicyGradient, step: Step, minibatch: Minibatch):
        self.job, self.method, self.scorer = models.job, models.method, models.scorer
        self.step, self.minibatch = step, minibatch
        self.entropy_coef = entropy_coef(models.method, models.state.memory)
        self.top_share = 1.0 if step.top_R is None else step.top_R[step.in_loss_R].float().mean()
        length_S = step.rollout.length_S
        self.counts = Counts(
            sequences=minibatch.counted,
            tokens=int(length_S[minibatch.chosen].sum()),
            rollout_tokens=int(length_S[step.in_loss_S].sum()) / minibatch.number,
            max_length=self.job.config.rollout.max_completion_length,
        )

    def __call__(self, part: RolloutPack) -> tuple[Tensor, dict[str, Tensor]]:
        method, step, tokens = self.method, self.step, self.counts.tokens
        part = part.to(self.job.device)
        pack, at_N = part.pack, part.token_N
        scores = self.scorer(pack, self.job.config.rollout.temperature)
        new_N = scores.logprob_N.detach()
        if step.old_R is None:
            step.trainer_R[at_N] = new_N
        old_N, advantage_N = step.trainer_R[at_N], step.advantage_R[at_N]
        where, sampler_N = (pack.sequence_N, pack.length_S), step.sampler(at_N, old_N)
        importance_N = torch.ones_like(old_N)
        if method.importance_sampling is not None:
            importance_N, _ = sampling_weights(old_N, sampler_N, *where, **dict(method.importance_sampling))
        behaviour_N = old_N
        if loss_of(method).surrogate is vespo:  # its weight includes the correction for the engine
            behaviour_N, importance_N = old_N - importance_N.log().clamp(min=LEAST_LOG_W), torch.ones_like(old_N)
        loss_N, clipped_N = surrogate(method, scores.logprob_N, behaviour_N, advantage_N, *where)
        step.new_R[at_N], step.clipped_R[at_N] = new_N, clipped_N
        step.entropy_R[at_N] = scores.entropy_N.detach()
        loss_N, bonus_N = loss_N * importance_N, scores.entropy_N
        metrics = {
            "entropy": scores.entropy_N.detach().sum() / tokens,
            "clip_ratio/low_mean": (clipped_N & (advantage_N < 0)).sum() / tokens,
            "clip_ratio/high_mean": (clipped_N & (advantage_N > 0)).sum() / tokens,
            "max_ratio": (new_N - old_N).amax().exp(),
        }
        if isinstance(method, GRPOMethod) and method.off_policy_mask_threshold is not None:
            threshold = method.off_policy_mask_threshold
            kept_N = off_policy_kept(new_N, sampler_N, advantage_N, *where, threshold=threshold)
            loss_N, metrics["off_policy_ratio"] = loss_N * kept_N, (~kept_N).sum() / tokens
        if step.top_R is not None:
            loss_N, bonus_N = loss_N * step.top_R[at_N], bonus_N * step.top_R[at_N] / self.top_share
        if step.reference_R is not None:
            kl_N = kl_penalty(scores.logprob_N, step.reference_R[at_N], estimator=method.kl_estimator)
            metrics["kl"] = kl_N.detach().sum() / tokens
            if method.kl_in == "loss":
                if isinstance(method, GRPOMethod) and method.use_bias_correction_kl:
                    level = method.importance_sampling_level or loss_of(method).level
                    kl_N = kl_N * logratio(scores.logprob_N, old_N, *where, level).exp()
                loss_N = loss_N + method.beta * kl_N
        if self.entropy_coef:
            loss_N = loss_N - self.entropy_coef * bonus_N
        if self.minibatch.is_first:
            self.check(pack, new_N, at_N)
        weight_N = token_weights(loss_of(method).average, pack.length_S, pack.sequence_N, self.counts)
        return (weight_N * loss_N).sum(), metrics

    def check(self, pack: Pack, new_N: Tensor, at_N: Tensor) -> None:
        """Check that before the first update the ratio to the old policy is 1 and the KL to the initial policy is 0."""
        step, dtype, record = self.step, self.job.dtype, self.job.record
        old_N = step.trainer_R[at_N]
        check_ratio(new_N - old_N, dtype, record)
        if step.reference_R is not None and self.method.ref_model is None:
            check_margins(pack.sum_by_sequence(old_N - step.reference_R[at_N]), pack.length_S, dtype, record)


def entropy_coef(method: AnyMethod, memory: Mapping[str, float]) -> float:
    """The weight of the entropy bonus in this step. If it adapts, it is 0 while entropy is above its target."""
    if not (isinstance(method, GRPOMethod) and method.use_adaptive_entropy):
        return method.entropy_coef
    acts = memory.get("last_entropy", math.inf) <= method.entropy_target
    return memory.get("entropy_coef", method.entropy_coef) if acts else 0.0


def adapt_entropy(method: AnyMethod, step: Step, memory: dict[str, float]) -> dict[str, float]:
    """Save the entropy of a step and the next step's coefficient in `memory`; return the coefficient as a metric.

    Skywork-OR1, arXiv 2505.22312; as in TRL, the coefficient rises while entropy is below its target and falls else."""
    if not (isinstance(method, GRPOMethod) and method.use_adaptive_entropy) or not len(step.in_loss_S):
        return {}
    step.exchange("entropy_R")
    counted_R = step.in_loss_R if step.top_R is None else step.in_loss_R & step.top_R
    memory["last_entropy"] = entropy = step.entropy_R[counted_R].double().mean().item()
    change = method.entropy_coef_delta * (1 if entropy < method.entropy_target else -1)
    coef = memory.get("entropy_coef", method.entropy_coef) + change
    memory["entropy_coef"] = min(max(coef, method.entropy_coef_min), method.entropy_coef_max)
    return {"entropy_coef": memory["entropy_coef"]}


def loss_of(method: AnyMethod) -> PolicyLoss:
    return policy_loss_named(method.loss_type if isinstance(method, GRPOMethod) else method.type)


def surrogate(
    method: AnyMethod, logprob_N: Tensor, old_N: Tensor, advantage_N: Tensor, sequence_N: Tensor, length_S: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss of each token under these settings, and whether the token is clipped (both N)."""
    loss, settings = loss_of(method), dict(method)
    if loss.surrogate not in (cispo, grpo_clip) and method.epsilon_high is None:
        settings["epsilon_high"] = method.epsilon  # a user's loss gets the number
    level = method.importance_sampling_level if isinstance(method, GRPOMethod) else None
    return policy_loss(loss, logprob_N, old_N, advantage_N, sequence_N, length_S, level=level, **settings)


def advantages(method: PolicyGradientMethod, step: Step) -> Tensor:
    """The advantage of each token (R), 0 for completions without a reward."""
    rollout, chosen = step.rollout, step.counted_S
    inside_R = torch.isin(rollout.sequence_R, chosen)
    advantage_R = torch.zeros(rollout.num_tokens)
    penalty_R = advantage_R if step.penalty_R is None else step.penalty_R.cpu()
    turns, group_S = rollout.turns(chosen), rollout.group_S[chosen]
    parts = [parts_of(rollout.completions[index].reward) for index in chosen.tolist()]
    advantage_R[inside_R] = of_tokens(method, turns, group_S, penalty_R[inside_R], parts)
    return advantage_R


def of_tokens(
    method: PolicyGradientMethod, turns: Turns, group_S: Tensor, penalty_N: Tensor, parts: Sequence[Parts] = ()
) -> Tensor:
    """The advantage of each token (N) of completions with these turns.

    Each completion's reward, minus the penalties of its tokens, is compared with the rewards of its group. With
    `advantage_level: turn`, what each turn and those after it earn is compared with the same turn of the group's other
    completions: an action is not credited with earlier rewards, and the baseline does not depend on the action. Where
    episodes branch, the comparisons with the group and with the completion's own tree are added (Tree-GRPO, arXiv
    2509.21240, section 3.3). In REINFORCE++, each token's return is normalised over the step. GDPO normalises the
    `parts` of each completion's reward one by one.
    """
    if not len(group_S):
        return penalty_N
    if isinstance(method, ReinforcePlusPlusMethod):
        return normalized(rewards_to_go(turns.token_rewards(penalty_N), turns.sequence_N), eps=EPS)
    if isinstance(method, GRPOMethod) and method.multi_objective_aggregation == "normalize_then_sum":
        if not all(parts):
            raise RunError(
                "method.multi_objective_aggregation: normalize_then_sum compares each reward alone, but of some "
                "completions only the sum of their rewards is stored: use sum_then_normalize"
            )
        rows = [[part["value"] for part in each.values()] for each in parts]
        reward_SK = torch.tensor([[math.nan if value is None else value for value in row] for row in rows])
        weight_K = torch.tensor([part["weight"] for part in parts[0].values()])
        return decoupled(reward_SK, weight_K, group_S, eps=EPS)[turns.sequence_N]
    if method.advantage_level == "trajectory":
        total_S = turns.totals(penalty_N)
        advantage_S = compared(method, total_S, group_S)
        if turns.tree_S is not None and forest_of(method) is not None:
            trees = group_S * (int(turns.tree_S.max()) + 1) + turns.tree_S
            advantage_S = advantage_S + compared(method, total_S, trees)
        return advantage_S[turns.sequence_N]
    to_go_U, number_U = turns.to_go(penalty_N)
    place_U = group_S[turns.sequence_U] * (int(number_U.max()) + 1) + number_U
    return compared(method, to_go_U, place_U).repeat_interleave(turns.length_U)


def forest_of(method: PolicyGradientMethod) -> Forest | None:
    """How the episodes of a prompt branch."""
    if isinstance(method, GRPOMethod) and method.num_trees is not None:
        return Forest(method.num_trees, method.tree_rounds)
    return None


def compared(method: PolicyGradientMethod, reward_S: Tensor, group_S: Tensor) -> Tensor:
    """Each completion's advantage (S): its reward compared with the rewards of its group."""
    if isinstance(method, GRPOMethod) and method.loss_type == "no_baseline":
        return reward_S
    if isinstance(method, RLOOMethod):
        return leave_one_out(reward_S, group_S)
    scale = method.scale_rewards if isinstance(method, GRPOMethod) else "none"
    return group_advantages(reward_S, group_S, scale_rewards=scale, eps=EPS)


def regraded(
    method: PolicyGradientMethod, rollouts: Sequence[Mapping[str, Any]], rewards: Sequence[float]
) -> list[float | None]:
    """The mean advantage of each stored completion of a step under these rewards, including those outside the loss.

    `rollouts` have the parts of these rewards. None for a completion without trained tokens."""
    known = [index for index, row in enumerate(rollouts) if len(row["tokens"])]  # an episode may have no reply
    means: list[float | None] = [None] * len(rollouts)
    if not known:
        return means
    rows = [rollouts[index] for index in known]
    turns = stored_turns(rows, [rewards[index] for index in known])
    penalty_N = torch.cat([_stored_penalty(method, row) for row in rows])
    group_S = torch.tensor([row["prompt_index"] for row in rows])
    advantage_N = of_tokens(method, turns, group_S, penalty_N, [row.get("parts", {}) for row in rows]).double()
    for index, each_N in zip(known, advantage_N.split([len(row["tokens"]) for row in rows]), strict=True):
        means[index] = float(each_N.mean())
    return means


def _stored_penalty(method: PolicyGradientMethod, row: Mapping[str, Any]) -> Tensor:
    """The penalty of each token. Earlier versions did not store it, and penalised only completions in the loss."""
    if row.get("penalties") is not None:
        return torch.tensor(row["penalties"])
    if method.beta == 0 or method.kl_in == "loss" or row["advantages"] is None or row["ref_logprobs"] is None:
        return torch.zeros(len(row["tokens"]))
    old_N, reference_N = torch.tensor(row["old_logprobs"]), torch.tensor(row["ref_logprobs"])
    return method.beta * kl_penalty(old_N, reference_N, estimator=method.kl_estimator)
