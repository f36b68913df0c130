"""Policy gradients: what a sampled token contributes to the loss, given its completion's advantage. Unreduced.

A token t of a completion has log π(y_t | x, y_<t) under the policy that is trained, log π_old under the policy at the
start of the step, and an advantage A. Losses are elementwise: all tensors have the same shape, [N] for a pack, (B, L)
if padded. `POLICY_LOSSES` maps each name to its loss and to how the tokens of a step are averaged. The KL to
a reference is a term of the loss or of the reward.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from posttrain.base.errors import ConfigError
from posttrain.batch import sum_segments
from posttrain.losses import MAX_EXPONENT, called, check_shapes, own_loss

# There is one ratio π / π_old per token, or per completion: the geometric mean over its tokens (sequence, GSPO), or the
# product over its tokens (product, RLOO).
Level = Literal["token", "sequence", "product"]
# How tokens are averaged: within each completion, then over completions; over all tokens of the update, or of the
# step's rollout; or each completion's sum is divided by a constant length, then averaged over completions (max_length),
# or not divided (sums).
Average = Literal["sequences", "update_tokens", "rollout_tokens", "max_length", "sums"]
LEAST_LOG_W = math.log(1e-8)  # of VESPO's weight, as in its authors' code


def policy_gradient(logprob: Tensor, advantage: Tensor) -> Tensor:
    """REINFORCE: −A log π, whose gradient −A ∇ log π estimates the policy gradient (Williams 1992, section 5).
    A is the reward, or the reward minus a baseline, which changes the estimate's variance but not its mean."""
    check_shapes(logprob=logprob, advantage=advantage)
    return -advantage * logprob


def grpo_clip(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    *,
    epsilon: float,
    epsilon_high: float | None = None,
    delta: float | None = None,
) -> tuple[Tensor, Tensor]:
    """−min(ρ A, clip(ρ, 1 − ε, 1 + ε_high) A) with ρ = π / π_old, and whether the clipped term is the smaller one.

    PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with GRPO's advantage (arXiv 2402.03300, eq. 3). A clipped token
    (second result, bool) has no gradient, because the policy has already moved ε in the direction of A.
    ε_high above ε leaves unlikely tokens more room to grow (clip-higher, DAPO, arXiv 2503.14476, section 3.1).
    `delta`, above 1 + ε_high, also bounds ρ where A < 0, which is otherwise unbounded: min(ρ, δ) takes the place of ρ
    in the first term (two-sided clip, INTELLECT-2, arXiv 2505.07291); such tokens do not count as clipped.
    """
    check_shapes(logprob=logprob, old_logprob=old_logprob, advantage=advantage)
    ratio = torch.exp((logprob - old_logprob).clamp(max=MAX_EXPONENT))
    held = ratio.clamp(1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high))
    free, clipped = (ratio if delta is None else ratio.clamp(max=delta)) * advantage, held * advantage
    return -torch.minimum(free, clipped), (clipped < free).detach()


def cispo(
    logprob: Tensor, old_logprob: Tensor, advantage: Tensor, *, epsilon: float = 0.2, epsilon_high: float | None = None
) -> tuple[Tensor, Tensor]:
    """−min(ρ, ε_high) A log π, min(…) detached, and whether it was capped. CISPO, arXiv 2506.13585, eq. 4 and 5.

    No token loses its gradient, unlike clipped tokens in `grpo_clip`. ε_high bounds the ratio itself, as in TRL;
    without it, 1 + ε does. Tokens with A ≤ 0 do not count as capped.
    """
    check_shapes(logprob=logprob, old_logprob=old_logprob, advantage=advantage)
    bound = 1 + epsilon if epsilon_high is None else epsilon_high
    ratio = torch.exp((logprob - old_logprob).detach().clamp(max=MAX_EXPONENT))
    return -ratio.clamp(max=bound) * advantage * logprob, (ratio > bound) & (advantage > 0)


def sapo(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    *,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
) -> Tensor:
    """−(4 / τ) σ(τ (ρ − 1)) A, with τ = `sapo_temperature_pos` where A > 0 and `sapo_temperature_neg` elsewhere.

    SAPO, arXiv 2511.20347: the gate's slope is 1 at ρ = 1 and falls smoothly on both sides, where clipping
    ends the gradient at once. The higher τ for A ≤ 0 damps tokens that the policy moves away from.
    """
    check_shapes(logprob=logprob, old_logprob=old_logprob, advantage=advantage)
    ratio = torch.exp((logprob - old_logprob).clamp(max=MAX_EXPONENT))
    temperature = torch.where(advantage > 0, sapo_temperature_pos, sapo_temperature_neg)
    return -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantage


def vespo(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    *,
    sequence_N: Tensor,
    length_S: Tensor,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> Tensor:
    """−φ(w) A log π, with w the product of a completion's ratios and φ(w) = w^k e^{λ (1 − w)}, detached.

    VESPO, arXiv 2602.10693: a smooth weight for the complete completion instead of clipped tokens. k and λ are
    `vespo_k_pos` and `vespo_lambda_pos` where A ≥ 0, `vespo_k_neg` and `vespo_lambda_neg` elsewhere; values as in TRL.
    """
    check_shapes(logprob=logprob, old_logprob=old_logprob, advantage=advantage)
    with torch.no_grad():
        log_w_S = sum_segments((logprob - old_logprob).clamp(-20.0, 20.0), length_S)
        log_w = log_w_S.clamp(LEAST_LOG_W, 20.0)[sequence_N]
        k = torch.where(advantage >= 0, vespo_k_pos, vespo_k_neg)
        decay = torch.where(advantage >= 0, vespo_lambda_pos, vespo_lambda_neg).clamp(min=1e-4)
        weight = torch.exp(decay + k * log_w - decay * log_w.exp())
    return -weight * advantage * logprob


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """One entry of POLICY_LOSSES, or a user's function as the surrogate; without one, −A log π, which has no ratio."""

    surrogate: Callable[..., Any] | None
    average: Average
    level: Level = "token"


POLICY_LOSSES: Mapping[str, PolicyLoss] = {
    "grpo": PolicyLoss(grpo_clip, "sequences"),  # arXiv 2402.03300, eq. 3
    "bnpo": PolicyLoss(grpo_clip, "update_tokens"),  # TRL: normalised by the update's own tokens
    "dr_grpo": PolicyLoss(grpo_clip, "max_length"),  # arXiv 2503.20783: no length bias
    "dapo": PolicyLoss(grpo_clip, "rollout_tokens"),  # arXiv 2503.14476, eq. 8
    "gspo": PolicyLoss(grpo_clip, "sequences", "sequence"),  # arXiv 2507.18071, eq. 5
    "luspo": PolicyLoss(grpo_clip, "sums", "sequence"),  # arXiv 2602.05261: GSPO without its length bias
    "cispo": PolicyLoss(cispo, "rollout_tokens"),  # arXiv 2506.13585
    "sapo": PolicyLoss(sapo, "sequences"),  # arXiv 2511.20347
    "vespo": PolicyLoss(vespo, "rollout_tokens"),  # arXiv 2602.10693
    "no_baseline": PolicyLoss(None, "sequences"),  # REINFORCE on the raw reward
    "reinforce_with_baseline": PolicyLoss(None, "sequences"),  # REINFORCE on advantages
    "grpo_clip": PolicyLoss(grpo_clip, "sequences"),  # CS336's name for grpo
    "rloo": PolicyLoss(grpo_clip, "sequences", "product"),  # arXiv 2402.14740
    "reinforce_plus_plus": PolicyLoss(grpo_clip, "rollout_tokens"),  # arXiv 2501.03262
}


@functools.cache
def policy_loss_named(name: str) -> PolicyLoss:
    """The loss of a name: one of POLICY_LOSSES, or a user's `module:function`, which maps (logprob_N, old_logprob_N,
    advantage_N, *, epsilon, epsilon_high, sequence_N, length_S) to loss_N, or to loss_N and clipped_N (bool).

    The function's attribute `average` says how tokens are averaged; without it, over the tokens of the rollout. Raises
    KeyError for an unknown name, and ConfigError for an unsuitable function.
    """
    if ":" not in name:
        return POLICY_LOSSES[name]
    settings = {"epsilon": 0.2, "epsilon_high": 0.3, "sequence_N": torch.tensor([0, 0, 1, 1])}
    settings |= {"length_S": torch.tensor([2, 2])}
    inputs = [torch.tensor(n) for n in ([-1.0, -2.0, -0.5, -3.0], [-1.1, -1.5, -0.4, -3.2], [1.0, 1.0, -0.5, -0.5])]
    function, _ = own_loss(name, settings, inputs)
    average = getattr(function, "average", "rollout_tokens")
    if average not in (known := get_args(Average)):
        raise ConfigError(f"method.loss_type: {name}.average is {average!r}: it is one of {', '.join(known)}")
    return PolicyLoss(function, cast(Average, average))


def policy_loss(
    loss: PolicyLoss,
    logprob_N: Tensor,
    old_logprob_N: Tensor,
    advantage_N: Tensor,
    sequence_N: Tensor,
    length_S: Tensor,
    *,
    level: Level | None = None,
    **settings: Any,
) -> tuple[Tensor, Tensor]:
    """The loss of each scored token, and whether it was clipped; both [N].

    `sequence_N` is the index of each token's completion, ascending; `length_S` counts each completion's scored tokens.
    `level` defaults to the level of the loss. With one ratio per completion, the tokens of a completion share this
    ratio and, if their advantages are equal, one value. The surrogate gets those of the `settings` that it reads.

    Raises ValueError for CISPO and VESPO with one ratio per completion: they weight each token's log-probability.
    """
    never_N = torch.zeros_like(sequence_N, dtype=torch.bool)
    if loss.surrogate is None:
        return policy_gradient(logprob_N, advantage_N), never_N
    level = level or loss.level
    if level != "token":
        if loss.surrogate in (cispo, vespo):  # they weight each token's own log-probability
            raise ValueError("this loss has a ratio for each token: importance_sampling_level must be token")
        logprob_N = logratio(logprob_N, old_logprob_N, sequence_N, length_S, level)
        old_logprob_N = torch.zeros_like(logprob_N)
    inputs = logprob_N, old_logprob_N, advantage_N
    made = called(loss.surrogate, *inputs, **settings, sequence_N=sequence_N, length_S=length_S)
    return made if isinstance(made, tuple) else (made, never_N)


def logratio(logprob_N: Tensor, old_N: Tensor, sequence_N: Tensor, length_S: Tensor, level: Level) -> Tensor:
    """log π / π_old of each token: its own, or its completion's mean (sequence) or sum (product). [N]"""
    if level == "token":
        return logprob_N - old_N
    total_S = sum_segments(logprob_N - old_N, length_S)
    return (total_S / length_S.clamp(min=1) if level == "sequence" else total_S)[sequence_N]


@dataclass(frozen=True, slots=True)
class Counts:
    """The denominators of an update's averages, which are known before its first backward pass."""

    sequences: int  # number of completions of the update, including those without a scored token
    tokens: int  # number of scored tokens of the update
    rollout_tokens: float  # number of scored tokens of the step's rollout, divided by its number of updates
    max_length: int  # the maximum length of a completion, in tokens


def token_weights(average: Average, length_S: Tensor, sequence_N: Tensor, counts: Counts) -> Tensor:
    """The weight of each token's loss, so that the sum over all packs of an update is the update's loss. [N], float32.

    `length_S` counts the scored tokens of each of the pack's completions.

        sequences        1 / (completions · length)      GRPO
        update_tokens    1 / tokens of the update        BNPO
        rollout_tokens   1 / (tokens of the rollout / number of its updates)     DAPO, CISPO
        max_length       1 / (completions · max length)  Dr. GRPO
        sums             1 / completions                 LUSPO
    """
    if average == "sequences":
        return 1.0 / (counts.sequences * length_S.clamp(min=1).float())[sequence_N]
    divisors = {
        "update_tokens": counts.tokens,
        "rollout_tokens": counts.rollout_tokens,
        "max_length": counts.sequences * counts.max_length,
        "sums": counts.sequences,
    }
    return torch.full(sequence_N.shape, 1.0 / divisors[average], device=sequence_N.device)


def sampling_weights(
    logprob_N: Tensor,
    sampler_logprob_N: Tensor,
    sequence_N: Tensor,
    length_S: Tensor,
    *,
    mode: str = "token_truncate",
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> tuple[Tensor, Tensor]:
    """π / π_sampler, which corrects for differences between engine and trainer, and whether it was clipped; both [N].

    `logprob_N` is under the policy that sampled, scored by the trainer; detached. `mode` has two parts. The ratio is a
    token's (token), the product over its completion (sequence), or the geometric mean over it (geometric); names and
    values as in TRL, which lacks geometric. Outside [`clip_min`, `clip_max`] it is set to the bound (truncate: F. Yao
    et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025), or to 0 (mask; token_mask
    with both bounds is IcePop, arXiv 2510.18855).
    """
    check_shapes(logprob=logprob_N, sampler_logprob=sampler_logprob_N)
    unit, _, action = mode.partition("_")
    level: Level = {"sequence": "product", "geometric": "sequence"}.get(unit, "token")  # type: ignore[assignment]
    ratio_N = logratio(logprob_N, sampler_logprob_N, sequence_N, length_S, level).detach().clamp(max=MAX_EXPONENT).exp()
    held_N = ratio_N.clamp(clip_min, clip_max) if (clip_min, clip_max) != (None, None) else ratio_N
    clipped_N = held_N != ratio_N
    return held_N if action == "truncate" else ratio_N.masked_fill(clipped_N, 0.0), clipped_N


def off_policy_kept(
    logprob_N: Tensor,
    sampler_logprob_N: Tensor,
    advantage_N: Tensor,
    sequence_N: Tensor,
    length_S: Tensor,
    *,
    threshold: float,
) -> Tensor:
    """Whether each token stays in the loss (bool, [N]): A ≥ 0, or its completion's mean of log π_sampler − log π is at
    most `threshold`, in nats per token. A bad completion that the policy would hardly sample any more teaches nothing
    and may do harm. DeepSeek-V3.2, arXiv 2512.02556, eq. 9."""
    check_shapes(logprob=logprob_N, sampler_logprob=sampler_logprob_N, advantage=advantage_N)
    drift_N = logratio(sampler_logprob_N, logprob_N.detach(), sequence_N, length_S, "sequence")
    return (advantage_N >= 0) | (drift_N <= threshold)


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, *, estimator: str) -> Tensor:
    """An estimate of KL(π‖π_ref), the divergence of a policy from its reference, for each sampled token, in nats.

    With ρ = log π_ref − log π of the token (J. Schulman, "Approximating KL divergence", 2020):

        k1   −ρ                 unbiased, high variance, sometimes negative
        k2   ρ² / 2             biased, low variance; its gradient is the unbiased gradient of the KL on policy
        k3   e^ρ − ρ − 1        unbiased, never negative; GRPO's, arXiv 2402.03300, eq. 4

    As a term of the loss, on tokens sampled from π itself, the expected gradient is the gradient of the token's
    KL(π‖π_ref) for k2, of KL(π_ref‖π) for k3, and 0 for k1, which has no effect there. As part of the reward, through
    which no gradient flows, k1 gives the gradient of the full completion's KL(π‖π_ref) through the policy gradient.

    Raises ValueError for an unknown estimator or unequal shapes.
    """
    check_shapes(logprob=logprob, ref_logprob=ref_logprob)
    rho = ref_logprob - logprob
    match estimator:
        case "k1":
            return -rho
        case "k2":
            return rho**2 / 2
        case "k3":
            return torch.expm1(rho.clamp(max=MAX_EXPONENT)) - rho
    raise ValueError(f"unknown estimator {estimator!r}: one of k1, k2, k3")


def adapted_kl_coef(kl_coef: float, kl: float, *, target: float, horizon: int, completions: int) -> float:
    """The next coefficient of PPO's KL penalty: raised if the measured KL is above the target, lowered if it is below.

        e = clip(KL / target − 1, −0.2, 0.2)        β ← β (1 + e · completions / horizon)

    arXiv 1909.08593, section 2.2; `kl` is in nats per completion, `horizon` the number of completions over which
    the largest error changes β by a fifth.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * completions / horizon)
