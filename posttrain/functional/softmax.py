"""Selected log-probabilities and entropies from logits, some rows at a time, without a second tensor of their size.

Backward recomputes each chunk's softmax and writes into one tensor, the gradient:

    d log p_i / d z_v = [i = v] − p_v          d H / d z_v = −p_v (log p_v + H)
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

ROWS = 128  # rows of V logits at a time


def selective_log_softmax(logits: Tensor, index: Tensor, chunk_size: int = ROWS) -> Tensor:
    """Log-probabilities of given tokens: `log_softmax(logits, -1)` gathered at `index`, in nats.

    logits (…, V) and index (…) give (…); index (…, K), K tokens of each row, gives (…, K). As in TRL; computed a chunk
    of `chunk_size` rows at a time, which changes neither value nor gradient. Computed and returned in at least float32.

    Raises ValueError for an index of another shape, and a chunk_size below 1.
    """
    one_each = index.ndim == logits.ndim - 1
    if index.shape[: logits.ndim - 1] != logits.shape[:-1] or index.ndim > logits.ndim:
        raise ValueError(f"index {list(index.shape)} does not fit logits {list(logits.shape)}: give one for each row")
    chosen = _Selected.apply(logits, index[..., None] if one_each else index, _rows(chunk_size))
    return chosen.squeeze(-1) if one_each else chosen  # pyright: ignore[reportOptionalMemberAccess, reportReturnType]


def compute_entropy(logits: Tensor, chunk_size: int = ROWS) -> Tensor:
    """Entropy of each next-token distribution, in nats: (B, L, V) gives (B, L), or any leading shape.

        H = −Σ_v p_v log p_v,   log p_v = z_v − log Σ_u e^{z_u}

    log p is computed from the logits z directly, never as the logarithm of a rounded p, so logits of any size are safe;
    a token excluded by a logit of −∞ adds 0 to value and gradient. Computed and returned in at least float32. The
    entropy is log V if all tokens are equally likely, 0 if one is certain.

    A chunk of `chunk_size` rows is computed at a time, which changes neither value nor gradient.

    Raises ValueError for a chunk_size below 1.
    """
    return _Entropy.apply(logits, _rows(chunk_size))  # pyright: ignore[reportReturnType]


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, index, chunk_size):
        chosen = torch.empty(index.shape, dtype=_dtype(logits), device=logits.device)
        for rows in _chunks(logits, chunk_size):
            chosen[rows] = _log_softmax(logits[rows]).gather(-1, index[rows])
        ctx.save_for_backward(logits, index)
        ctx.chunk_size = chunk_size
        return chosen

    @staticmethod
    def backward(ctx, *grad_outputs):
        logits, index = ctx.saved_tensors
        [grad] = grad_outputs
        by_logits = torch.empty_like(logits)
        for rows in _chunks(logits, ctx.chunk_size):
            chunk = _log_softmax(logits[rows]).exp() * -grad[rows].sum(-1, keepdim=True)
            by_logits[rows] = chunk.scatter_add_(-1, index[rows], grad[rows]).to(logits.dtype)
        return by_logits, None, None


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, chunk_size):
        entropy = torch.empty(logits.shape[:-1], dtype=_dtype(logits), device=logits.device)
        for rows in _chunks(logits, chunk_size):
            logprob = _log_softmax(logits[rows])
            entropy[rows] = -(logprob.exp() * _finite(logprob)).sum(-1)
        ctx.save_for_backward(logits, entropy)
        ctx.chunk_size = chunk_size
        return entropy

    @staticmethod
    def backward(ctx, *grad_outputs):
        logits, entropy = ctx.saved_tensors
        [grad] = grad_outputs
        by_logits = torch.empty_like(logits)
        for rows in _chunks(logits, ctx.chunk_size):
            logprob = _log_softmax(logits[rows])
            chunk = logprob.exp() * (_finite(logprob) + entropy[rows][..., None])
            by_logits[rows] = (-grad[rows][..., None] * chunk).to(logits.dtype)
        return by_logits, None


def _chunks(logits: Tensor, size: int) -> Iterator[tuple[Tensor, ...]]:
    """Indices of some rows (…, V) at a time, one tensor per leading dimension, so that no layout is copied."""
    leading = logits.shape[:-1]
    for start in range(0, math.prod(leading), size):
        stop = min(start + size, math.prod(leading))
        yield torch.unravel_index(torch.arange(start, stop, device=logits.device), leading) if leading else ()


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1, dtype=_dtype(logits))


def _finite(logprob: Tensor) -> Tensor:
    """The log-probabilities clamped to finite numbers: 0 · −∞ is NaN, 0 · finite is 0."""
    return logprob.clamp(min=torch.finfo(logprob.dtype).min)


def _dtype(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _rows(chunk_size: int) -> int:
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}: it must be 1 or more")
    return chunk_size
