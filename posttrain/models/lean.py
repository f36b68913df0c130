"""Leaner forwards with the same values: linear layers, and the LLaMA kin's attention, norms, MLPs and last layer.

Plain autograd keeps every intermediate of `weight * (x * rsqrt(mean(x^2) + eps))` and of `silu(gate) * up`. Here the
norm keeps its input and one number a row, the MLP its gate and up projections; the rest is computed again, which costs
less than writing it to memory and reading it back. Queries and keys are rotated without a copy of their swapped halves.
After the last layer's attention only the tokens whose hidden states are read go on: a prompt's others have given their
keys and values, and nothing looks at them again. Linear layers of every family multiply as models/matmul.py does.
`lean` gives a model's own modules these forwards: weights, names and files stay as transformers has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from posttrain.models.attention import Visible, packed_attention
from posttrain.models.matmul import linear, product

# Modules whose transformers forward is exactly what is computed here (proven by tests/test_equivalence.py).
NORMS = frozenset({"LlamaRMSNorm", "MistralRMSNorm", "Phi3RMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm"})
SILU = type(ACT2FN["silu"])
MLPS = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP"})
LAYERS = frozenset({"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer"})
# And where each kind of attention has the window beyond which a query sees no keys.
WINDOWS: dict[str, Callable[[Any], int | None]] = {
    "LlamaAttention": lambda attention: None,
    "MistralAttention": lambda attention: attention.config.sliding_window,
    "Qwen2Attention": lambda attention: attention.sliding_window,
    "Qwen3Attention": lambda attention: attention.sliding_window,
}

BLOCK_ELEMENTS = 1 << 19  # of a tensor: 2 MB in float32; those of one operation stay in the cache for the next


@dataclass(frozen=True, slots=True)
class Kernels:
    """norm(x, weight, eps) and swiglu(gate, up), with gradients."""

    norm: Callable[[Tensor, Tensor, float], Tensor]
    swiglu: Callable[[Tensor, Tensor], Tensor]


def lean(model: PreTrainedModel, kernels: Kernels | None = None) -> None:
    """Give the model's linear layers, attention, norms, gated MLPs and last layer these forwards, in place.

    `kernels` are other functions with the same values, such as Liger's for GPUs.
    """
    kernels = kernels or Kernels(rms_norm, swiglu)

    def norm(self, hidden_states: Tensor) -> Tensor:
        return kernels.norm(hidden_states, self.weight, self.variance_epsilon)

    def mlp(self, x: Tensor) -> Tensor:
        gate, up, down = self.gate_proj(x), self.up_proj(x), self.down_proj
        if kernels.swiglu is swiglu and _is_trained(down) and not torch.is_autocast_enabled(x.device.type):
            return GatedLinear.apply(gate, up, down.weight, down.bias)
        return down(kernels.swiglu(gate, up))

    layers = [module for module in model.modules() if type(module).__name__ in LAYERS]
    if layers:
        layers[-1].forward = MethodType(_last_layer, layers[-1])
    for module in model.modules():
        name = type(module).__name__
        if type(module) is nn.Linear and module.weight.device.type == "cpu":
            module.forward = MethodType(linear, module)
        elif name in WINDOWS:
            module.forward = MethodType(_attention, module)
        elif name in NORMS:
            module.forward = MethodType(norm, module)
        elif name in MLPS and type(module.act_fn) is SILU:
            module.forward = MethodType(mlp, module)


def _is_trained(layer: nn.Module) -> bool:
    """Whether it is a linear layer, no adapter around one, whose weight is to get a gradient."""
    return type(layer) is nn.Linear and layer.weight.requires_grad and torch.is_grad_enabled()


def _last_layer(self, hidden_states: Tensor, packed: Visible | None = None, **settings) -> Tensor:
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), packed=packed, **settings)
    if packed is not None:
        hidden_states, attended = hidden_states[:, packed.read], attended[:, packed.read]
    hidden_states = hidden_states + attended
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def _attention(self, hidden_states: Tensor, position_embeddings, packed: Visible | None = None, **settings):
    if packed is None:
        return type(self).forward(self, hidden_states, position_embeddings=position_embeddings, **settings)
    heads = (*hidden_states.shape[:-1], -1, self.head_dim)
    query, key, value = (layer(hidden_states).view(heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
    if hasattr(self, "q_norm"):
        query, key = self.q_norm(query), self.k_norm(key)
    cos, sin = (turn.unsqueeze(-2) for turn in position_embeddings)
    query, key = rotated(query, cos, sin), rotated(key, cos, sin)
    out, _ = packed_attention(
        self,
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attention_mask=None,
        scaling=self.scaling,
        dropout=self.attention_dropout if self.training else 0.0,
        sliding_window=WINDOWS[type(self).__name__](self),
        packed=packed,
    )
    return self.o_proj(out.flatten(-2)), None


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x turned by its positions' angles: x cos + (-second half of x, first half) sin. arXiv 2104.09864, eq. 34.

    x (..., T, H, d), cos and sin (..., T, 1, d), whose second halves repeat the first.
    """
    return Rotated.apply(x, cos, sin) if torch.is_grad_enabled() else _rotated(x, cos, sin, 1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """Turned by the angles, or with sign -1 back, which is its gradient. Rounded as in transformers, bit by bit."""
    (first, second), (sin, _) = x.chunk(2, -1), sin.chunk(2, -1)
    y = x * cos
    y_first, y_second = y.chunk(2, -1)
    y_first.sub_(second * sin, alpha=sign)
    y_second.add_(first * sin, alpha=sign)
    return y


class Rotated(torch.autograd.Function):
    """`rotated` with gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, *grad_outputs):
        cos, sin = ctx.saved_tensors
        return _rotated(grad_outputs[0], cos, sin, -1), None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension, in float32 inside. arXiv 1910.07467, eq. 4."""
    return RMSNorm.apply(x, weight, eps) if torch.is_grad_enabled() else _rms_norm(x, weight, eps)[0]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm, and 1 / sqrt(mean(x^2) + eps)."""
    wide = x.float()
    rstd = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    unit = (wide * rstd).to(x.dtype)
    return (unit.mul_(weight) if unit.dtype == weight.dtype else unit * weight), rstd


class RMSNorm(torch.autograd.Function):
    """`rms_norm` with gradients."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, rstd = _rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    def backward(ctx, *grad_outputs):
        x, weight, rstd = ctx.saved_tensors
        wide, grad = x.float(), grad_outputs[0].float()
        along = grad * wide
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (rstd.flatten(0, -2).t() @ along.flatten(0, -2)).squeeze(0).to(weight.dtype)
        back = torch.linalg.vecdot(along, weight.float())[..., None] * rstd.pow(3)
        grad_x = (grad * weight).mul_(rstd).addcmul_(wide, back, value=-1 / x.shape[-1])
        return grad_x.to(x.dtype), grad_weight, None


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. arXiv 2002.05202, eq. 5."""
    return SwiGLU.apply(gate, up) if torch.is_grad_enabled() else _swiglu(gate, up)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    y = torch.empty_like(gate, memory_format=torch.contiguous_format)  # for blocks that are views of it
    for gate_rows, up_rows, out in _blocks(gate, up, y):
        torch.ops.aten.silu.out(gate_rows, out=out).mul_(up_rows)
    return y


class SwiGLU(torch.autograd.Function):
    """`swiglu` with gradients."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _swiglu(gate, up)

    @staticmethod
    def backward(ctx, *grad_outputs):
        return _swiglu_gradients(*ctx.saved_tensors, *grad_outputs)


def _swiglu_gradients(gate: Tensor, up: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor]:
    grad_gate, grad_up = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
    for gate_rows, up_rows, grad, out_gate, out_up in _blocks(gate, up, grad_y, grad_gate, grad_up):
        _grad_gate(gate_rows, up_rows, grad, out_gate)
        torch.ops.aten.silu.out(gate_rows, out=out_up).mul_(grad)
    return grad_gate, grad_up


def _swiglu_gradients_again(gate: Tensor, up: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients, the one by `up` in the place of `grad_y`, and y again, in one pass."""
    grad_gate, y = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
    for gate_rows, up_rows, grad, out_gate, out in _blocks(gate, up, grad_y, grad_gate, y):
        _grad_gate(gate_rows, up_rows, grad, out_gate)
        grad.mul_(torch.ops.aten.silu.out(gate_rows, out=out))
        out.mul_(up_rows)
    return grad_gate, grad_y, y


def _grad_gate(gate: Tensor, up: Tensor, grad_y: Tensor, out: Tensor) -> None:
    torch.mul(grad_y, up, out=out)
    torch.ops.aten.silu_backward.grad_input(out, gate, grad_input=out)


class GatedLinear(torch.autograd.Function):
    """(silu(gate) * up) W^T + b, keeping gate and up: what W multiplies is made again for its gradient."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return product(_swiglu(gate, up), weight, bias)

    @staticmethod
    def backward(ctx, *grad_outputs):
        [grad] = grad_outputs
        gate, up, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_gate, grad_up, y = _swiglu_gradients_again(gate, up, product(rows, weight.t()).view_as(up))
        grad_weight = rows.t() @ y.flatten(0, -2)
        return grad_gate, grad_up, grad_weight, rows.sum(0) if ctx.needs_input_grad[3] else None


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors' rows together, on a CPU a block at a time: what one operation leaves the next finds in the cache."""
    rows = [tensor.flatten(0, -2) for tensor in tensors]
    size = BLOCK_ELEMENTS // rows[0].shape[1] if rows[0].device.type == "cpu" else len(rows[0])
    return zip(*(tensor.split(max(1, size)) for tensor in rows), strict=True)
