"""Policy gradients: advantages from rewards, and what a sampled token contributes to the loss. Unreduced.

Sampling gives S completions y of prompts x, G of them to a prompt (its group), and a reward r for each. A token t of a
completion has log π(y_t | x, y_<t) under the policy that is trained, log π_old of the policy that sampled it, and its
completion's advantage A. The losses are elementwise: their tensors have one shape, [N] for a pack, (B, L) when padded.
"""

from typing import Literal

import torch
from torch import Tensor

from posttrain.losses.divergence import MAX_EXPONENT

ScaleRewards = Literal["group", "none"]


def group_advantages(reward_S: Tensor, group_S: Tensor, *, scale_rewards: ScaleRewards, eps: float) -> Tensor:
    """GRPO's advantage of each completion: how much better than its group's mean. [S], detached, dtype of the rewards.

        group:  A_i = (r_i − mean r) / (std r + ε)     arXiv 2402.03300, section 4.1.2
        none:   A_i =  r_i − mean r                    Dr. GRPO, arXiv 2503.20783: σ favours too easy or hard prompts

    mean and std are over the group of i, std with n − 1 below. `group_S` names the group of each completion by any
    integers; groups may differ in size. A completion alone in its group, or in a group of equal rewards, has A = 0.

    Raises ValueError when the two are not vectors of one length.
    """
    if reward_S.ndim != 1 or reward_S.shape != group_S.shape:
        raise ValueError(f"expected a group for each reward, got {list(reward_S.shape)} and {list(group_S.shape)}")
    reward = reward_S.detach().double()  # so that the mean of equal rewards is that reward, exactly
    _, index_S, count_G = torch.unique(group_S, return_inverse=True, return_counts=True)
    mean_G = reward.new_zeros(len(count_G)).index_add(0, index_S, reward) / count_G
    advantage_S = reward - mean_G[index_S]
    if scale_rewards == "group":
        squares_G = reward.new_zeros(len(count_G)).index_add(0, index_S, advantage_S**2)
        scale_G = torch.sqrt(squares_G / (count_G - 1).clamp(min=1)) + eps
        advantage_S = advantage_S / torch.where(scale_G > 0, scale_G, 1.0)[index_S]
    return advantage_S.to(reward_S.dtype)


def policy_gradient(logprob: Tensor, advantage: Tensor) -> Tensor:
    """REINFORCE: −A log π, whose gradient −A ∇ log π is the policy gradient's estimate (Williams 1992, section 5).

    A is the reward itself, or the reward less a baseline, which changes the variance and not the mean.
    """
    _check_shapes(logprob=logprob, advantage=advantage)
    return -advantage * logprob


def grpo_clip(logprob: Tensor, old_logprob: Tensor, advantage: Tensor, *, epsilon: float) -> tuple[Tensor, Tensor]:
    """−min(ρ A, clip(ρ, 1 − ε, 1 + ε) A) with ρ = π / π_old, and where the clipped term was the smaller one.

    PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with GRPO's advantage (arXiv 2402.03300, eq. 3). A token that is
    clipped (second result, bool) has no gradient: the policy has already moved ε in the direction that A asks for.
    """
    _check_shapes(logprob=logprob, old_logprob=old_logprob, advantage=advantage)
    ratio = torch.exp((logprob - old_logprob).clamp(max=MAX_EXPONENT))
    free, held = ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage
    return -torch.minimum(free, held), (held < free).detach()


def _check_shapes(**named: Tensor) -> None:
    """Raise ValueError unless all have one shape: broadcasting would hide a mistake."""
    if len({tensor.shape for tensor in named.values()}) > 1:
        listed = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named.items())
        raise ValueError(f"expected tensors of one shape, got {listed}")
