"""One optimizer step over the packs of a batch."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Generic, Protocol, TypeVar

import torch

from posttrain.models.experts import RouterLoss
from posttrain.optim.adamw import AdamW
from posttrain.parallel.ranks import ALONE, Ranks

Metrics = dict[str, torch.Tensor]


class HasTokens(Protocol):
    """A pack, or an object with one."""

    @property
    def num_tokens(self) -> int: ...


Batch = TypeVar("Batch", bound=HasTokens)


@dataclass(frozen=True, slots=True)
class Objective(Generic[Batch]):
    """The loss of a batch. Every pack gives its share, and shares add up to the batch's loss and metrics.

    `of(pack)` returns the share of the loss, with its graph, and the shares of the metrics; `count` is the denominator
    of the batch's mean (tokens, pairs, a sum of weights), counted before the first backward, so that packing never
    changes a gradient.
    Metrics named `min_…` and `max_…` are extremes. `counts` has the denominators of other metrics, such as the
    completions of one class; a batch may lack them. `check` is called with the gradients, before the update; its errors
    leave the weights unchanged.
    """

    of: Callable[[Batch], tuple[torch.Tensor, Metrics]]
    count: float
    counts: Mapping[str, int] = field(default_factory=dict)
    check: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Updated:
    """The result of an update: the batch's metrics with `loss` and `grad_norm`, and whether the weights changed.

    `grad_norm` is missing if the loss was not finite.
    """

    metrics: dict[str, float]
    applied: bool


def update(
    packs: Iterable[Batch],
    objective: Objective[Batch],
    optimizer: AdamW,
    learning_rate: float,
    ranks: Ranks = ALONE,
    spare: Sequence[Batch] = (),
) -> Updated:
    """Sum the packs' gradients and take one step. Of several ranks, each is given its own packs.

    `spare` are packs that add nothing, for a model that all ranks pass through together.

    A loss or a gradient that is not finite leaves weights and optimizer state unchanged.
    """
    metrics = summed(ranks.passes(lambda: backward(packs, objective, spare)))
    if not math.isfinite(metrics["loss"]):
        optimizer.forget()
        return Updated(metrics, applied=False)
    objective.check()
    grad_norm = optimizer.step(learning_rate, ranks)
    return Updated(metrics | {"grad_norm": grad_norm}, applied=math.isfinite(grad_norm))


def balanced(objective: Objective[Batch], routers: RouterLoss, packs: int) -> Objective[Batch]:
    """The objective of so many packs with the load-balancing loss of the policy's routers, the mean over the packs, as
    TRL takes it over micro-batches."""
    if not routers.coefficient:
        return objective

    def share(pack: Batch) -> tuple[torch.Tensor, Metrics]:
        with routers.reading():
            loss, metrics = objective.of(pack)
            aux_loss = routers.loss() / packs
        return loss + routers.coefficient * aux_loss, metrics | {"aux_loss": aux_loss.detach()}

    return replace(objective, of=share)


def backward(packs: Iterable[Batch], objective: Objective[Batch], spare: Sequence[Batch] = ()) -> dict[str, float]:
    """Sum the packs' gradients. Returns the batch's metrics with `loss`; those of `spare` count nothing."""
    total: Metrics = {}
    for pack in packs:
        loss, metrics = objective.of(pack)
        loss.backward()
        add(total, {"loss": loss.detach(), **metrics})
    for pack in spare:
        (0.0 * objective.of(pack)[0]).backward()
    return to_floats(total)


def summed(shares: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """A batch's metrics from the shares of the ranks; a rank without packs has none."""
    total = dict(shares[0])
    for share in shares[1:]:
        for name, value in share.items():
            if name in total:
                extreme = _extreme(name)
                value = extreme(total[name], value) if extreme else total[name] + value
            total[name] = value
    return total


def add(total: Metrics, share: Metrics) -> None:
    """Add a pack's shares to the batch's metrics, in place; on the device, without synchronisation."""
    for name, value in share.items():
        if name not in total:
            total[name] = value
        elif name.startswith("min_"):
            total[name] = torch.minimum(total[name], value)
        elif name.startswith("max_"):
            total[name] = torch.maximum(total[name], value)
        else:
            total[name] = total[name] + value


def to_floats(metrics: Metrics) -> dict[str, float]:
    """All metrics in one transfer from the device."""
    if not metrics:
        return {}
    values = torch.stack([value.float() for value in metrics.values()]).tolist()
    return dict(zip(metrics, values, strict=True))


@torch.no_grad()
def over_batches(batches: Iterable[tuple[Sequence[Batch], Objective[Batch]]], ranks: Ranks = ALONE) -> dict[str, float]:
    """Loss and metrics over all batches, weighted by their denominators (tokens, pairs, a class)."""
    total: dict[str, float] = {}
    count: dict[str, float] = {}
    for packs, objective in batches:
        share = partial(_of_batch, ranks.mine(packs), objective, ranks.spare(packs))
        for key, value in summed(ranks.passes(share)).items():
            if extreme := _extreme(key):
                total[key] = extreme(total.get(key, value), value)
            else:
                weight = objective.counts.get(key, objective.count)
                total[key] = total.get(key, 0.0) + value * weight
                count[key] = count.get(key, 0) + weight
    return {key: value / count[key] if key in count else value for key, value in total.items()}


def _of_batch(packs: Sequence[Batch], objective: Objective[Batch], spare: Sequence[Batch]) -> dict[str, float]:
    batch: Metrics = {}
    for pack in packs:
        loss, metrics = objective.of(pack)
        add(batch, {"loss": loss, **metrics})
    for pack in spare:
        objective.of(pack)
    return to_floats(batch)


def over_updates(made: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The step's metrics from those of its updates: means, or the minimum or maximum of `min_…` and `max_…`."""
    combined: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in made for name in metrics):
        values = [metrics[name] for metrics in made if name in metrics]
        combined[name] = (_extreme(name) or fmean)(values)
    return combined


def _extreme(name: str) -> Callable[..., float] | None:
    """The function that combines a metric named as an extreme; None for a mean."""
    return {"min": min, "max": max}.get(name.partition("_")[0])
