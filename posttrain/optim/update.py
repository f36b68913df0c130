"""One optimizer step over the packs of a batch: AdamW on float32 master weights.

bfloat16 weights do not change at a learning rate of 1e-6: the update is below their resolution. So for a model that
computes in bfloat16, each trained tensor has a float32 master here, gradients are summed in float32, and the model's
weights are the rounded masters. In float32 the masters are the model's weights themselves.

In float16 gradients below 6e-8 would be 0. So the loss is multiplied by a scale before the backward pass, and summed
gradients are divided by it. torch's GradScaler halves the scale when a gradient overflows, and doubles it after 2,000
updates without overflow (Micikevicius et al., arXiv 1710.03740, section 3.2).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from math import fsum
from statistics import fmean
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn

from posttrain.base.distributions import t_quantile
from posttrain.base.errors import DamagedError
from posttrain.models.experts import RouterLoss
from posttrain.parallel.ranks import ALONE, Ranks

LOSS_SCALE = "loss scale"  # in place of a parameter's name in the optimizer's state


class AdamW:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) over the trainable parameters of `model`, with clipping.

    Weight decay does not apply to vectors (biases and norms), as in transformers' Trainer. `compute_dtype` is the dtype
    of the model's trainable weights; pass the model with float32 weights so that the masters start exact.
    `loraplus_lr_ratio` multiplies the learning rate of LoRA's B matrices and of vectors, as PEFT groups them for LoRA+
    (arXiv 2402.12354). With `ema_decay` d, `averages` has a moving average of each master from its start on, to which
    every update adds 1 - d of the new master.
    """

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
    ):
        self.betas, self.eps, self.weight_decay, self.max_grad_norm = betas, eps, weight_decay, max_grad_norm
        self._ratio = loraplus_lr_ratio
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.masters = {name: self._adopt(name, p, compute_dtype) for name, p in self.parameters.items()}
        self._adamw = self._torch_adamw(self.masters)
        self._scaler: torch.amp.GradScaler | None = None
        if compute_dtype == torch.float16:
            device = next(iter(self.masters.values())).device
            self._scaler = torch.amp.GradScaler(device.type)
            self._scaler.scale(torch.zeros((), device=device))  # it makes its state at the first loss
            self._scaled = torch.optim.SGD([*self.masters.values()], lr=0.0)  # how the scaler is given gradients
        self._ema_decay = ema_decay
        self.averages = {name: m.detach().clone() for name, m in self.masters.items()} if ema_decay else {}

    def _torch_adamw(self, masters: Mapping[str, Tensor]) -> torch.optim.AdamW:
        """Return torch's AdamW over these masters. The learning rate is set at each step."""
        members: dict[tuple[float, float], list[Tensor]] = {(1.0, 0.0): []}
        for name, master in masters.items():
            decay = self.weight_decay if master.ndim >= 2 else 0.0
            members.setdefault((self._rate_factor(name), decay), []).append(master)
        groups = [{"params": ms, "factor": factor, "weight_decay": decay} for (factor, decay), ms in members.items()]
        return torch.optim.AdamW(groups, lr=0.0, betas=self.betas, eps=self.eps, fused=True)

    def _rate_factor(self, name: str) -> float:
        """Return the factor of a parameter's learning rate. A value head is not part of the PEFT model."""
        is_faster = ".lora_B." in name or (self.parameters[name].ndim < 2 and "base_model." in name)
        return self._ratio if is_faster else 1.0

    # The variants of this optimizer override these methods, which decide where masters are and how gradients get there.

    def _adopt(self, name: str, parameter: Tensor, compute_dtype: torch.dtype) -> Tensor:
        """Return the parameter's master, and round the parameter itself to `compute_dtype`."""
        if compute_dtype == torch.float32:
            return parameter
        master = parameter.detach().float().clone()
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

    def _publish(self, name: str) -> None:
        """Copy the master to the model's weight."""
        if self.parameters[name] is not self.masters[name]:
            self.parameters[name].copy_(self.masters[name])

    def _is_kept(self, name: str) -> bool:
        """Whether the state includes the master: only if the model's weight is rounded and does not determine it."""
        return self.masters[name] is not self.parameters[name]

    @torch.no_grad()
    def step(self, learning_rate: float, ranks: Ranks = ALONE) -> float:
        """Sum the gradients over the ranks, clip them, update the weights, and drop the gradients. Return the gradient
        norm before clipping.

        If the norm is not finite, weights and optimizer state do not change, except for the scale of float16's losses.
        """
        self._collect()
        self._sum(ranks)
        if self._scaler is not None and any(master.grad is not None for master in self.masters.values()):
            self._scaler.unscale_(self._scaled)
            self._scaler.update()
        norm = self._norm()
        value = norm.item()
        if torch.isfinite(norm):
            if self.max_grad_norm and value > self.max_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(list(self.masters.values()), self.max_grad_norm, norm)
            self._update(learning_rate)
            for name in self.masters:
                self._publish(name)
            if self._ema_decay:
                averages, masters = list(self.averages.values()), list(self.masters.values())
                torch._foreach_lerp_(averages, masters, 1 - self._ema_decay)
        self.forget()
        return value

    @property
    def loss_scale(self) -> float | None:
        """The current scale of losses in float16; None in other dtypes."""
        return None if self._scaler is None else self._scaler.get_scale()

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss to differentiate."""
        return loss if self._scaler is None else self._scaler.scale(loss)

    def forget(self) -> None:
        """Drop the accumulated gradients."""
        for master in self.masters.values():
            master.grad = None

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context in which the model has the averages of its weights."""
        self._swap_averages()
        try:
            yield
        finally:
            self._swap_averages()

    @torch.no_grad()
    def _swap_averages(self) -> None:
        for name, average in self.averages.items():
            kept = self.masters[name].clone()
            self.masters[name].copy_(average)
            average.copy_(kept)
            self._publish(name)

    @property
    def updates(self) -> int:
        """The number of updates, including those of a loaded state."""
        return max((int(value) for name, value in self.state().items() if name.endswith("|step")), default=0)

    def state(self) -> dict[str, Tensor]:
        """Return the state for resuming, by parameter name: moments, step counts, averages, masters that differ from
        weights."""
        tensors = {}
        for name, master in self.masters.items():
            for key, value in self._adamw.state.get(master, {}).items():
                tensors[f"{name}|{key}"] = value
            if self._is_kept(name):
                tensors[f"{name}|master"] = master
        if self._scaler is not None:
            facts = self._scaler.state_dict()
            tensors |= {f"{LOSS_SCALE}|{key}": torch.tensor(float(facts[key])) for key in ("scale", "_growth_tracker")}
        return tensors | {f"{name}|ema": average for name, average in self.averages.items()}

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
        scaler = {key: tensors.pop(key) for key in [*tensors] if self._scaler is not None and LOSS_SCALE in key}
        if self._scaler is not None and len(scaler) != 2:
            raise DamagedError("optimizer.safetensors: the scale of float16's losses is missing")
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
        if self._scaler is not None:
            facts = {key.rpartition("|")[2]: value.item() for key, value in scaler.items()}
            self._scaler.load_state_dict(self._scaler.state_dict() | facts)
        for name in self.masters:
            self._forget_moments(name)
        for full, value in tensors.items():
            name, key = full.rsplit("|", 1)
            if key == "master":
                self.masters[name].copy_(value)
                self._publish(name)
            elif key == "ema":
                self.averages[name].copy_(value)
            else:
                self._load(name, key, value)

    def _shapes(self, name: str) -> dict[str, torch.Size]:
        """Return the shapes of an updated parameter's tensors in `state`, without its master."""
        shape = self.masters[name].shape
        return {"step": torch.Size(), "exp_avg": shape, "exp_avg_sq": shape}

    def _forget_moments(self, name: str) -> None:
        """Reset a parameter's moments and step count."""
        self._adamw.state.pop(self.masters[name], None)

    def _load(self, name: str, key: str, value: Tensor) -> None:
        """Restore one of a parameter's moments, or its step count."""
        master = self.masters[name]
        device = "cpu" if key == "step" and not master.is_cuda else master.device
        self._adamw.state[master][key] = value.to(device, torch.float32)


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


Metrics = dict[str, torch.Tensor]


class HasTokens(Protocol):
    """A pack, or an object that contains one."""

    @property
    def num_tokens(self) -> int: ...


Batch = TypeVar("Batch", bound=HasTokens)


@dataclass(frozen=True, slots=True)
class Objective(Generic[Batch]):
    """The loss of a batch. Every pack gives its share, and shares add up to the batch's loss and metrics.

    `of(pack)` returns the pack's share of the loss, with its graph, and its shares of the metrics. `count` is the
    denominator of the batch's mean (tokens, pairs, a sum of weights), counted before the first backward, so that
    packing never changes a gradient.
    Metrics named `min_…` and `max_…` are extremes. `counts` has the denominators of metrics that do not use `count`,
    such as the number of completions of one class; a batch may lack such metrics. `check` is called when the gradients
    are complete, before the update; its errors leave the weights unchanged.
    """

    of: Callable[[Batch], tuple[torch.Tensor, Metrics]]
    count: float
    counts: Mapping[str, int] = field(default_factory=dict)
    check: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Updated:
    """The result of an update: the batch's metrics with `loss` and `grad_norm`, and whether the weights changed.

    `grad_norm` is missing if the loss was not finite. `rescaled`: a gradient overflowed float16, so that the scale of
    losses is lower from now on, but still 1 or more.
    """

    metrics: dict[str, float]
    applied: bool
    rescaled: bool = False


def update(
    packs: Iterable[Batch],
    objective: Objective[Batch],
    optimizer: AdamW,
    learning_rate: float,
    ranks: Ranks = ALONE,
    spare: Sequence[Batch] = (),
) -> Updated:
    """Sum the packs' gradients and take one step. Each of several ranks passes its own packs.

    `spare` are packs that add nothing, so that all ranks make the same number of passes over a sharded model. A loss or
    a gradient that is not finite leaves weights and optimizer state unchanged.
    """
    metrics = summed(ranks.passes(lambda: backward(packs, objective, spare, optimizer.scaled)))
    if not math.isfinite(metrics["loss"]):
        optimizer.forget()
        return Updated(metrics, applied=False)
    objective.check()
    before = optimizer.loss_scale
    metrics["grad_norm"] = optimizer.step(learning_rate, ranks)
    after = optimizer.loss_scale
    if before is None or after is None:
        return Updated(metrics, math.isfinite(metrics["grad_norm"]))
    return Updated(metrics | {"loss_scale": after}, math.isfinite(metrics["grad_norm"]), 1 <= after < before)


def balanced(objective: Objective[Batch], routers: RouterLoss, packs: int) -> Objective[Batch]:
    """Add the load-balancing loss of the policy's routers to the objective of a batch of `packs` packs: the mean over
    the packs, as in TRL over micro-batches."""
    if not routers.coefficient:
        return objective

    def share(pack: Batch) -> tuple[torch.Tensor, Metrics]:
        with routers.reading():
            loss, metrics = objective.of(pack)
            aux_loss = routers.loss() / packs
        return loss + routers.coefficient * aux_loss, metrics | {"aux_loss": aux_loss.detach()}

    return replace(objective, of=share)


def backward(
    packs: Iterable[Batch],
    objective: Objective[Batch],
    spare: Sequence[Batch] = (),
    scaled: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> dict[str, float]:
    """Sum the gradients of the packs' `scaled` losses. Return the metrics of `packs`, with `loss`; `spare` packs
    contribute nothing."""
    return _over_packs(packs, objective, spare, scaled)


def _over_packs(
    packs: Iterable[Batch],
    objective: Objective[Batch],
    spare: Sequence[Batch],
    scaled: Callable[[Tensor], Tensor] | None,
) -> dict[str, float]:
    total: Metrics = {}
    for pack in packs:
        loss, metrics = objective.of(pack)
        if scaled is not None:
            scaled(loss).backward()
        for name, value in {"loss": loss.detach(), **metrics}.items():  # on the device, without synchronisation
            total[name] = _combined(name, total[name], value) if name in total else value
    for pack in spare:
        loss, _ = objective.of(pack)
        if scaled is not None:
            (0.0 * loss).backward()
    values = torch.stack([value.float() for value in total.values()]).tolist() if total else []
    return dict(zip(total, values, strict=True))


def summed(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return a batch's metrics, from the shares of the ranks. A rank without packs has no metrics."""
    total = dict(shares[0])
    for share in shares[1:]:
        for name, value in share.items():
            total[name] = _combined(name, total[name], value) if name in total else value
    return total


@torch.no_grad()
def over_batches(
    batches: Iterable[tuple[Sequence[Batch], Objective[Batch]]], ranks: Ranks = ALONE
) -> tuple[dict[str, float], float | None]:
    """Return loss and metrics over all batches, weighted by their denominators (such as the number of tokens), and half
    the loss's 95 % interval, None with one batch.

    The loss L = Σ w_b l_b / Σ w_b is a ratio of sums over B batches, with the variance
    B / (B - 1) Σ w_b² (l_b - L)² / (Σ w_b)² (Cochran, Sampling Techniques, 1977, eq. 2.46).
    """
    total: dict[str, float] = {}
    count: dict[str, float] = {}
    losses: list[tuple[float, float]] = []  # of each batch, with its weight
    for packs, objective in batches:
        share = partial(_over_packs, ranks.mine(packs), objective, ranks.spare(packs), None)
        for key, value in summed(ranks.passes(share)).items():
            if extreme := _extreme(key):
                total[key] = extreme(total.get(key, value), value)
            else:
                weight = objective.counts.get(key, objective.count)
                total[key] = total.get(key, 0.0) + value * weight
                count[key] = count.get(key, 0) + weight
                if key == "loss":
                    losses.append((value, weight))
    means = {key: value / count[key] if key in count else value for key, value in total.items()}
    if len(losses) < 2:
        return means, None
    squares = fsum((weight * (loss - means["loss"])) ** 2 for loss, weight in losses)
    error = math.sqrt(len(losses) / (len(losses) - 1) * squares) / fsum(weight for _, weight in losses)
    return means, t_quantile(0.95, len(losses) - 1) * error


def over_updates(made: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return a step's metrics from those of its updates: means, or the minimum or maximum of `min_…` and `max_…`."""
    combined: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in made for name in metrics):
        values = [metrics[name] for metrics in made if name in metrics]
        combined[name] = (_extreme(name) or fmean)(values)
    return combined


def _combined(name: str, total: Any, value: Any) -> Any:
    """Return the sum of two shares of a metric, or the extreme of two numbers or tensors; NaN in a tensor is kept."""
    extreme = _extreme(name)
    if isinstance(total, Tensor) and extreme:
        extreme = torch.minimum if extreme is min else torch.maximum
    return extreme(total, value) if extreme else total + value


def _extreme(name: str) -> Callable[..., Any] | None:
    """Return the function that combines a metric named as an extreme; None for a mean."""
    return {"min": min, "max": max}.get(name.partition("_")[0])
