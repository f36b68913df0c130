"""Losses on single completions, labelled desirable or undesirable: KTO, BCO and APO-zero. Unreduced.

c is a sequence's log-ratio log π(y|x) − log π_ref(y|x); the sign s is +1 for a desirable sequence, otherwise −1. Values
and gradients match TRL 1.16's KTOTrainer, and for BCO TRL 1.12's BCOTrainer.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.losses import called, check_vectors, own_loss


def unpaired_loss(
    logratio_S: Tensor,
    desirable_S: Tensor,
    *,
    loss_type: str,
    beta: float,
    shift: Tensor | float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """One value per sequence [S], by `loss_type`. desirable_S is bool, `shift` a number:

    kto                  1 − σ(s (βc − shift)), shift = β · KL(π ‖ π_ref), an estimate ≥ 0. KTO, arXiv 2402.01306, eq. 7
    bco                  −log σ(s (βc − shift)), shift = running mean of the rewards βc. BCO, arXiv 2404.04656
    apo_zero_unpaired    1 − σ(s βc), `shift` is ignored: APO-zero on single completions. arXiv 2408.06266, eq. 7

    The shift is the baseline that a completion's reward is compared with; no gradient flows through it. Values are
    multiplied by `desirable_weight` for desirable completions and by `undesirable_weight` for undesirable ones, to
    balance classes of unequal size. Any other `loss_type` is a user's `module:function` (`own_unpaired_loss`).
    """
    check_vectors(logratio_S=logratio_S, desirable_S=desirable_S)
    sign_S = torch.where(desirable_S, 1.0, -1.0).to(logratio_S.dtype)
    weight_S = torch.where(desirable_S, desirable_weight, undesirable_weight).to(logratio_S.dtype)
    match loss_type:
        case "kto":
            loss_S = torch.sigmoid(-sign_S * (beta * logratio_S - shift))
        case "bco":
            loss_S = -F.logsigmoid(sign_S * (beta * logratio_S - shift))
        case "apo_zero_unpaired":
            loss_S = torch.sigmoid(-sign_S * beta * logratio_S)
        case _ if ":" not in loss_type:
            raise KeyError(loss_type)
        case _:
            loss_S = called(own_unpaired_loss(loss_type), logratio_S, desirable_S, beta=beta, shift=shift)
    return weight_S * loss_S


@functools.cache
def own_unpaired_loss(name: str) -> Callable[..., Tensor]:
    """A user's loss (logratio_S, desirable_S, *, beta, shift) -> [S], where `shift` is β times the KL estimate. Raises
    the errors of `own_loss`."""
    inputs = torch.tensor([0.5, -1.0, 2.0, -0.3]), torch.tensor([True, False, False, True])
    return own_loss(name, {"beta": 0.1, "shift": 0.05}, inputs)[0]


@torch.no_grad()
def kl_estimate(mismatched_logratio_S: Tensor) -> Tensor:
    """max(0, mean log-ratio) over prompts with completions that belong to other prompts: a batch's KL(π ‖ π_ref).

    A cheap replacement for completions sampled from the policy, biased but of the right scale; never negative, like the
    KL. arXiv 2402.01306, section 4.1. The mean is over the complete optimizer step.
    """
    return mismatched_logratio_S.mean().clamp(min=0)


@dataclass(frozen=True, slots=True)
class RunningMean:
    """The mean of all numbers so far, BCO's reward shift."""

    mean: float = 0.0
    count: int = 0

    def after(self, value_S: Tensor) -> "RunningMean":
        """The mean including `value_S`."""
        count, mean = self.count + value_S.numel(), float(value_S.detach().double().mean())
        return RunningMean(self.mean + (mean - self.mean) * value_S.numel() / count, count)


@torch.no_grad()
def unpaired_metrics(
    logprob_S: Tensor, logratio_S: Tensor, desirable_S: Tensor, beta: float, num_desirable: int, num_undesirable: int
) -> dict[str, Tensor]:
    """TRL's means of each class, as shares that add up over the parts of a step. `num_desirable` and `num_undesirable`
    count the complete step; a class without completions has no metrics, and the margin needs both classes."""
    metrics = {}
    for name, member_S, count in (("chosen", desirable_S, num_desirable), ("rejected", ~desirable_S, num_undesirable)):
        if count:
            metrics[f"rewards/{name}"] = beta * (logratio_S * member_S).sum() / count
            metrics[f"logps/{name}"] = (logprob_S * member_S).sum() / count
    if num_desirable and num_undesirable:
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return metrics
