"""How a mixture-of-experts model divides its tokens: counted while it trains, for the metrics of a step.

No expert has a capacity, so no token is ever dropped; what goes wrong instead is that few experts get most of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posttrain.models.attention import PackedMask
from posttrain.models.families import backbone_of, base_of


class RouterLoad:
    """Counts what the routers of a model choose in forwards with gradients; those of engines and references are not.

    Padding is left out. A layer that goes on with the tokens that are read alone (models/lean.py) counts these.
    """

    def __init__(self, model: nn.Module):
        routers = [module for module in base_of(model).modules() if type(module).__name__.endswith("TopKRouter")]
        self._counts: list[Tensor | None] = [None] * len(routers)  # of each router, the choices of each expert
        self._tokens: int | None = None  # of the pack that is computed; None where it is in rows
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
        """The metrics of what was counted since the last call: means over the layers; none without any.

        router/load_max: the busiest expert's choices over the mean of all experts, 1 where all get as many.
        router/idle_experts: the share of experts that no token chose.
        """
        counted = [counts.double() for counts in self._counts if counts is not None]
        self._counts = [None] * len(self._counts)
        if not counted:
            return {}
        loads = torch.stack([counts.amax() / counts.mean().clamp(min=1e-9) for counts in counted])
        idle = torch.stack([(counts == 0).double().mean() for counts in counted])
        return {"router/load_max": loads.mean().item(), "router/idle_experts": idle.mean().item()}
