"""x W^T on a CPU through oneDNN, which PyTorch includes in addition to MKL and uses for all dtypes except float32.

On an AMD EPYC, products of the models' shapes are 10 to 25 % faster this way: x W^T and its gradient with respect to x.
The gradient with respect to W is as fast through MKL, so MKL computes it. On Intel processors MKL is at least as fast
(a training step takes 4 % less time), except with few rows and prepacked weights, as in generation. So `packed_weights`
is used on every x86 processor. On other processors, and without oneDNN, this is `torch.nn.functional.linear`.

oneDNN caches 0.3 MB of machine code for every shape until the process ends. If packs always had new sizes, the process
would grow without limit. So oneDNN multiplies only recurring numbers of rows: multiples of ROWS, to which packs are
padded (`width_step` in models/attention.py). MKL multiplies all other numbers of rows.
"""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# These operations are private to torch.compile's compiler, so their existence is checked.
PACKS = (
    torch.backends.mkldnn.is_available()
    and platform.machine() in ("x86_64", "AMD64")
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
)
# Chosen by the processor's name, not by measurement: two runs on one machine must use the same kernels.
CAPABILITIES = getattr(torch.cpu, "get_capabilities", dict)()
ONEDNN = PACKS and "Intel" not in CAPABILITIES.get("cpu_name", "")

# By default oneDNN caches the code of 1,024 shapes, each generated in a millisecond. A pack has about 16 shapes.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")

ROWS = 16  # oneDNN is used for multiples of this number of rows
SAMPLED_ROWS = 4  # the same with packed weights, because sampled rows finish one by one
SMALL = 1 << 16  # elements of a weight below which oneDNN's overhead exceeds its gain
PACKED_BYTES = 1 << 30  # maximum size of weights that may be in memory twice


def multiplies_bfloat16(capabilities: dict = CAPABILITIES) -> bool | None:
    """Whether the processor has bfloat16 instructions (AVX512-BF16, AMX). With them, products take a half to a fifth of
    the time in float32; without them, up to four times as long. None if PyTorch does not report it."""
    names = ("avx512_bf16", "amx_bf16")
    return any(capabilities[name] for name in names) if all(name in capabilities for name in names) else None


# Packing gains nothing with other dtypes. oneDNN may be limited to fewer instructions than the processor has
# (ONEDNN_MAX_CPU_ISA), so that is checked too.
_BFLOAT16 = PACKS and multiplies_bfloat16() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
PACKED_DTYPES = {torch.float32, *([torch.bfloat16] if _BFLOAT16 else [])}


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b without gradients: (..., K), (M, K), (M) -> (..., M)."""
    if weight.is_mkldnn:
        rows = x.flatten(0, -2)
        missing = -len(rows) % SAMPLED_ROWS
        filled = nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows
        return _onednn(filled, weight, bias)[: len(rows)].view(*x.shape[:-1], -1)
    return _onednn(x, weight, bias) if _suits_onednn(x, weight) else nn.functional.linear(x, weight, bias)


def float32_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b with sums and results in float32, whatever the dtype of x and W: (N, K), (M, K), (M) -> (N, M).

    In bfloat16, a logit of 20 would be off by up to 0.06, and by a different amount in each batch.
    """
    if weight.is_cuda and weight.dtype != torch.float32:
        out = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return out if bias is None else out.add_(bias)
    return product(x.float(), float32_weight(weight), None if bias is None else bias.float())


def float32_weight(weight: Tensor) -> Tensor:
    """Return the weight for `float32_product`, converted once for several products. CUDA needs no conversion."""
    return weight if weight.is_cuda or weight.is_mkldnn else weight.float()


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer's forward, through `product` if that differs from PyTorch's linear."""
    if torch.is_autocast_enabled("cpu"):
        return nn.functional.linear(x, layer.weight, layer.bias)
    if not torch.is_grad_enabled():
        return product(x, weight_of(layer), layer.bias)
    if _suits_onednn(x, layer.weight):
        return Linear.apply(x, layer.weight, layer.bias)
    return nn.functional.linear(x, layer.weight, layer.bias)


def is_for_onednn(weight: Tensor) -> bool:
    """Whether oneDNN multiplies with this weight, for suitable rows."""
    return ONEDNN and weight.dtype == torch.float32 and _is_large(weight)


def _is_large(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.numel() >= SMALL


def _suits_onednn(x: Tensor, weight: Tensor) -> bool:
    if not is_for_onednn(weight) or x.dtype != torch.float32:  # before `rows`, which torch.compile would trace
        return False
    rows = x.numel() // x.shape[-1]
    return rows > 0 and rows % ROWS == 0


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@contextmanager
def packed_weights(model: nn.Module, head: nn.Linear) -> Iterator[int]:
    """Context in which products without gradients use large weights packed in oneDNN's layout.

    Otherwise oneDNN packs them for every product, which takes 40 % of the time with 16 rows and 15 % with 60. Packing
    needs a second copy, so a model of more than PACKED_BYTES is not packed.

    Yields a step: the number of rows should be a multiple of it, because other numbers are padded at every product.
    """
    heads = (head, getattr(head, "original_module", None))  # PEFT's wrapper contains the published head
    weights = {m: m.weight.detach() for m in model.modules() if type(m) is nn.Linear and m not in heads}
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
        yield SAMPLED_ROWS if large else 1
    finally:
        for layer in packed:
            del layer.packed


def weight_of(layer: nn.Linear) -> Tensor:
    """Return the weight for `product`: the layer's weight, or its packed copy."""
    packed = layer.__dict__.get("packed")
    return layer.weight if packed is None else packed


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
