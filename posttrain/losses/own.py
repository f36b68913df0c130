"""Loss functions of the user's, which `method.loss_type` names as `module:function`, tried before they are used."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from posttrain.base.errors import ConfigError
from posttrain.base.functions import find_function
from posttrain.losses import called, keywords_of


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
    function = find_function(name)
    if unknown := sorted(keywords_of(function) - settings.keys()):
        raise ConfigError(
            f"method.loss_type: {name} takes the keyword {', '.join(unknown)}; this method offers {', '.join(settings)}"
        )

    def tried(tensors: Sequence[Tensor]) -> Tensor:
        leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in tensors]
        try:
            with torch.enable_grad():
                values = called(function, *arguments(*leaves), **settings)
        except Exception as error:  # the user's code may raise any
            raise ConfigError(f"method.loss_type: {name} failed with {type(error).__name__}: {error}") from error
        values = values[0] if isinstance(values, tuple) else values
        size = len(tensors[0])
        if not isinstance(values, Tensor) or values.shape != (size,):
            got = f"shape {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise ConfigError(f"method.loss_type: {name} returned {got}; it must return one value for each of {size}")
        if not values.isfinite().all():
            raise ConfigError(
                f"method.loss_type: {name} returned {values.tolist()} for {[t.tolist() for t in tensors]}"
            )
        if not values.requires_grad:
            raise ConfigError(f"method.loss_type: {name} has no gradient: it does not depend on the policy")
        return values.detach()

    half = len(inputs[0]) // 2
    whole, first = tried(inputs), tried([tensor[:half] for tensor in inputs])
    couples = not torch.allclose(whole[:half], first)
    if couples and not may_couple:
        raise ConfigError(
            f"method.loss_type: {name} gives values that depend on others of the batch, such as a mean over it; only a "
            "loss on pairs may do that, because a batch is several packs"
        )
    return function, couples


@functools.cache
def own_token_loss(name: str) -> Callable[[Tensor], Tensor]:
    """A user's loss of each token from its log-probability, [N] to [N]. Raises the errors of `own_loss`."""
    return own_loss(name, {}, [torch.tensor([-0.1, -1.0, -4.0, -2.0])])[0]
