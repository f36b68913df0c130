"""From unreduced losses to a gradient that does not depend on how a step was divided into packs, batches and ranks."""

from collections.abc import Callable

import torch
from torch import Tensor


def global_mean(value: Tensor, count: float, weight: Tensor | None = None) -> Tensor:
    """This part's share of the step's mean: its sum over `count`, the tokens, pairs or sequences of the complete step;
    with `weight` (of the shape of `value`) its weighted sum, and `count` is the sum of weights of the complete step.

    The shares of a step add up to its mean, and their gradients to its gradient. `count` is known before the first
    backward; ValueError unless it is above 0.
    """
    if count <= 0:
        raise ValueError(f"a mean needs a count above 0, got {count}")
    return (value if weight is None else value * weight).sum() / count


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
