"""Leaner forwards with the same values: linear layers, and attention, norms, MLPs and last layer of LLaMA variants.

After the last layer's attention, only tokens whose hidden states are read are processed further: the other tokens have
provided their keys and values and are no longer needed. Linear layers of every family use models/matmul.py. `lean` sets
these forwards on a model's modules; weights, names and files are unchanged.

Norms, rotations and gated MLPs are element-wise chains with gradients. Plain autograd saves every intermediate of
`weight * (x * rsqrt(mean(x^2) + eps))` and of `silu(gate) * up`. Here the norm saves its input and one number per row,
and the MLP saves its gate and up projections. Everything else is recomputed, which is faster than writing it to memory
and reading it back. Queries and keys are rotated without copying their halves. The operations themselves, without
autograd, are implemented below in PyTorch, and under the same names in Triton in kernels/layers.py.

Some layers of hybrid models (gated delta rule, arXiv 2412.06464, after a short convolution) have a recurrent state
instead of keys and values. The state is forked where a tree branches: transformers' own forward is called for every
node of a tree, and starts with the final states of the node's parent. Gradients flow back through these states.
Siblings start with the same states and never see each other.

Gradient checkpointing: a layer saves only its input, and is recomputed in backward.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.models.attention import How, PackedMask, Visible
from posttrain.models.families import FAMILIES, UNKNOWN, base_of
from posttrain.models.matmul import linear, product, project

BLOCK_ELEMENTS = 1 << 19  # elements of a block: 2 MB in float32, still in the cache for the next operation


@dataclass(frozen=True, slots=True)
class Kernels:
    """The element-wise chains with gradients, as a model's modules call them.

    norm(x, weight, eps), swiglu(gate, up), rotated(x, cos, sin) and gated_linear(gate, up, weight, bias). The last one
    computes (silu(gate) * up) W^T + b and saves less than swiglu and a linear layer; None if it is not available.
    """

    norm: Callable[[Tensor, Tensor, float], Tensor]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    rotated: Callable[[Tensor, Tensor, Tensor], Tensor]
    gated_linear: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor] | None

    @classmethod
    def of(cls, operations: Any) -> Kernels:
        """Return the chains made of a module's `rms_norm`, `swiglu`, `rotate` and their gradients."""

        def chain(function: Any, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return lambda *inputs: function.apply(operations, *inputs) if torch.is_grad_enabled() else plain(*inputs)

        return cls(
            norm=chain(RMSNorm, lambda x, weight, eps: operations.rms_norm(x, weight, eps)[0]),
            swiglu=chain(SwiGLU, operations.swiglu),
            rotated=chain(Rotated, lambda x, cos, sin: operations.rotate(x, cos, sin, 1)),
            gated_linear=partial(GatedLinear.apply, operations),
        )


class RMSNorm(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension, computed in float32. arXiv 1910.07467, eq. 4."""

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
    """silu(gate) * up. arXiv 2002.05202, eq. 5."""

    @staticmethod
    def forward(ctx, operations: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.operations = operations
        return operations.swiglu(gate, up)

    @staticmethod
    def backward(ctx, *grad_outputs):
        grad_gate, grad_up, _ = ctx.operations.swiglu_gradients(*ctx.saved_tensors, *grad_outputs, again=False)
        return None, grad_gate, grad_up


class Rotated(torch.autograd.Function):
    """Rotate x by the angles of its positions: x cos + (-second half of x, first half) sin. arXiv 2104.09864, eq. 34.

    x (..., T, H, d), cos and sin (..., T, 1, d), whose second halves repeat the first.
    """

    @staticmethod
    def forward(ctx, operations: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.operations = operations
        return operations.rotate(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, *grad_outputs):
        return None, ctx.operations.rotate(*grad_outputs, *ctx.saved_tensors, -1), None, None


class GatedLinear(torch.autograd.Function):
    """(silu(gate) * up) W^T + b. It saves gate and up; the input of W is recomputed for the gradient of W."""

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
        grad_gate, grad_up, y = ctx.operations.swiglu_gradients(gate, up, grad_y, again=True)
        grad_weight = rows.t() @ y.flatten(0, -2)
        return None, grad_gate, grad_up, grad_weight, rows.sum(0) if ctx.needs_input_grad[4] else None


# --- in PyTorch -------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm, and 1 / sqrt(mean(x^2) + eps) in float32."""
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
    """Rotate x by the angles, or back if `sign` is -1 (the gradient). Equals transformers bit for bit."""
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


def swiglu_gradients(gate: Tensor, up: Tensor, grad_y: Tensor, again: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients with respect to gate and up and, if `again`, the recomputed y, in one pass. If `again`, the
    gradient with respect to up overwrites `grad_y`."""
    grad_gate, other = (torch.empty_like(gate, memory_format=torch.contiguous_format) for _ in range(2))
    for gate_rows, up_rows, grad, out_gate, out in _blocks(gate, up, grad_y, grad_gate, other):
        torch.mul(grad, up_rows, out=out_gate)
        torch.ops.aten.silu_backward.grad_input(out_gate, gate_rows, grad_input=out_gate)
        torch.ops.aten.silu.out(gate_rows, out=out)
        if again:
            grad.mul_(out)
            out.mul_(up_rows)
        else:
            out.mul_(grad)
    return (grad_gate, grad_y, other) if again else (grad_gate, other, None)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors' rows: on a CPU one block at a time, so that the next operation finds them in the cache."""
    rows = [tensor.flatten(0, -2) for tensor in tensors]
    has_cache = rows[0].device.type == "cpu" and not isinstance(rows[0], FakeTensor)  # plans use tensors without data
    size = BLOCK_ELEMENTS // rows[0].shape[1] if has_cache else len(rows[0])
    return zip(*(tensor.split(max(1, size)) for tensor in rows), strict=True)


TORCH = Kernels.of(sys.modules[__name__])

# Modules whose transformers forward equals the one here (proven by tests/test_equivalence.py).
PLAIN = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "SmolLM3")
NORMS = frozenset(f"{name}RMSNorm" for name in (*PLAIN, "Glm", "Glm4", "Granite", "Olmoe", "Phi3"))
# Layers with a recurrent state instead of keys and values.
RECURRENT = frozenset({"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"})
SILU = type(ACT2FN["silu"])
MLPS = frozenset(f"{name}MLP" for name in (*PLAIN, "Cohere", "Cohere2", "Granite", "Olmo2", "Olmo3", "Olmoe"))
LAYERS = frozenset(f"{name}DecoderLayer" for name in (*PLAIN, "Glm", "Olmoe"))
# For each attention class, a function that returns its sliding window.
WINDOWS: dict[str, Callable[[Any], int | None]] = {
    **dict.fromkeys(("GraniteAttention", "LlamaAttention", "Qwen2MoeAttention"), lambda m: None),
    **dict.fromkeys(("Qwen2Attention", "Qwen3Attention", "Qwen3MoeAttention"), lambda m: m.sliding_window),
    **dict.fromkeys(("MistralAttention", "MixtralAttention"), lambda m: getattr(m.config, "sliding_window", None)),
}


def lean(model: PreTrainedModel, kernels: Kernels = TORCH) -> None:
    """Set these forwards on the model's linear layers, attention, norms, gated MLPs and last layer, in place.

    `kernels` are the element-wise chains.
    """

    def norm(self, hidden_states: Tensor) -> Tensor:
        return kernels.norm(hidden_states, self.weight, self.variance_epsilon)

    def mlp(self, x: Tensor) -> Tensor:
        (gate, up), down = project((self.gate_proj, self.up_proj), x), self.down_proj
        # A linear layer without an adapter whose weight receives a gradient.
        is_trained = type(down) is nn.Linear and down.weight.requires_grad and torch.is_grad_enabled()
        if kernels.gated_linear is not None and is_trained and not torch.is_autocast_enabled(x.device.type):
            return kernels.gated_linear(gate, up, down.weight, down.bias)
        return down(kernels.swiglu(gate, up))

    def attention(self, hidden_states: Tensor, position_embeddings, packed: Visible | None = None, **settings):
        if packed is None:
            return type(self).forward(self, hidden_states, position_embeddings=position_embeddings, **settings)
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (y.view(heads) for y in project((self.q_proj, self.k_proj, self.v_proj), hidden_states))
        dropout, window = self.attention_dropout if self.training else 0.0, WINDOWS[type(self).__name__](self)
        how, is_normed = How(self.scaling, dropout, window, softcap=None), hasattr(self, "q_norm")
        if packed.attend_new is not None:
            norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.variance_epsilon) if is_normed else None
            return self.o_proj(packed.attend_new(self, query, key, value, *position_embeddings, norms, how)), None
        if is_normed:
            query, key = self.q_norm(query), self.k_norm(key)
        elif torch.is_grad_enabled():
            value = value.contiguous()  # saved for backward, part of a larger tensor would keep all of it in memory
        cos, sin = (turn.unsqueeze(-2) for turn in position_embeddings)
        query, key = kernels.rotated(query, cos, sin), kernels.rotated(key, cos, sin)
        out = packed.attend(self, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), how)
        return self.o_proj(out.transpose(1, 2).flatten(-2)), None

    layers = [module for module in model.modules() if type(module).__name__ in LAYERS]
    if layers:
        layers[-1].forward = MethodType(_last_layer, layers[-1])
    for module in model.modules():
        name = type(module).__name__
        if name in RECURRENT:
            module.forward = MethodType(_forked, module)
        elif type(module) is nn.Linear and module.weight.device.type == "cpu":
            module.forward = MethodType(linear, module)
        elif name in WINDOWS:
            module.forward = MethodType(attention, module)
        elif name in NORMS:
            module.forward = MethodType(norm, module)
        elif name in MLPS and type(module.act_fn) is SILU:
            module.forward = MethodType(mlp, module)


def _last_layer(self, hidden_states: Tensor, packed: Visible | None = None, **settings) -> Tensor:
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), packed=packed, **settings)
    if packed is not None:
        hidden_states, attended = hidden_states[:, packed.read], attended[:, packed.read]
    hidden_states = hidden_states + attended
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def _forked(self, hidden_states: Tensor, *args, packed: Visible | None = None, **settings) -> Tensor:
    """The forward of a layer with a recurrent state, one node at a time."""
    if packed is None:
        return type(self).forward(self, hidden_states, *args, **settings)
    assert isinstance(packed, PackedMask), "only transformers' engine has recurrent states"
    ends: dict[int, _States] = {}
    parts = []
    for node in packed.nodes:
        states = ends[node.start] = copy(ends[node.before[-1].start]) if node.before else _States()
        parts.append(type(self).forward(self, hidden_states[:, node.start : node.stop], cache_params=states))
    return torch.cat(parts, dim=1)


class _States:
    """The cache interface of a transformers layer. It provides a node's initial states and receives its final states.

    `conv`: the last inputs of the convolution (1, channels, width - 1). `recurrent`: the state of the delta rule.
    """

    conv: Tensor | None = None
    recurrent: Tensor | None = None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        return True  # states are never changed in place: siblings start with them too

    # transformers 5.17 reads the states from cache.layers[layer_idx] instead.

    record_past = True

    def has_previous_state(self, layer_idx: int, state_idx: int = 0) -> bool:
        return self.recurrent is not None

    @property
    def layers(self) -> Mapping[int, _States]:
        return defaultdict(lambda: self)

    @property
    def conv_states(self) -> list[Tensor | None]:
        return [self.conv]

    @property
    def recurrent_states(self) -> list[Tensor | None]:
        return [self.recurrent]

    def update_conv_state(self, inputs: Tensor, layer_idx: int, conv_kernel_size: int, **_unused) -> Tensor:
        """Return the inputs (1, channels, T), preceded by the earlier inputs that the convolution also sees."""
        seen = inputs if self.conv is None else torch.cat([self.conv, inputs], dim=-1)
        # The convolution pads the first inputs with zeros itself.
        whole = nn.functional.pad(inputs, (conv_kernel_size - 1, 0)) if self.conv is None else seen
        self.conv = whole[..., whole.shape[-1] - conv_kernel_size + 1 :]
        return seen

    def update_recurrent_state(self, state: Tensor, layer_idx: int, **_unused) -> Tensor:
        self.recurrent = state
        return state


def is_stochastic(model: nn.Module) -> bool:
    """Whether the model may sample random numbers in training mode: dropout in its settings or in an adapter, routers,
    or a family that is not known."""
    config = base_of(model).config
    text, family = config.get_text_config(), FAMILIES.get(config.model_type, UNKNOWN)
    rates = [rate for name, rate in text.to_dict().items() if "drop" in name and isinstance(rate, int | float)]
    rates += [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    return not family.packed or hasattr(text, "num_experts_per_tok") or any(rate > 0 for rate in rates)


def enable_gradient_checkpointing(policy: nn.Module) -> None:
    """Recompute each layer's activations in backward, in training and evaluation mode.

    transformers' own switch needs training mode. That would also turn on the dropout that some layers apply themselves
    (OPT, Falcon), but the recipe decides about dropout.
    """
    has_dropout = is_stochastic(policy)
    for layer in base_of(policy).modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.forward = partial(_checkpointed, layer, layer.forward, has_dropout)


def _checkpointed(
    layer: nn.Module, forward: Callable[..., Any], has_dropout: bool, *inputs: Any, **settings: Any
) -> Any:
    """Call the layer's forward, to be recomputed in backward. The states of random generators are saved for dropout
    only, which is on in training mode: on a GPU reading them waits for the device, and a CUDA graph cannot."""
    if not torch.is_grad_enabled():
        return forward(*inputs, **settings)
    kept = has_dropout and layer.training
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=kept, **settings)
