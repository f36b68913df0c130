"""Products of linear layers: on a CPU through oneDNN, and those that read the same input, with their LoRA, in few.

PyTorch includes oneDNN in addition to MKL and uses it for all dtypes except float32.

On an AMD EPYC, products of the models' shapes are 10 to 25 % faster this way: x W^T and its gradient with respect to x.
The gradient with respect to W is as fast through MKL, so MKL computes it. On Intel processors MKL is at least as fast
(a training step takes 4 % less time), except with few rows and prepacked weights, as in generation. So `packed_weights`
is used on every x86 processor. On other processors, and without oneDNN, this is `torch.nn.functional.linear`.

oneDNN caches 0.3 MB of machine code for every shape until the process ends. If packs always had new sizes, the process
would grow without limit. So oneDNN multiplies only recurring numbers of rows: multiples of ROWS, to which packs are
padded (`width_step` in models/attention.py). MKL multiplies all other numbers of rows.

`place` moves the weights of layers that read the same input (q, k and v; gate and up) one after another in memory,
where they are one matrix without a copy. One product then gives all outputs, as columns of one tensor. LoRA's matrices
A read the same input and are placed likewise. Names, files and gradients stay those of separate layers; where weights
do not lie like this, each has its own product.
"""

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

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
GROUPS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")  # layers that read the same input


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


# Layers that read the same input


def place(model: nn.Module, bases: bool) -> None:
    """Place the weights of layers with the same input one after another, in place: those of adapters and, with `bases`,
    of the layers themselves. On a CPU, larger products gain nothing."""
    for module in model.modules():
        for names in GROUPS:
            layers: list[Any] = [getattr(module, name, None) for name in names]
            if not all(isinstance(layer, nn.Module) for layer in layers):
                continue
            inner = [getattr(layer, "base_layer", layer) for layer in layers]
            if bases and all(type(layer) is nn.Linear for layer in inner):
                _place([layer.weight for layer in inner])
                _place([layer.bias for layer in inner])
            factors = [layer.lora_A for layer in layers if hasattr(layer, "lora_A")]
            for adapter in factors[0] if factors else ():
                _place([of[adapter].weight for of in factors if adapter in of])


def _place(weights: Sequence[Any]) -> None:
    """Place weights, unless some are missing, sharded, quantised, or would start where kernels cannot read 16 bytes."""
    is_plain = all(type(w) is nn.Parameter and w.nbytes % 16 == 0 for w in weights)
    if is_plain and len({(w.dtype, w.shape[1:]) for w in weights}) == 1 and joined(weights) is None:
        whole = torch.cat([w.detach() for w in weights])
        for weight, part in zip(weights, whole.split([len(w) for w in weights]), strict=True):
            weight.data = part


def apart(model: nn.Module) -> dict[str, Tensor] | None:
    """Return a model's state dict for saving, with copies in CPU memory of the weights that `place` moved, because
    transformers would copy them all on the GPU; None if there are none."""
    state = model.state_dict()
    whole = {name: w for name, w in state.items() if type(w) is Tensor and w.layout is torch.strided}
    placed = {n: w.to("cpu", copy=True) for n, w in whole.items() if w.untyped_storage().nbytes() > w.nbytes}
    return state | placed if placed else None


def joined(weights: Sequence[Any]) -> Tensor | None:
    """Return weights (M_i, ...) that lie one after another in memory as one, (sum of M_i, ...); otherwise None."""
    first = end = weights[0]
    for weight in weights:
        if type(weight) not in (Tensor, nn.Parameter) or weight.layout is not torch.strided:
            return None
        start = weight.data_ptr(), weight.untyped_storage().data_ptr()
        if weight is not first and start != end:
            return None
        if not weight.is_contiguous() or (weight.dtype, weight.shape[1:]) != (first.dtype, first.shape[1:]):
            return None
        end = start[0] + weight.nbytes, start[1]
    return first.detach().as_strided((sum(map(len, weights)), *first.shape[1:]), first.stride())


class Part(NamedTuple):
    """A layer x W^T + b + s x A^T B^T (arXiv 2106.09685, eq. 3): W (M, K), b (M), A (r, K), B (M, r)."""

    weight: Tensor
    bias: Tensor | None
    A: Tensor | None = None
    B: Tensor | None = None
    scaling: float = 0.0


def project(layers: Sequence[nn.Module], x: Tensor) -> Sequence[Tensor]:
    """Return the outputs of layers that read x (..., K)."""
    parts = [part for layer in layers if (part := _part(layer, x)) is not None]
    whole = joined([part.weight for part in parts]) if len(parts) == len(layers) > 1 else None
    is_known = len(parts) == len(layers) and (whole is not None or any(part.A is not None for part in parts))
    return _together(parts, whole, x) if is_known else [layer(x) for layer in layers]


def _together(parts: Sequence[Part], whole: Tensor | None, x: Tensor) -> Sequence[Tensor]:
    """Return the outputs of `parts`, whose weights are one matrix unless it is None."""
    weights, biases, As, Bs, scalings = zip(*parts, strict=True)
    if torch.is_grad_enabled():
        return Projections.apply(x, whole, scalings, *weights, *biases, *As, *Bs)
    outputs, *_ = _outputs(x.flatten(0, -2), whole, weights, biases, As, Bs, scalings)
    return [y.view(*x.shape[:-1], y.shape[-1]) for y in outputs]


def fuse(policy: nn.Module) -> None:
    """Compute the adapters of a PEFT model's plain linear layers together with their layers, in place."""
    from peft.tuners.lora.layer import Linear

    for module in policy.modules():
        if type(module) is Linear and type(module.base_layer) is nn.Linear:
            module.forward = MethodType(_fused, module)


def _fused(self: Any, x: Tensor, *args: Any, **settings: Any) -> Tensor:
    part = None if args or settings else _part(self, x)
    if part is None or part.A is None:
        return type(self).forward(self, x, *args, **settings)
    return _together([part], None, x)[0]


def _part(layer: Any, x: Tensor) -> Part | None:
    """Return a layer's weights, or None if it computes something else."""
    own = layer.__dict__.get("forward")
    is_adapted = getattr(own, "__func__", None) is _fused
    base = layer.base_layer if is_adapted else layer
    if type(base) is not nn.Linear or torch.is_autocast_enabled(x.device.type) or x.dtype != base.weight.dtype:
        return None
    if any(m._forward_hooks or m._forward_pre_hooks for m in (layer, base)):  # they see every layer's own output
        return None
    weight = base.weight if torch.is_grad_enabled() else weight_of(base)
    if not is_adapted:
        return Part(weight, base.bias)
    active = [] if layer.disable_adapters else [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.merged or len(active) > 1:
        return None
    if not active:
        return Part(weight, base.bias)
    [name] = active
    A, B = layer.lora_A[name], layer.lora_B[name]
    drops = layer.training and not isinstance(layer.lora_dropout[name], nn.Identity)
    if drops or name in layer.lora_variant or B.bias is not None or A.weight.dtype != x.dtype:
        return None
    return Part(weight, base.bias, A.weight, B.weight, layer.scaling[name])


def _outputs(
    rows: Tensor, whole: Tensor | None, weights: Any, biases: Any, As: Any, Bs: Any, scalings: Any
) -> tuple[Any, Any, Any]:
    """Return the outputs for x (N, K), the A's of the adapters as one matrix, and their products with x."""
    bias = None if whole is None else joined(biases)
    if whole is not None and (bias is not None or biases == (None,) * len(biases)):
        outputs = product(rows, whole, bias).split([len(w) for w in weights], dim=1)
    else:
        outputs = [product(rows, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    given = [n for n, A in enumerate(As) if A is not None]
    if not given:
        return outputs, None, []
    stacked = joined([As[n] for n in given])
    stacked = torch.cat([As[n] for n in given]) if stacked is None else stacked
    inners = (rows @ stacked.t()).split([len(As[n]) for n in given], dim=1)
    for n, inner in zip(given, inners, strict=True):
        outputs[n].addmm_(inner, Bs[n].t(), alpha=scalings[n])
    return outputs, stacked, inners


class Projections(torch.autograd.Function):
    """Several `Part`s. Scalings and sums are part of the products."""

    @staticmethod
    def forward(ctx, x: Tensor, whole: Tensor | None, scalings: tuple[float, ...], *tensors: Tensor | None):
        rows, count = x.flatten(0, -2), len(scalings)
        weights, biases, As, Bs = (tensors[start : start + count] for start in range(0, 4 * count, count))
        outputs, stacked, inners = _outputs(rows, whole, weights, biases, As, Bs, scalings)
        ctx.scalings = scalings
        ctx.save_for_backward(rows if any(ctx.needs_input_grad[3:]) else None, *weights, *Bs, stacked, *inners)
        return tuple(y.view(*x.shape[:-1], y.shape[-1]) for y in outputs)

    @staticmethod
    def backward(ctx, *grad_outputs):
        (rows, *saved), scalings, count = ctx.saved_tensors, ctx.scalings, len(ctx.scalings)
        weights, Bs, (stacked, *inners) = saved[:count], saved[count : 2 * count], saved[2 * count :]
        needs = [ctx.needs_input_grad[start : start + count] for start in range(3, 3 + 2 * count, count)]
        grads = [grad.flatten(0, -2) for grad in grad_outputs]
        grad_weights = [grad.t() @ rows if need else None for grad, need in zip(grads, needs[0], strict=True)]
        grad_biases = [grad.sum(0) if need else None for grad, need in zip(grads, needs[1], strict=True)]
        grad_As: list[Tensor | None] = [None] * count
        grad_Bs: list[Tensor | None] = [None] * count
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = product(grads[0], weights[0].t())
            for g, weight in zip(grads[1:], weights[1:], strict=True):
                grad_x = grad_x.add_(product(g, weight.t())) if is_for_onednn(weight) else grad_x.addmm_(g, weight)
        if inners:
            ranks, given = [inner.shape[1] for inner in inners], [n for n in range(count) if Bs[n] is not None]
            grad_inner = grads[0].new_empty(len(grads[0]), sum(ranks))
            for n, inner, grad in zip(given, inners, grad_inner.split(ranks, dim=1), strict=True):
                torch.addmm(grad, grads[n], Bs[n], beta=0, alpha=scalings[n], out=grad)
                grad_Bs[n] = torch.addmm(Bs[n], grads[n].t(), inner, beta=0, alpha=scalings[n])
            if rows is not None:
                for n, grad_A in zip(given, (grad_inner.t() @ rows).split(ranks), strict=True):
                    grad_As[n] = grad_A
            if grad_x is not None:
                grad_x.addmm_(grad_inner, stacked)
        grad_x = None if grad_x is None else grad_x.view(*grad_outputs[0].shape[:-1], grad_x.shape[-1])
        return grad_x, None, None, *grad_weights, *grad_biases, *grad_As, *grad_Bs
