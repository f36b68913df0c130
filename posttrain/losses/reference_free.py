"""Losses on pairs without a reference: Bradley-Terry for reward models, ORPO, CPO and SimPO.

Each loss maps pairs to one unreduced value per pair. In ORPO, CPO and SimPO a likelihood term on the chosen completion,
which the recipe adds, replaces the reference. In their formulas, c and r are the levels of the chosen and the rejected
completion: log π(y|x), or its mean per token where a docstring says so. Values and gradients match TRL 1.16's
RewardTrainer and its experimental ORPO and CPO trainers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.losses import MAX_EXPONENT, check_vectors, smoothed
from posttrain.losses.preference import Pairs, preference_metrics

# The losses that compare means per token; the other losses compare sums.
PER_TOKEN = frozenset({"ipo", "simpo"})


def bradley_terry(
    chosen_P: Tensor,
    rejected_P: Tensor,
    margin_P: Tensor | None = None,
    center_rewards_coefficient: float | None = None,
    tie_P: Tensor | None = None,
) -> Tensor:
    """−log σ(r_chosen − r_rejected − m) + κ (r_chosen + r_rejected)², one value per pair [P].

    InstructGPT, arXiv 2203.02155, eq. 1. The margin m says how much better chosen is (Llama 2, arXiv 2307.09288,
    eq. 2). The first term determines rewards only up to a constant per prompt; the second, κ =
    `center_rewards_coefficient`, keeps rewards around 0 (arXiv 2312.09244, eq. 2, which suggests 0.01). Rewards and
    margin are [P].

    Where `tie_P` (bool [P]) is true, neither is better: the loss is the mean over both orders, −½ log σ(r_chosen −
    r_rejected) − ½ log σ(r_rejected − r_chosen), as in WebGPT (arXiv 2112.09332, section 3.2).
    """
    tensors = {"chosen_P": chosen_P, "rejected_P": rejected_P, "margin_P": margin_P, "tie_P": tie_P}
    check_vectors(**{name: tensor for name, tensor in tensors.items() if tensor is not None})
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
    `accuracy` and `margin` exclude ties: divide them by the number of pairs that are not ties."""
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


def log_odds_ratio(pairs: Pairs) -> Tensor:
    """log odds(chosen) − log odds(rejected) [P], odds = p / (1 − p), p = exp(mean log π per token).

    ORPO, arXiv 2403.07691, equations 4 and 5. If a completion is certain (p = 1), its odds are infinite; p is then
    replaced by the largest number below 1, so that loss and gradient stay finite.
    """
    mean = pairs.per_token()
    return _log_odds(mean.chosen_P) - _log_odds(mean.rejected_P)


def odds_ratio(pairs: Pairs, *, beta: float) -> Tensor:
    """ORPO's comparison: −β log σ(log odds(chosen) − log odds(rejected)), β the paper's λ. arXiv 2403.07691, eq. 6, 7.
    The full loss is this plus the negative log-likelihood of the chosen completion."""
    return -beta * F.logsigmoid(log_odds_ratio(pairs))


def contrastive(
    pairs: Pairs, *, loss_type: str, beta: float, label_smoothing: float, simpo_gamma: float, alpha: float
) -> Tensor:
    """The comparison of CPO and SimPO, by `loss_type` (KeyError if unknown):

    sigmoid   −log σ(β (c − r))            CPO, arXiv 2401.08417, eq. 3: DPO with a uniform reference
    hinge     max(0, 1 − β (c − r))        SLiC-HF, arXiv 2305.10425
    ipo       (c − r − 1/(2β))²            on means per token; IPO, arXiv 2310.12036, without its reference
    simpo     −log σ(β (c − r) − γ)        on means per token; SimPO, arXiv 2405.14734, eq. 6, γ = `simpo_gamma`

    `label_smoothing` ε mixes the value for the opposite label into sigmoid and simpo: (1 − ε) L(x) + ε L(−x). `alpha`
    is explained in `shaped`.
    """
    chosen_P, rejected_P = levels(pairs, loss_type, alpha)
    difference_P = chosen_P - rejected_P
    match loss_type:
        case "sigmoid":
            return smoothed(beta * difference_P, label_smoothing)
        case "hinge":
            return torch.relu(1 - beta * difference_P)
        case "ipo":
            return (difference_P - 1 / (2 * beta)) ** 2
        case "simpo":
            return smoothed(beta * difference_P - simpo_gamma, label_smoothing)
    raise KeyError(loss_type)


def levels(pairs: Pairs, loss_type: str, alpha: float) -> tuple[Tensor, Tensor]:
    """c and r [P], whose difference `contrastive` scores; multiplied by β, they are the implicit rewards."""
    used = pairs.per_token() if loss_type in PER_TOKEN else pairs
    return shaped(used.chosen_P, alpha), shaped(used.rejected_P, alpha)


def shaped(level_P: Tensor, alpha: float) -> Tensor:
    """AlphaPO's reward shape (1 − p^(−α)) / α, p = e^level; α = 0 is the level itself. arXiv 2501.03884, eq. 7."""
    return level_P if alpha == 0 else -torch.expm1((-alpha * level_P).clamp(max=MAX_EXPONENT)) / alpha


@torch.no_grad()
def odds_ratio_metrics(pairs: Pairs, beta: float) -> dict[str, Tensor]:
    """TRL's ORPO metrics as sums over the pairs; log-probabilities are means per token, rewards are β times those."""
    log_odds_P = log_odds_ratio(pairs)
    return preference_metrics(pairs.per_token(), beta) | {
        "log_odds_chosen": log_odds_P.sum(),
        "log_odds_ratio": F.logsigmoid(log_odds_P).sum(),
    }


@torch.no_grad()
def contrastive_metrics(pairs: Pairs, *, loss_type: str, beta: float, alpha: float) -> dict[str, Tensor]:
    """TRL's CPO metrics as sums over the pairs; rewards are β times the levels that the loss compares."""
    used = pairs.per_token() if loss_type in PER_TOKEN else pairs
    rewards = preference_metrics(pairs.with_policy(*levels(pairs, loss_type, alpha)), beta)
    return rewards | {"logps/chosen": used.chosen_P.sum(), "logps/rejected": used.rejected_P.sum()}


def _log_odds(level_P: Tensor) -> Tensor:
    """log p − log(1 − p) with p = e^level, stable at both ends of p."""
    level_P = level_P.clamp(max=-torch.finfo(level_P.dtype).eps)
    small = level_P < -0.6931471805599453  # p < 1/2, where 1 − p loses no digits
    # Each branch receives only arguments for which it is exact, so no NaN flows back through the unused branch.
    log_rest_P = torch.where(
        small,
        torch.log1p(-torch.exp(torch.where(small, level_P, -1.0))),
        torch.log(-torch.expm1(torch.where(small, -0.5, level_P))),
    )
    return level_P - log_rest_P
