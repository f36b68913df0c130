"""An estimate of the memory of a training step, part by part, before anything is loaded.

Weights, gradients, optimizer state, reference and the engine's cache are counted from the model's shapes; activations
are simulated (activations.py). A `Target` describes a run on several processes, or on GPUs that this machine lacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from posttrain.batch import Example, Node, Pack, pack
from posttrain.config import DevicesConfig, ModelConfig, RunConfig
from posttrain.engines.cache import GPU_SHARE, Room, cache_tokens, token_bytes
from posttrain.engines.embedded import MAX_ROWS
from posttrain.models.devices import compute_dtype, device_of, take_device
from posttrain.models.families import base_of, head_layer
from posttrain.models.graphs import padded, without_graphs
from posttrain.models.load import load_config, takes_triton
from posttrain.models.lora import continues
from posttrain.models.matmul import ONEDNN, PACKS
from posttrain.models.sharding import layers_of
from posttrain.optim.adamw import is_large
from posttrain.optim.variants import BLOCK, eight_bit_names, layer_matrices
from posttrain.parallel.ranks import ALONE, Ranks
from posttrain.planning import CARDS
from posttrain.planning.activations import activations, empty_model
from posttrain.runs.inputs import reference_settings
from posttrain.runs.run import Run
from posttrain.scoring import CHUNK_ELEMENTS, gradient_elements
from posttrain.training.job import Job

# Bytes per weight: a 4-bit code, an 8-bit scale per 64 weights, a float32 per 256 scales.
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
SAMPLED_LOGITS = 4  # tensors as large as the logits: logits, exponentials, random words, a filter's sorted copy
SAFE = 0.75  # share of a GPU's memory that an estimate may fill; estimates are within a quarter of the peak
# Fragmentation of the C library's heap, as a share of the memory that a step allocates and frees. Measured after twelve
# steps with glibc 2.36, with oneDNN as the matmul library (which also allocates and frees its buffers) and with MKL
# (models/matmul.py). With gradient checkpointing, memory is returned to the system immediately (base/memory.py).
HOLES = 0.4 if PACKS and not ONEDNN else 0.8
PROCESS = 50 << 20  # bytes, on a CPU: tokenizer, data, code and workspaces of kernels, log and plots


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes by part, and at the peak. `host`: CPU memory of a run on a GPU; the part `allocator`: heap fragmentation.

    `resting` is in use all the time, `updating` only during an update. `updating` may be less than the sum of its
    parts: gradients are allocated while activations are freed, so with one pack per step the two are never complete at
    the same time. `engine` is the memory of generation without the weights. If `keeps_engine` is true, this memory is
    kept during updates; otherwise (always on a CPU) it is released before them.
    """

    parts: dict[str, int]
    resting: int
    updating: int
    host: int = 0
    engine: int = 0
    keeps_engine: bool = False
    captured: bool = False  # whether CUDA graphs replay the packs

    @property
    def peak(self) -> int:
        changing = self.updating + self.engine if self.keeps_engine else max(self.updating, self.engine)
        return self.resting + changing


def count(model: nn.Module) -> tuple[int, int]:
    """Return the number of parameters and the number of trained parameters."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)


def holds_reference(config: RunConfig, model: ModelConfig) -> bool:
    """Whether the reference is a second model in memory (not the policy without its adapter, nor stored scores)."""
    method = config.method
    return method.scores_reference and (model.lora is None or method.reference_path is not None)


def checkpoints_gradients(
    config: RunConfig, model: ModelConfig, device: torch.device, ranks: int = 1, card: int | None = None
) -> bool:
    """Whether layers are recomputed in the backward pass. `auto`: on a GPU, if a full pack would not fit otherwise. The
    result depends on settings, model and card, not on the data: a run resumed on the same card decides the same."""
    wanted = config.training.gradient_checkpointing
    if wanted != "auto" or device.type != "cuda":
        return wanted is True
    tokens = config.training.tokens_per_pack
    whole = pack([Example((Node(np.zeros(tokens, np.int64), trained=True),), row=0)], tokens)
    card = torch.cuda.get_device_properties(device).total_memory if card is None else card
    empty = empty_model(config, model)
    return estimate(config, model, empty, whole, device, False, card, ranks, captured=False).peak > SAFE * card


def start_job(
    config: RunConfig, model: ModelConfig, run: Run, checkpoint: Path | None = None, ranks: Ranks = ALONE
) -> Job:
    """Start the job of a run. The settings or the estimate decide on gradient checkpointing."""
    recomputed = checkpoints_gradients(config, model, take_device(config.devices), ranks.size)
    return Job.start(config, model, run, checkpoint, recomputed, ranks)


def estimate(
    config: RunConfig,
    model: ModelConfig,
    empty: nn.Module,
    packs: list[Pack],
    device: torch.device,
    checkpointing: bool | None = None,
    card: int | None = None,
    ranks: int = 1,
    continued: bool | None = None,
    captured: bool | None = None,
) -> Estimate:
    """Estimate the memory of a step with these packs, the fullest first, on `device`; `empty` has the model's shapes.

    `checkpointing`: whether layers are recomputed; None: the settings decide. `card`: the GPU's memory in bytes; None:
    that of the current GPU. With several `ranks`, the result is the memory of each. `continued`: whether the run
    continues to train the adapter of an earlier stage; None: the adapter in the model's folder decides. `captured`:
    whether CUDA graphs replay the packs; None: if there is room, and nothing else rules it out.
    """
    if device.type == "cuda" and card is None:
        card = torch.cuda.get_device_properties(device).total_memory
    fullest = packs[0] if captured is not True else padded(packs[0])
    dtype = compute_dtype(model, device)
    width = dtype.itemsize
    parts, host = _between_steps(config, model, empty, device, ranks, continued)
    if checkpointing is None:
        checkpointing = checkpoints_gradients(config, model, device, ranks, card)
    if captured is None:
        captured = without_graphs(config, load_config(model), dtype, device, ranks) is None
        if captured:
            both = estimate(config, model, empty, packs, device, checkpointing, card, ranks, continued, captured)
            if both.keeps_engine:
                return both
            captured = False
    kept, working = activations(config, model, fullest, dtype, checkpointing, device.type == "cuda")
    logits = 0 if config.method.head == "reward" else _logits(model, empty, fullest, width, device)
    # The head frees its logits before the backward pass of the layers starts. CUDA graphs keep the memory of their
    # widest pass, and a pass that is not captured needs as much beside it.
    parts |= {"activations": 2 * (kept + working) if captured else kept + max(working - logits, 0), "logits": logits}
    passing = parts["activations"] + logits
    if device.type == "cpu":
        parts["process"] = PROCESS
    if device.type == "cpu" and not checkpointing:
        parts["allocator"] = int(HOLES * passing)
    # In the first pack, gradients are allocated while activations are freed; later packs add to the gradients.
    largest = width * max((p.numel() for p in empty.parameters() if p.requires_grad), default=0)
    beside = passing * max((len(other.tokens_T) for other in packs[1:]), default=0) // max(len(fullest.tokens_T), 1)
    updating = max(passing, parts["gradients"] + max(passing if captured else largest, beside))
    resting = sum(parts.values()) - passing - parts["gradients"]
    engine = generation(config, model, packs, device, card)
    if engine and "gathered weights" in parts:
        engine += _weights(empty, width, model.load_in_4bit)  # the whole model is gathered
    keeps = card is not None and resting + updating + engine <= SAFE * card
    if engine:
        parts["engine" if keeps else "engine, between updates"] = engine
    return Estimate(parts, resting, updating, host, engine, keeps, captured)


def _between_steps(
    config: RunConfig, model: ModelConfig, empty: nn.Module, device: torch.device, ranks: int, continued: bool | None
) -> tuple[dict[str, int], int]:
    """Return the bytes on the device that do not depend on packs, by part, and, with a GPU, the bytes in CPU memory."""
    width = compute_dtype(model, device).itemsize
    _, trained = count(empty)
    kind = config.training.optimizer
    offloaded = kind == "adamw_cpu_offload" and device.type == "cuda"
    masters = 4 * trained if width < 4 or offloaded else 0
    if compute_dtype(model, device) == torch.bfloat16 and takes_triton(model, device) and not offloaded:
        own = _own_names(empty, kind)
        masters -= sum(
            2 * p.numel() for n, p in empty.named_parameters() if p.requires_grad and n not in own and is_large(p)
        )
    weights = _weights(empty, width, model.load_in_4bit)
    averages = 4 * trained if config.training.ema_decay else 0
    parts = {"weights": weights, "gradients": 4 * trained, "optimizer": masters + averages + _moments(empty, kind)}
    host = 0
    if offloaded:  # including the transfer buffers, in the model's dtype
        host = parts["gradients"] + parts["optimizer"] + width * trained
        parts |= {"gradients": 0, "optimizer": 0}
    if config.method.updates > 1:  # training/saving.py
        copied = 4 * trained + averages + _moments(empty, kind)
        if device.type == "cpu":
            parts["copy of a step's start"] = copied
        else:
            host += copied
    if holds_reference(config, model):
        parts["reference"] = _reference(config, model, empty, width)
        if config.method.syncs_reference and width < 4:  # its float32 weights are in CPU memory
            exact = 4 * parts["reference"] // width
            parts["reference"] += exact if device.type == "cpu" else 0
            host += exact if device.type != "cpu" else 0
    elif config.method.refers_to_itself and (continues(config, model) if continued is None else continued):
        parts["reference"] = width * trained  # a frozen copy of the adapter
    elif model.lora is not None and model.lora.init != "default":
        parts["adapter's start"] = width * trained
    if config.devices.strategy == "fsdp" and ranks > 1:
        # The float32 shards are both the weights and the master weights.
        parts |= {"weights": weights + (4 - width) * trained, "optimizer": averages + _moments(empty, kind)}
        parts = {name: size // ranks for name, size in parts.items()}
        parts["gathered weights"] = gathered(empty, width)
    return parts, host


def generation(config: RunConfig, model: ModelConfig, packs: list[Pack], device: torch.device, card: int | None) -> int:
    """Bytes for sampling a step's completions: keys and values, and the logits of one token per completion."""
    if not config.method.samples_completions:
        return 0
    rollout, settings = config.rollout, load_config(model)
    if rollout.engine == "vllm":
        share = rollout.vllm.gpu_memory_utilization if rollout.vllm.base_url is None else 0
        return int(share * card) if card is not None else 0
    dtype = compute_dtype(model, device)
    most, n = rollout.max_completion_length, config.method.completions_per_prompt
    # A completion's last token is not an input.
    longest = max(1, max(int(pack.position_T.max()) for pack in packs) + 2 - most)
    tokens = cache_tokens(settings, dtype, device, None if card is None else card // GPU_SHARE)
    room = Room.of(
        config.training.batch_size, n, longest, most, max_rows=MAX_ROWS, tokens=tokens, static=device.type == "cuda"
    )
    chunk = CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cpu"])
    logits = min(chunk, room.rows * settings.get_text_config().vocab_size)
    return room.tokens * token_bytes(settings, dtype, device) + SAMPLED_LOGITS * 4 * logits


def _reference(config: RunConfig, model: ModelConfig, empty: nn.Module, width: int) -> int:
    """Bytes of the reference model's weights."""
    path = config.method.reference_path
    if path is not None:
        empty = empty_model(config, reference_settings(model, path).model_copy(update={"lora": None}))
    adapters = sum(p.numel() for name, p in empty.named_parameters() if "lora_" in name or "trainable_tokens" in name)
    return _weights(empty, width, model.load_in_4bit) - width * adapters


def _weights(model: nn.Module, width: int, in_4bit: bool) -> int:
    """Bytes of the weights. With `in_4bit`, the linear layers that bitsandbytes converts take NF4_BYTES per weight."""
    converted: set[torch.Tensor] = set()
    if in_4bit:
        base = base_of(model)
        layers = [m for name, m in base.named_modules() if isinstance(m, nn.Linear) and "lora_" not in name]
        converted = {m.weight for m in layers if m is not base.get_output_embeddings() and m.out_features > 1}
    return int(sum(p.numel() * (NF4_BYTES if p in converted else width) for p in model.parameters()))


def _own_names(model: nn.Module, kind: str) -> set[str]:
    """Return the names of the trained parameters that are not updated by AdamW with float32 moments."""
    return {"muon": layer_matrices, "adamw_8bit": eight_bit_names}.get(kind, lambda _: set())(model)


def _moments(model: nn.Module, kind: str) -> int:
    """Bytes of AdamW's two moments. Each takes 4 per weight; in 8 bits, 1 per weight and a float32 scale per block.
    Muon has one moment for the matrices of layers."""
    own, sizes = _own_names(model, kind), {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}
    of_own = {"muon": lambda n: 4 * n, "adamw_8bit": lambda n: 2 * (n + 4 * -(-n // BLOCK))}.get(kind)
    return sum(of_own(n) if of_own and name in own else 8 * n for name, n in sizes.items())


def _logits(settings: ModelConfig, model: nn.Module, pack: Pack, width: int, device: torch.device) -> int:
    """Bytes for the language-model head: a chunk's logits with copies, scored hidden states, the weight's gradient."""
    head = head_layer(model).weight
    scored, (vocabulary, hidden) = len(pack.target_N), head.shape
    if takes_triton(settings, device) and width < 4:
        chunk = width * min(gradient_elements(head, head.requires_grad), scored * vocabulary)
    else:
        chunk = 3 * 4 * min(CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cpu"]), scored * vocabulary)
    wide = 4 * head.numel() if device.type == "cpu" and width < 4 else 0  # models/matmul.py: float32_weight
    gradient = 4 * head.numel() if head.requires_grad else 0
    if not head.is_leaf:  # PEFT copies the head to insert trained rows; the copy has a gradient, too
        gradient += 2 * width * head.numel()
    return chunk + wide + 2 * scored * hidden * width + gradient


@dataclass(frozen=True, slots=True)
class Target:
    """The hardware that a run is planned for: this machine's device or named GPUs, and the number of processes."""

    device: torch.device
    ranks: int = 1
    name: str | None = None

    @classmethod
    def of(cls, devices: DevicesConfig, card: str | None = None, ranks: int = 1) -> Target:
        """Return the target for GPUs named in CARDS; if `card` is None, for this machine's device."""
        return cls(device_of(devices) if card is None else torch.device("cuda", 0), ranks, card)

    @property
    def card(self) -> int | None:
        """Bytes of the named GPU's memory; None for this machine's own device."""
        return None if self.name is None else int(CARDS[self.name] * 2**30)


def gathered(model: nn.Module, width: int) -> int:
    """Bytes of gathered weights that a sharded process holds at once: all weights outside of layers, and two layers."""
    layers = [sum(p.numel() for p in layer.parameters()) for layer in layers_of(model)]
    rest = sum(p.numel() for p in model.parameters()) - sum(layers)
    return width * (rest + 2 * max(layers, default=0))


def exchanged(total: int, trained: int, width: int, ranks: int, packs: float, sharded: bool) -> float:
    """Bytes that a process sends in a step; it receives as many. `packs`: its number of packs; `width`: bytes a weight.

    Replicas sum their float32 gradients once (ring reduce-scatter and all-gather). Sharded weights are gathered for
    every forward and every backward pass, and each pack's gradients are reduced in float32.
    """
    share = (ranks - 1) / ranks
    return packs * (2 * width * total + 4 * trained) * share if sharded else 2 * 4 * trained * share
