"""The operations of models/lean.py in Triton: inputs and outputs pass through memory once, in any dtype.

PyTorch runs each operation as a chain of three to ten kernels with float32 intermediates. The kernels here compute in
float32 and round at the end, while PyTorch's chains round in between, so in 16 bits the two differ by a unit in the
last place. All sums have a fixed order: weights' gradients are summed by a fixed number of programs and then joined.

Shapes: a tensor (..., W) is contiguous rows of W numbers.
"""

# Type checkers do not know how Triton launches kernels: arguments differ from the kernels' parameters.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096  # elements of a program's block
PROGRAMS = 264  # programs that sum a weight's gradient: twice the multiprocessors of an H100


@triton.jit
def _rms_norm(x, weight, y, rstd, rows, width, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    here = (row < rows)[:, None] & (column < width)[None, :]
    index = row[:, None].to(tl.int64) * width + column[None, :]
    wide = tl.load(x + index, mask=here, other=0.0).to(tl.float32)
    inverse = 1 / tl.sqrt(tl.sum(wide * wide, 1) / width + eps)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y + index, (wide * inverse[:, None] * w[None, :]).to(y.dtype.element_ty), mask=here)
    tl.store(rstd + row, inverse, mask=row < rows)


@triton.jit
def _rms_norm_gradients(
    x, weight, rstd, grad_y, grad_x, grad_weight, rows, width, blocks,
    WEIGHT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of `blocks` blocks of rows; grad_weight (programs, width) is float32."""
    column = tl.arange(0, WIDTH)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros((WIDTH,), tl.float32)
    for block in range(tl.program_id(0) * blocks, (tl.program_id(0) + 1) * blocks):
        row = block * ROWS + tl.arange(0, ROWS)
        here = (row < rows)[:, None] & (column < width)[None, :]
        index = row[:, None].to(tl.int64) * width + column[None, :]
        wide = tl.load(x + index, mask=here, other=0.0).to(tl.float32)
        grad = tl.load(grad_y + index, mask=here, other=0.0).to(tl.float32)
        inverse = tl.load(rstd + row, mask=row < rows, other=0.0)[:, None]
        unit = wide * inverse
        along = tl.sum(grad * w * unit, 1)[:, None] / width
        tl.store(grad_x + index, ((grad * w - unit * along) * inverse).to(grad_x.dtype.element_ty), mask=here)
        if WEIGHT:
            total += tl.sum(grad * unit, 0)
    if WEIGHT:
        tl.store(grad_weight + tl.program_id(0) * width + column, total, mask=column < width)


@triton.jit
def _rotate(x, cos, sin, y, rows, heads, half, sign, ROWS: tl.constexpr, HALF: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HALF)
    here = (row < rows)[:, None] & (column < half)[None, :]
    index = row[:, None].to(tl.int64) * (2 * half) + column[None, :]
    turn = (row // heads)[:, None].to(tl.int64) * (2 * half) + column[None, :]
    c = tl.load(cos + turn, mask=here, other=0.0).to(tl.float32)
    s = tl.load(sin + turn, mask=here, other=0.0).to(tl.float32) * sign
    first = tl.load(x + index, mask=here, other=0.0).to(tl.float32)
    second = tl.load(x + index + half, mask=here, other=0.0).to(tl.float32)
    tl.store(y + index, (first * c - second * s).to(y.dtype.element_ty), mask=here)
    tl.store(y + index + half, (second * c + first * s).to(y.dtype.element_ty), mask=here)


@triton.jit
def _swiglu(gate, up, y, size, ELEMENTS: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    here = index < size
    g = tl.load(gate + index, mask=here, other=0.0).to(tl.float32)
    u = tl.load(up + index, mask=here, other=0.0).to(tl.float32)
    tl.store(y + index, (g * tl.sigmoid(g) * u).to(y.dtype.element_ty), mask=here)


@triton.jit
def _swiglu_gradients(gate, up, grad_y, grad_gate, grad_up, y, size, AGAIN: tl.constexpr, ELEMENTS: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    here = index < size
    g = tl.load(gate + index, mask=here, other=0.0).to(tl.float32)
    u = tl.load(up + index, mask=here, other=0.0).to(tl.float32)
    grad = tl.load(grad_y + index, mask=here, other=0.0).to(tl.float32)
    share = tl.sigmoid(g)
    silu = g * share
    tl.store(grad_gate + index, (grad * u * (share + silu * (1 - share))).to(grad_gate.dtype.element_ty), mask=here)
    tl.store(grad_up + index, (grad * silu).to(grad_up.dtype.element_ty), mask=here)
    if AGAIN:
        tl.store(y + index, (silu * u).to(y.dtype.element_ty), mask=here)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm, and 1 / sqrt(mean(x^2) + eps) in float32."""
    x = x.contiguous()
    y = torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype))
    rstd = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    blocks, sizes = _rows_of(x.shape[-1], rstd.numel())
    if x.numel():
        _rms_norm[blocks,](x, weight, y, rstd, rstd.numel(), x.shape[-1], eps, **sizes)
    return y, rstd


def rms_norm_gradients(
    x: Tensor, weight: Tensor, rstd: Tensor, grad_y: Tensor, need_weight: bool
) -> tuple[Tensor, Tensor | None]:
    x, grad_y, width = x.contiguous(), grad_y.contiguous(), x.shape[-1]
    blocks, sizes = _rows_of(width, rstd.numel())
    each = max(1, triton.cdiv(blocks, PROGRAMS))
    programs = triton.cdiv(blocks, each)
    grad_x, grad_weight = torch.empty_like(x), x.new_empty(programs, width, dtype=torch.float32)
    if x.numel():
        _rms_norm_gradients[programs,](
            x, weight, rstd, grad_y, grad_x, grad_weight, rstd.numel(), width, each, WEIGHT=need_weight, **sizes
        )
    return grad_x, grad_weight.sum(0).to(weight.dtype) if need_weight else None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Rotate x by the angles, or back if `sign` is -1: x (..., T, H, d), cos and sin (..., T, 1, d)."""
    x, turns = x.contiguous(), (*x.shape[:-2], 1, x.shape[-1])
    cos, sin, y = cos.expand(turns).contiguous(), sin.expand(turns).contiguous(), torch.empty_like(x)
    rows, half = x.numel() // x.shape[-1], x.shape[-1] // 2
    blocks, sizes = _rows_of(half, rows)
    if x.numel():
        _rotate[blocks,](x, cos, sin, y, rows, x.shape[-2], half, sign, ROWS=sizes["ROWS"], HALF=sizes["WIDTH"])
    return y


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    if y.numel():
        _swiglu[triton.cdiv(y.numel(), ELEMENTS),](gate, up, y, y.numel(), ELEMENTS=ELEMENTS)
    return y


def swiglu_gradients(gate: Tensor, up: Tensor, grad_y: Tensor, again: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients with respect to gate and up and, if `again`, the recomputed y, in one pass."""
    gate, up, grad_y = gate.contiguous(), up.contiguous(), grad_y.contiguous()
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    y = torch.empty_like(gate) if again else None
    if gate.numel():
        _swiglu_gradients[triton.cdiv(gate.numel(), ELEMENTS),](
            gate, up, grad_y, grad_gate, grad_up, gate if y is None else y, gate.numel(), AGAIN=again, ELEMENTS=ELEMENTS
        )
    return grad_gate, grad_up, y


def _rows_of(width: int, rows: int) -> tuple[int, dict[str, int]]:
    """Return the number of blocks for these rows, and a block's sizes: complete rows, padded to a power of two."""
    wide = triton.next_power_of_2(width)
    each = max(1, ELEMENTS // wide)
    return triton.cdiv(rows, each), {"ROWS": each, "WIDTH": wide}
