"""`posttrain sample`."""

from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.errors import UsageError
from posttrain.cli.generate import EngineOption, Seed
from posttrain.cli.settings import from_flags
from posttrain.cli.train import saved_config
from posttrain.config import load
from posttrain.config.rollout import RolloutConfig

Checkpoint = Annotated[Path, typer.Argument(help="A checkpoint, final/, best/, or a run folder (its newest model).")]
Prompts = Annotated[int, typer.Option("--prompts", min=1, help="How many prompts of the run's data.")]
NumGenerations = Annotated[int, typer.Option("--num-generations", "-n", min=2, help="Completions of each prompt.")]
Show = Annotated[int, typer.Option("--show", min=0, help="Completions shown of each prompt.")]
Temperature = Annotated[float | None, typer.Option("--temperature", help="Of sampling; default: the training's, or 1.")]
MaxLength = Annotated[
    int | None, typer.Option("--max-completion-length", min=1, help="In tokens; default: the training's, or 512.")
]


def sample(
    checkpoint: Checkpoint,
    prompts: Prompts = 4,
    num_generations: NumGenerations = 8,
    show: Show = 1,
    temperature: Temperature = None,
    max_completion_length: MaxLength = None,
    engine: EngineOption = "embedded",
    seed: Seed = 0,
) -> None:
    """Draw completions from a checkpoint as its training would, and say what they show.

    Prompts, template, rewards and model settings are those of the run that the checkpoint is of. For every prompt:
    lengths, how many the limit cut off, how many differ, how many keep the format of the template, and the mean and
    spread of their rewards; then what that suggests.
    """
    if not checkpoint.is_dir():
        raise UsageError(f"{checkpoint}: no such folder")
    config = load(saved_config(checkpoint)).stages[0].config
    given = {"engine": engine, "temperature": temperature, "max_completion_length": max_completion_length}
    given = {name: value for name, value in given.items() if value is not None}
    if engine != "vllm":
        given["vllm"] = {}  # where vLLM ran in training is nothing to another engine
    rollout = from_flags(RolloutConfig, config.rollout.model_dump() | given)
    from posttrain.console import PlainConsole
    from posttrain.recipes.sample import sample as sample_from  # imports torch, which takes seconds

    sample_from(checkpoint, config, rollout, prompts, num_generations, show, seed, PlainConsole())
