"""AdamW on float32 master weights.

bfloat16 weights do not change at a learning rate of 1e-6: the update is below their resolution. So for a model that
computes in bfloat16, each trained tensor has a float32 master here, gradients are summed in float32, and the model's
weights are the rounded masters. In float32 the masters are the model's weights themselves.

With `in_halves`, on a GPU, a large bfloat16 weight and its master are kept in halves: the weight, which is the master
rounded (ties away from 0), and the difference of their bits, which fits into 16 bits. Both take 4 bytes instead of 6,
and the master is exact. One kernel updates all of them.

In float16 gradients below 6e-8 would be 0. So the loss is multiplied by a scale before the backward pass, and summed
gradients are divided by it. torch's GradScaler halves the scale when a gradient overflows, and doubles it after 2,000
updates without overflow (Micikevicius et al., arXiv 1710.03740, section 3.2).
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set

import torch
from torch import Tensor, nn

from posttrain.base.errors import DamagedError
from posttrain.models.graphs import PackGraphs
from posttrain.parallel.ranks import ALONE, Ranks

LOSS_SCALE = "loss scale"  # in place of a parameter's name in the optimizer's state
LARGE = 1 << 20  # elements of the smallest tensor whose master is kept in halves


def halves(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rounded weight, bfloat16, and the rest of the bits, int16."""
    bits = master.contiguous().view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def is_large(parameter: Tensor) -> bool:
    return parameter.numel() >= LARGE and parameter.numel() % 16 == 0  # for the kernel


class Masters(Mapping[str, Tensor]):
    """The float32 master of each trained parameter: the tensor itself, or a new one if it is in halves."""

    def __init__(self, optimizer: "AdamW"):
        self._optimizer = optimizer

    def __getitem__(self, name: str) -> Tensor:
        optimizer = self._optimizer
        if name not in optimizer.rests:
            return optimizer.masters[name].detach()
        bits = optimizer.parameters[name].detach().view(torch.int16).int()
        return bits.bitwise_left_shift_(16).add_(optimizer.rests[name]).view(torch.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self._optimizer.masters)

    def __len__(self) -> int:
        return len(self._optimizer.masters)


class AdamW:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) over the trainable parameters of `model`, with clipping.

    Weight decay does not apply to vectors (biases and norms), as in transformers' Trainer. `compute_dtype` is the dtype
    of the model's trainable weights; pass the model with float32 weights so that the masters start exact.
    `loraplus_lr_ratio` multiplies the learning rate of LoRA's B matrices and of vectors, as PEFT groups them for LoRA+
    (arXiv 2402.12354). With `ema_decay` d, `averages` has a moving average of each master from its start on, to which
    every update adds 1 - d of the new master. With `in_halves`, large bfloat16 weights are halves of their masters:
    `masters` then has stand-ins for these, which only hold gradients, and `values` all masters' values.
    """

    own_names: Set[str] = frozenset()  # of the parameters that a variant updates itself

    def __init__(
        self,
        model: nn.Module,
        compute_dtype: torch.dtype = torch.float32,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        loraplus_lr_ratio: float = 1.0,
        ema_decay: float | None = None,
        in_halves: bool = False,
    ):
        self.betas, self.eps, self.weight_decay, self.max_grad_norm = betas, eps, weight_decay, max_grad_norm
        self._ratio = loraplus_lr_ratio
        self._in_halves = in_halves and compute_dtype == torch.bfloat16
        self.rests: dict[str, Tensor] = {}  # of masters in halves, the bits that the weights lack
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {name: self._adopt(name, p, compute_dtype) for name, p in self.parameters.items()}
        members: dict[tuple[float, float], list[Tensor]] = {(1.0, 0.0): []}
        for name, master in self.masters.items():
            if name not in self.own_names and name not in self.rests:
                members.setdefault((self._rate_factor(name), self._decay(name)), []).append(master)
        groups = [{"params": ms, "factor": factor, "weight_decay": decay} for (factor, decay), ms in members.items()]
        # The learning rate is set at each step.
        self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=self.betas, eps=self.eps, fused=True)
        device = next(iter(self.masters.values()), torch.empty(0)).device
        self.scaler = torch.amp.GradScaler(device.type, enabled=compute_dtype == torch.float16)
        self.scaler.scale(torch.zeros((), device=device))  # it makes its state at the first loss
        self.graphs: PackGraphs | None = None
        self._ema_decay = ema_decay
        self.averages = {name: m.clone() for name, m in self.values.items()} if ema_decay else {}

    def _decay(self, name: str) -> float:
        return self.weight_decay if self.parameters[name].ndim >= 2 else 0.0

    def _rate_factor(self, name: str) -> float:
        """Return the factor of a parameter's learning rate. A value head is not part of the PEFT model."""
        is_faster = ".lora_B." in name or (self.parameters[name].ndim < 2 and "base_model." in name)
        return self._ratio if is_faster else 1.0

    @property
    def values(self) -> "Masters":
        return Masters(self)

    # The variants of this optimizer override these methods, which decide where masters are and how gradients get there.

    def _adopt(self, name: str, parameter: Tensor, compute_dtype: torch.dtype) -> Tensor:
        """Return the parameter's master, and round the parameter itself to `compute_dtype`."""
        if compute_dtype == torch.float32:
            return parameter
        master = parameter.detach().float().clone()
        if self._in_halves and is_large(parameter) and name not in self.own_names:
            parameter.data, self.rests[name] = halves(master)
            master = torch.full((), math.nan, device=parameter.device).expand(parameter.shape)  # it takes no memory
        parameter.data = parameter.data.to(compute_dtype)
        parameter.register_post_accumulate_grad_hook(_deliver_to(master))
        return master

    def _collect(self) -> None:
        """Make sure, before a step, that every master has its gradient."""

    def _sum(self, ranks: Ranks) -> None:
        """Sum the masters' gradients over the ranks."""
        ranks.sum_gradients(list(self.masters.values()))

    def _norm(self) -> Tensor:
        """Return the norm of all gradients."""
        return torch.nn.utils.get_total_norm([m.grad for m in self.masters.values() if m.grad is not None])

    def _update(self, learning_rate: float) -> None:
        """Update the masters with their clipped gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate * group["factor"]
        self._adamw.step()
        self._update_halves(learning_rate)

    def _update_halves(self, learning_rate: float) -> None:
        tensors, numbers, (beta1, beta2) = [], [], self.betas
        for name, rest in self.rests.items():
            grad, moments = self.masters[name].grad, self._moments(name)
            if grad is None:
                continue
            if not moments:
                moments["step"] = torch.zeros(())
                moments |= {key: torch.zeros_like(grad) for key in ("exp_avg", "exp_avg_sq")}
            moments["step"] += 1
            rate, step = learning_rate * self._rate_factor(name), int(moments["step"])
            tensors.append((self.parameters[name], rest, grad.contiguous(), moments["exp_avg"], moments["exp_avg_sq"]))
            numbers.append((1 - rate * self._decay(name), rate / (1 - beta1**step), math.sqrt(1 - beta2**step)))
        if tensors:
            from posttrain.models.kernels.adamw import adamw  # needs Triton

            adamw(tensors, numbers, beta1, beta2, self.eps)

    def _publish(self, names: Sequence[str]) -> None:
        """Copy masters to the model's weights."""
        names = [n for n in names if self.parameters[n] is not self.masters[n] and n not in self.rests]
        if names:
            torch._foreach_copy_([self.parameters[n] for n in names], [self.masters[n] for n in names])

    def _set(self, name: str, value: Tensor) -> None:
        """Give a master this value, and set the model's weight from it."""
        if name in self.rests:
            weight, rest = halves(value.to(self.rests[name].device))
            self.parameters[name].copy_(weight)
            self.rests[name].copy_(rest)
        else:
            self.masters[name].copy_(value)
            self._publish([name])

    def _is_kept(self, name: str) -> bool:
        """Whether the state includes the master: only if the model's weight is rounded and does not determine it."""
        return self.masters[name] is not self.parameters[name]

    @torch.no_grad()
    def norm(self, ranks: Ranks = ALONE) -> Tensor:
        """Sum the gradients over the ranks and return their norm. Those of scaled losses are divided by the scale."""
        self._collect()
        self._sum(ranks)
        if self.scaler.is_enabled():  # it takes the gradients of an optimizer
            self.scaler.unscale_(torch.optim.SGD([*self.masters.values()]))
            self.scaler.update()
        return self._norm()

    @torch.no_grad()
    def step(self, learning_rate: float, ranks: Ranks = ALONE, norm: Tensor | None = None) -> float:
        """Sum the gradients over the ranks, clip them, update the weights, and drop the gradients. Return the gradient
        norm before clipping: `norm`, if it was computed before.

        If the norm is not finite, weights and optimizer state do not change, except for the scale of float16's losses.
        """
        norm = self.norm(ranks) if norm is None else norm
        value = norm.item()
        if math.isfinite(value):
            if self.max_grad_norm and value > self.max_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(list(self.masters.values()), self.max_grad_norm, norm)
            self._update(learning_rate)
            self._publish([*self.masters])
            if self._ema_decay:
                whole = [name for name in self.averages if name not in self.rests]
                averages, masters = [self.averages[n] for n in whole], [self.masters[n] for n in whole]
                if whole:
                    torch._foreach_lerp_(averages, masters, 1 - self._ema_decay)
                for name in self.rests:
                    self.averages[name].lerp_(self.values[name], 1 - self._ema_decay)
        self.forget()
        return value

    def prepare(self) -> None:
        """Capture what CUDA graphs have met before. Call it while there are no gradients."""
        if self.graphs is not None:
            self.graphs.prepare()

    def release(self) -> None:
        """Free the memory of CUDA graphs, which are captured again later."""
        if self.graphs is not None:
            self.graphs.release()

    def forget(self) -> None:
        """Drop the accumulated gradients; those of CUDA graphs, whose addresses must stay, become 0."""
        kept = set() if self.graphs is None else self.graphs.kept
        for master in self.masters.values():
            if master not in kept:
                master.grad = None
        if self.graphs is not None:
            self.graphs.forget()

    @torch.no_grad()
    def swap_averages(self) -> None:
        """Exchange masters, and so the model's weights, with their averages."""
        for name, average in self.averages.items():
            kept = self.values[name].clone()
            self._set(name, average)
            average.copy_(kept)

    @property
    def updates(self) -> int:
        """The number of updates, including those of a loaded state."""
        return max((int(self._moments(name).get("step", 0)) for name in self.masters), default=0)

    def state(self, masters: bool = True) -> dict[str, Tensor]:
        """Return the state for resuming, by parameter name: moments, step counts, averages, `masters` that differ from
        weights; those in halves are copied to CPU memory."""
        tensors = {}
        for name, master in self.masters.items():
            for key, value in self._moments(name).items():
                tensors[f"{name}|{key}"] = value
            if masters and self._is_kept(name):
                tensors[f"{name}|master"] = self.values[name].cpu() if name in self.rests else master
        scaler = {f"{LOSS_SCALE}|{key}": torch.tensor(float(v)) for key, v in self.scaler.state_dict().items()}
        return tensors | scaler | {f"{name}|ema": average for name, average in self.averages.items()}

    def is_part(self, full: str) -> bool:
        """Whether this rank has only some rows of a tensor of the state. If not, every rank has the whole tensor."""
        return False

    def rows_of(self, full: str, rows: int) -> slice:
        """Return which rows of a tensor of the state this rank has."""
        return slice(0, rows)

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore a `state`, and set the model's weights from the masters. A parameter without moments has not been
        updated yet.

        Raises DamagedError, before anything is changed, for a tensor of an unknown parameter or with a wrong shape, and
        for a parameter with missing tensors.
        """
        tensors, saved = dict(tensors), {name: dict[str, torch.Size]() for name in self.averages}
        scaler = self.scaler.state_dict()
        for key, value in scaler.items():
            if (stored := tensors.pop(f"{LOSS_SCALE}|{key}", None)) is None:
                raise DamagedError(f"optimizer.safetensors: {LOSS_SCALE}|{key} is missing")
            scaler[key] = type(value)(stored.item())
        for full, value in tensors.items():
            name, _, key = full.rpartition("|")
            saved.setdefault(name, {})[key] = value.shape
        for name, shapes in saved.items():
            if name not in self.masters:
                raise DamagedError(f"optimizer.safetensors: {name or 'a tensor'} is not a trained weight of this model")
            shape = self.masters[name].shape
            kept = {"master": shape} if "master" in shapes else {}
            kept |= {"ema": shape} if self.averages else {}
            expected = kept | (self._shapes(name) if shapes.keys() - kept.keys() else {})
            for key in sorted(expected.keys() | shapes.keys()):
                if expected.get(key) != shapes.get(key):
                    got, want = (list(side[key]) if key in side else "none" for side in (shapes, expected))
                    raise DamagedError(f"optimizer.safetensors: {name}|{key} has the shape {got}, expected {want}")
        self.scaler.load_state_dict(scaler)
        for name in self.masters:
            self._moments(name).clear()
        for full, value in tensors.items():
            name, key = full.rsplit("|", 1)
            master = self.masters[name]
            if key == "master":
                self._set(name, value)
            elif key == "ema":
                self.averages[name].copy_(value)
            else:
                on_cpu = key == "step" and (not master.is_cuda or name in self.own_names or name in self.rests)
                self._moments(name)[key] = value.to("cpu" if on_cpu else master.device)

    def _moments(self, name: str) -> dict[str, Tensor]:
        """Return a parameter's moments and step count, which can be changed; empty before its first update."""
        return self._adamw.state[self.masters[name]]

    def _shapes(self, name: str) -> dict[str, torch.Size]:
        """Return the shapes of an updated parameter's tensors in `state`, without its master."""
        shape = self.masters[name].shape
        return {"step": torch.Size(), "exp_avg": shape, "exp_avg_sq": shape}


def _deliver_to(master: Tensor):
    """Return a hook that adds a parameter's new gradient to its float32 master's gradient, during backward."""

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return hook
