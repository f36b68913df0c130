"""f-DPO (arXiv 2309.16240): the score that replaces the log-ratio if the regulariser is another f-divergence.

With D_f(π‖π_ref) in place of the reverse KL, the implicit reward is β f'(π/π_ref), up to a term that depends on the
prompt only and cancels between chosen and rejected. Each function maps log-ratios log t = log π − log π_ref, of any
shape, to f'(t) up to a constant, as TRL 1.16 does.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

Score = Callable[[Tensor], Tensor]

# Beyond this exp() overflows float32. A clamped score gives a loss without gradient instead of an infinite one.
MAX_EXPONENT = 80.0


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
