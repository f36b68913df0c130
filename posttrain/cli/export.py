"""`posttrain export`."""

import re
from typing import Annotated

import typer

from posttrain.base.errors import UsageError
from posttrain.base.imports import quick_imports
from posttrain.base.terminal import say
from posttrain.cli.errors import Interrupted
from posttrain.cli.settings import devices_from_flag
from posttrain.config.options import DEVICE, ExportOptions
from posttrain.config.reading.explain import did_you_mean

ENGINES, DTYPES = ("ollama", "llama.cpp", "vllm"), ("auto", "float32", "bfloat16", "float16")
SIZE = re.compile(r"\d+(?:\.\d+)? ?(?:[KMGT]i?B)", re.IGNORECASE)


def export(
    model: Annotated[
        str,
        typer.Argument(help="A run (its final model, else its best), a checkpoint, an adapter, any model or hub id."),
    ],
    options: ExportOptions,
    device: Annotated[str, DEVICE] = "auto",
) -> None:
    """Export a model for plain transformers, vLLM, llama.cpp or ollama, and to the hub.

    An adapter is merged into its base and compared with it on real prompts; the written files are loaded by plain
    transformers and compared, too. The folder has safetensors, tokenizer, chat template, stop tokens, and a model card
    with data, settings and results of the run. It is complete or absent; --overwrite replaces an earlier one.
    """
    for name, given, known in (("--dtype", [options.dtype], DTYPES), ("--for", options.engines, ENGINES)):
        for value in given:
            if value not in known:
                raise UsageError(f"{name} {value}: {did_you_mean(value, known)}")
    if not SIZE.fullmatch(options.max_shard_size):
        raise UsageError(
            f"--max-shard-size {options.max_shard_size}: it is a number with its unit, such as 5GB or 500MB"
        )
    if options.private and options.push_to_hub is None:
        raise UsageError("--private is about the hub: give --push-to-hub ID as well")
    devices = devices_from_flag(device)
    with quick_imports():
        from posttrain.export.export import export as export_model  # imports torch, which takes seconds

    try:
        export_model(model, options, devices, say)
    except KeyboardInterrupt as error:
        notes = getattr(error, "__notes__", None) or ["nothing was written"]
        raise Interrupted(f"interrupted: {' '.join(notes)}") from error
