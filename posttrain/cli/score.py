"""`posttrain score`."""

from pathlib import Path
from typing import Annotated

import typer

from posttrain.base.imports import quick_imports
from posttrain.base.terminal import say
from posttrain.cli.settings import Device, devices_from_flag

Model = Annotated[
    str, typer.Argument(help="Hub id or folder: a causal model, a reward model, or a LoRA adapter of one.")
]
File = Annotated[Path, typer.Argument(help="JSONL, JSON, CSV or Parquet; also .gz.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Where to write; default: FILE.scored.jsonl.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output file if it exists.")]
Format = Annotated[
    str, typer.Option("--format", help="Format of the rows, as data.format; auto: inferred from the columns.")
]
Template = Annotated[
    str | None, typer.Option("--template", help="As data.template; default: chat if there is one, else none.")
]
Variables = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs",
        metavar="JSON",
        help="Variables of the chat template, such as '{enable_thinking: false}'; default: as saved with the model.",
    ),
]
MaxLength = Annotated[
    int, typer.Option("--max-length", min=2, help="Maximum length of a row in tokens; a longer one is an error.")
]
TokensPerPack = Annotated[
    int, typer.Option("--tokens-per-pack", min=2, help="Maximum tokens per pack, which limits memory, as in training.")
]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32 or bfloat16.")]


def score(
    model: Model,
    file: File,
    output: Output = None,
    overwrite: Overwrite = False,
    format: Format = "auto",
    template: Template = None,
    max_length: MaxLength = 4096,
    tokens_per_pack: TokensPerPack = 8192,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Score a file's completions: log-probabilities by a causal model, rewards by a reward model.

    Rows keep their order and fields, with `logprob` and `logprobs`, or `reward`; rows with chosen and rejected get both
    (`chosen_reward`, `rejected_reward`).
    """
    from posttrain.config import load

    devices = devices_from_flag(device)
    overrides = [f"data.max_length={max_length}", f"data.format={format}", "data.overlong=error", "data.shuffle=false"]
    flags = {"model.path": model, "model.dtype": dtype, "method.type": "sft", "data.source": str(file)}
    flags |= {"training.tokens_per_pack": max(tokens_per_pack, 2 * max_length)}
    config = load(None, overrides, flags).config
    with quick_imports():
        from posttrain.inspection.score import score as score_file
        from posttrain.models.load import load_tokenizer  # these import torch, which takes seconds

    if template is None:
        template = "chat" if load_tokenizer(config.models[0]).chat_template else "none"
    data = config.data.model_copy(update={"template": template})
    target = output or file.with_name(f"{file.name}.scored.jsonl")
    tokens = config.training.tokens_per_pack
    means = score_file(config.models[0], file, target, data, devices, tokens, overwrite)
    for name, value in means.items():
        say(f"mean {name}: {value:.4f}" if name != "accuracy" else f"chosen above rejected: {value:.1%}")
    say(f"written: {target}")
