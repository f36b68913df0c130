"""Reward models: the Bradley-Terry likelihood of a preference, and what to watch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.losses.pairs import check_vectors


def bradley_terry(
    chosen_P: Tensor,
    rejected_P: Tensor,
    margin_P: Tensor | None = None,
    center_rewards_coefficient: float | None = None,
    tie_P: Tensor | None = None,
) -> Tensor:
    """−log σ(r_chosen − r_rejected − m) + κ (r_chosen + r_rejected)², one value a pair [P].

    InstructGPT, arXiv 2203.02155, eq. 1; the margin m, by how much chosen is better, is Llama 2's (arXiv 2307.09288,
    eq. 2); the second term, κ = `center_rewards_coefficient`, holds rewards, which the first leaves free up to a
    constant a prompt, around 0 (arXiv 2312.09244, eq. 2; it suggests 0.01). Rewards and margin are [P].

    Where `tie_P` [P], bool, is true neither is better: each counts as the better one by half, −½ log σ(r_chosen −
    r_rejected) − ½ log σ(r_rejected − r_chosen), as in WebGPT (arXiv 2112.09332, section 3.2).
    """
    given = {"chosen_P": chosen_P, "rejected_P": rejected_P, "margin_P": margin_P, "tie_P": tie_P}
    check_vectors({name: tensor for name, tensor in given.items() if tensor is not None})
    difference_P = chosen_P - rejected_P
    loss_P = -F.logsigmoid(difference_P if margin_P is None else difference_P - margin_P)
    if tie_P is not None:
        even_P = -(F.logsigmoid(difference_P) + F.logsigmoid(-difference_P)) / 2
        loss_P = torch.where(tie_P, even_P, loss_P)
    if center_rewards_coefficient is not None:
        loss_P = loss_P + center_rewards_coefficient * (chosen_P + rejected_P) ** 2
    return loss_P


@torch.no_grad()
def reward_metrics(chosen_P: Tensor, rejected_P: Tensor, tie_P: Tensor | None = None) -> dict[str, Tensor]:
    """TRL's means as sums over the pairs: add them up over the batch's parts, then divide by the number of pairs.

    `accuracy` and `margin` leave ties out: divide by the number of the others.
    """
    told_P = torch.ones_like(chosen_P) if tie_P is None else (~tie_P).to(chosen_P.dtype)
    return {
        "mean_reward": (chosen_P + rejected_P).sum() / 2,
        "accuracy": (told_P * (chosen_P > rejected_P)).sum(),
        "margin": (told_P * (chosen_P - rejected_P)).sum(),
    }


@torch.no_grad()
def reward_range(chosen_P: Tensor, rejected_P: Tensor) -> dict[str, Tensor]:
    """TRL's `min_reward` and `max_reward`: over the batch's parts they combine by min and max, not by sums."""
    rewards = torch.cat((chosen_P, rejected_P))
    return {"min_reward": rewards.min(), "max_reward": rewards.max()}
