"""The memory a step takes, by its parts, before anything is loaded.

Weights, gradients, optimizer and reference are counted from the model's shapes. Activations are not guessed by a
formula: a forward and a backward of two and of three of the model's layers run on tensors without memory (torch's
FakeTensorMode), with its adapters, dropout and checkpointing; what autograd would keep is added up, and each further
layer keeps what the third did.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from posttrain.batch import Example, Pack, Sample, pack
from posttrain.config import DPOMethod, KTOMethod, ModelConfig, OnlineMethod, RunConfig
from posttrain.engines.embedded import MAX_ROWS
from posttrain.engines.room import Room, cache_tokens, token_bytes
from posttrain.models.attention import NAME as PACKED
from posttrain.models.attention import How, PackedMask
from posttrain.models.families import FAMILIES, backbone_of, base_of
from posttrain.models.lean import lean
from posttrain.models.load import compute_dtype, load_config, use_packed
from posttrain.models.lora import add_lora
from posttrain.models.matmul import ONEDNN, PACKS
from posttrain.models.optional import takes_triton
from posttrain.optim.adamw_8bit import BLOCK, eight_bit_names
from posttrain.recipes.checkpointing import enable_gradient_checkpointing
from posttrain.recipes.inputs import reference_settings
from posttrain.scoring import CHUNK_ELEMENTS, GRADIENT_ELEMENTS

if TYPE_CHECKING:
    from peft import PeftModel

NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)  # a code, a byte of scale for 64 weights, a float32 for 256 scales
DRAWN_LOGITS = 4  # logits, exponentials, random words and what a filter sorts, each of a step's size
SAFE = 0.75  # of a GPU's memory, as the estimate is within a quarter of the peak
FEW, MORE = 2, 3  # layers that are looked at
# What the heap of a C library loses in holes that no later tensor fits, as a share of what comes and goes in a step:
# measured after twelve steps with glibc 2.36, where oneDNN multiplies (its buffers come and go too) and where MKL does
# (models/matmul.py). With gradient checkpointing tensors are returned at once instead (posttrain.memory).
HOLES = 0.4 if PACKS and not ONEDNN else 0.8
# Tokenizer, data, kernels' code and workspaces, log and curves on a CPU.
PROCESS = 50 << 20


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes by part and at the peak; `host` is in CPU memory beside a GPU. `allocator` is what a CPU's heap wastes.

    The peak may be below the sum: gradients come as activations go, so that with one pack a step the two are never
    whole at once. So it is with `engine`, what generation takes beside the weights, where that is given back after
    every rollout (`keeps_engine` is off): on a CPU, and on a GPU that has no room for it beside an update.
    """

    parts: dict[str, int]
    peak: int
    host: int = 0
    engine: int = 0
    keeps_engine: bool = False


def empty_model(
    config: RunConfig, model: ModelConfig, dtype: torch.dtype = torch.float32, layers: int | None = None
) -> PreTrainedModel | PeftModel:
    """The model with its adapters on the meta device: shapes without memory. Only so many layers if given."""
    reward = config.method.type == "reward"
    auto = AutoModelForSequenceClassification if reward else AutoModelForCausalLM
    settings = load_config(model)
    if reward:
        settings.num_labels = 1
    if layers is not None:
        settings.num_hidden_layers = layers
        if getattr(settings, "layer_types", None):
            settings.layer_types = settings.layer_types[:layers]
    with torch.device("meta"):
        empty = auto.from_config(settings, dtype=dtype, trust_remote_code=model.trust_remote_code)
        return empty if model.lora is None else add_lora(empty, model.lora, "reward" if reward else "lm")


def count(model: nn.Module) -> tuple[int, int]:
    """All and trained parameters."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)


def holds_reference(config: RunConfig, model: ModelConfig) -> bool:
    """Whether a second model lies in memory as the reference, rather than an adapter switched off or saved numbers."""
    method = config.method
    if isinstance(method, OnlineMethod):
        return method.needs_reference and (model.lora is None or method.ref_model is not None)
    if not isinstance(method, DPOMethod | KTOMethod) or method.precompute_ref_log_probs:
        return False
    if isinstance(method, DPOMethod) and not method.use_ref_model:
        return False
    return model.lora is None or method.ref_model is not None


def checkpoints_gradients(config: RunConfig, model: ModelConfig, device: torch.device) -> bool:
    """Whether layers are recomputed in backward: `auto` does so on a GPU where a full pack would not fit otherwise.

    A function of settings, model and card, whatever the data: a resumed run on the same card decides alike.
    """
    wanted = config.training.gradient_checkpointing
    if wanted != "auto" or device.type != "cuda":
        return wanted is True
    tokens = config.training.tokens_per_pack
    whole = pack([Example((Sample(np.zeros(tokens, np.int64), trained=True),), row=0)], tokens)
    peak = estimate(config, model, empty_model(config, model), whole, device, checkpointing=False).peak
    return peak > SAFE * _memory_of(device)


def estimate(
    config: RunConfig,
    model: ModelConfig,
    empty: PreTrainedModel | PeftModel,
    packs: list[Pack],
    device: torch.device,
    checkpointing: bool | None = None,
) -> Estimate:
    """What a step of these packs, the fullest first, takes on `device`; `empty` has the model's shapes.

    `checkpointing`: whether layers are recomputed; None: as the settings have it.
    """
    fullest = packs[0]
    dtype = compute_dtype(model, device)
    width = dtype.itemsize
    _, trained = count(empty)
    kind = config.training.optimizer
    offloaded = kind == "adamw_cpu_offload" and device.type == "cuda"
    masters = 4 * trained if dtype != torch.float32 or offloaded else 0
    weights = _weights(empty, width, model.load_in_4bit)
    parts = {"weights": weights, "gradients": 4 * trained, "optimizer": masters + _moments(empty, kind)}
    host = 0
    if offloaded:  # with what travels, in the model's dtype
        host = parts["gradients"] + parts["optimizer"] + width * trained
        parts |= {"gradients": 0, "optimizer": 0}
    if isinstance(config.method, OnlineMethod) and config.method.updates > 1:  # recipes/boundary.py
        copied = 4 * trained + _moments(empty, kind)
        if device.type == "cpu":
            parts["copy of a step's start"] = copied
        else:
            host += copied
    if holds_reference(config, model):
        parts["reference"] = _reference(config, model, empty, width)
    if checkpointing is None:
        checkpointing = checkpoints_gradients(config, model, device)
    kept, working = _activations(config, model, fullest, dtype, checkpointing, _masks_on(device))
    logits = 0 if config.method.type == "reward" else _logits(model, empty, fullest, width, device)
    # The head is done with its logits before the layers' backward begins.
    parts |= {"activations": kept + max(working - logits, 0), "logits": logits}
    passing = parts["activations"] + logits
    if device.type == "cpu":
        parts["process"] = PROCESS
    if device.type == "cpu" and not checkpointing:
        parts["allocator"] = int(HOLES * passing)
    # Of the first pack, gradients come as activations go; each further pack is computed beside them.
    largest = width * max((p.numel() for p in empty.parameters() if p.requires_grad), default=0)
    beside = passing * max((len(other.tokens_T) for other in packs[1:]), default=0) // max(len(fullest.tokens_T), 1)
    updating = max(passing, parts["gradients"] + max(largest, beside))
    resting = sum(parts.values()) - passing - parts["gradients"]
    engine = _engine(config, model, packs, dtype, device) if isinstance(config.method, OnlineMethod) else 0
    keeps = device.type == "cuda" and resting + updating + engine <= _memory_of(device)
    if engine:
        parts["engine" if keeps else "engine, between updates"] = engine
    peak = resting + (updating + engine if keeps else max(updating, engine))
    return Estimate(parts, peak, host, engine, keeps)


def _memory_of(gpu: torch.device) -> int:
    return torch.cuda.get_device_properties(gpu).total_memory


def _engine(config: RunConfig, model: ModelConfig, packs: list[Pack], dtype: torch.dtype, device: torch.device) -> int:
    """What drawing a step's completions takes: keys and values, one token's logits of each and what is made of them."""
    rollout, settings = config.rollout, load_config(model)
    if rollout.engine == "vllm":
        share = rollout.vllm.gpu_memory_utilization if rollout.vllm.base_url is None else 0
        return int(share * _memory_of(device)) if device.type == "cuda" else 0
    assert isinstance(config.method, OnlineMethod)
    most, n = rollout.max_completion_length, config.method.num_generations
    # A completion's last token is fed to no step.
    longest = max(1, max(int(pack.position_T.max()) for pack in packs) + 2 - most)
    tokens = cache_tokens(settings, dtype, device, None)
    room = Room.of(
        config.training.batch_size, n, longest, most, max_rows=MAX_ROWS, tokens=tokens, static=device.type == "cuda"
    )
    logits = min(
        CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cpu"]), room.rows * settings.get_text_config().vocab_size
    )
    return room.tokens * token_bytes(settings, dtype) + DRAWN_LOGITS * 4 * logits


def _reference(config: RunConfig, model: ModelConfig, empty: PreTrainedModel | PeftModel, width: int) -> int:
    """Bytes of the second model in memory."""
    ref_model = getattr(config.method, "ref_model", None)
    if ref_model is not None:
        empty = empty_model(config, reference_settings(model, ref_model).model_copy(update={"lora": None}))
    adapters = sum(p.numel() for name, p in empty.named_parameters() if "lora_" in name)
    return _weights(empty, width, model.load_in_4bit) - width * adapters


def _weights(model: PreTrainedModel | PeftModel, width: int, in_4bit: bool) -> int:
    """Bytes of the weights, with those of the linear layers that bitsandbytes converts in 4 bits."""
    converted: set[torch.Tensor] = set()
    if in_4bit:
        base = base_of(model)
        layers = [m for name, m in base.named_modules() if isinstance(m, nn.Linear) and "lora_" not in name]
        converted = {m.weight for m in layers if m is not base.get_output_embeddings() and m.out_features > 1}
    return int(sum(p.numel() * (NF4_BYTES if p in converted else width) for p in model.parameters()))


def _moments(model: nn.Module, kind: str) -> int:
    """Bytes of AdamW's two moments: 4 each, or with `adamw_8bit` 1 each and a float32 scale for every block."""
    small = eight_bit_names(model) if kind == "adamw_8bit" else set()
    sizes = [(p.numel(), name in small) for name, p in model.named_parameters() if p.requires_grad]
    return sum(2 * (n + 4 * -(-n // BLOCK)) if eight else 8 * n for n, eight in sizes)


def _logits(
    settings: ModelConfig, model: PreTrainedModel | PeftModel, pack: Pack, width: int, device: torch.device
) -> int:
    """The language-model head: a chunk's logits and their likes, scored hidden states, the gradient of its weight."""
    head = base_of(model).get_output_embeddings()
    assert isinstance(head, nn.Linear)
    scored, (vocabulary, hidden) = len(pack.target_N), head.weight.shape
    if takes_triton(settings, device):
        chunk = width * min(GRADIENT_ELEMENTS, scored * vocabulary)
    else:
        chunk = 3 * 4 * min(CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cpu"]), scored * vocabulary)
    wide = 4 * head.weight.numel() if device.type == "cpu" and width < 4 else 0  # models/matmul.py: float32_weight
    gradient = 4 * head.weight.numel() if head.weight.requires_grad else 0
    return chunk + wide + 2 * scored * hidden * width + gradient


def _activations(
    config: RunConfig,
    model: ModelConfig,
    pack: Pack,
    dtype: torch.dtype,
    checkpointing: bool,
    masks: type[PackedMask] = PackedMask,
) -> tuple[int, int]:
    """Bytes that the backbone keeps of a pack for backward, and what it takes beyond that at most, for a moment."""
    settings = load_config(model)
    family = FAMILIES.get(settings.model_type)
    if family is None or not family.packed or model.attention not in ("auto", "packed"):
        return _by_formula(settings, pack, dtype, checkpointing), 0
    depth = settings.num_hidden_layers
    if depth <= MORE:
        return _simulate(config, model, pack, dtype, checkpointing, depth, masks)
    kept_few, _ = _simulate(config, model, pack, dtype, checkpointing, FEW, masks)
    kept, working = _simulate(config, model, pack, dtype, checkpointing, MORE, masks)
    return kept + (depth - MORE) * (kept - kept_few), working


class _OneKernel(PackedMask):
    """Attention as a GPU has it, where one kernel takes the whole pack and keeps no weights: for memory alone it does
    not matter which keys are seen."""

    def masks(self, window: int | None, dtype: torch.dtype) -> list[torch.Tensor | None]:
        return []

    def attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, how: How
    ) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _masks_on(device: torch.device) -> type[PackedMask]:
    return _OneKernel if device.type == "cuda" else PackedMask


def _simulate(
    config: RunConfig,
    model: ModelConfig,
    pack: Pack,
    dtype: torch.dtype,
    checkpointing: bool,
    layers: int,
    masks: type[PackedMask] = PackedMask,
) -> tuple[int, int]:
    """The same for a model of so many layers, by forward and backward without memory."""
    read = pack.last_S if config.method.type == "reward" else pack.read_U
    mask = masks(pack, read)
    mask.masks(None, dtype)
    policy = empty_model(config, model, dtype, layers)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        _on_cpu(policy)
        base = base_of(policy)
        if use_packed(model, base):
            base.set_attn_implementation(PACKED)
        lean(base)
        if checkpointing:
            enable_gradient_checkpointing(policy)
        policy.train(config.method.dropout)
        for module in policy.modules():
            if hasattr(module, "layerdrop"):  # OPT of older transformers draws a number for each layer, and reads it
                module.training = False
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(_forget)
        inputs: dict[str, Any] = {"input_ids": fake.from_tensor(pack.tokens_T)[None], "use_cache": False}
        inputs |= {"position_ids": fake.from_tensor(pack.position_T)[None], "packed": mask}
        with _Live(policy) as live:
            hidden = backbone_of(base)(**inputs).last_hidden_state
            kept = live.now
            hidden.sum().backward()
        return kept, live.peak - kept


def _on_cpu(model: nn.Module) -> None:
    """Replace meta tensors by fake ones of the CPU, for which torch chooses kernels as for real ones."""
    replaced: dict[torch.Tensor, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
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


def _forget(parameter: torch.Tensor) -> None:
    """Gradients of weights are a part of their own."""
    parameter.grad = None


class _Live(TorchDispatchMode):
    """Adds up the bytes of all tensors made under it that are alive, now and at most; views of weights are not made."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._weights = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
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
    """For families that take packs as rows: about 16 hidden vectors and 4 of the MLP's a token and layer."""
    hidden, depth = settings.hidden_size, settings.num_hidden_layers
    mlp = getattr(settings, "intermediate_size", None) or getattr(settings, "n_inner", None) or 4 * hidden
    tokens = pack.num_sequences * pack.longest
    layer = (16 * hidden + 4 * mlp) * dtype.itemsize
    return tokens * (layer + depth * hidden * dtype.itemsize if checkpointing else depth * layer)
