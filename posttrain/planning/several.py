"""A run on several processes, or on GPUs that are not here: what each process holds and exchanges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from posttrain.config import DevicesConfig
from posttrain.models.devices import device_of
from posttrain.models.sharding import layers_of
from posttrain.planning.cards import CARDS

if TYPE_CHECKING:
    from peft import PeftModel


@dataclass(frozen=True, slots=True)
class Target:
    """Where a run is planned for: this machine's device, or GPUs of a name; and the processes that share a step."""

    device: torch.device
    ranks: int = 1
    name: str | None = None

    @classmethod
    def of(cls, devices: DevicesConfig, card: str | None = None, ranks: int = 1) -> Target:
        """For GPUs of a name in CARDS, or for this machine's device."""
        return cls(device_of(devices) if card is None else torch.device("cuda", 0), ranks, card)

    @property
    def card(self) -> int | None:
        """Bytes of the named GPU's memory; None for this machine's own device."""
        return None if self.name is None else int(CARDS[self.name] * 2**30)


def gathered(model: PreTrainedModel | PeftModel, width: int) -> int:
    """Bytes of the weights that a process of a sharded run holds at once: all but the layers, and two layers."""
    layers = [sum(p.numel() for p in layer.parameters()) for layer in layers_of(model)]
    rest = sum(p.numel() for p in model.parameters()) - sum(layers)
    return width * (rest + 2 * max(layers, default=0))


def exchanged(total: int, trained: int, width: int, ranks: int, packs: float, sharded: bool) -> float:
    """Bytes that a process sends, and receives as many, in a step: `packs` are its own; weights of `width` bytes.

    Replicas sum their float32 gradients once (reduce-scatter and all-gather of a ring). Sharded weights are gathered
    for every forward and backward pass, and every pack's gradients are reduced, in float32.
    """
    share = (ranks - 1) / ranks
    return packs * (2 * width * total + 4 * trained) * share if sharded else 2 * 4 * trained * share
