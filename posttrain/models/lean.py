"""Leaner forwards with the same values: linear layers, and attention, norms, MLPs and last layer of LLaMA variants.

Norms, rotations and gated MLPs are those of elementwise.py, or other kernels with the same values. After the last
layer's attention only the tokens whose hidden states are read continue: the other tokens have provided their keys and
values and are not needed any more. Linear layers of every family use models/matmul.py. `lean` sets these forwards on
a model's modules: weights, names and files stay those of transformers.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from posttrain.models.attention import Visible, packed_attention
from posttrain.models.elementwise import TORCH, Kernels
from posttrain.models.matmul import linear
from posttrain.models.recurrent import fork_states

# Modules whose transformers forward equals the one here (proven by tests/test_equivalence.py).
PLAIN = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "SmolLM3")
NORMS = frozenset(f"{name}RMSNorm" for name in (*PLAIN, "Glm", "Glm4", "Granite", "Olmoe", "Phi3"))
SILU = type(ACT2FN["silu"])
MLPS = frozenset(f"{name}MLP" for name in (*PLAIN, "Cohere", "Cohere2", "Granite", "Olmo2", "Olmo3", "Olmoe"))
LAYERS = frozenset(f"{name}DecoderLayer" for name in (*PLAIN, "Glm", "Olmoe"))
# The attribute with the sliding window of each attention class.
WINDOWS: dict[str, Callable[[Any], int | None]] = {
    **dict.fromkeys(("GraniteAttention", "LlamaAttention", "Qwen2MoeAttention"), lambda one: None),
    **dict.fromkeys(("Qwen2Attention", "Qwen3Attention", "Qwen3MoeAttention"), lambda one: one.sliding_window),
    **dict.fromkeys(("MistralAttention", "MixtralAttention"), lambda one: getattr(one.config, "sliding_window", None)),
}


def lean(model: PreTrainedModel, kernels: Kernels = TORCH) -> None:
    """Set these forwards on the model's linear layers, attention, norms, gated MLPs and last layer, in place.

    `kernels` are the element-wise chains.
    """

    def norm(self, hidden_states: Tensor) -> Tensor:
        return kernels.norm(hidden_states, self.weight, self.variance_epsilon)

    def mlp(self, x: Tensor) -> Tensor:
        gate, up, down = self.gate_proj(x), self.up_proj(x), self.down_proj
        if kernels.gated_linear is not None and _is_trained(down) and not torch.is_autocast_enabled(x.device.type):
            return kernels.gated_linear(gate, up, down.weight, down.bias)
        return down(kernels.swiglu(gate, up))

    def attention(self, hidden_states: Tensor, position_embeddings, packed: Visible | None = None, **settings):
        if packed is None:
            return type(self).forward(self, hidden_states, position_embeddings=position_embeddings, **settings)
        heads = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (layer(hidden_states).view(heads) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            query, key = self.q_norm(query), self.k_norm(key)
        cos, sin = (turn.unsqueeze(-2) for turn in position_embeddings)
        query, key = kernels.rotated(query, cos, sin), kernels.rotated(key, cos, sin)
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

    layers = [module for module in model.modules() if type(module).__name__ in LAYERS]
    if layers:
        layers[-1].forward = MethodType(_last_layer, layers[-1])
    for module in model.modules():
        name = type(module).__name__
        if fork_states(module):
            continue
        if type(module) is nn.Linear and module.weight.device.type == "cpu":
            module.forward = MethodType(linear, module)
        elif name in WINDOWS:
            module.forward = MethodType(attention, module)
        elif name in NORMS:
            module.forward = MethodType(norm, module)
        elif name in MLPS and type(module.act_fn) is SILU:
            module.forward = MethodType(mlp, module)


def _is_trained(layer: nn.Module) -> bool:
    """Whether it is a linear layer (not an adapter around one) whose weight gets a gradient."""
    return type(layer) is nn.Linear and layer.weight.requires_grad and torch.is_grad_enabled()


def _last_layer(self, hidden_states: Tensor, packed: Visible | None = None, **settings) -> Tensor:
    attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), packed=packed, **settings)
    if packed is not None:
        hidden_states, attended = hidden_states[:, packed.read], attended[:, packed.read]
    hidden_states = hidden_states + attended
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
