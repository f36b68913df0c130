"""Which failures are memory that ran out (posttrain/base/errors.py)."""

import sqlite3

import pytest
import torch
from torch._inductor.exc import InductorError

from posttrain.base.errors import RewardError, is_out_of_memory


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


OUT = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OUT,
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("MPS backend out of memory (MPS allocated: 17.9 GB)"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried"),
        OSError(12, "Cannot allocate memory"),
        InductorError(OUT, None),  # pyright: ignore[reportArgumentType]
        caused(RuntimeError("backend='inductor' raised"), OUT),
    ],
)
def test_out_of_memory(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("out of resource: shared memory, Required: 131072"),
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered"),
        caused(RewardError("my_reward failed"), MemoryError()),  # said by its own name
        sqlite3.OperationalError("out of memory"),
        ValueError("CUDA out of memory is what the user's code says of its own"),
        KeyboardInterrupt(),
    ],
)
def test_what_is_another_failure(error):
    assert not is_out_of_memory(error)
