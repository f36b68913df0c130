"""Reward models: the Bradley-Terry likelihood of a preference, and its metrics."""

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
    """−log σ(r_chosen − r_rejected − m) + κ (r_chosen + r_rejected)², one value per pair [P].

    InstructGPT, arXiv 2203.02155, eq. 1. The margin m, by how much chosen is better, is from Llama 2 (arXiv 2307.09288,
    eq. 2). The first term determines rewards only up to a constant per prompt; the second, κ =
    `center_rewards_coefficient`, keeps them around 0 (arXiv 2312.09244, eq. 2, which suggests 0.01). Rewards and margin
    are [P].

    Where `tie_P` [P], bool, is true, neither is better: the loss is the mean of both orders, −½ log σ(r_chosen −
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

    `accuracy` and `margin` exclude ties: divide them by the number of the other pairs.
    """
    decided_P = torch.ones_like(chosen_P) if tie_P is None else (~tie_P).to(chosen_P.dtype)
    return {
        "mean_reward": (chosen_P + rejected_P).sum() / 2,
        "accuracy": (decided_P * (chosen_P > rejected_P)).sum(),
        "margin": (decided_P * (chosen_P - rejected_P)).sum(),
    }


@torch.no_grad()
def reward_range(chosen_P: Tensor, rejected_P: Tensor) -> dict[str, Tensor]:
    """TRL's `min_reward` and `max_reward`: combine the batch's parts by min and max, not by sums."""
    rewards = torch.cat((chosen_P, rejected_P))
    return {"min_reward": rewards.min(), "max_reward": rewards.max()}
