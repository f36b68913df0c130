"""AdamW on float32 master weights.

bfloat16 weights do not change at a learning rate of 1e-6: the update is below their resolution. So for a model that
computes in bfloat16, each trained tensor has a float32 master here, gradients are summed in float32, and the model's
weights are the rounded masters. In float32 the masters are the model's weights themselves.
Over weights that are sharded (models/sharding.py), each rank updates its part of every tensor.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from posttrain.base.errors import DamagedError
from posttrain.models.sharding import is_sharded, own_part
from posttrain.parallel.ranks import ALONE, Ranks


class AdamW:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) over the trainable parameters of `model`, with clipping.

    Weight decay does not apply to vectors (biases and norms), as in transformers' Trainer. `compute_dtype` is the dtype
    of the model's trainable weights; pass the model with float32 weights so that the masters start exact.
    """

    def __init__(
        self,
        model: nn.Module,
        compute_dtype: torch.dtype = torch.float32,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
    ):
        self.betas, self.eps, self.weight_decay, self.max_grad_norm = betas, eps, weight_decay, max_grad_norm
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {name: self._adopt(name, p, compute_dtype) for name, p in self.parameters.items()}
        self._adamw = self._torch_adamw(self.masters)

    def _torch_adamw(self, masters: Mapping[str, Tensor]) -> torch.optim.AdamW:
        """torch's AdamW over these masters. The learning rate is given at each step."""
        matrices = [m for m in masters.values() if m.ndim >= 2]
        vectors = [m for m in masters.values() if m.ndim < 2]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=0.0, betas=self.betas, eps=self.eps, fused=True)

    # Overridden by the variants of this optimizer: the place of the masters, and the transfer of gradients.

    def _adopt(self, name: str, parameter: Tensor, compute_dtype: torch.dtype) -> Tensor:
        """The parameter's master; the parameter itself becomes the master rounded to `compute_dtype`."""
        if compute_dtype == torch.float32:
            return parameter
        master = parameter.detach().float().clone()
        parameter.data = parameter.data.to(compute_dtype)
        parameter.register_post_accumulate_grad_hook(_deliver_to(master))
        return master

    def _collect(self) -> None:
        """Before a step: make sure that every master has its gradient."""

    def _sum(self, ranks: Ranks) -> None:
        """Sum the masters' gradients over the ranks."""
        ranks.sum_gradients(list(self.masters.values()))

    def _norm(self) -> Tensor:
        """The norm of all gradients."""
        return torch.nn.utils.get_total_norm([m.grad for m in self.masters.values() if m.grad is not None])

    def _update(self, learning_rate: float) -> None:
        """Update the masters by their clipped gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()

    def _publish(self, name: str) -> None:
        """Copy the master to the model's weight."""
        if self.parameters[name] is not self.masters[name]:
            self.parameters[name].copy_(self.masters[name])

    def _is_kept(self, name: str) -> bool:
        """Whether the state has the master, which the model's weight does not give back."""
        return self.masters[name] is not self.parameters[name]

    @torch.no_grad()
    def step(self, learning_rate: float, ranks: Ranks = ALONE) -> float:
        """Sum the gradients over the ranks, clip, update, and drop them. Returns the gradient norm before clipping.

        If the norm is not finite, weights and optimizer state do not change.
        """
        self._collect()
        self._sum(ranks)
        norm = self._norm()
        value = norm.item()
        if torch.isfinite(norm):
            if self.max_grad_norm and value > self.max_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(list(self.masters.values()), self.max_grad_norm, norm)
            self._update(learning_rate)
            for name in self.masters:
                self._publish(name)
        self.forget()
        return value

    def forget(self) -> None:
        """Drop the accumulated gradients."""
        for master in self.masters.values():
            master.grad = None

    @property
    def updates(self) -> int:
        """The number of updates, including those of a loaded state."""
        return max((int(value) for name, value in self.state().items() if name.endswith("|step")), default=0)

    def state(self) -> dict[str, Tensor]:
        """The state for resuming, by parameter name: moments, step counts, and masters that differ from the weights."""
        tensors = {}
        for name, master in self.masters.items():
            for key, value in self._adamw.state.get(master, {}).items():
                tensors[f"{name}|{key}"] = value
            if self._is_kept(name):
                tensors[f"{name}|master"] = master
        return tensors

    def is_part(self, full: str) -> bool:
        """Whether this rank has only some rows of a tensor of the state; otherwise every rank has the same."""
        return False

    def rows_of(self, full: str, rows: int) -> slice:
        """The rows that this rank has of a tensor of the state."""
        return slice(0, rows)

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore a `state`. The model's weights follow the masters; a parameter without moments has not been updated
        yet.

        Raises DamagedError for a tensor of an unknown parameter or another shape, and for a parameter with missing
        tensors; nothing is changed then.
        """
        found: dict[str, dict[str, torch.Size]] = {}
        for full, value in tensors.items():
            name, _, key = full.rpartition("|")
            found.setdefault(name, {})[key] = value.shape
        for name, shapes in found.items():
            if name not in self.masters:
                raise DamagedError(f"optimizer.safetensors: {name or 'a tensor'} is not a trained weight of this model")
            master = {"master": self.masters[name].shape} if "master" in shapes else {}
            expected = master | (self._shapes(name) if shapes.keys() - master.keys() else {})
            for key in sorted(expected.keys() | shapes.keys()):
                if expected.get(key) != shapes.get(key):
                    is_, should = (list(some[key]) if key in some else "none" for some in (shapes, expected))
                    raise DamagedError(f"optimizer.safetensors: {name}|{key} has the shape {is_}, expected {should}")
        for name in self.masters:
            self._forget_moments(name)
        for full, value in tensors.items():
            name, key = full.rsplit("|", 1)
            if key == "master":
                self.masters[name].copy_(value)
                self._publish(name)
            else:
                self._load(name, key, value)

    def _shapes(self, name: str) -> dict[str, torch.Size]:
        """The tensors in `state` of an updated parameter, without its master."""
        shape = self.masters[name].shape
        return {"step": torch.Size(), "exp_avg": shape, "exp_avg_sq": shape}

    def _forget_moments(self, name: str) -> None:
        """Reset a parameter's moments and step count."""
        self._adamw.state.pop(self.masters[name], None)

    def _load(self, name: str, key: str, value: Tensor) -> None:
        """Restore one tensor of a parameter's moments or its step count."""
        master = self.masters[name]
        device = "cpu" if key == "step" and not master.is_cuda else master.device
        self._adamw.state[master][key] = value.to(device, torch.float32)


def _deliver_to(master: Tensor):
    """Add a parameter's new gradient to its float32 master's as soon as backward has it."""

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return hook


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
