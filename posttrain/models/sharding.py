"""Weights sharded over the ranks with torch's FSDP2: each rank has a part of every tensor, some of its rows.

The parts are float32 and are the optimizer's masters. A layer is gathered for its forward and its backward pass, in the
dtype of the computation. Its gradients are summed over the ranks in float32, and each rank receives the gradients of
its part. So every pass over the model is a collective operation, and all ranks must make the same number of passes.
`whole` gathers everything temporarily, so that each rank can use the model independently, as an engine does.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from posttrain.models.families import backbone_of, base_of

PARTS = "sharded_parts"  # attribute of a sharded model: the modules that are gathered at once, including the model


def shard(model: nn.Module, ranks: int, device: torch.device, dtype: torch.dtype) -> None:
    """Shard a plain or PEFT model over the ranks. Layers in CPU memory are moved to the device as they are sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (ranks,))
    precision = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=None if dtype == torch.float32 else torch.float32,
        cast_forward_inputs=False,
    )
    parts = [*layers_of(model), model]
    for part in parts:
        fully_shard(part, mesh=mesh, mp_policy=precision, reshard_after_forward=part is not model)
        part.set_gradient_divide_factor(1.0)  # pyright: ignore[reportCallIssue]
        part.set_force_sum_reduction_for_comms(True)  # pyright: ignore[reportCallIssue]
        if hasattr(part, "set_reduce_scatter_unused_params"):  # an expert may have tokens on only one rank
            part.set_reduce_scatter_unused_params(True, recurse=False)  # pyright: ignore[reportCallIssue]
    # Backward prefetches in this order. By default it repeats the order of forward passes since the last backward. But
    # engines make different numbers of passes, so ranks would gather in different orders and wait for each other.
    for part, before in zip(parts, [model, *parts], strict=False):
        part.set_modules_to_backward_prefetch([before])  # pyright: ignore[reportCallIssue]
    model.to(device)  # moves the buffers; the weights are already there
    object.__setattr__(model, PARTS, parts)
    object.__setattr__(model, "through_hooks", lambda of, **inputs: of(**inputs))
    register_fsdp_forward_method(model, "through_hooks")


def own_part(parameter: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor, sharing its memory. Any other tensor is returned unchanged."""
    part = parameter.detach()
    return part.to_local() if is_sharded(part) else parameter  # pyright: ignore[reportAttributeAccessIssue]


def own_rows(index: int, size: int, rows: int) -> slice:
    """This rank's rows of a sharded tensor, as torch.chunk divides them."""
    each = -(-rows // size)
    return slice(min(index * each, rows), min((index + 1) * each, rows))


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "to_local")


def architecture_of(model: nn.Module) -> str:
    """Return the name of the model's class, which FSDP replaces with a subclass."""
    from torch.distributed.fsdp import FSDPModule

    return next(kind.__name__ for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


@contextmanager
def whole(model: nn.Module) -> Iterator[None]:
    """Context in which every rank has the whole model, in the dtype of the computation. All ranks must enter together.

    It does nothing for a model that is not sharded.
    """
    with ExitStack() as resources:
        for module in [module for module in model.modules() if PARTS in module.__dict__]:
            resources.enter_context(_gathered(module.__dict__[PARTS]))
        yield


def whole_state(model: nn.Module) -> dict[str, Tensor] | None:
    """Return a sharded model's whole state dict inside `whole`, where `state_dict()` has only parts; or else None."""
    sharded = next((module for module in model.modules() if PARTS in module.__dict__), None)
    if sharded is None:
        return None
    state = {name: value.detach() for name, value in sharded.named_parameters(remove_duplicate=False)}
    for prefix, module in sharded.named_modules():
        for name, value in module._buffers.items():
            if value is not None and name not in module._non_persistent_buffers_set:
                state[f"{prefix}.{name}" if prefix else name] = value
    return state


def at_rest(model: nn.Module) -> None:
    """Reshard the layers of a sharded model after a pass without a backward."""
    for module in model.modules():
        for part in module.__dict__.get(PARTS, ()):
            part.reshard()


@contextmanager
def _gathered(parts: list[Any]) -> Iterator[None]:
    root = parts[-1]
    if root.__dict__.get("gathered"):
        yield
        return
    root.through_hooks(lambda: None)  # for FSDP, the root is the first module that is called
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    root.__dict__["gathered"] = True
    try:
        yield
    finally:
        root.__dict__["gathered"] = False
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(part is not root, recurse=False)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are gathered one after another: the backbone's longest module list, its layers."""
    lists = [module for module in backbone_of(base_of(model)).modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=len, default=()))
