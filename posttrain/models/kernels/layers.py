"""The operations of models/lean.py in Triton: inputs and outputs pass through memory once, in any dtype.

PyTorch runs each operation as a chain of three to ten kernels with float32 intermediates. The kernels here compute in
float32 and round at the end, while PyTorch's chains round in between, so in 16 bits the two differ by a unit in the
last place. All sums have a fixed order: weights' gradients are summed by a fixed number of programs and then joined.

Shapes: a tensor (..., W) is rows of W numbers, in groups of `each` rows. Inputs may be columns of a larger tensor, as
projections by one product are: `row` is the distance between rows, `group` that between groups. Outputs are contiguous.
"""

# Type checkers do not know how Triton launches kernels: arguments differ from the kernels' parameters.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 4096  # elements of a program's block
COLUMNS = 1024  # elements of a row in a program that computes no sums over it
PROGRAMS = 264  # programs that sum a weight's gradient: twice the multiprocessors of an H100


@triton.jit
def _start(index, each, row, group):
    """Return where the rows of these numbers start."""
    return (index // each).to(tl.int64) * group + (index % each).to(tl.int64) * row


@triton.jit
def _rms_norm(x, weight, y, rstd, rows, width, each, row, group, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    here = (index < rows)[:, None] & (column < width)
    wide = tl.load(x + _start(index, each, row, group)[:, None] + column, mask=here, other=0.0).to(tl.float32)
    inverse = 1 / tl.sqrt(tl.sum(wide * wide, 1) / width + eps)
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    unit = (wide * inverse[:, None] * w).to(y.dtype.element_ty)
    tl.store(y + index[:, None].to(tl.int64) * width + column, unit, mask=here)
    tl.store(rstd + index, inverse, mask=index < rows)


@triton.jit
def _rms_norm_gradients(
    x, weight, rstd, grad_y, grad_x, grad_weight, rows, width, blocks,
    each, row, group, grad_each, grad_row, grad_group,
    WEIGHT: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of `blocks` blocks of rows; grad_weight (programs, width) is float32."""
    column = tl.arange(0, WIDTH)[None, :]
    w = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros((WIDTH,), tl.float32)
    for block in range(tl.program_id(0) * blocks, (tl.program_id(0) + 1) * blocks):
        index = block * ROWS + tl.arange(0, ROWS)
        here = (index < rows)[:, None] & (column < width)
        wide = tl.load(x + _start(index, each, row, group)[:, None] + column, mask=here, other=0.0).to(tl.float32)
        start = _start(index, grad_each, grad_row, grad_group)
        grad = tl.load(grad_y + start[:, None] + column, mask=here, other=0.0).to(tl.float32)
        inverse = tl.load(rstd + index, mask=index < rows, other=0.0)[:, None]
        unit = wide * inverse
        along = tl.sum(grad * w * unit, 1)[:, None] / width
        grad_wide = ((grad * w - unit * along) * inverse).to(grad_x.dtype.element_ty)
        tl.store(grad_x + index[:, None].to(tl.int64) * width + column, grad_wide, mask=here)
        if WEIGHT:
            total += tl.sum(grad * unit, 0)
    if WEIGHT:
        column = tl.arange(0, WIDTH)
        tl.store(grad_weight + tl.program_id(0) * width + column, total, mask=column < width)


@triton.jit
def _rotate(x, cos, sin, y, rows, half, sign, each, row, group, ROWS: tl.constexpr, HALF: tl.constexpr):
    """The rows of a group are the heads of a token."""
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, HALF)[None, :]
    here = (index < rows)[:, None] & (column < half)
    source = _start(index, each, row, group)[:, None] + column
    turn = (index // each)[:, None].to(tl.int64) * (2 * half) + column
    c = tl.load(cos + turn, mask=here, other=0.0).to(tl.float32)
    s = tl.load(sin + turn, mask=here, other=0.0).to(tl.float32) * sign
    first = tl.load(x + source, mask=here, other=0.0).to(tl.float32)
    second = tl.load(x + source + half, mask=here, other=0.0).to(tl.float32)
    target = index[:, None].to(tl.int64) * (2 * half) + column
    tl.store(y + target, (first * c - second * s).to(y.dtype.element_ty), mask=here)
    tl.store(y + target + half, (second * c + first * s).to(y.dtype.element_ty), mask=here)


@triton.jit
def _swiglu(gate, up, y, width, each, row, group, up_each, up_row, up_group, COLUMNS: tl.constexpr):
    index, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here = column < width
    g = tl.load(gate + _start(index, each, row, group) + column, mask=here, other=0.0).to(tl.float32)
    u = tl.load(up + _start(index, up_each, up_row, up_group) + column, mask=here, other=0.0).to(tl.float32)
    tl.store(y + index.to(tl.int64) * width + column, (g * tl.sigmoid(g) * u).to(y.dtype.element_ty), mask=here)


@triton.jit
def _swiglu_gradients(
    gate, up, grad_y, grad_gate, grad_up, y, width, each, row, group, up_each, up_row, up_group,
    AGAIN: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    index, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    here, at = column < width, index.to(tl.int64) * width + column
    g = tl.load(gate + _start(index, each, row, group) + column, mask=here, other=0.0).to(tl.float32)
    u = tl.load(up + _start(index, up_each, up_row, up_group) + column, mask=here, other=0.0).to(tl.float32)
    grad = tl.load(grad_y + at, mask=here, other=0.0).to(tl.float32)
    share = tl.sigmoid(g)
    silu = g * share
    tl.store(grad_gate + at, (grad * u * (share + silu * (1 - share))).to(grad_gate.dtype.element_ty), mask=here)
    tl.store(grad_up + at, (grad * silu).to(grad_up.dtype.element_ty), mask=here)
    if AGAIN:
        tl.store(y + at, (silu * u).to(y.dtype.element_ty), mask=here)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm, and 1 / sqrt(mean(x^2) + eps) in float32."""
    x, places = _rows(x)
    y = _like(x, torch.promote_types(x.dtype, weight.dtype))
    rstd = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    blocks, sizes = _blocks(x.shape[-1], rstd.numel())
    if x.numel():
        _rms_norm[blocks,](x, weight, y, rstd, rstd.numel(), x.shape[-1], *places, eps, **sizes)
    return y, rstd


def rms_norm_gradients(
    x: Tensor, weight: Tensor, rstd: Tensor, grad_y: Tensor, need_weight: bool
) -> tuple[Tensor, Tensor | None]:
    (x, places), (grad_y, grad_places), width = _rows(x), _rows(grad_y), x.shape[-1]
    blocks, sizes = _blocks(width, rstd.numel())
    share = max(1, triton.cdiv(blocks, PROGRAMS))
    programs = triton.cdiv(blocks, share)
    grad_x, grad_weight = _like(x), x.new_empty(programs, width, dtype=torch.float32)
    if x.numel():
        _rms_norm_gradients[programs,](
            x, weight, rstd, grad_y, grad_x, grad_weight, rstd.numel(), width, share, *places, *grad_places,
            WEIGHT=need_weight, **sizes,
        )  # fmt: skip
    return grad_x, grad_weight.sum(0).to(weight.dtype) if need_weight else None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Rotate x by the angles, or back if `sign` is -1: x (..., T, H, d), cos and sin (..., T, 1, d)."""
    (x, places), turns = _rows(x), (*x.shape[:-2], 1, x.shape[-1])
    cos, sin, y = cos.expand(turns).contiguous(), sin.expand(turns).contiguous(), _like(x)
    rows, half = x.numel() // x.shape[-1], x.shape[-1] // 2
    blocks, sizes = _blocks(half, rows)
    if x.numel():
        _rotate[blocks,](x, cos, sin, y, rows, half, sign, *places, ROWS=sizes["ROWS"], HALF=sizes["WIDTH"])
    return y


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    (gate, places), (up, up_places), width = _rows(gate), _rows(up), gate.shape[-1]
    y = _like(gate)
    if y.numel():
        grid = y.numel() // width, triton.cdiv(width, COLUMNS)
        _swiglu[grid](gate, up, y, width, *places, *up_places, COLUMNS=COLUMNS)
    return y


def swiglu_gradients(gate: Tensor, up: Tensor, grad_y: Tensor, again: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients with respect to gate and up and, if `again`, the recomputed y, in one pass."""
    (gate, places), (up, up_places), width = _rows(gate), _rows(up), gate.shape[-1]
    grad_gate, grad_up, y = _like(gate), _like(up), _like(gate) if again else None
    if gate.numel():
        grid = gate.numel() // width, triton.cdiv(width, COLUMNS)
        _swiglu_gradients[grid](
            gate, up, grad_y.contiguous(), grad_gate, grad_up, gate if y is None else y, width, *places, *up_places,
            AGAIN=again, COLUMNS=COLUMNS,
        )  # fmt: skip
    return grad_gate, grad_up, y


def _rows(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Return the tensor, copied if its rows are not contiguous, and the `each`, `row` and `group` of its rows."""
    if x.stride(-1) != 1 or x.numel() != math.prod(x.shape[-3:]):
        x = x.contiguous()
    return x, (x.shape[-2], x.stride(-2), x.stride(-3) if x.dim() > 2 else 0)


def _like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


def _blocks(width: int, rows: int) -> tuple[int, dict[str, int]]:
    """Return the number of blocks for these rows, and a block's sizes: complete rows, padded to a power of two."""
    wide = triton.next_power_of_2(width)
    each = max(1, ELEMENTS // wide)
    return triton.cdiv(rows, each), {"ROWS": each, "WIDTH": wide}
