"""The weights of a policy as in a checkpoint: with transformers' names, adapters merged."""

import copy
from collections.abc import Iterator

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn

from posttrain.base.errors import ModelError
from posttrain.engines.protocol import seed_of
from posttrain.models.families import base_of
from posttrain.runs.files import bits

Named = tuple[str, Tensor]
Adapters = tuple[tuple[bool, tuple[str, ...]], ...]


def adapters_of(policy: nn.Module) -> Adapters:
    """The active adapters of each layer; empty without any."""
    layers = (module for module in policy.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper))
    return tuple((bool(layer.disable_adapters), tuple(layer.active_adapters)) for layer in layers)


@torch.no_grad()
def fingerprint(policy: nn.Module) -> int:
    """A checksum that almost surely changes when any bit of a weight does."""
    return seed_of(*(int(bits(parameter).sum(dtype=torch.int64)) for parameter in policy.parameters()))


@torch.no_grad()
def weights_of(policy: nn.Module) -> Iterator[Named]:
    """Every weight of the model once, with active adapters merged into a copy.

    Merged layers are computed one at a time, on demand; the policy is not changed. Raises ModelError for quantised
    weights.
    """
    base = base_of(policy)
    if getattr(base, "is_quantized", False):
        raise ModelError(
            "vLLM needs unquantised weights, and this model's are quantised (load_in_4bit, or posttrain quantize): set "
            "rollout.engine: embedded"
        )
    wrapped = {
        name: module
        for name, module in base.named_modules()
        if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper)
    }
    done: set[str] = set()
    for name, parameter in base.named_parameters():
        owner = next((prefix for prefix in wrapped if name.startswith(f"{prefix}.")), None)
        if owner is None:
            yield name, parameter.detach()
        elif owner not in done:
            done.add(owner)
            for inner, tensor in _as_switched(wrapped[owner]).named_parameters():
                yield f"{owner}.{inner}", tensor.detach()


def _as_switched(module: BaseTunerLayer | ModulesToSaveWrapper) -> nn.Module:
    """The layer without PEFT."""
    if isinstance(module, ModulesToSaveWrapper):
        on = not module.disable_adapters and module.active_adapters
        return module.modules_to_save[module.active_adapters[0]] if on else module.original_module
    if not module.disable_adapters and module.active_adapters:
        module = copy.deepcopy(module)  # merging and unmerging the layer itself would round its weights
        module.merge()
    return module.get_base_layer()
