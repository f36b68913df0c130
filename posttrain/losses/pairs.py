"""Preference pairs as the input of losses, their metrics, and the Bradley-Terry likelihood of reward models."""

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.losses.base import check_vectors


@dataclass(frozen=True, slots=True)
class Pairs:
    """P pairs of a chosen and a rejected completion of the same prompt; every field is a [P] tensor.

    chosen_P, rejected_P            log π(y|x), summed over the completion's tokens (nats)
    ref_chosen_P, ref_rejected_P    log π_ref(y|x), the same; zeros when the method has no reference
    chosen_length_P, rejected_length_P    number of completion tokens summed over

    Raises ValueError unless all fields are vectors of one length.
    """

    chosen_P: Tensor
    rejected_P: Tensor
    ref_chosen_P: Tensor
    ref_rejected_P: Tensor
    chosen_length_P: Tensor
    rejected_length_P: Tensor

    def __post_init__(self) -> None:
        check_vectors({field.name: getattr(self, field.name) for field in fields(self)})

    def __len__(self) -> int:
        return self.chosen_P.shape[0]

    @property
    def chosen_logratio_P(self) -> Tensor:
        """log π(chosen|x) − log π_ref(chosen|x)."""
        return self.chosen_P - self.ref_chosen_P

    @property
    def rejected_logratio_P(self) -> Tensor:
        """log π(rejected|x) − log π_ref(rejected|x)."""
        return self.rejected_P - self.ref_rejected_P

    def with_policy(self, chosen_P: Tensor, rejected_P: Tensor) -> "Pairs":
        """The same pairs under other policy log-probabilities."""
        return replace(self, chosen_P=chosen_P, rejected_P=rejected_P)

    def per_token(self) -> "Pairs":
        """The same pairs with the policy's log-probabilities as means over each completion's tokens."""
        return self.with_policy(
            self.chosen_P / self.chosen_length_P.clamp(min=1), self.rejected_P / self.rejected_length_P.clamp(min=1)
        )


@torch.no_grad()
def preference_metrics(pairs: Pairs, beta: float) -> dict[str, Tensor]:
    """TRL's metrics as sums over the pairs: add them up over the batch's parts, then divide by the number of pairs.

    The implicit reward of a completion is β (log π − log π_ref) (arXiv 2305.18290, eq. 5, without the term
    that depends on the prompt only). A tie does not count as accurate, so `rewards/accuracies` is 0 while the policy
    is its reference.
    """
    chosen_P, rejected_P = beta * pairs.chosen_logratio_P, beta * pairs.rejected_logratio_P
    return {
        "rewards/chosen": chosen_P.sum(),
        "rewards/rejected": rejected_P.sum(),
        "rewards/accuracies": (chosen_P > rejected_P).float().sum(),
        "rewards/margins": (chosen_P - rejected_P).sum(),
        "logps/chosen": pairs.chosen_P.sum(),
        "logps/rejected": pairs.rejected_P.sum(),
    }


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
