"""`posttrain export` and `posttrain quantize`: a model as a folder for other programs."""

import re
from typing import Annotated

import typer

from posttrain.base.errors import UsageError
from posttrain.base.imports import quick_imports
from posttrain.base.terminal import say
from posttrain.cli.command import Interrupted
from posttrain.cli.eval import suites_of
from posttrain.cli.settings import devices_from_flag
from posttrain.config import DataConfig, ModelConfig
from posttrain.config.options import DEVICE, PRECISIONS, ExportOptions, QuantizeOptions, from_flags
from posttrain.config.reading.explain import did_you_mean
from posttrain.config.schema.rollout import RolloutConfig

ENGINES, DTYPES = ("ollama", "llama.cpp", "vllm"), ("auto", "float32", "bfloat16", "float16")
NOT_PASSED = 3  # exit status
SIZE = re.compile(r"\d+(?:\.\d+)? ?(?:[KMGT]i?B)", re.IGNORECASE)
Model = Annotated[
    str, typer.Argument(help="A run (its final or best model), a checkpoint, an adapter, any other model or a hub id.")
]


def export(model: Model, options: ExportOptions, device: Annotated[str, DEVICE] = "auto") -> None:
    """Export a model for plain transformers, vLLM, llama.cpp or ollama, and to the hub.

    An adapter is merged into its base, and outputs before and after are compared on real prompts. Then plain
    transformers loads the written files, and its outputs are compared too. The folder contains safetensors, tokenizer,
    chat template, stop tokens, and a model card with data, settings and results of the run. The folder is complete or
    absent; --overwrite replaces an earlier one.
    """
    for name, values, known in (("--dtype", [options.dtype], DTYPES), ("--for", options.engines, ENGINES)):
        for value in values:
            if value not in known:
                raise UsageError(f"{name} {value}: {did_you_mean(value, known)}")
    if not SIZE.fullmatch(options.max_shard_size):
        raise UsageError(
            f"--max-shard-size {options.max_shard_size}: it must be a number with a unit, such as 5GB or 500MB"
        )
    if options.private and options.push_to_hub is None:
        raise UsageError("--private applies to the hub: give --push-to-hub ID as well")
    devices = devices_from_flag(device)
    with quick_imports():
        from posttrain.export.export import export as export_model  # imports torch, which takes seconds

    try:
        export_model(model, options, devices, say)
    except KeyboardInterrupt as error:
        notes = getattr(error, "__notes__", None) or ["nothing was written"]
        raise Interrupted(f"interrupted: {' '.join(notes)}") from error


def quantize(model: Model, options: QuantizeOptions) -> None:
    """Quantise a model's linear layers, and measure what that changes.

    Plain transformers and every posttrain command can load the folder. Adapters are merged first; heads, embeddings and
    norms keep their precision. The gate compares both models on your rows: KL and greedy flips on tokens that the
    original samples, or a reward model's accuracy on pairs, and the accuracy on suites. A check passes if its 95 %
    interval is within the limit. Exit status 3: the gate is not passed, but the model is written (quantization.json).

        posttrain quantize runs/sft --to int8 --gate prompts.jsonl
        posttrain quantize runs/reward/best --to nf4 --gate pairs.jsonl
        posttrain quantize MODEL --to int4 --suite gsm8k
    """
    if options.to not in PRECISIONS:
        raise UsageError(f"--to {options.to}: {did_you_mean(options.to, PRECISIONS)}")
    from_flags(RolloutConfig, options)
    from_flags(ModelConfig, options, path=model)
    from_flags(DataConfig, source="gate", format=options.format, template=options.template or "none")
    devices = devices_from_flag(options.device)
    suites = suites_of(options.suite, {}, options.data) if options.suite else []
    if options.data and not suites:
        raise UsageError("--data needs --suite, whose rows it replaces; to give rows for the gate, use --gate")
    with quick_imports():
        from posttrain.base.console import PlainConsole
        from posttrain.evaluation.items import load_items  # these import torch, which takes seconds
        from posttrain.export.gate import table
        from posttrain.export.quantize import notes
        from posttrain.export.quantize import quantize as quantize_model

    items = [load_items(suite, options.max_rows) for suite in suites]
    try:
        result = quantize_model(model, options, items, devices, say)
    except KeyboardInterrupt as error:
        raise Interrupted("interrupted: nothing was written") from error
    PlainConsole().print(table(result.checks))
    for line in notes(result):
        say(line)
    if not result.passed:
        raise typer.Exit(NOT_PASSED)
