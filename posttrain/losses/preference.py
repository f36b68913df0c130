"""Preference pairs, their metrics, and the DPO family: losses on pairs against a reference.

Each loss is a function from pairs to one unreduced value per pair, and is named after its function. The keyword-only
parameters are the settings that the loss reads, named as in the configuration; `preference_loss` passes exactly these.
To add a loss, write its function, and add it to LOSSES or, if a value depends on other pairs, to COUPLING.

In the formulas, c and r are the log-ratios log π − log π_ref of the chosen and the rejected completion, and s(·) is the
f-divergence score, the identity by default. Values and gradients are those of TRL 1.16 unless stated otherwise.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.losses import MAX_EXPONENT, called, check_vectors, own_loss, smoothed

Score = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Pairs:
    """P pairs of a chosen and a rejected completion of the same prompt; every field is a [P] tensor.

    chosen_P, rejected_P            log π(y|x), summed over the completion's tokens (nats)
    ref_chosen_P, ref_rejected_P    log π_ref(y|x), summed likewise; zeros if the method has no reference
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
        check_vectors(**{field.name: getattr(self, field.name) for field in fields(self)})

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
        """The same pairs with different policy log-probabilities."""
        return replace(self, chosen_P=chosen_P, rejected_P=rejected_P)

    def per_token(self) -> "Pairs":
        """The same pairs with the policy's log-probabilities as means over each completion's tokens."""
        chosen_P = self.chosen_P / self.chosen_length_P.clamp(min=1)
        return self.with_policy(chosen_P, self.rejected_P / self.rejected_length_P.clamp(min=1))


@torch.no_grad()
def preference_metrics(pairs: Pairs, beta: float) -> dict[str, Tensor]:
    """TRL's metrics as sums over the pairs: add them up over the batch's parts, then divide by the number of pairs.

    The implicit reward of a completion is β (log π − log π_ref) (arXiv 2305.18290, eq. 5, without the term of the
    prompt only). A tie does not count as accurate, so `rewards/accuracies` is 0 while the policy is its reference.
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


def sigmoid(pairs: Pairs, *, beta: float, label_smoothing: float, score: Score) -> Tensor:
    """DPO: −(1 − ε) log σ(x) − ε log σ(−x) with x = β (s(c) − s(r)). arXiv 2305.18290, eq. 7.

    ε = `label_smoothing` above 0 is conservative DPO (Mitchell 2023, "A note on DPO with noisy preferences"): the
    expected loss if a label is wrong with probability ε. Earlier versions of TRL smoothed here too; 1.16 does not.
    """
    return smoothed(beta * _score_margin(pairs, score), label_smoothing)


def sigmoid_norm(pairs: Pairs, *, beta: float, score: Score) -> Tensor:
    """DPO on log-ratios per token: −log σ(β (s(c)/|chosen| − s(r)/|rejected|)). Tülu 3, arXiv 2411.15124."""
    return -F.logsigmoid(beta * _mean_score_margin(pairs, score))


def hinge(pairs: Pairs, *, beta: float, score: Score) -> Tensor:
    """SLiC's hinge on DPO's margin: max(0, 1 − β (s(c) − s(r))). RSO, arXiv 2309.06657."""
    return torch.relu(1 - beta * _score_margin(pairs, score))


def ipo(pairs: Pairs, *, beta: float, score: Score) -> Tensor:
    """IPO: (s(c)/|chosen| − s(r)/|rejected| − 1/(2β))², with β the paper's τ. arXiv 2310.12036, eq. 17.

    Log-ratios are per token, as in TRL. The paper does not say so, but its authors confirmed to TRL that the paper's
    results used this form.
    """
    return (_mean_score_margin(pairs, score) - 1 / (2 * beta)) ** 2


def exo_pair(pairs: Pairs, *, beta: float, label_smoothing: float, score: Score) -> Tensor:
    """EXO with two completions: KL(p_θ ‖ p), p_θ = softmax(β s(c), β s(r)), p = (1 − ε, ε). arXiv 2402.00856, eq. 16.
    ε = `label_smoothing` must be above 0 (the paper uses 1e-3). Zero exactly where σ(β (s(c) − s(r))) = 1 − ε."""
    logit_P = beta * _score_margin(pairs, score)
    log_win = logit_P.new_full((), -label_smoothing).log1p()
    log_lose = logit_P.new_full((), label_smoothing).log()
    win_P = torch.sigmoid(logit_P) * (F.logsigmoid(logit_P) - log_win)
    return win_P + torch.sigmoid(-logit_P) * (F.logsigmoid(-logit_P) - log_lose)


def nca_pair(pairs: Pairs, *, beta: float) -> Tensor:
    """NCA: −log σ(βc) − ½ log σ(−βc) − ½ log σ(−βr). arXiv 2402.05369."""
    chosen_P, rejected_P = beta * pairs.chosen_logratio_P, beta * pairs.rejected_logratio_P
    return -F.logsigmoid(chosen_P) - 0.5 * F.logsigmoid(-chosen_P) - 0.5 * F.logsigmoid(-rejected_P)


def robust(pairs: Pairs, *, beta: float, label_smoothing: float, score: Score) -> Tensor:
    """Robust DPO: ((1 − ε) L(c, r) − ε L(r, c)) / (1 − 2ε) with L the sigmoid loss. arXiv 2403.00409.
    The unbiased estimate of the clean loss if a label is flipped with probability ε = `label_smoothing` < 1/2."""
    logit_P = beta * _score_margin(pairs, score)
    clean_P, flipped_P = -F.logsigmoid(logit_P), -F.logsigmoid(-logit_P)
    return ((1 - label_smoothing) * clean_P - label_smoothing * flipped_P) / (1 - 2 * label_smoothing)


def bco_pair(pairs: Pairs, *, beta: float) -> Tensor:
    """BCO on pairs: −log σ(βc) − log σ(−βr). arXiv 2404.04656, without its reward shift δ, as in TRL 1.16."""
    return -F.logsigmoid(beta * pairs.chosen_logratio_P) - F.logsigmoid(-beta * pairs.rejected_logratio_P)


def sppo_hard(pairs: Pairs, *, beta: float) -> Tensor:
    """SPPO with hard labels: (c − 1/(2β))² + (r + 1/(2β))². arXiv 2405.00675, eq. 4.7 with P = 1 and 0."""
    return (pairs.chosen_logratio_P - 0.5 / beta) ** 2 + (pairs.rejected_logratio_P + 0.5 / beta) ** 2


def aot(pairs: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """AOT, paired: the policy's sorted margins compared with the reference's sorted margins. arXiv 2406.05882.

    δ_i = i-th smallest (log π(chosen) − log π(rejected)) − i-th smallest (the same for π_ref);
    −(1 − ε) log σ(βδ) − ε log σ(−βδ), ε = `label_smoothing`. Value i belongs to rank i in the batch, not to pair i.
    """
    margin_P, _ = torch.sort(pairs.chosen_P - pairs.rejected_P)
    ref_margin_P, _ = torch.sort(pairs.ref_chosen_P - pairs.ref_rejected_P)
    return smoothed(beta * (margin_P - ref_margin_P), label_smoothing)


def aot_unpaired(pairs: Pairs, *, beta: float, label_smoothing: float) -> Tensor:
    """AOT, unpaired: like `aot`, with δ_i = i-th smallest c − i-th smallest r. arXiv 2406.05882."""
    chosen_P, _ = torch.sort(pairs.chosen_logratio_P)
    rejected_P, _ = torch.sort(pairs.rejected_logratio_P)
    return smoothed(beta * (chosen_P - rejected_P), label_smoothing)


def apo_zero(pairs: Pairs, *, beta: float) -> Tensor:
    """APO-zero: 1 − σ(βc) + σ(βr), which raises chosen and lowers rejected. arXiv 2408.06266, eq. 7."""
    return torch.sigmoid(-beta * pairs.chosen_logratio_P) + torch.sigmoid(beta * pairs.rejected_logratio_P)


def apo_down(pairs: Pairs, *, beta: float) -> Tensor:
    """APO-down: σ(βc) + 1 − σ(β (c − r)), which lowers both, rejected further. arXiv 2408.06266, eq. 8."""
    chosen_P, rejected_P = pairs.chosen_logratio_P, pairs.rejected_logratio_P
    return torch.sigmoid(beta * chosen_P) + torch.sigmoid(-beta * (chosen_P - rejected_P))


def discopop(pairs: Pairs, *, beta: float, discopop_tau: float, score: Score) -> Tensor:
    """DiscoPOP: −(1 − m) log σ(x) + m e^(−x) with x = β (s(c) − s(r)), m = σ(x/τ). arXiv 2406.08414, eq. 5.
    τ = `discopop_tau`. m e^(−x) is computed as one exponential, which for τ < 1 is finite where e^(−x) overflows."""
    logit_P = beta * _score_margin(pairs, score)
    logistic_P = -F.logsigmoid(logit_P) * torch.sigmoid(-logit_P / discopop_tau)
    return logistic_P + torch.exp(F.logsigmoid(logit_P / discopop_tau) - logit_P)


def sft(pairs: Pairs, *, num_pairs: int, num_chosen_tokens: int) -> Tensor:
    """Negative log-likelihood of the chosen completions per token: −log π(chosen) · num_pairs / num_chosen_tokens.

    Both counts are for the complete optimizer step, so the sum over all its pairs divided by the number of pairs is the
    mean over all chosen tokens, however the step is divided. A term of MPO, arXiv 2411.10442.
    """
    return -pairs.chosen_P * num_pairs / num_chosen_tokens


def kto_pair(pairs: Pairs, *, beta: float) -> Tensor:
    """KTO on pairs: ½ (1 − σ(β (c − KL_r))) + ½ (1 − σ(β (KL_c − r))). arXiv 2402.01306.

    KL_c = max(0, mean c) and KL_r = max(0, mean r) over the batch are each the KL baseline of the other half; no
    gradient flows through them, as in the paper. Early TRL (0.7 to 0.9) had this loss with 2P values, one per
    completion, and with a gradient through the KL. Here a pair has the mean of its two values: batch means agree.
    """
    chosen_P, rejected_P = pairs.chosen_logratio_P, pairs.rejected_logratio_P
    chosen_kl = chosen_P.detach().mean().clamp(min=0)
    rejected_kl = rejected_P.detach().mean().clamp(min=0)
    return 0.5 * (torch.sigmoid(-beta * (chosen_P - rejected_kl)) + torch.sigmoid(-beta * (chosen_kl - rejected_P)))


def _score_margin(pairs: Pairs, score: Score) -> Tensor:
    return score(pairs.chosen_logratio_P) - score(pairs.rejected_logratio_P)


def _mean_score_margin(pairs: Pairs, score: Score) -> Tensor:
    chosen_P = score(pairs.chosen_logratio_P) / pairs.chosen_length_P.clamp(min=1)
    return chosen_P - score(pairs.rejected_logratio_P) / pairs.rejected_length_P.clamp(min=1)


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """An entry of PREFERENCE_LOSSES. `couples_batch`: values depend on other pairs, so the loss needs the full step."""

    function: Callable[..., Tensor]
    couples_batch: bool


LOSSES = (sigmoid, hinge, ipo, exo_pair, nca_pair, robust, bco_pair, sppo_hard, apo_zero, apo_down, discopop, sft,
          sigmoid_norm)  # fmt: skip
COUPLING = (kto_pair, aot, aot_unpaired)
PREFERENCE_LOSSES = {each.__name__: PreferenceLoss(each, each in COUPLING) for each in (*LOSSES, *COUPLING)}


@functools.cache
def loss_named(name: str) -> PreferenceLoss:
    """The loss of a name: one of PREFERENCE_LOSSES, or a user's `module:function`, tried on four pairs: whether it
    couples the batch is seen there. Raises KeyError for an unknown name, and ConfigError for an unsuitable function."""
    if ":" not in name:
        return PREFERENCE_LOSSES[name]
    settings = {"beta": 0.1, "label_smoothing": 0.1, "discopop_tau": 0.05, "score": reverse_kl}
    settings |= {"num_pairs": 4, "num_chosen_tokens": 18}
    numbers = [[-2.0, -9.0, -4.0, -7.0], [-3.0, -5.0, -8.0, -6.0], [-2.5, -8.0, -5.0, -7.5], [-2.5, -6.0, -7.0, -6.5]]
    inputs = [*map(torch.tensor, numbers), torch.tensor([3, 6, 4, 5]), torch.tensor([2, 5, 6, 4])]
    return PreferenceLoss(*own_loss(name, settings, inputs, lambda *fields: (Pairs(*fields),), may_couple=True))


def couples_batch(loss_type: Sequence[str]) -> bool:
    """Whether any of the losses needs all pairs of the optimizer step at once."""
    return any(loss_named(name).couples_batch for name in loss_type)


def preference_loss(
    pairs: Pairs,
    *,
    loss_type: Sequence[str],
    loss_weights: Sequence[float] | None,
    f_divergence_type: str,
    f_alpha_divergence_coef: float,
    num_pairs: int | None = None,
    num_chosen_tokens: int | None = None,
    **settings: Any,
) -> Tensor:
    """The weighted sum of the named losses, one value per pair [P]; each loss gets those of the `settings` that it
    reads. For the loss of an optimizer step, sum the values and divide by the step's number of pairs.

    If `loss_weights` is None, every weight is 1. `num_pairs` and `num_chosen_tokens` count the complete optimizer step;
    None means that `pairs` is the complete step. Raises the errors of `loss_named`, and ValueError if weights do not
    match the losses. The configuration checks which settings are valid together.
    """
    settings |= {
        "score": divergence_score(f_divergence_type, f_alpha_divergence_coef),
        "num_pairs": len(pairs) if num_pairs is None else num_pairs,
        "num_chosen_tokens": pairs.chosen_length_P.sum() if num_chosen_tokens is None else num_chosen_tokens,
    }
    weights = [1.0] * len(loss_type) if loss_weights is None else loss_weights
    total_P = torch.zeros_like(pairs.chosen_P)
    for name, weight in zip(loss_type, weights, strict=True):
        total_P = total_P + weight * called(loss_named(name).function, pairs, **settings)
    return total_P


# f-DPO (arXiv 2309.16240): with D_f(π‖π_ref) in place of the reverse KL, the implicit reward is β f'(π/π_ref), up to a
# term that depends on the prompt only and cancels between chosen and rejected. Each function maps log-ratios
# log t = log π − log π_ref, of any shape, to f'(t) up to a constant, as TRL 1.16 does.


def reverse_kl(logratio: Tensor) -> Tensor:
    """f(t) = t log t, f'(t) = log t + 1: the log-ratio itself, which is standard DPO."""
    return logratio


def forward_kl(logratio: Tensor) -> Tensor:
    """f(t) = −log t, f'(t) = −1/t; returns 1 − 1/t."""
    return 1 - torch.exp((-logratio).clamp(max=MAX_EXPONENT))


def js_divergence(logratio: Tensor) -> Tensor:
    """f(t) = t log(2t/(t+1)) + log(2/(t+1)), f'(t) = log(2t/(t+1))."""
    return math.log(2) + F.logsigmoid(logratio)


def alpha_divergence(logratio: Tensor, *, coef: float) -> Tensor:
    """f'(t) = (t^(α−1) − 1)/(α − 1) with α = `coef`; α = 1 is the reverse KL, α = 0 the forward KL."""
    if abs(coef - 1.0) < 1e-6:
        return logratio
    return torch.expm1(((coef - 1.0) * logratio).clamp(max=MAX_EXPONENT)) / (coef - 1.0)


F_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")


def divergence_score(f_divergence_type: str, f_alpha_divergence_coef: float) -> Score:
    """The score function of `f_divergence_type`, one of F_DIVERGENCES (KeyError otherwise)."""
    return {
        "reverse_kl": reverse_kl,
        "forward_kl": forward_kl,
        "js_divergence": js_divergence,
        "alpha_divergence": partial(alpha_divergence, coef=f_alpha_divergence_coef),
    }[f_divergence_type]
