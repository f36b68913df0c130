"""The routers of a mixture-of-experts model in training: their load-balancing loss, and their load as metrics.

Experts have no capacity limit, so no token is ever dropped. But a few experts may receive most of the tokens.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from posttrain.base.errors import ModelError
from posttrain.base.log import log
from posttrain.models.attention import PackedMask
from posttrain.models.families import backbone_of, base_of
from posttrain.models.sharding import architecture_of


class RouterLoss:
    """The load-balancing loss of a policy's routers, E sum_e f_e P_e (arXiv 2101.03961, eq. 4), as in transformers.

    There are E experts. f_e is how often expert e is among a token's choices, and P_e is the mean probability of e;
    both are means over layers and tokens. A token counts once for each sequence that it is part of, as if sequences
    were computed one by one; padding does not count. A `coefficient` of 0 turns the loss off.
    """

    def __init__(self, model: nn.Module, coefficient: float, is_explicit: bool = True):
        """If transformers lacks the loss, raises ModelError if the user set it, or drops it with a warning."""
        self.coefficient = coefficient
        self._read(None)
        if not coefficient:
            return
        base = base_of(model)
        routers, balance = _routers(base), _balance_of(base)
        if not routers or balance is None:
            lacking = f"transformers has no load-balancing loss for {architecture_of(base)} that can be used here"
            if is_explicit:
                raise ModelError(f"{lacking}: set method.router_aux_loss_coef: 0, or leave it out")
            log.warning("%s: its routers are trained without this loss", lacking)
            self.coefficient = 0.0
            return
        self._balance = balance
        self._top_k = int(getattr(routers[0][0], "top_k", 0) or base.config.get_text_config().num_experts_per_tok)
        backbone_of(base).register_forward_pre_hook(self._begin, with_kwargs=True)
        for router, index in routers:
            router.register_forward_hook(partial(self._keep, index))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Context in which `loss` reads the policy's first forward pass with gradients, or without if they are off."""
        self._read(torch.is_grad_enabled())
        try:
            yield
        finally:
            self._read(None)

    def _read(self, with_gradients: bool | None) -> None:
        """Read the next forward pass with or without gradients; None: read none."""
        self._with_gradients, self._is_over = with_gradients, False
        self._weight: Tensor | None = None  # of each token, in the shape of the input; None: the pass has not started
        self._logits: list[Tensor] = []  # logits of each router

    def loss(self) -> Tensor:
        """Return the loss of the forward pass that was read, not multiplied by the coefficient."""
        assert self._weight is not None, "no forward was read"
        logits = tuple(layer.reshape(-1, layer.shape[-1]) for layer in self._logits)
        return self._balance(logits, logits[0].shape[-1], self._top_k, self._weight)

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        packed = kwargs.get("packed")
        if torch.is_grad_enabled() != self._with_gradients:
            return
        if self._weight is not None:  # a later pass, such as the reference's in an evaluation
            self._is_over = True
        elif isinstance(packed, PackedMask):
            self._weight, packed.read = packed.sequences_T()[None], slice(None)
        else:
            self._weight = kwargs["attention_mask"]

    def _keep(self, index: int, module: nn.Module, args: tuple, output: tuple[Tensor, ...]) -> None:
        """Store a router's logits unchanged, because operations here would be missing when the layer is recomputed."""
        is_read = torch.is_grad_enabled() == self._with_gradients and self._weight is not None
        if is_read and not self._is_over:
            self._logits.append(output[index])


def _balance_of(base: PreTrainedModel) -> Callable[..., Tensor] | None:
    """Return the load-balancing function in the module of the model's class, if it has the usual arguments."""
    for kind in type(base).__mro__:
        function = getattr(sys.modules[kind.__module__], "load_balancing_loss_func", None)
        if function is not None:
            usual = ["gate_logits", "num_experts", "top_k", "attention_mask"]
            return function if list(inspect.signature(function).parameters) == usual else None
    return None


def _routers(base: PreTrainedModel) -> list[tuple[nn.Module, int]]:
    """Return the modules that compute transformers' router logits, with the index of the logits in their outputs."""
    known = getattr(backbone_of(base), "_can_record_outputs", None) or getattr(base, "_can_record_outputs", None) or {}
    recorders = known.get("router_logits", [])
    return [
        (module, recorder.index)
        for recorder in (recorders if isinstance(recorders, list | tuple) else [recorders])
        for name, module in base.named_modules()
        if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name
    ]


class RouterLoad:
    """Counts the choices of a model's routers in forward passes with gradients, so not of engines and references.

    Each computed token counts once; padding does not count. A last layer that is computed only for the tokens whose
    states are read (models/lean.py) counts only these tokens.
    """

    def __init__(self, model: nn.Module):
        routers = [module for module in base_of(model).modules() if type(module).__name__.endswith("TopKRouter")]
        self._counts: dict[nn.Module, Tensor] = {}  # per router, how often each expert was chosen
        self._packed: PackedMask | None = None  # the mask of the current pack; None for padded rows
        self._mask: Tensor | None = None  # which tokens of the current rows are not padding
        if not routers:
            return
        backbone_of(base_of(model)).register_forward_pre_hook(self._begin, with_kwargs=True)
        for router in routers:
            router.register_forward_hook(self._count)

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        packed = kwargs.get("packed")
        self._packed, self._mask = packed if isinstance(packed, PackedMask) else None, kwargs.get("attention_mask")

    def _count(self, router: nn.Module, args: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
        if not torch.is_grad_enabled():
            return
        logits, _, chosen = output
        if (packed := self._packed) is not None:  # padding and copies of the last token that is read do not count
            chosen = chosen[: packed.num_tokens if len(chosen) == len(packed.end_T) else packed.num_read]
        times = torch.ones_like(chosen)
        if packed is None and self._mask is not None:
            # Not chosen[mask], which would wait for the GPU.
            times = self._mask.reshape(-1, 1).bool().to(chosen.dtype).expand_as(chosen)
        made = torch.zeros(logits.shape[-1], dtype=torch.int64, device=chosen.device)
        made.scatter_add_(0, chosen.flatten(), times.flatten())
        self._counts[router] = self._counts.get(router, 0) + made

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call, as means over the layers; empty if nothing was counted.

        router/load_max: the busiest expert's choices divided by the mean of all experts; 1 is balanced.
        router/idle_experts: the share of experts that no token chose.
        """
        counted = [counts.double() for counts in self._counts.values()]
        self._counts.clear()
        if not counted:
            return {}
        loads = torch.stack([counts.amax() / counts.mean().clamp(min=1e-9) for counts in counted])
        idle = torch.stack([(counts == 0).double().mean() for counts in counted])
        return {"router/load_max": loads.mean().item(), "router/idle_experts": idle.mean().item()}
