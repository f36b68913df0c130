"""AdamW over weights that are sharded (models/sharding.py): each rank updates its part of every tensor."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from posttrain.models.sharding import is_sharded, own_part
from posttrain.optim.adamw import AdamW
from posttrain.ranks import Ranks


class ShardedAdamW(AdamW):
    """AdamW whose masters and moments are this rank's parts.

    Trained tensors outside the sharded model, such as a value head, are whole on every rank. Same updates as `AdamW`,
    and the same state but for its rows.
    """

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype, *, ranks: Ranks, **settings):
        self._ranks, self._dtype = ranks, compute_dtype
        super().__init__(model, compute_dtype, **settings)

    def _adopt(self, name: str, parameter: Tensor, compute_dtype: torch.dtype) -> Tensor:
        return own_part(parameter) if is_sharded(parameter) else super()._adopt(name, parameter, compute_dtype)

    def _is_kept(self, name: str) -> bool:
        return self._dtype != torch.float32

    def _collect(self) -> None:
        for name, parameter in self.parameters.items():
            if is_sharded(parameter) and parameter.grad is not None:
                self.masters[name].grad = own_part(parameter.grad)

    def _sum(self, ranks: Ranks) -> None:
        ranks.sum_gradients([master for name, master in self.masters.items() if not is_sharded(self.parameters[name])])

    def _norm(self) -> Tensor:
        grads: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, master in self.masters.items():
            if master.grad is not None:
                grads[is_sharded(self.parameters[name])].append(master.grad)
        parts, others = (torch.nn.utils.get_total_norm(some).double() ** 2 for some in (grads[True], grads[False]))
        device = next(iter(self.masters.values())).device
        total = parts.to(device)
        self._ranks.sum_([total])
        return (total + others.to(device)).sqrt().float()

    def _publish(self, name: str) -> None:
        if not is_sharded(self.parameters[name]):
            super()._publish(name)

    def forget(self) -> None:
        super().forget()
        for parameter in self.parameters.values():
            parameter.grad = None

    def is_part(self, full: str) -> bool:
        parameter = self.parameters.get(full.rpartition("|")[0])
        return parameter is not None and is_sharded(parameter)

    def rows_of(self, full: str, rows: int) -> slice:
        if not self.is_part(full):
            return slice(0, rows)
        each = -(-rows // self._ranks.size)  # as torch.chunk
        return slice(min(self._ranks.index * each, rows), min((self._ranks.index + 1) * each, rows))
