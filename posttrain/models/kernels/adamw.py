"""AdamW on masters that are kept in halves (optim/adamw.py), over many tensors in one launch."""

# Type checkers do not know how Triton launches kernels: arguments differ from the kernels' parameters.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # elements of a program
MULTIPLE = tl.constexpr(16)  # of which sizes, and addresses in bytes, are: then a thread reads several numbers at once


@triton.jit
def _numbers(place, which, kind: tl.constexpr):
    return tl.multiple_of(tl.load(place + which).to(tl.pointer_type(kind)), MULTIPLE)


@triton.jit
def _adamw(places, numbers, tensor_B, start_B, beta1, beta2, eps, BLOCK: tl.constexpr):
    """Update one block of one tensor. Its row of `places` has the addresses of weight, rest, gradient and moments, and
    its size; its row of `numbers` the factor of the decay, the step size, and the root of the second moment's bias."""
    tensor = tl.load(tensor_B + tl.program_id(0))
    index = tl.multiple_of(tl.load(start_B + tl.program_id(0)), BLOCK) + tl.arange(0, BLOCK)
    place, number = places + tensor * 6, numbers + tensor * 3
    here = index < tl.multiple_of(tl.load(place + 5), MULTIPLE)
    weight = _numbers(place, 0, tl.int16) + index
    rest = _numbers(place, 1, tl.int16) + index
    gradient = _numbers(place, 2, tl.float32) + index
    first = _numbers(place, 3, tl.float32) + index
    second = _numbers(place, 4, tl.float32) + index
    bits = (tl.load(weight, mask=here, other=0).to(tl.int32) << 16) + tl.load(rest, mask=here, other=0).to(tl.int32)
    x, grad = bits.to(tl.float32, bitcast=True), tl.load(gradient, mask=here, other=0.0)
    m = beta1 * tl.load(first, mask=here, other=0.0) + (1 - beta1) * grad
    v = beta2 * tl.load(second, mask=here, other=0.0) + (1 - beta2) * grad * grad
    x = x * tl.load(number) - tl.load(number + 1) * m / (tl.sqrt(v) / tl.load(number + 2) + eps)
    bits = x.to(tl.int32, bitcast=True)
    high = (bits + 0x8000) >> 16
    tl.store(weight, high.to(tl.int16), mask=here)
    tl.store(rest, (bits - (high << 16)).to(tl.int16), mask=here)
    tl.store(first, m, mask=here)
    tl.store(second, v, mask=here)


def adamw(
    tensors: Sequence[Sequence[Tensor]],
    numbers: Sequence[tuple[float, float, float]],
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """Update contiguous tensors in place: weight (bfloat16), rest (int16), gradient, first and second moment (float32).

    `numbers`, for each: 1 - learning rate · decay, learning rate / (1 - beta1^t), and √(1 - beta2^t).
    """
    device, sizes = tensors[0][0].device, tuple(parts[0].numel() for parts in tensors)
    tensor_B, start_B = _blocks(sizes, device)
    rows = [[*(part.data_ptr() for part in parts), size] for parts, size in zip(tensors, sizes, strict=True)]
    places = torch.tensor(rows).to(device, non_blocking=True)
    given = torch.tensor(numbers, dtype=torch.float32).to(device, non_blocking=True)
    _adamw[len(tensor_B),](places, given, tensor_B, start_B, beta1, beta2, eps, BLOCK=BLOCK, num_warps=8)


@functools.lru_cache(maxsize=1)
def _blocks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tensor of each block, and where the block starts in it."""
    starts = [torch.arange(0, size, BLOCK) for size in sizes]
    tensor_B = torch.repeat_interleave(torch.tensor([len(start) for start in starts]))
    return tensor_B.to(device), torch.cat(starts).to(device)
