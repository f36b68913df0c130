"""One optimizer step over the packs of a batch, and the loss over batches."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import fsum
from statistics import fmean
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from posttrain.base.distributions import t_quantile
from posttrain.models.experts import RouterLoss
from posttrain.optim.adamw import AdamW
from posttrain.parallel.ranks import ALONE, Ranks

Metrics = dict[str, torch.Tensor]
Number = TypeVar("Number", float, Tensor)


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
    counts: Mapping[str, float] = field(default_factory=dict)
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
    scaler, norm = optimizer.scaler, None
    optimizer.prepare()
    if ranks.size == 1 and not scaler.is_enabled():
        total = shares_of(packs, objective, spare)
        norm = optimizer.norm()  # before the host waits for the metrics, so that a GPU waits for it only once
        metrics = numbers(total)
    else:
        metrics = summed(ranks.passes(lambda: numbers(shares_of(packs, objective, spare, scaler.scale))))
    if not math.isfinite(metrics["loss"]):
        optimizer.forget()
        return Updated(metrics, applied=False)
    objective.check()
    before = scaler.get_scale()
    metrics["grad_norm"] = optimizer.step(learning_rate, ranks, norm)
    if scaler.is_enabled():
        metrics["loss_scale"] = scaler.get_scale()
    return Updated(metrics, math.isfinite(metrics["grad_norm"]), rescaled=1 <= scaler.get_scale() < before)


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


def shares_of(
    packs: Iterable[Batch],
    objective: Objective[Batch],
    spare: Sequence[Batch] = (),
    scaled: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> Metrics:
    """Return the metrics of `packs`, with `loss`; `spare` packs contribute nothing. Unless gradients are off, those of
    the `scaled` losses are summed."""
    total: Metrics = {}
    for pack in packs:
        loss, metrics = objective.of(pack)
        if torch.is_grad_enabled():
            scaled(loss).backward()
        total = summed([total, {"loss": loss.detach(), **metrics}])  # on the device, without synchronisation
    for pack in spare:
        loss, _ = objective.of(pack)
        if torch.is_grad_enabled():
            (0.0 * loss).backward()
    return total


def numbers(metrics: Metrics) -> dict[str, float]:
    """Return the metrics as numbers, for which the host waits once."""
    values = torch.stack([value.float() for value in metrics.values()]).tolist() if metrics else []
    return dict(zip(metrics, values, strict=True))


def summed(shares: Sequence[Mapping[str, Number]]) -> dict[str, Number]:
    """Return a batch's metrics, from the shares of packs or ranks. A rank without packs has no metrics."""
    total: dict[str, Number] = {}
    for share in shares:
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
        share = partial(shares_of, ranks.mine(packs), objective, ranks.spare(packs))
        for key, value in summed(ranks.passes(lambda share=share: numbers(share()))).items():
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
