"""`posttrain generate`."""

from pathlib import Path
from typing import Annotated

import typer

from posttrain.base.imports import quick_imports
from posttrain.base.terminal import say
from posttrain.base.words import counted
from posttrain.cli.score import Dtype, Format, Overwrite, Template, Variables
from posttrain.cli.settings import Device, devices_from_flag, from_flags, saved_settings, variables_from_flag
from posttrain.config import DataConfig, ModelConfig, load
from posttrain.config.schema.rollout import RolloutConfig
from posttrain.config.schema.run import BEHAVIOR_VERSION

Model = Annotated[str, typer.Argument(help="Hub id or folder: a causal model, or a LoRA adapter of one.")]
File = Annotated[Path, typer.Argument(help="Prompts, as rows of any format: JSONL, JSON, CSV or Parquet; also .gz.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Where to write; default: FILE.generated.jsonl.")]
NumGenerations = Annotated[int, typer.Option("--num-generations", "-n", min=1, help="Completions of each prompt.")]
EngineOption = Annotated[str, typer.Option("--engine", help="embedded; transformers: any architecture; vllm.")]
Temperature = Annotated[float, typer.Option("--temperature", help="Sampling temperature; 0: greedy.")]
TopP = Annotated[float, typer.Option("--top-p", help="Total probability of the most likely tokens to sample from.")]
TopK = Annotated[int, typer.Option("--top-k", help="Number of most likely tokens; 0: all.")]
MinP = Annotated[float, typer.Option("--min-p", help="Minimum probability, as a share of the most likely token's.")]
MaxLength = Annotated[int, typer.Option("--max-completion-length", help="Longest completion in tokens.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="String that ends a completion; repeatable.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same completions.")]


def generate(
    model: Model,
    file: File,
    output: Output = None,
    overwrite: Overwrite = False,
    num_generations: NumGenerations = 1,
    engine: EngineOption = "embedded",
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    max_completion_length: MaxLength = 512,
    stop: Stop = None,
    seed: Seed = 0,
    format: Format = "auto",
    template: Template = None,
    chat_template_kwargs: Variables = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Sample completions for the prompts of a file.

    Rows keep their order and fields, with `completions`, each with `text`, `token_ids`, `logprobs` (of the sampling
    distribution) and `finish_reason` (stop or length).
    """
    model_settings = from_flags(ModelConfig, {"path": model, "dtype": dtype})
    rollout = from_flags(
        RolloutConfig,
        {
            "engine": engine,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "max_completion_length": max_completion_length,
            "stop": tuple(stop or ()),
        },
    )
    devices = devices_from_flag(device)
    given = variables_from_flag(chat_template_kwargs)
    values = {"source": str(file), "format": format, "template": template or ("chat" if given else "none")}
    data = from_flags(DataConfig, values | {"chat_template_kwargs": given})
    with quick_imports():
        from posttrain.inspection.generate import generate as generate_for
        from posttrain.models.load import load_tokenizer  # these import torch, which takes seconds

    if template is None and load_tokenizer(model_settings).chat_template:
        data = data.model_copy(update={"template": "chat"})
    target = output or file.with_name(f"{file.name}.generated.jsonl")
    saved = saved_settings(Path(model).expanduser())
    version = load(saved).stages[0].config.behavior_version if saved else BEHAVIOR_VERSION
    done = generate_for(model_settings, file, target, data, rollout, devices, num_generations, seed, overwrite, version)
    say(
        f"{counted(done.completions, 'completion')} of {counted(done.prompts, 'prompt')}: "
        f"{counted(done.tokens, 'token')} in {done.seconds:.1f} s "
        f"({done.tokens / max(done.seconds, 1e-9):,.0f} per second), {done.truncated:,} reached the length limit"
    )
    say(f"written: {target}")
