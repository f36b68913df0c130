"""Sums and means over the elements that a mask selects. Other elements may have any value, including NaN and −∞."""

import torch
from torch import Tensor


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of the elements where `mask` is 1, along `dim`, or over all elements.

        mean_i = Σ_j m_ij x_ij / Σ_j m_ij

    `mask` has the tensor's shape, or one that broadcasts to it; bool, or numbers that are 0 or 1. As with
    `tensor.mean`, `dim` is removed from the result, and an empty mean (a row whose mask is all 0) is NaN.

    GRPO averages over each response in this way (arXiv 2402.03300, eq. 3): a token of a short response has more weight
    than one of a long response. `masked_normalize` gives all tokens the same weight.
    """
    kept = _kept(tensor, mask)
    total, count = (x.sum() if dim is None else x.sum(dim) for x in (_only(tensor, kept), kept))
    return total / count


def masked_normalize(tensor: Tensor, mask: Tensor, dim: int | None = None, normalize_constant: float = 1.0) -> Tensor:
    """Sum of the elements where `mask` is 1, along `dim` or over all elements, divided by a constant.

        s_i = Σ_j m_ij x_ij / c

    `mask` as in `masked_mean`; an empty sum is 0. With c the same for every batch (in Dr. GRPO, arXiv 2503.20783, the
    maximum completion length), every token has the same weight, however long its response.

    Raises ValueError for a constant of 0.
    """
    if normalize_constant == 0:
        raise ValueError("normalize_constant is 0: the sum cannot be divided by it")
    kept = _only(tensor, _kept(tensor, mask))
    return (kept.sum() if dim is None else kept.sum(dim)) / normalize_constant


def _kept(tensor: Tensor, mask: Tensor) -> Tensor:
    """The mask as bool, expanded to the tensor's shape."""
    try:
        return mask.bool().expand_as(tensor)
    except RuntimeError:
        raise ValueError(f"mask {list(mask.shape)} does not fit tensor {list(tensor.shape)}") from None


def _only(tensor: Tensor, kept: Tensor) -> Tensor:
    """The tensor with 0 where the mask is 0; multiplication by the mask would turn an infinity into NaN."""
    return torch.where(kept, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))
