"""Advantages: how much better a completion or token did than expected, and the values that PPO predicts. All results
are detached, except the value loss.

A step samples S completions, G per prompt (its group), and gives each a reward r. Statistics are computed in double
precision, so that the mean of equal rewards is exactly that reward, and a group without a learning signal has A = 0.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from posttrain.batch import sum_segments
from posttrain.losses import check_shapes, check_vectors

ScaleRewards = Literal["group", "batch", "none"]
DECAY = 0.9  # in the running statistics of returns, each later step multiplies a step's weight by this


def group_advantages(reward_S: Tensor, group_S: Tensor, *, scale_rewards: ScaleRewards, eps: float) -> Tensor:
    """GRPO's advantage: how much better each completion is than its group's mean. [S], dtype of the rewards.

        group:  A_i = (r_i − mean r) / (std r + ε)     arXiv 2402.03300, section 4.1.2
        batch:  the same, with the standard deviation of all rewards of the step     arXiv 2508.08221, section 4.2
        none:   A_i =  r_i − mean r                    Dr. GRPO, arXiv 2503.20783: std favours easy and hard prompts

    mean is over the group of i, and std divides by n − 1. `group_S` identifies each completion's group by any integer;
    groups may differ in size. The only completion of a group, and those of a group of equal rewards, have A = 0.

    Raises ValueError unless both are vectors of one length.
    """
    reward, index_S, count_G = _groups(reward_S, group_S)
    mean_G = _sums(reward, index_S, count_G) / count_G
    advantage_S = reward - mean_G[index_S]
    if scale_rewards == "group":
        std_G = torch.sqrt(_sums(advantage_S**2, index_S, count_G) / (count_G - 1).clamp(min=1))
        advantage_S = advantage_S / _or_one(std_G + eps)[index_S]
    elif scale_rewards == "batch":
        advantage_S = advantage_S / _or_one(_std(reward) + eps)
    return advantage_S.to(reward_S.dtype)


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of S completions, in order; a completion without an episode is one turn. Each has trained tokens."""

    reward_S: Tensor  # the rewards of a completion's turns add up to it
    reward_U: Tensor
    length_U: Tensor  # number of trained tokens
    sequence_U: Tensor  # index of the turn's completion, ascending
    tree_S: Tensor | None = None  # if completions branch: the number of each one's tree in its group

    @property
    def sequence_N(self) -> Tensor:
        """The index of each trained token's completion."""
        return self.sequence_U.repeat_interleave(self.length_U)

    def token_rewards(self, penalty_N: Tensor) -> Tensor:
        """Each token's reward, with a turn's reward at its last token, minus the token's penalty. [N]"""
        reward_N, last_U = -penalty_N, self.length_U.to(penalty_N.device).cumsum(0) - 1
        reward_N[last_U] += self.reward_U.to(reward_N)
        return reward_N

    def totals(self, penalty_N: Tensor) -> Tensor:
        """Each completion's reward minus the penalties of its tokens. [S]"""
        length_S = torch.zeros(len(self.reward_S), dtype=torch.int64).index_add(0, self.sequence_U, self.length_U)
        return self.reward_S - sum_segments(penalty_N, length_S)

    def to_go(self, penalty_N: Tensor) -> tuple[Tensor, Tensor]:
        """What each turn and those after it earn, minus the penalties of their tokens, and the turn's number. [U]"""
        earned_U = self.reward_U - sum_segments(penalty_N, self.length_U)
        first_U = torch.searchsorted(self.sequence_U, self.sequence_U)
        return rewards_to_go(earned_U, self.sequence_U), torch.arange(len(first_U)) - first_U


def leave_one_out(reward_S: Tensor, group_S: Tensor) -> Tensor:
    """RLOO: A_i = r_i − the mean reward of the group's other completions. [S]. arXiv 2402.14740, eq. 7. This baseline
    is independent of completion i, so the gradient is unbiased. The only completion of a group has A = 0."""
    reward, index_S, count_G = _groups(reward_S, group_S)
    others_S = (count_G - 1)[index_S]
    baseline_S = (_sums(reward, index_S, count_G)[index_S] - reward) / others_S.clamp(min=1)
    return torch.where(others_S > 0, reward - baseline_S, 0.0).to(reward_S.dtype)


def decoupled(reward_SK: Tensor, weight_K: Tensor, group_S: Tensor, *, eps: float) -> Tensor:
    """GDPO's advantage, which keeps combinations of K rewards apart that have the same sum. [S]. arXiv 2601.05242.

        B_i = Σ_k w_k (r_ik − mean r_k) / (std r_k + ε)     over the group of i
        A_i = (B_i − mean B) / (std B + ε)                  over all completions

    A reward of NaN does not apply to the completion: it counts neither in the statistics nor in the sum.
    """
    sum_S = torch.zeros(len(group_S), dtype=torch.float64)
    for reward_S, weight in zip(reward_SK.T, weight_K.tolist(), strict=True):
        known_S = ~reward_S.isnan()
        own = group_advantages(reward_S[known_S].double(), group_S[known_S], scale_rewards="group", eps=eps)
        sum_S[known_S] += weight * own
    return normalized(sum_S, eps=eps).to(reward_SK.dtype)


def normalized(advantage: Tensor, *, eps: float) -> Tensor:
    """(A − mean A) / (std A + ε) over all entries; std divides by n − 1. REINFORCE++, arXiv 2501.03262, eq. 5; PPO."""
    wide = advantage.detach().double()
    return ((wide - wide.mean()) / _or_one(_std(wide) + eps)).to(advantage.dtype)


def whitened(reward: Tensor) -> Tensor:
    """(r − mean r) / √(var r + 1e-8) + mean r over all entries: std 1, unchanged mean. TRL's `whiten_rewards`."""
    wide = reward.detach().double()
    scale = torch.rsqrt(_std(wide) ** 2 + 1e-8)
    return ((wide - wide.mean()) * scale + wide.mean()).to(reward.dtype)


def rewards_to_go(reward_N: Tensor, sequence_N: Tensor, *, gamma: float = 1.0) -> Tensor:
    """The return of each token, Σ_{k ≥ t} γ^(k − t) r_k over the rest of its sequence. [N].
    `sequence_N` is ascending, and the tokens of a sequence are in order."""
    return gae(reward_N, torch.zeros_like(reward_N), sequence_N, gamma=gamma, lam=1.0)[0]


def gae(reward_N: Tensor, value_N: Tensor, sequence_N: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over each sequence: advantages and returns, both [N]. arXiv 1506.02438, eq. 16.

        δ_t = r_t + γ V_{t+1} − V_t        A_t = δ_t + γ λ A_{t+1}        R_t = A_t + V_t

    V after a completion's last token is 0. `value_N` is V before each token; `sequence_N` is ascending.
    Raises ValueError unless all three are vectors of one length.
    """
    check_vectors(reward_N=reward_N, value_N=value_N, sequence_N=sequence_N)
    reward, value = reward_N.detach().double(), value_N.detach().double()
    last_N = torch.ones_like(sequence_N, dtype=torch.bool)
    last_N[:-1] = sequence_N[1:] != sequence_N[:-1]
    following_N = torch.cat([value[1:], value[-1:]]).masked_fill(last_N, 0.0)
    delta_N = reward + gamma * following_N - value
    # A loop over floats, from the end, is fast enough: an RL step has about ten thousand tokens.
    advantages, after = [], 0.0
    for delta, last in zip(reversed(delta_N.tolist()), reversed(last_N.tolist()), strict=True):
        after = delta if last else delta + gamma * lam * after
        advantages.append(after)
    advantage_N = torch.tensor(advantages[::-1], dtype=torch.float64, device=reward_N.device)
    return advantage_N.to(reward_N.dtype), (advantage_N + value).to(reward_N.dtype)


def _groups(reward_S: Tensor, group_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards in double precision, the index of each completion's group, and the size of each group."""
    check_vectors(reward_S=reward_S, group_S=group_S)
    _, index_S, count_G = torch.unique(group_S, return_inverse=True, return_counts=True)
    return reward_S.detach().double(), index_S, count_G


def _sums(value_S: Tensor, index_S: Tensor, count_G: Tensor) -> Tensor:
    """The sum over each group. [G]"""
    return sum_segments(value_S[index_S.argsort(stable=True)], count_G)


def _std(values: Tensor) -> Tensor:
    return values.std() if values.numel() > 1 else values.new_zeros(())


def _or_one(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, 1.0)


@dataclass(frozen=True, slots=True)
class ReturnScale:
    """Running mean and standard deviation of the returns: V = mean + std · (output of the value head).

    Keeps the value loss on the same scale whatever the scale of the rewards (value normalisation as in MAPPO, arXiv
    2103.01955, section 5.1). Recent steps have the most weight, so that values follow a rising reward.
    """

    mean: float = 0.0
    std: float = 1.0
    steps: int = 0

    def after(self, return_N: Tensor) -> "ReturnScale":
        """The statistics updated with a step's returns. If the variance is 0, std is 1."""
        returns, steps = return_N.detach().double(), self.steps + 1
        share = (1 - DECAY) / (1 - DECAY**steps)  # 1 at the first step: the initial values do not count
        distance = float(returns.mean()) - self.mean
        variance = self.std**2 + share * distance**2 if self.steps else 0.0
        variance = (1 - share) * variance + share * float(returns.var(correction=0))
        return ReturnScale(self.mean + share * distance, math.sqrt(variance) if variance > 0 else 1.0, steps)

    def values(self, output: Tensor) -> Tensor:
        """Convert outputs of the value head to returns."""
        return self.mean + self.std * output

    def outputs(self, returns: Tensor) -> Tensor:
        """Convert returns to outputs of the value head."""
        return (returns - self.mean) / self.std


def value_loss(value: Tensor, old_value: Tensor, returns: Tensor, *, cliprange_value: float) -> tuple[Tensor, Tensor]:
    """½ max((V − R)², (V_clip − R)²), V_clip = V clipped to V_old ± `cliprange_value`, and whether V_clip was worse.

    PPO's value loss as in the code of arXiv 1707.06347 and in TRL's PPO. Elementwise; all tensors have the same shape.
    """
    check_shapes(value=value, old_value=old_value, returns=returns)
    held = torch.clamp(value, old_value - cliprange_value, old_value + cliprange_value)
    free, clipped = (value - returns) ** 2, (held - returns) ** 2
    return 0.5 * torch.maximum(free, clipped), (clipped > free).detach()
