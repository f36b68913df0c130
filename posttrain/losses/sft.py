"""Supervised fine-tuning."""

from torch import Tensor


def nll(logprob_N: Tensor) -> Tensor:
    """Negative log-likelihood of each scored token in nats [N]; its mean over a step's tokens is the cross-entropy."""
    if logprob_N.ndim != 1:
        raise ValueError(f"expected a vector with one log-probability per scored token, got {list(logprob_N.shape)}")
    return -logprob_N
