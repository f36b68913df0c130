"""From unreduced losses to a gradient that does not depend on how a step was divided into packs, batches and ranks."""

from collections.abc import Callable

import torch
from torch import Tensor

HAVE_SEGMENTS = ("cpu", "cuda")  # devices for which PyTorch has sums of segments


def global_mean(value: Tensor, count: float, weight: Tensor | None = None) -> Tensor:
    """This part's share of the step's mean: its sum over `count`, the tokens, pairs or sequences of the complete step;
    with `weight` (of the shape of `value`) its weighted sum, and `count` is the sum of weights of the complete step.

    The shares of a step add up to its mean, and their gradients to its gradient. `count` is known before the first
    backward; ValueError unless it is above 0.
    """
    if count <= 0:
        raise ValueError(f"a mean needs a count above 0, got {count}")
    return (value if weight is None else value * weight).sum() / count


def sum_segments(value_N: Tensor, length_S: Tensor) -> Tensor:
    """Sums over consecutive segments of lengths `length_S`: (N) to (S), floating point. `length_S` adds up to N.

    Sums have a fixed order, so that results are reproducible to the bit on a GPU too, unlike with `index_add`.
    """
    if value_N.device.type not in HAVE_SEGMENTS:
        sequence_N = torch.arange(len(length_S), device=length_S.device).repeat_interleave(length_S)
        return value_N.new_zeros(len(length_S)).index_add(0, sequence_N, value_N)
    if not value_N.is_cuda and int(length_S.sum()) != len(value_N):  # on a GPU the check would wait for it
        raise ValueError(f"lengths add up to {int(length_S.sum())}, but there are {len(value_N)} values")
    return torch.segment_reduce(value_N, "sum", lengths=length_S, unsafe=True)  # unchecked: no wait for a GPU


def loss_coefficients(loss: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The unreduced `loss(*inputs)` and, for each input, the gradient of its sum, of that input's shape; both detached.

    If the loss couples sequences that do not fit in memory together, score all of them without gradients, compute the
    coefficients d loss / d logprob here over the complete step, and call backward on Σ coefficient · logprob of each
    pack: by the chain rule that is the step's exact gradient. An input that the loss does not read has coefficients 0.
    """
    leaves = [value.detach().requires_grad_() for value in inputs]
    with torch.enable_grad():
        values = loss(*leaves)
        gradients = torch.autograd.grad(values.sum(), leaves, materialize_grads=True)
    return values.detach(), gradients
