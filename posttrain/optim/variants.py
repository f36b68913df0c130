"""Variants of AdamW: sharded over the ranks, in CPU memory, with 8-bit moments, or with Muon for the matrices.

With sharded weights (models/sharding.py), each rank updates its part of every tensor.

With masters, moments and gradients in CPU memory, the GPU keeps only the weights. In bfloat16 it then needs 2 bytes per
trained parameter instead of 16 (weight and master 4, moments 8, gradient 4). Each pack's gradients are transferred
during backward and summed on the CPU in float32. torch's fused AdamW makes the step on the CPU, and rounded weights are
copied back. The idea comes from ZeRO-Offload (arXiv 2101.06840).

With 8-bit moments (bitsandbytes' block-wise dynamic quantisation), every block of 256 values of a moment is stored as
bytes with one scale (Dettmers et al., arXiv 2110.02861). At each step a block is converted to float32, updated as in
AdamW, and rounded again. As the paper advises, embeddings keep float32 moments. Small tensors also keep them, because
8 bits would save nothing.
"""

import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from posttrain.base.imports import need
from posttrain.models.sharding import is_sharded, own_part, own_rows
from posttrain.optim.adamw import AdamW
from posttrain.parallel.ranks import Ranks

BLOCK = 256  # values of an 8-bit moment that share a scale
SMALLEST = 4096  # elements of the smallest tensor with 8-bit moments, bitsandbytes' own limit


class ShardedAdamW(AdamW):
    """AdamW whose masters and moments are this rank's parts.

    Trained tensors outside the sharded model, such as a value head, are whole on every rank. The updates are those of
    `AdamW`. The state is the same too, except that it has only this rank's rows.
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
        parts, others = (torch.nn.utils.get_total_norm(grads[sharded]).double() ** 2 for sharded in (True, False))
        device = next(iter(self.masters.values())).device
        total = parts.to(device)
        self._ranks.sum_([total])
        return (total + others.to(device)).sqrt().float()

    def _publish(self, names: Sequence[str]) -> None:
        super()._publish([name for name in names if not is_sharded(self.parameters[name])])

    def forget(self) -> None:
        super().forget()
        for parameter in self.parameters.values():
            parameter.grad = None

    def is_part(self, full: str) -> bool:
        parameter = self.parameters.get(full.rpartition("|")[0])
        return parameter is not None and is_sharded(parameter)

    def rows_of(self, full: str, rows: int) -> slice:
        return own_rows(self._ranks.index, self._ranks.size, rows) if self.is_part(full) else slice(0, rows)


class AdamWCPUOffload(AdamW):
    """AdamW whose masters, moments and gradients are in CPU memory, wherever the model computes.

    Updates and saved state are the same as with `AdamW`, so a run can be resumed with either.
    """

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype, *, device: torch.device, **settings):
        """`device`: where the model computes. Pass the model in CPU memory, so that its float32 weights never fill the
        device."""
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}
        # Another thread adds the gradients, so that backward's thread can keep launching work on the GPU.
        self._adder = ThreadPoolExecutor(1, "gradients") if self._stream is not None else None
        self._adding: dict[str, Future[None]] = {}
        super().__init__(model, compute_dtype, **settings)
        model.to(device)

    def _adopt(self, name: str, parameter: Tensor, compute_dtype: torch.dtype) -> Tensor:
        def in_cpu_memory(dtype: torch.dtype, pin_memory: bool = False) -> Tensor:
            return torch.empty_like(parameter, dtype=dtype, device="cpu", pin_memory=pin_memory, requires_grad=False)

        # Buffers have the model's dtype, which halves the traffic for bfloat16, and are page-locked, so that the GPU
        # does not wait. One buffer serves both directions: gradients arrive before a step, weights leave after it.
        self._buffers[name] = in_cpu_memory(compute_dtype, pin_memory=self._stream is not None)
        self._sums[name] = in_cpu_memory(torch.float32)
        master = in_cpu_memory(torch.float32).copy_(parameter.detach())
        parameter.data = parameter.data.to(self._device, compute_dtype)
        parameter.register_post_accumulate_grad_hook(lambda p: self._fetch(name, p))
        return master

    def _fetch(self, name: str, parameter: Tensor) -> None:
        """Wait until the last pack's gradient is added (usually it already is), then start to transfer the new one."""
        self._take(name)
        grad = parameter.grad
        assert grad is not None
        arrived = None
        if self._stream is None:
            self._buffers[name].copy_(grad)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._buffers[name].copy_(grad, non_blocking=True)
                # Waiting for this event uses no CPU.
                arrived = self._stream.record_event(torch.cuda.Event(blocking=True))
            grad.record_stream(self._stream)  # its memory is not reused before it has been read
        parameter.grad = None
        if self._adder is None:
            self._add(name, arrived)
        else:
            self._adding[name] = self._adder.submit(self._add, name, arrived)

    @torch.no_grad()
    def _add(self, name: str, arrived: torch.Event | None) -> None:
        """Add the transferred gradient to the gradient of its master."""
        if arrived is not None:
            arrived.synchronize()
        master = self.masters[name]
        if master.grad is None:
            master.grad = self._sums[name].copy_(self._buffers[name])
        else:
            master.grad += self._buffers[name]

    def _take(self, name: str) -> None:
        """Wait until a pending gradient is added, if there is one."""
        if adding := self._adding.pop(name, None):
            adding.result()

    def _collect(self) -> None:
        for name in self.masters:
            self._take(name)

    def _publish(self, names: Sequence[str]) -> None:
        # Weights are rounded on the CPU. The next write to the buffer is a gradient's, in a stream that waits for this
        # copy, or this method's, after a gradient has arrived.
        for name in names:
            self._buffers[name].copy_(self.masters[name])
            self.parameters[name].copy_(self._buffers[name], non_blocking=True)

    def forget(self) -> None:
        self._collect()
        super().forget()


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name, without embeddings."""
    embeddings = {p for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p not in embeddings}


def eight_bit_names(model: nn.Module) -> set[str]:
    """Return the names of trained parameters with 8-bit moments: large tensors except embeddings."""
    return {name for name, p in _trained(model).items() if p.numel() >= SMALLEST}


class AdamW8bit(AdamW):
    """AdamW with 8-bit moments. If the model computes in bfloat16, the masters are still float32."""

    def __init__(self, model: nn.Module, *args, **settings):
        self._library = need("bitsandbytes.functional", "quant", "training.optimizer: adamw_8bit")
        self.own_names = eight_bit_names(model)
        self._moments_8bit: dict[str, dict[str, Tensor]] = {}
        self._codes: dict[torch.device, tuple[Tensor, Tensor]] = {}
        super().__init__(model, *args, **settings)

    def _update(self, learning_rate: float) -> None:
        super()._update(learning_rate)
        for name in sorted(self.own_names):
            master = self.masters[name]
            if master.grad is None:
                continue
            moments = self._moments(name)
            moments.update({} if moments else self._new_moments(name))
            moments["step"] += 1
            signed, unsigned = self._codes_on(master.device)
            self._library.optimizer_update_8bit_blockwise(
                "adam",  # with decoupled weight decay: AdamW
                master.grad.contiguous(),
                master,
                moments["exp_avg"],
                moments["exp_avg_sq"],
                *self.betas,
                0.0,  # beta3 and alpha, which only AdEMAMix uses
                0.0,
                self.eps,
                int(moments["step"]),
                learning_rate * self._rate_factor(name),
                signed,
                unsigned,
                moments["exp_avg_scale"],
                moments["exp_avg_sq_scale"],
                self.weight_decay if master.ndim >= 2 else 0.0,
            )

    def _new_moments(self, name: str) -> dict[str, Tensor]:
        """Return a parameter's moments and step count before its first update."""
        master = self.masters[name]
        assert master.is_contiguous()  # a block is 256 adjacent values in memory
        blocks = -(-master.numel() // BLOCK)
        new = {"step": torch.zeros(())}
        for moment in ("exp_avg", "exp_avg_sq"):
            new[moment] = torch.zeros_like(master, dtype=torch.uint8)
            new[f"{moment}_scale"] = torch.zeros(blocks, device=master.device)
        return new

    def _codes_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the value of each byte: between -1 and 1 for the first moment, between 0 and 1 for the second."""
        if device not in self._codes:
            signed, unsigned = (self._library.create_dynamic_map(signed=signed) for signed in (True, False))
            self._codes[device] = signed.to(device), unsigned.to(device)
        return self._codes[device]

    def _moments(self, name: str) -> dict[str, Tensor]:
        return self._moments_8bit.setdefault(name, {}) if name in self.own_names else super()._moments(name)

    def _shapes(self, name: str) -> dict[str, torch.Size]:
        if name not in self.own_names:
            return super()._shapes(name)
        return {key: value.shape for key, value in self._new_moments(name).items()}


def layer_matrices(model: nn.Module) -> set[str]:
    """The names of the trained 2-D weights of layers, which have the layer's number in their names: not embeddings, the
    head, vectors or the stacked weights of experts."""
    return {name for name, p in _trained(model).items() if p.ndim == 2 and re.search(r"(^|\.)\d+\.", name)}


class Muon(AdamW):
    """Muon for the matrices of layers, AdamW for all other weights; one learning rate and weight decay for both.

    Muon (K. Jordan et al., 2024) makes the momentum of a matrix orthogonal, so that all its directions move equally. As
    in Moonlight (arXiv 2502.16982, section 2.2), a step is scaled by 0.2 √(larger side), the size of AdamW's, so that
    its learning rates carry over. torch's implementation, with a momentum of 0.95 (Nesterov). A matrix and its
    transpose, as in GPT-2's layers, get the same step. It has one moment where AdamW has two.
    """

    def __init__(self, model: nn.Module, *args, **settings):
        self.own_names = layer_matrices(model)
        super().__init__(model, *args, **settings)
        matrices = [{"params": [self.masters[name] for name in sorted(self.own_names)]}]
        self._muon = torch.optim.Muon(matrices, lr=0.0, weight_decay=self.weight_decay, adjust_lr_fn="match_rms_adamw")

    def _update(self, learning_rate: float) -> None:
        super()._update(learning_rate)
        self._muon.param_groups[0]["lr"] = learning_rate
        self._muon.step()
        for state in filter(None, self._muon.state.values()):
            state["step"] = state.get("step", torch.zeros(())) + 1

    def _moments(self, name: str) -> dict[str, Tensor]:
        return self._muon.state[self.masters[name]] if name in self.own_names else super()._moments(name)

    def _shapes(self, name: str) -> dict[str, torch.Size]:
        if name not in self.own_names:
            return super()._shapes(name)
        return {"step": torch.Size(), "momentum_buffer": self.masters[name].shape}
