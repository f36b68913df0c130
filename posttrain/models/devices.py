"""The device of the settings, its dtype, and deterministic kernels."""

import contextlib
import functools
import os
from collections.abc import Iterator

import torch

from posttrain.base.errors import ModelError
from posttrain.config.schema.model import ModelConfig
from posttrain.config.schema.training import DevicesConfig


def take_device(devices: DevicesConfig) -> torch.device:
    """Return the device to compute on, and make it the current one, which kernels of other packages use."""
    device = device_of(devices)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def own_device(devices: DevicesConfig, rank: int, ranks: int) -> DevicesConfig:
    """Return the settings for one rank of a machine: rank i uses the i-th of the named or visible GPUs.

    Raises ModelError if there is no such GPU, or if several GPUs are named for a single process.
    """
    if device_type(devices) != "cuda":
        return devices
    if ranks == 1:
        if devices.ids and len(devices.ids) > 1:
            raise ModelError(
                f"devices.ids names {len(devices.ids)} GPUs, but this process trains on one: start the run with "
                f"`posttrain train` or `posttrain launch --nproc {len(devices.ids)}`, or give a single id"
            )
        return devices
    ids = devices.ids or tuple(range(torch.cuda.device_count()))
    if rank >= len(ids):
        raise ModelError(f"there is no GPU for process {rank} of this machine: start at most {len(ids)} (one per GPU)")
    return devices.model_copy(update={"ids": (ids[rank],)})


@contextlib.contextmanager
def determinism(devices: DevicesConfig) -> Iterator[None]:
    """Context in which PyTorch uses only deterministic kernels, if `full_determinism` is set.

    Enter it before anything has run on the GPU: cuBLAS reads its setting when it starts.
    """
    if not devices.full_determinism:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def device_type(devices: DevicesConfig) -> str:
    """Return the type of device: the named one, or the best available."""
    if devices.type != "auto":
        return devices.type
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def device_of(devices: DevicesConfig) -> torch.device:
    """Return the device to compute on: the first one named, or the best available. A CUDA device has its index."""
    kind = device_type(devices)
    if kind == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            "devices.type is cuda, but PyTorch sees no GPU: install its CUDA build, or set devices.type: auto"
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise ModelError("devices.type is mps, but this machine has no MPS device: set devices.type: auto")
    if kind != "cuda" and devices.ids:
        raise ModelError(
            f"devices.ids names GPUs, but PyTorch sees none: this run computes on {kind}; remove the setting"
        )
    if kind == "cuda":
        chosen, there = (devices.ids or (0,))[0], torch.cuda.device_count()
        if chosen >= there:
            raise ModelError(
                f"devices.ids names GPU {chosen}, but PyTorch sees {there}, numbered from 0: choose one of them, or "
                "check CUDA_VISIBLE_DEVICES"
            )
        return torch.device("cuda", chosen)
    return torch.device(kind)


def compute_dtype(model: ModelConfig, device: torch.device) -> torch.dtype:
    """Return the dtype of the computation: `auto` is bfloat16 on a GPU and float32 elsewhere.

    Raises ModelError for float16 elsewhere, where it is slow and its losses are not scaled.
    """
    if model.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if model.dtype == "float16" and device.type != "cuda":
        raise ModelError(
            f"model.dtype: float16 is for GPUs without bfloat16, but this run computes on {device.type}: set auto"
        )
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[model.dtype]


OLD_CARD = (
    "computes bfloat16 slowly (compute capability below 8.0): set model.dtype=float16; for models that do not fit also "
    "model.lora=true and model.load_in_4bit=true. FlexAttention and posttrain's kernels are off"
)


@functools.cache
def lacks_bfloat16() -> bool:
    """Whether this machine's GPU only emulates bfloat16: compute capability below 8.0, such as T4's and V100's."""
    is_nvidia = torch.cuda.is_available() and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability() < (8, 0)
