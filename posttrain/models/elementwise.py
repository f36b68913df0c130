"""The element-wise chains of a decoder layer, with gradients: RMS norm, rotary embedding, the gated MLP's activation.

Plain autograd saves every intermediate of `weight * (x * rsqrt(mean(x^2) + eps))` and of `silu(gate) * up`. Here the
norm saves its input and one number per row, the MLP its gate and up projections; the rest is recomputed, which is
faster than writing it to memory and reading it back. Queries and keys are rotated without copying their halves.

The operations without gradients are below in PyTorch, and in kernels/layers.py in Triton, under the same names.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from posttrain.models.matmul import product

BLOCK_ELEMENTS = 1 << 19  # of a block: 2 MB in float32, which stay in the cache for the next operation


@dataclass(frozen=True, slots=True)
class Kernels:
    """The chains as a model's modules call them, with gradients.

    norm(x, weight, eps), swiglu(gate, up), rotated(x, cos, sin) and gated_linear(gate, up, weight, bias), which
    computes (silu(gate) * up) W^T + b and saves less than the two in turn; None if missing.
    """

    norm: Callable[[Tensor, Tensor, float], Tensor]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    rotated: Callable[[Tensor, Tensor, Tensor], Tensor]
    gated_linear: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] | None

    @classmethod
    def of(cls, operations: Any) -> Kernels:
        """The chains of a module with `rms_norm`, `swiglu`, `rotate` and their gradients."""
        return cls(
            partial(_norm, operations),
            partial(_swiglu, operations),
            partial(_rotated, operations),
            partial(GatedLinear.apply, operations),
        )


def _norm(operations: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension, computed in float32. arXiv 1910.07467, eq. 4."""
    if torch.is_grad_enabled():
        return RMSNorm.apply(operations, x, weight, eps)
    return operations.rms_norm(x, weight, eps)[0]


def _swiglu(operations: Any, gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. arXiv 2002.05202, eq. 5."""
    return SwiGLU.apply(operations, gate, up) if torch.is_grad_enabled() else operations.swiglu(gate, up)


def _rotated(operations: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x rotated by its positions' angles: x cos + (-second half of x, first half) sin. arXiv 2104.09864, eq. 34.

    x (..., T, H, d), cos and sin (..., T, 1, d), whose second halves repeat the first.
    """
    if torch.is_grad_enabled():
        return Rotated.apply(operations, x, cos, sin)
    return operations.rotate(x, cos, sin, 1)


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, operations: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = operations.rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.operations = operations
        return y

    @staticmethod
    def backward(ctx, *grad_outputs):
        grads = ctx.operations.rms_norm_gradients(*ctx.saved_tensors, *grad_outputs, ctx.needs_input_grad[2])
        return None, *grads, None


class SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, operations: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.operations = operations
        return operations.swiglu(gate, up)

    @staticmethod
    def backward(ctx, *grad_outputs):
        return None, *ctx.operations.swiglu_gradients(*ctx.saved_tensors, *grad_outputs)


class Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, operations: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.operations = operations
        return operations.rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, *grad_outputs):
        return None, ctx.operations.rotate(*grad_outputs, *ctx.saved_tensors, -1), None, None


class GatedLinear(torch.autograd.Function):
    """(silu(gate) * up) W^T + b, saving gate and up: the input of W is recomputed for its gradient."""

    @staticmethod
    def forward(ctx, operations: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.operations = operations
        return product(operations.swiglu(gate, up), weight, bias)

    @staticmethod
    def backward(ctx, *grad_outputs):
        [grad] = grad_outputs
        gate, up, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_y = product(rows, weight.t()).view_as(up)
        grad_gate, grad_up, y = ctx.operations.swiglu_gradients_again(gate, up, grad_y)
        grad_weight = rows.t() @ y.flatten(0, -2)
        return None, grad_gate, grad_up, grad_weight, rows.sum(0) if ctx.needs_input_grad[4] else None


# --- in PyTorch -------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm, and 1 / sqrt(mean(x^2) + eps), float32."""
    wide = x.float()
    rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    unit = (wide * rstd).to(x.dtype)
    return (unit.mul_(weight) if unit.dtype == weight.dtype else unit * weight), rstd


def rms_norm_gradients(
    x: Tensor, weight: Tensor, rstd: Tensor, grad_y: Tensor, need_weight: bool
) -> tuple[Tensor, Tensor | None]:
    wide, grad = x.float(), grad_y.float()
    along = grad * wide
    grad_weight = None
    if need_weight:
        grad_weight = (rstd.flatten(0, -2).t() @ along.flatten(0, -2)).squeeze(0).to(weight.dtype)
    back = torch.linalg.vecdot(along, weight.float())[..., None] * rstd.pow(3)
    grad_x = (grad * weight).mul_(rstd).addcmul_(wide, back, value=-1 / x.shape[-1])
    return grad_x.to(x.dtype), grad_weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """x rotated by the angles, or back with sign -1, which is the gradient. Rounded as in transformers, to the bit."""
    (first, second), (sin, _) = x.chunk(2, -1), sin.chunk(2, -1)
    y = x * cos
    y_first, y_second = y.chunk(2, -1)
    y_first.sub_(second * sin, alpha=sign)
    y_second.add_(first * sin, alpha=sign)
    return y


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)  # so that blocks are views of it
    for gate_rows, up_rows, out in _blocks(gate, up, y):
        torch.ops.aten.silu.out(gate_rows, out=out).mul_(up_rows)
    return y


def swiglu_gradients(gate: Tensor, up: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
    for gate_rows, up_rows, grad, out_gate, out_up in _blocks(gate, up, grad_y, grad_gate, grad_up):
        _grad_gate(gate_rows, up_rows, grad, out_gate)
        torch.ops.aten.silu.out(gate_rows, out=out_up).mul_(grad)
    return grad_gate, grad_up


def swiglu_gradients_again(gate: Tensor, up: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by gate and up, the latter written over `grad_y`, and y recomputed, in one pass."""
    grad_gate, y = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
    for gate_rows, up_rows, grad, out_gate, out in _blocks(gate, up, grad_y, grad_gate, y):
        _grad_gate(gate_rows, up_rows, grad, out_gate)
        grad.mul_(torch.ops.aten.silu.out(gate_rows, out=out))
        out.mul_(up_rows)
    return grad_gate, grad_y, y


def _grad_gate(gate: Tensor, up: Tensor, grad_y: Tensor, out: Tensor) -> None:
    torch.mul(grad_y, up, out=out)
    torch.ops.aten.silu_backward.grad_input(out, gate, grad_input=out)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors' rows, on a CPU a block at a time, so that the next operation finds them in the cache."""
    rows = [tensor.flatten(0, -2) for tensor in tensors]
    has_cache = rows[0].device.type == "cpu" and not isinstance(rows[0], FakeTensor)  # of a plan, without numbers
    size = BLOCK_ELEMENTS // rows[0].shape[1] if has_cache else len(rows[0])
    return zip(*(tensor.split(max(1, size)) for tensor in rows), strict=True)


TORCH = Kernels.of(sys.modules[__name__])
