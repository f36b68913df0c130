"""Activation memory, simulated: forward and backward passes of a few layers on fake tensors.

The simulated model runs in torch's FakeTensorMode, which allocates nothing, with adapters, dropout and checkpointing.
It has the first layer, one layer of every type, and the last, which may be computed for some rows only. The saved bytes
are counted, and each other layer is assumed to save as much as the simulated layer of its type.
"""

import weakref
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from posttrain.batch import Pack
from posttrain.config import ModelConfig, RunConfig
from posttrain.models.attention import NAME as PACKED
from posttrain.models.attention import How, PackedMask, suits_paths
from posttrain.models.families import FAMILIES, UNKNOWN, backbone_of, base_of, is_adapted
from posttrain.models.lean import enable_gradient_checkpointing, lean
from posttrain.models.load import grow, load_config, new_token_ids
from posttrain.models.lora import add_lora
from posttrain.models.matmul import fuse


def empty_model(
    config: RunConfig, model: ModelConfig, dtype: torch.dtype = torch.float32, layers: int | None = None
) -> nn.Module:
    """The model with its adapters on the meta device: shapes without memory. `layers`: number of layers; None: all."""
    reward = config.method.head == "reward"
    auto = AutoModelForSequenceClassification if reward else AutoModelForCausalLM
    settings = load_config(model)
    if reward:
        settings.num_labels = 1
    if layers is not None:
        settings.num_hidden_layers = layers
        if getattr(settings, "layer_types", None):
            settings.layer_types = [*settings.layer_types[: layers - 1], settings.layer_types[-1]]
    with torch.device("meta"):
        empty = auto.from_config(settings, dtype=dtype, trust_remote_code=model.trust_remote_code)
        grow(empty, model)
        if model.lora is None:
            return empty
        return add_lora(empty, model.lora, config.method.head, tokens=new_token_ids(model))


def activations(
    config: RunConfig, model: ModelConfig, pack: Pack, dtype: torch.dtype, checkpointing: bool, on_gpu: bool
) -> tuple[int, int]:
    """Bytes that the backbone saves for a pack's backward pass, and the peak of its temporary memory beyond them."""
    settings = load_config(model)
    if not FAMILIES.get(settings.model_type, UNKNOWN).packed or model.attention not in ("auto", "packed"):
        return _by_formula(settings, pack, dtype, checkpointing), 0
    depth, masks = settings.num_hidden_layers, _OneKernel if on_gpu else PackedMask
    types = getattr(settings, "layer_types", None) or [""] * depth
    inner = {kind: 1 + types[1:].index(kind) for kind in types[1 : depth - 1]}  # the first of each type after layer 0
    layers = min(depth, 2 + max(inner.values(), default=1))
    policy = empty_model(config, model, dtype, layers)
    for parameter in policy.parameters():  # on the meta device PEFT leaves those of adapters in float32
        parameter.data = parameter.data.to(dtype)
    policy.train(config.method.dropout)
    mask = masks(pack, pack.last_S if config.method.head == "reward" else pack.read_U)
    mask.masks(None, dtype)
    _ = mask.paths  # made of tensors, so not while they are simulated
    kept, working, saved = _simulate(policy, pack, mask, checkpointing)
    return kept + sum(saved[inner[kind]] for kind in types[layers - 1 : depth - 1]), working


class _OneKernel(PackedMask):
    """Attention as on a GPU: one kernel for the complete pack saves no attention weights, whatever the mask."""

    def masks(self, window: int | None, dtype: torch.dtype) -> list[Tensor | None]:
        return []

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        fits = suits_paths(query.shape[-1], how.softcap) and query.dtype != torch.float32
        if fits and self.paths is not None:
            key, value = (self.paths.gathered(x).transpose(0, 1)[None] for x in (key, value))
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _simulate(policy: nn.Module, pack: Pack, mask: PackedMask, checkpointing: bool) -> tuple[int, int, list[int]]:
    """Simulate the forward and backward pass of a model. Return both results of `activations`, and the bytes that each
    layer except the last saves."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        _on_cpu(policy)
        base = base_of(policy)
        base.set_attn_implementation(PACKED)
        lean(base)
        if is_adapted(policy):
            fuse(policy)
        if checkpointing:
            enable_gradient_checkpointing(policy)
        for module in policy.modules():
            if hasattr(module, "layerdrop"):  # older transformers' OPT samples a number per layer and reads it
                module.training = False
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_forget)
        inputs: dict[str, Any] = {"input_ids": fake.from_tensor(pack.tokens_T)[None], "use_cache": False}
        inputs |= {"position_ids": fake.from_tensor(pack.position_T)[None], "packed": mask}
        before: list[int] = []  # bytes of live tensors before each layer
        with _Live(policy) as live:
            for layer in base.modules():
                if isinstance(layer, GradientCheckpointingLayer):
                    layer.register_forward_pre_hook(lambda *_: before.append(live.now))
            hidden = backbone_of(base)(**inputs).last_hidden_state
            kept = live.now
            hidden.sum().backward()
        return kept, live.peak - kept, [then - now for now, then in pairwise(before)]


def _grouped_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """An empty tensor with the shape of torch's result; torch's own rule for fake tensors supports only bfloat16.

    a (T, K), b (E, K, N): the rows of each expert times its weight. a (K, T), b (T, N): gradients of experts' weights.
    """
    return a.new_empty((len(offsets), a.shape[0], b.shape[1]) if b.ndim == 2 else (a.shape[0], b.shape[2]))


def _on_cpu(model: nn.Module) -> None:
    """Replace meta tensors with fake CPU tensors, for which torch chooses the same kernels as for real ones."""
    replaced: dict[Tensor, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if tensor not in replaced:
            twin = torch.empty_like(tensor, device="cpu", requires_grad=False)
            is_parameter = isinstance(tensor, nn.Parameter)
            replaced[tensor] = nn.Parameter(twin, tensor.requires_grad) if is_parameter else twin
        return replaced[tensor]

    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = fake(tensor)  # pyright: ignore[reportArgumentType]


def _forget(parameter: Tensor) -> None:
    """Drop a weight's gradient, which the estimate counts separately."""
    parameter.grad = None


class _Live(TorchDispatchMode):
    """Counts the bytes of live tensors created in its context, currently and at the peak, except views of weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._weights = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        of_experts = func is torch.ops.aten._grouped_mm.default
        out = _grouped_mm(*args[:3]) if of_experts else func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes and key not in self._weights:
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _by_formula(settings: PreTrainedConfig, pack: Pack, dtype: torch.dtype, checkpointing: bool) -> int:
    """Estimate for families that run packs as padded rows: about 16 hidden and 4 MLP vectors per token and layer."""
    hidden, depth = settings.hidden_size, settings.num_hidden_layers
    mlp = getattr(settings, "intermediate_size", None) or getattr(settings, "n_inner", None) or 4 * hidden
    tokens = pack.num_sequences * pack.longest
    layer = (16 * hidden + 4 * mlp) * dtype.itemsize
    return tokens * (layer + depth * hidden * dtype.itemsize if checkpointing else depth * layer)
