"""x W^T on a CPU through oneDNN, which PyTorch has besides MKL and uses itself for dtypes other than float32.

On an AMD EPYC the models' shapes run 10 to 25 % faster this way (x W^T and its gradient by x; the gradient by W is as
fast through MKL and stays there). On Intel's processors MKL is as fast or faster (a training step by 4 %), except with
few rows and weights packed beforehand, as in generation: `packed_weights` is for every x86 processor. Elsewhere, and
if PyTorch has no oneDNN, this is `torch.nn.functional.linear`.

oneDNN caches 0.3 MB of machine code for every shape until the process ends: with ever new sizes of packs, the process
would grow without limit. So it only gets recurring numbers of rows, multiples of ROWS, to which packs are padded
(`width_step` in models/attention.py); MKL multiplies all others.
"""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# These are private to torch.compile's compiler, so their existence is checked.
PACKS = (
    torch.backends.mkldnn.is_available()
    and platform.machine() in ("x86_64", "AMD64")
    and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
)
# By the processor's name, not by measurement: two runs on one machine must use the same kernels.
CAPABILITIES = getattr(torch.cpu, "get_capabilities", dict)()
ONEDNN = PACKS and "Intel" not in CAPABILITIES.get("cpu_name", "")

# oneDNN would cache the code of 1,024 shapes. It takes a millisecond to generate, and a pack has about 16 shapes.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")

ROWS = 16
SAMPLED_ROWS = 4  # the same with packed weights, since sampled rows finish one by one
SMALL = 1 << 16  # size of a weight below which oneDNN's overhead exceeds its gain
PACKED_BYTES = 1 << 30  # of weights that may be in memory twice


def multiplies_bfloat16(capabilities: dict = CAPABILITIES) -> bool | None:
    """Whether the processor has instructions for it (AVX512-BF16, AMX): products then take a half to a fifth of
    float32's time, otherwise up to four times as long. None if PyTorch does not report it."""
    names = ("avx512_bf16", "amx_bf16")
    return any(capabilities[name] for name in names) if all(name in capabilities for name in names) else None


# Other dtypes gain nothing. oneDNN may use less than the processor has (ONEDNN_MAX_CPU_ISA), so that is checked too.
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

    A logit of 20 in bfloat16 is off by up to 0.06, and differently in other batches.
    """
    if weight.is_cuda and weight.dtype != torch.float32:
        out = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return out if bias is None else out.add_(bias)
    return product(x.float(), float32_weight(weight), None if bias is None else bias.float())


def float32_weight(weight: Tensor) -> Tensor:
    """The weight for `float32_product`, converted once for several products. Only CUDA's product takes two dtypes."""
    return weight if weight.is_cuda or weight.is_mkldnn else weight.float()


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """The layer's forward, through `product` if that differs."""
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

    Otherwise oneDNN packs them for every product: 40 % of the time with 16 rows, 15 % with 60. The cost is a second
    copy, so a model of more than PACKED_BYTES is not packed.

    Yields the number of which the number of rows should be a multiple: other rows are padded at every product.
    """
    heads = (head, getattr(head, "original_module", None))  # PEFT's wrapper has the published one in it
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
    """The weight for `product`: the layer's weight, or its packed copy."""
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
