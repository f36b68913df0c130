"""Estimates of KL(π‖π_ref), the divergence of a policy from its reference, from sampled tokens.

With ρ = log π_ref − log π of a sampled token (J. Schulman, "Approximating KL divergence", 2020):

    k1   −ρ                 unbiased, high variance, sometimes negative
    k2   ρ² / 2             biased, low variance; its gradient is the unbiased gradient of the KL on policy
    k3   e^ρ − ρ − 1        unbiased, never negative; GRPO's, arXiv 2402.03300, eq. 4

As a term of the loss, on tokens sampled from π itself, the expected gradient is that of the token's KL(π‖π_ref) for
k2, that of KL(π_ref‖π) for k3, and 0 for k1, which has no effect there. As part of the reward, through which no
gradient flows, k1 gives the gradient of the full completion's KL(π‖π_ref) through the policy gradient.
"""

import torch
from torch import Tensor

from posttrain.losses.divergence import MAX_EXPONENT

KL_ESTIMATORS = ("k1", "k2", "k3")


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, *, estimator: str) -> Tensor:
    """The estimate for each token, of the tensors' shape; nats. ValueError for other names or unequal shapes."""
    if logprob.shape != ref_logprob.shape:
        raise ValueError(f"expected one shape, got logprob {list(logprob.shape)}, ref {list(ref_logprob.shape)}")
    rho = ref_logprob - logprob
    match estimator:
        case "k1":
            return -rho
        case "k2":
            return rho**2 / 2
        case "k3":
            return torch.expm1(rho.clamp(max=MAX_EXPONENT)) - rho
    raise ValueError(f"unknown estimator {estimator!r}: one of {', '.join(KL_ESTIMATORS)}")


def adapted_kl_coef(kl_coef: float, kl: float, *, target: float, horizon: int, completions: int) -> float:
    """The next coefficient of PPO's KL penalty: raised if the measured KL is above the target, lowered if below.

        e = clip(KL / target − 1, −0.2, 0.2)        β ← β (1 + e · completions / horizon)

    arXiv 1909.08593, section 2.2; `kl` is in nats per completion, `horizon` the number of completions over which
    the largest error changes β by a fifth.
    """
    error = min(max(kl / target - 1.0, -0.2), 0.2)
    return kl_coef * (1.0 + error * completions / horizon)
