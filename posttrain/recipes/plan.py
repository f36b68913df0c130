"""Before a run: examples, tokens, packs, steps, and the memory it will take. Loads tokenizer and data, no weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerBase

from posttrain.batch import Example, pack
from posttrain.config import DPOMethod, KTOMethod, ModelConfig, RunConfig, Stage, check_skip, learning_rate
from posttrain.config.methods import EXAMPLES_OF
from posttrain.data import Prepared, prepare_run
from posttrain.models.families import FAMILIES, base_of
from posttrain.models.load import compute_dtype, device_of, load_config, load_tokenizer
from posttrain.models.lora import add_lora
from posttrain.optim.schedules import warmup_count
from posttrain.scoring import CHUNK_ELEMENTS

STEPS_LOOKED_AT = 50


class StageTokenizers:
    """The tokenizer that each stage of one model meets: with the template that the stage it starts from has put on it.

    Before a run there is no `final/` to load it from.
    """

    def __init__(self, model: int):
        self._model = model
        self._of: dict[str, PreTrainedTokenizerBase] = {}

    def of(self, stage: Stage) -> PreTrainedTokenizerBase:
        """A tokenizer for the stage, to prepare its data with; stages come in their order."""
        source = self._of.get(stage.init_from or "") if stage.init_from else None
        found = deepcopy(source) if source else load_tokenizer(stage.config.models[self._model])
        self._of[stage.name] = found
        return found

    def skip(self, stage: Stage) -> None:
        """Take the tokenizer that the finished stage has saved, or else the model's own."""
        config, several = stage.config, len(stage.config.models) > 1
        model = config.models[self._model]
        final = Path(config.output_dir, config.name or "", model.folder_name if several else "", stage.name, "final")
        if config.name and final.is_dir():
            self._of[stage.name] = load_tokenizer(model.model_copy(update={"path": str(final), "revision": None}))


def plan(
    config: RunConfig | Sequence[Stage],
    console: Console | None = None,
    *,
    model_index: int | None = None,
    skip: Collection[str] = (),
) -> None:
    """Print, for every model at every stage, what training it will do and take."""
    console = console or Console()
    stages = (Stage("", None, config),) if isinstance(config, RunConfig) else config
    check_skip(skip, stages)
    for index in range(len(stages[0].config.models)) if model_index is None else [model_index]:
        tokenizers = StageTokenizers(index)
        for stage in stages:
            if stage.name in skip:
                tokenizers.skip(stage)
            else:
                console.print(_table(stage, stage.config.models[index], tokenizers.of(stage)))


def _table(stage: Stage, model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> Table:
    config = stage.config
    device = device_of(config.devices)
    method = config.method
    data = prepare_run(config, tokenizer)
    empty = _empty_model(config, model)
    total, trained = count(empty)
    training = config.training
    per_epoch = math.ceil(len(data.train) / training.batch_size)
    steps = training.max_steps or math.ceil(training.num_train_epochs * per_epoch)
    packs, tokens, targets_seen = _sampled_steps(config, data)
    memory = estimate(config, model, empty, device)

    title = f"{method.type} of {model.folder_name}"
    if stage.name:
        title = f"stage {stage.name}: {title}" + (f", from {stage.init_from}" if stage.init_from else "")
    table = Table(title=title, show_header=False, title_justify="left", box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("device", f"{device}, {str(compute_dtype(model, device)).removeprefix('torch.')}")
    table.add_row("parameters", f"{total:,}, of them trained {trained:,} ({trained / total:.1%})")
    for line in data.report.lines():
        table.add_row("data", line)
    for name, dataset in data.validation.items():
        table.add_row("validation", f"{name}: {len(dataset):,} examples")
    unit = "pairs" if EXAMPLES_OF[method.type] == "pair" else "examples"
    table.add_row(
        "a step",
        f"{training.batch_size} {unit}, about {tokens:,.0f} tokens ({targets_seen:,.0f} scored) in {packs:.1f} packs",
    )
    table.add_row("steps", f"{steps:,} ({steps / per_epoch:.2f} epochs of {per_epoch:,})")
    table.add_row("tokens in all", f"about {steps * tokens:,.0f}")
    warmup = warmup_count(training.warmup_steps, steps)
    rate = learning_rate(config, model)
    table.add_row("learning rate", f"{rate:.1e}, {training.lr_scheduler_type}, {warmup} steps of warm-up")
    table.add_row("memory", f"about {sum(memory.values()) / 2**30:.2f} GiB above the program's own")
    for part, size in memory.items():
        table.add_row("", f"{part} {size / 2**30:.2f} GiB")
    return table


def _empty_model(config: RunConfig, model: ModelConfig) -> nn.Module:
    """The model with its adapters on the meta device: shapes without memory."""
    reward = config.method.type == "reward"
    auto = AutoModelForSequenceClassification if reward else AutoModelForCausalLM
    settings = load_config(model)
    if reward:
        settings.num_labels = 1
    with torch.device("meta"):
        empty = auto.from_config(settings, trust_remote_code=model.trust_remote_code)
        if model.lora is not None:
            empty = add_lora(empty, model.lora, "reward" if reward else "lm")
    return empty


def count(model: nn.Module) -> tuple[int, int]:
    """All and trained parameters."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, _ in sizes), sum(n for n, trained in sizes if trained)


def _sampled_steps(config: RunConfig, data: Prepared) -> tuple[float, float, float]:
    """Mean packs, tokens and scored tokens of a step, over some batches drawn as training draws them."""
    size = config.training.batch_size
    order = np.random.default_rng([config.seed, 0]).permutation(len(data.train))
    counts = []
    for start in range(0, min(len(order), size * STEPS_LOOKED_AT), size):
        examples: list[Example] = [data.train[int(i)] for i in order[start : start + size]]
        packs = pack(examples, config.training.tokens_per_pack, keep_last=config.method.type == "reward")
        tokens = sum(p.num_tokens for p in packs)
        counts.append((len(packs), tokens, sum(len(p.target_N) for p in packs)))
    return tuple(np.mean(counts, axis=0))  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True)
class Shape:
    """What activations scale with."""

    layers: int
    hidden: int
    mlp: int
    vocabulary: int


def estimate(config: RunConfig, model: ModelConfig, empty: nn.Module, device: torch.device) -> dict[str, int]:
    """Bytes by part: weights, gradients, optimizer, reference, activations of one pack, logits."""
    dtype = compute_dtype(model, device)
    width = dtype.itemsize
    total, trained = count(empty)
    masters = 0 if dtype == torch.float32 else 4 * trained
    parts = {"weights": width * total, "gradients": 4 * trained, "optimizer": 8 * trained + masters}
    method = config.method
    if isinstance(method, DPOMethod | KTOMethod) and not method.precompute_ref_log_probs:
        compared = isinstance(method, KTOMethod) or method.use_ref_model
        separate = model.lora is None or method.ref_model is not None
        parts["reference"] = width * total if compared and separate else 0
    shape = _shape(empty)
    family = FAMILIES.get(base_of(empty).config.model_type)
    tokens = config.training.tokens_per_pack * (1 if family and family.packed else 2)
    checkpointing = config.training.gradient_checkpointing
    if checkpointing == "auto":
        checkpointing = device.type == "cuda"
    # What autograd keeps per token and layer: about 16 vectors of the hidden size (norms, projections, residuals) and
    # 4 of the MLP's; with checkpointing one hidden vector a layer, and one layer's whole while it is recomputed.
    layer = (16 * shape.hidden + 4 * shape.mlp) * width
    kept = layer + shape.layers * shape.hidden * width if checkpointing else shape.layers * layer
    parts["activations"] = tokens * kept
    chunk = CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cpu"])
    parts["logits"] = 0 if method.type == "reward" else 3 * 4 * min(chunk, tokens * shape.vocabulary)
    return parts


def _shape(empty: nn.Module) -> Shape:
    config = base_of(empty).config
    hidden = config.hidden_size
    mlp = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
    return Shape(config.num_hidden_layers, hidden, mlp, config.vocab_size)
