"""Linear layers that read the same input (q, k and v; gate and up), with their LoRA, in few products.

`place` moves the weights of such layers one after another in memory, where they are one matrix without a copy. One
product then gives all outputs, as columns of one tensor. LoRA's matrices A read the same input and are placed likewise.
Names, files and gradients stay those of separate layers; where weights do not lie like this, each has its own product.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from posttrain.models.matmul import is_for_onednn, product, weight_of

GROUPS = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


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
