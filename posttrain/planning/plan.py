"""The plan of a run: examples, tokens, packs, steps and memory. Loads the tokenizer and the data, but no weights."""

import math
from collections.abc import Collection, Iterator, Sequence
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from posttrain.base.console import PlainConsole
from posttrain.base.errors import PosttrainError, RunError
from posttrain.base.log import log
from posttrain.base.words import counted
from posttrain.config import ModelConfig, RunConfig, Stage, check_skip, held_out_together, learning_rate
from posttrain.data import KINDS, Prepared, longest_sequence
from posttrain.models.attention import width_step
from posttrain.models.devices import OLD_CARD, compute_dtype, lacks_bfloat16
from posttrain.models.families import base_of, check_longest
from posttrain.models.load import load_tokenizer
from posttrain.models.matmul import multiplies_bfloat16
from posttrain.planning import OLD_CARDS
from posttrain.planning.activations import empty_model
from posttrain.planning.estimate import SAFE, Estimate, Target, count, estimate, exchanged
from posttrain.planning.largest import FirstEpoch, probe
from posttrain.recipes import check_functions
from posttrain.training.job import data_of, router_weight
from posttrain.training.loop import learning_rate_at, warmup_count
from posttrain.training.order import epoch_order
from posttrain.training.state import total_steps

SAMPLED_STEPS = 50  # number of steps that the plan averages over


class StageTokenizers:
    """The tokenizer of each stage of one model. A stage that starts from another inherits its tokenizer, with the
    template; before a run there is no `final/` to load the tokenizer from."""

    def __init__(self, model: int):
        self._model = model
        self._of: dict[str, PreTrainedTokenizerBase] = {}

    def of(self, stage: Stage) -> PreTrainedTokenizerBase:
        """Return the tokenizer for the stage's data. Call this in the order of the stages."""
        source = self._of.get(stage.init_from or "") if stage.init_from else None
        model = stage.config.models[self._model]
        tokenizer = deepcopy(source) if source else load_tokenizer(model)
        tokenizer.add_tokens([*model.new_tokens])
        self._of[stage.name] = tokenizer
        return tokenizer

    def skip(self, stage: Stage) -> None:
        """Use the tokenizer that a finished stage saved, or the model's tokenizer if the stage saved none."""
        config, model = stage.config, stage.config.models[self._model]
        root = Path(config.output_dir).expanduser() / (config.name or "")
        final = stage.folder(root, self._model, several_stages=True) / "final"
        if config.name and final.is_dir():
            self._of[stage.name] = load_tokenizer(model.model_copy(update={"path": str(final), "revision": None}))


def plan(
    config: RunConfig | Sequence[Stage],
    console: Console | None = None,
    *,
    model_index: int | None = None,
    skip: Collection[str] = (),
    probed: bool = False,
    memory_limit: int | None = None,
    ranks: int | None = None,
    card: str | None = None,
) -> None:
    """Print the steps, tokens and memory of every model at every stage.

    With `probed`, also print the largest tokens_per_pack that fits in `memory_limit` bytes (None: the free memory).
    `ranks`: the number of processes that share each step (None: one per entry of devices.ids). `card`: the name of
    their GPUs in CARDS (None: this machine's device).
    """
    console = console or PlainConsole()
    stages = held_out_together((Stage("", None, config),) if isinstance(config, RunConfig) else config)
    check_skip(skip, stages)
    for stage in stages:
        if stage.name not in skip:
            check_functions(stage.config)
    models, failed = stages[0].config.models, list[str]()

    def tables_of(index: int) -> Iterator[Table]:
        tokenizers = StageTokenizers(index)
        for stage in stages:
            if stage.name in skip:
                tokenizers.skip(stage)
                continue
            config, model = stage.config, stage.config.models[index]
            data = data_of(config, model, tokenizers.of(stage))
            target = Target.of(config.devices, card, ranks or len(config.devices.ids or (0,)))
            source = next((other for other in stages if other.name == stage.init_from), None)
            continued = None if source is None else source.config.models[index].lora == model.lora is not None
            table = _table(stage, model, data, target, continued)
            if probed:
                table.add_row("fits", str(probe(config, model, data, memory_limit)))
            yield table

    for index in range(len(models)) if model_index is None else [model_index]:
        try:
            for table in tables_of(index):
                console.print(table)
        except PosttrainError as error:
            if len(models) == 1 or model_index is not None:
                raise
            failed.append(models[index].folder_name)
            log.error("%s cannot be planned: %s", failed[-1], error)
    if failed:
        raise RunError(f"{len(failed)} of {len(models)} models cannot be planned: {', '.join(failed)} (see above)")


DTYPE_HINTS: dict[tuple[torch.dtype, bool | None], str] = {
    (torch.float32, True): "this processor multiplies faster in bfloat16: set model.dtype=bfloat16",
    (torch.bfloat16, False): "this processor has no bfloat16 instructions: model.dtype=float32 is faster",
}


def _table(stage: Stage, model: ModelConfig, data: Prepared, target: Target, continued: bool | None = None) -> Table:
    config, device, ranks = stage.config, target.device, target.ranks
    method, training = config.method, config.training
    empty = empty_model(config, model)
    check_longest(base_of(empty).config, longest_sequence(config, data))
    total, trained = count(empty)
    per_epoch = math.ceil(len(data.train) / training.batch_size)
    steps = total_steps(config, len(data.train))
    epoch, size = FirstEpoch(config, data, router_weight(config, model) > 0, ranks), training.tokens_per_pack
    packs, tokens, targets_seen = _sampled_steps(epoch, size)
    largest = epoch.largest(size, width_step(device, size))
    memory = estimate(config, model, empty, largest, device, card=target.card, ranks=ranks, continued=continued)

    title = f"{method.type} of {model.folder_name}"
    if stage.name:
        title = f"stage {stage.name}: {title}" + (f", from {stage.init_from}" if stage.init_from else "")
    table = Table(title=title, show_header=False, title_justify="left", box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    dtype = compute_dtype(model, device)
    sharded = config.devices.strategy == "fsdp"
    shared = f", {ranks} processes with {'parts of the weights' if sharded else 'the whole model'}" if ranks > 1 else ""
    table.add_row("device", f"{target.name or device}, {str(dtype).removeprefix('torch.')}{shared}")
    if device.type == "cpu" and (hint := DTYPE_HINTS.get((dtype, multiplies_bfloat16()))):
        table.add_row("", hint)
    is_old = target.name in OLD_CARDS or (target.name is None and device.type == "cuda" and lacks_bfloat16())
    if is_old and dtype == torch.bfloat16:
        table.add_row("", f"this GPU {OLD_CARD}")
    table.add_row("parameters", f"{total:,}, {trained:,} of them trained ({trained / total:.1%})")
    for line in data.report.lines():
        table.add_row("data", line)
    for name, dataset in data.validation.items():
        table.add_row("validation", f"{name}: {counted(len(dataset), 'example')}")
    batch = counted(training.batch_size, KINDS[method.kind].unit)
    table.add_row("per step", f"{batch}, about {tokens:,.0f} tokens ({targets_seen:,.0f} scored) in {packs:.1f} packs")
    if method.samples_completions:
        most, n = config.rollout.max_completion_length, training.batch_size * method.completions_per_prompt
        sampled = f"{counted(n, 'completion')} of up to {counted(most, 'token')}"
        table.add_row("per rollout", f"{sampled}, then {counted(method.updates, 'update')}")
        made = f"{counted(steps * n, 'completion')}, {counted(steps * method.updates, 'update')}"
        table.add_row("in total", f"up to {made}")
    table.add_row("steps", f"{steps:,} ({steps / per_epoch:.2f} epochs of {per_epoch:,})")
    if config.data.mixing == "interleave":
        sizes, order = np.bincount(data.train.sources), epoch_order(config, data.train, 0)
        passes = np.bincount(data.train.sources[order], minlength=len(sizes)) / sizes
        of_sources = zip(config.data.source_names, passes, sizes, strict=False)  # data.max_rows may exclude the last
        mixed = (f"{name}: {count:.2f} epochs of {counted(int(size), 'row')}" for name, count, size in of_sources)
        table.add_row("sources", "; ".join(mixed))
    table.add_row("total tokens", f"about {steps * tokens:,.0f}")
    warming = f"{counted(warmup_count(training.warmup_steps, steps), 'step')} of warm-up"
    rate = learning_rate(config, model)
    last = learning_rate_at(config, rate, steps - 1, steps)
    table.add_row("learning rate", f"{rate:.1e}, {training.lr_scheduler_type}, {warming}, {last:.1e} in the last step")
    _add_memory(table, memory, target)
    if ranks > 1:
        each = exchanged(total, trained, dtype.itemsize, ranks, max(1.0, packs / ranks), sharded) * method.updates
        table.add_row("exchanged", f"about {each / 2**30:.3g} GiB sent and received by each process in a step")
    if ranks > 1 or target.card is not None:
        table.add_row("", "memory and exchange are estimated from shapes, not measured")
    return table


def _add_memory(table: Table, memory: Estimate, target: Target) -> None:
    of_each = " of each process" if target.ranks > 1 else ""
    how = ", with CUDA graphs" if memory.captured else ""
    table.add_row("memory", f"about {_binary(memory.peak)} at the peak{of_each}{how}, in addition to the program's own")
    if target.card is not None:
        fits = "fits" if memory.peak <= SAFE * target.card else "does not fit with a margin of a quarter"
        table.add_row("", f"{fits}: {target.name} has {target.card / 2**30:.1f} GiB")
    for part, size in memory.parts.items():
        table.add_row("", f"{part} {_binary(size)}")
    if memory.host:
        table.add_row("", f"and {_binary(memory.host)} of CPU memory")


def _binary(size: int) -> str:
    """A number of bytes in GiB, or in MiB if it is small."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**29 else f"{size / 2**20:.3g} MiB"


def _sampled_steps(epoch: FirstEpoch, tokens_per_pack: int) -> tuple[float, float, float]:
    """Mean numbers of packs, tokens and scored tokens per step, over the first SAMPLED_STEPS steps of training."""
    steps = (epoch.packs(rows, tokens_per_pack) for rows in epoch.rows()[:SAMPLED_STEPS])
    counts = [(len(packs), sum(p.num_tokens for p in packs), sum(len(p.target_N) for p in packs)) for packs in steps]
    return tuple(np.mean(counts, axis=0))  # pyright: ignore[reportReturnType]
