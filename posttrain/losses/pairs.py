"""A batch of preference pairs as the input of losses: summed log-probabilities of policy and reference, and lengths."""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


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


def check_vectors(named: dict[str, Tensor]) -> None:
    """Raise ValueError unless all tensors are vectors of one length: broadcasting would hide a mistake."""
    shapes = {name: tuple(tensor.shape) for name, tensor in named.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != 1 for shape in shapes.values()):
        listed = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(f"expected vectors of one length, got {listed}")


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
