"""`posttrain export`."""

import re
from pathlib import Path
from typing import Annotated

import typer

from posttrain.base.imports import quick_imports
from posttrain.base.terminal import say
from posttrain.cli.errors import Interrupted, UsageError
from posttrain.cli.settings import Device, devices_from_flag
from posttrain.config.reading.explain import did_you_mean

ENGINES, DTYPES = ("ollama", "llama.cpp", "vllm"), ("auto", "float32", "bfloat16", "float16")
SIZE = re.compile(r"\d+(?:\.\d+)? ?(?:[KMGT]i?B)", re.IGNORECASE)

Model = Annotated[
    str, typer.Argument(help="A run (its final model, else its best), a checkpoint, an adapter, any model or hub id.")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="A new folder; default: exports/NAME.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an earlier export, in the folder and on the hub.")
]
Merge = Annotated[
    bool, typer.Option("--merge/--no-merge", help="Merge an adapter into its base, or export it as it is.")
]
Base = Annotated[
    str | None, typer.Option("--base", help="Merge an adapter into this model, such as the full one of a 4-bit base.")
]
Fold = Annotated[
    bool,
    typer.Option(
        "--fold", help="Write one adapter of the original base, with the adapters that were merged into its base."
    ),
]
Dtype = Annotated[str, typer.Option("--dtype", help="auto (as stored), float32, bfloat16 or float16.")]
MaxShardSize = Annotated[str, typer.Option("--max-shard-size", help="Size of the largest file of weights.")]
PromptsFile = Annotated[
    Path | None,
    typer.Option("--prompts", help="File whose first 8 prompts are compared; default: the run's data, or built-in."),
]
For = Annotated[list[str] | None, typer.Option("--for", help="Write what ollama, llama.cpp or vllm needs; repeatable.")]
Evaluations = Annotated[
    list[Path] | None, typer.Option("--evaluation", help="Evaluation folder for the model card; repeatable.")
]
PushTo = Annotated[str | None, typer.Option("--push-to-hub", metavar="ID", help="Upload it, such as me/my-model.")]
Private = Annotated[bool, typer.Option("--private", help="Create the hub's repository as a private one.")]


def export(
    model: Model,
    output: Output = None,
    overwrite: Overwrite = False,
    merge: Merge = True,
    base: Base = None,
    fold: Fold = False,
    dtype: Dtype = "auto",
    max_shard_size: MaxShardSize = "5GB",
    prompts: PromptsFile = None,
    engine: For = None,
    evaluation: Evaluations = None,
    push_to_hub: PushTo = None,
    private: Private = False,
    device: Device = "auto",
) -> None:
    """Export a model for plain transformers, vLLM, llama.cpp or ollama, and to the hub.

    An adapter is merged into its base and compared with it on real prompts; the written files are loaded by plain
    transformers and compared, too. The folder has safetensors, tokenizer, chat template, stop tokens, and a model card
    with data, settings and results of the run. It is complete or absent; --overwrite replaces an earlier one.
    """
    for name, given, known in (("--dtype", [dtype], DTYPES), ("--for", engine or [], ENGINES)):
        for value in given:
            if value not in known:
                raise UsageError(f"{name} {value}: {did_you_mean(value, known)}")
    if not SIZE.fullmatch(max_shard_size):
        raise UsageError(f"--max-shard-size {max_shard_size}: it is a number with its unit, such as 5GB or 500MB")
    if private and push_to_hub is None:
        raise UsageError("--private is about the hub: give --push-to-hub ID as well")
    devices = devices_from_flag(device)
    with quick_imports():
        from posttrain.export.export import Asked
        from posttrain.export.export import export as export_model  # these import torch, which takes seconds

    asked = Asked(
        model=model,
        output=output and output.expanduser(),
        overwrite=overwrite,
        merge=merge,
        base=base,
        fold=fold,
        dtype=None if dtype == "auto" else dtype,
        max_shard_size=max_shard_size,
        prompts=prompts,
        engines=tuple(dict.fromkeys(engine or ())),
        evaluations=tuple(evaluation or ()),
        push_to=push_to_hub,
        private=private,
    )
    try:
        export_model(asked, devices, say)
    except KeyboardInterrupt as error:
        notes = getattr(error, "__notes__", None) or ["nothing was written"]
        raise Interrupted(f"interrupted: {' '.join(notes)}") from error
