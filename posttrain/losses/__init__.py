"""Losses as pure, unreduced functions of tensors; _P means pairs, _N scored tokens (legend in posttrain/batch.py).

This module contains what all losses share: the likelihood of tokens; means over a step and their exact gradients, which
do not depend on how the step is divided into packs, batches and ranks; shape checks; and functions of the user's, which
`method.loss_type` names as `module:function`, tried before they are used.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from posttrain.base.errors import ConfigError
from posttrain.base.functions import find_function

# Beyond this exp() overflows float32. A clamped exponent gives a loss without gradient instead of an infinite one.
MAX_EXPONENT = 80.0


def keywords_of(function: Callable[..., Any]) -> frozenset[str]:
    """The settings that a loss reads: its keyword-only parameters."""
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def called(function: Callable[..., Any], *inputs: Any, **settings: Any) -> Any:
    """The values of a loss, called with those of the settings that it reads."""
    return function(*inputs, **{key: settings[key] for key in keywords_of(function) & settings.keys()})


def nll(logprob_N: Tensor) -> Tensor:
    """Negative log-likelihood of each scored token in nats [N]; its mean over a step's tokens is the cross-entropy."""
    check_vectors(logprob_N=logprob_N)
    return -logprob_N


def dft(logprob_N: Tensor) -> Tensor:
    """−p log p with p detached [N]: each token's loss is weighted by its probability. DFT, arXiv 2508.05629, eq. 9.
    The gradient of −log p has a factor 1 / p, which makes unlikely targets outweigh all others; this removes it."""
    return nll(logprob_N) * logprob_N.detach().exp()


def eaft(logprob_N: Tensor, top_entropy_N: Tensor, eaft_alpha: float) -> Tensor:
    """−(H / log K)^α log p [N], with H the entropy of the K most likely tokens, detached. EAFT, arXiv 2601.02151.
    Where the model is certain of another token than the target, learning the target would change it most."""
    return nll(logprob_N) * top_entropy_N.detach() ** eaft_alpha


def label_smoothed_nll(logprob_N: Tensor, mean_N: Tensor, label_smoothing_factor: float) -> Tensor:
    """−(1 − ε) log p(target) − ε mean over the vocabulary of log p [N], as transformers' LabelSmoother: the
    cross-entropy with targets of which a share ε is uniform. arXiv 1512.00567, section 7."""
    return (1 - label_smoothing_factor) * nll(logprob_N) - label_smoothing_factor * mean_N


def smoothed(logit_P: Tensor, label_smoothing: float) -> Tensor:
    """−(1 − ε) log σ(x) − ε log σ(−x), ε = `label_smoothing`: the loss if a label is wrong with probability ε."""
    return -(1 - label_smoothing) * F.logsigmoid(logit_P) - label_smoothing * F.logsigmoid(-logit_P)


def global_mean(value: Tensor, count: float, weight: Tensor | None = None) -> Tensor:
    """This part's share of the step's mean: its sum divided by `count`, the step's number of tokens, pairs or
    sequences. With `weight` (same shape as `value`), the weighted sum; `count` is then the step's sum of weights.

    The shares of a step add up to its mean, and their gradients to its gradient. `count` is known before the first
    backward pass. Raises ValueError unless `count` is above 0.
    """
    if count <= 0:
        raise ValueError(f"a mean needs a count above 0, got {count}")
    return (value if weight is None else value * weight).sum() / count


def loss_coefficients(loss: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The unreduced `loss(*inputs)`, and the gradient of its sum for each input, in the input's shape; all detached.

    If the loss couples sequences that do not fit in memory together, score all of them without gradients, compute the
    coefficients d loss / d logprob here over the complete step, and call backward on Σ coefficient · logprob of each
    pack: by the chain rule this is the step's exact gradient. An input that the loss does not read has coefficients 0.
    """
    leaves = [value.detach().requires_grad_() for value in inputs]
    with torch.enable_grad():
        values = loss(*leaves)
        gradients = torch.autograd.grad(values.sum(), leaves, materialize_grads=True)
    return values.detach(), gradients


def check_vectors(**named: Tensor) -> None:
    """Raise ValueError unless all tensors are vectors of one length: broadcasting would hide a mistake."""
    if len({tensor.shape for tensor in named.values()}) > 1 or any(tensor.ndim != 1 for tensor in named.values()):
        raise ValueError(f"expected vectors of one length, got {_shapes(named)}")


def check_shapes(**named: Tensor) -> None:
    """Raise ValueError unless all tensors have the same shape: broadcasting would hide a mistake."""
    if len({tensor.shape for tensor in named.values()}) > 1:
        raise ValueError(f"expected tensors of one shape, got {_shapes(named)}")


def _shapes(named: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in named.items())


def own_loss(
    name: str,
    settings: Mapping[str, Any],
    inputs: Sequence[Tensor],
    arguments: Callable[..., tuple[Any, ...]] = lambda *tensors: tensors,
    may_couple: bool = False,
) -> tuple[Callable[..., Any], bool]:
    """A user's loss; and whether its values for the first half of the `inputs`, for which it is tried, depend on the
    second half.

    The loss is called with `arguments(*inputs)` and those of the `settings` that it reads. It must return one value for
    each entry of the first input, or a tuple that begins with these values. Raises ConfigError if it does not or,
    unless it `may_couple`, if the values depend; and RewardError if there is no such function.
    """
    function, where = find_function(name), f"method.loss_type: {name}"
    if unknown := sorted(keywords_of(function) - settings.keys()):
        raise ConfigError(f"{where} takes the keyword {', '.join(unknown)}; this method offers {', '.join(settings)}")

    def tried(tensors: Sequence[Tensor]) -> Tensor:
        leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in tensors]
        try:
            with torch.enable_grad():
                values = called(function, *arguments(*leaves), **settings)
        except Exception as error:  # the user's code may raise any
            raise ConfigError(f"{where} failed with {type(error).__name__}: {error}") from error
        values = values[0] if isinstance(values, tuple) else values
        size = len(tensors[0])
        if not isinstance(values, Tensor) or values.shape != (size,):
            got = f"shape {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise ConfigError(f"{where} returned {got}; it must return one value for each of {size}")
        if not values.isfinite().all():
            raise ConfigError(f"{where} returned {values.tolist()} for {[t.tolist() for t in tensors]}")
        if not values.requires_grad:
            raise ConfigError(f"{where} has no gradient: it does not depend on the policy")
        return values.detach()

    half = len(inputs[0]) // 2
    whole, first = tried(inputs), tried([tensor[:half] for tensor in inputs])
    couples = not torch.allclose(whole[:half], first)
    if couples and not may_couple:
        raise ConfigError(
            f"{where} gives values that depend on others of the batch, such as a mean over it; only a loss on "
            "pairs may do that, because a batch is several packs"
        )
    return function, couples


@functools.cache
def own_token_loss(name: str) -> Callable[[Tensor], Tensor]:
    """A user's loss of each token from its log-probability, [N] to [N]. Raises the errors of `own_loss`."""
    return own_loss(name, {}, [torch.tensor([-0.1, -1.0, -4.0, -2.0])])[0]
