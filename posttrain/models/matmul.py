"""x W^T on a CPU through oneDNN, which PyTorch carries beside MKL and uses by itself for dtypes other than float32.

On an AMD EPYC the models' own shapes run 10 to 25 % faster this way (x W^T and its gradient by x; the gradient by W is
as fast through MKL and stays there). On Intel's processors MKL is as fast or faster, a training step by 4 %, but not
with few rows and weights laid out beforehand, as drawing has them: `packed_weights` is for every x86 processor.
Elsewhere, and where PyTorch has no oneDNN, this is `torch.nn.functional.linear`.

oneDNN makes machine code for every shape that it multiplies and keeps it, 0.3 MB, for as long as the process lives: a
run whose packs are all of other sizes would grow without end. So it gets numbers of rows that come again, multiples of
ROWS, to which packs are padded (`width_step` in models/attention.py); MKL takes the others.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Private to torch.compile's compiler, which lowers its own linear layers to it: hence the look before the use.
PACKS = (
    torch.backends.mkldnn.is_available()
    and platform.machine() in ("x86_64", "AMD64")
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
)
# Asked of the processor, not measured: two runs on one machine must multiply alike.
CAPABILITIES = getattr(torch.cpu, "get_capabilities", dict)()
ONEDNN = PACKS and "Intel" not in CAPABILITIES.get("cpu_name", "")

# oneDNN would keep 1,024 products' code ready beside. It takes a millisecond to make, and a pack has some 16 shapes.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")

ROWS = 16
DRAWN_ROWS = 4  # the same with packed weights, for rows that drop out one by one
SMALL = 1 << 16  # numbers of a weight below which oneDNN's longer way to the product costs more than it saves
PACKED_BYTES = 1 << 30  # of weights that may lie in memory twice


def multiplies_bfloat16(capabilities: dict = CAPABILITIES) -> bool | None:
    """Whether the processor has instructions for it (AVX512-BF16, AMX): products then take a half to a fifth of
    float32's time, and else up to four times as long. None where PyTorch does not say."""
    names = ("avx512_bf16", "amx_bf16")
    return any(capabilities[name] for name in names) if all(name in capabilities for name in names) else None


PACKED_DTYPES = {torch.float32, *([torch.bfloat16] if multiplies_bfloat16() else [])}  # others wait for no layout


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b without gradients: (..., K), (M, K), (M) -> (..., M)."""
    if weight.is_mkldnn:
        rows = x.flatten(0, -2)
        missing = -len(rows) % DRAWN_ROWS
        filled = nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows
        return _onednn(filled, weight, bias)[: len(rows)].view(*x.shape[:-1], -1)
    return _onednn(x, weight, bias) if _suits_onednn(x, weight) else nn.functional.linear(x, weight, bias)


def float32_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same with sums and results in float32, whatever the dtype of x and W: (N, K), (M, K), (M) -> (N, M).

    A logit of 20 that leaves in bfloat16 is off by up to 0.06, otherwise with other rows beside it.
    """
    if weight.is_cuda and weight.dtype != torch.float32:
        out = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return out if bias is None else out.add_(bias)
    return product(x.float(), float32_weight(weight), None if bias is None else bias.float())


def float32_weight(weight: Tensor) -> Tensor:
    """What `float32_product` multiplies with: made once for several products. Only CUDA's take two dtypes."""
    return weight if weight.is_cuda or weight.is_mkldnn else weight.float()


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer's own forward, through `product` where that differs."""
    if torch.is_autocast_enabled("cpu"):
        return nn.functional.linear(x, layer.weight, layer.bias)
    if not torch.is_grad_enabled():
        return product(x, weight_of(layer), layer.bias)
    if _suits_onednn(x, layer.weight):
        return Linear.apply(x, layer.weight, layer.bias)
    return nn.functional.linear(x, layer.weight, layer.bias)


def is_for_onednn(weight: Tensor) -> bool:
    """Whether oneDNN is to multiply with this weight, given rows that suit it."""
    return ONEDNN and weight.dtype == torch.float32 and _is_large(weight)


def _is_large(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.numel() >= SMALL


def _suits_onednn(x: Tensor, weight: Tensor) -> bool:
    if not is_for_onednn(weight) or x.dtype != torch.float32:  # before `rows`, which torch.compile would look at
        return False
    rows = x.numel() // x.shape[-1]
    return rows > 0 and rows % ROWS == 0


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@contextmanager
def packed_weights(model: nn.Module, head: nn.Linear) -> Iterator[int]:
    """While this lasts, products without gradients find large weights in the layout that oneDNN multiplies from.

    Else it makes that layout for every product anew, which with few rows takes a good part of the time: 40 % of it with
    16 rows, 15 % with 60. The price is a second copy, so a model of more than PACKED_BYTES stays as it is.

    Yields the number of which the rows should be a multiple: others are filled up at every product.
    """
    weights = {m: m.weight.detach() for m in model.modules() if type(m) is nn.Linear and m is not head}
    weights[head] = float32_weight(head.weight.detach())
    large = {
        m: weight for m, weight in weights.items() if PACKS and weight.dtype in PACKED_DTYPES and _is_large(weight)
    }
    if sum(weight.nbytes for weight in large.values()) > PACKED_BYTES:
        large = {}
    packed = {head: weights[head]} if weights[head].dtype != head.weight.dtype else {}
    packed |= {layer: torch.ops.mkldnn._reorder_linear_weight(weight, None) for layer, weight in large.items()}
    for layer, weight in packed.items():
        layer.packed = weight
    try:
        yield DRAWN_ROWS if large else 1
    finally:
        for layer in packed:
            del layer.packed


def weight_of(layer: nn.Linear) -> Tensor:
    """What `product` is to multiply with: the layer's weight, or its packed copy."""
    return layer.__dict__.get("packed", layer.weight)


class Linear(torch.autograd.Function):
    """y = x W^T + b."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx, *grad_outputs):
        [grad] = grad_outputs
        x, weight = ctx.saved_tensors
        need_x, need_weight, need_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        grad_x = product(grad, weight.t()) if need_x else None
        grad_weight = rows.t() @ x.flatten(0, -2) if need_weight else None
        return grad_x, grad_weight, rows.sum(0) if need_bias else None
