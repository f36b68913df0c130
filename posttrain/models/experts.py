"""The load of a mixture-of-experts model's routers, counted during training for the metrics of a step.

Experts have no capacity limit, so no token is ever dropped; the possible problem is that few experts get most tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posttrain.models.attention import PackedMask
from posttrain.models.families import backbone_of, base_of


class RouterLoad:
    """Counts the choices of a model's routers in forwards with gradients, not in those of engines and references.

    Padding is not counted. A layer that continues with the tokens that are read (models/lean.py) counts only these.
    """

    def __init__(self, model: nn.Module):
        routers = [module for module in base_of(model).modules() if type(module).__name__.endswith("TopKRouter")]
        self._counts: list[Tensor | None] = [None] * len(routers)  # per router, how often each expert was chosen
        self._tokens: int | None = None  # tokens of the current pack; None for rows
        if not routers:
            return
        backbone_of(base_of(model)).register_forward_pre_hook(self._begin, with_kwargs=True)
        for number, router in enumerate(routers):
            router.register_forward_hook(self._counter(number))

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        packed = kwargs.get("packed")
        self._tokens = packed.num_tokens if isinstance(packed, PackedMask) else None

    def _counter(self, number: int):
        def count(module: nn.Module, args: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
            if torch.is_grad_enabled():
                logits, _, chosen = output
                made = torch.zeros(logits.shape[-1], dtype=torch.int64, device=chosen.device)
                chosen = chosen[: self._tokens].flatten()
                made.scatter_add_(0, chosen, torch.ones_like(chosen))
                before = self._counts[number]
                self._counts[number] = made if before is None else before + made

        return count

    def take(self) -> dict[str, float]:
        """The metrics since the last call, as means over the layers; empty without counts.

        router/load_max: the busiest expert's choices divided by the mean of all experts; 1 is balanced.
        router/idle_experts: the share of experts that no token chose.
        """
        counted = [counts.double() for counts in self._counts if counts is not None]
        self._counts = [None] * len(self._counts)
        if not counted:
            return {}
        loads = torch.stack([counts.amax() / counts.mean().clamp(min=1e-9) for counts in counted])
        idle = torch.stack([(counts == 0).double().mean() for counts in counted])
        return {"router/load_max": loads.mean().item(), "router/idle_experts": idle.mean().item()}
