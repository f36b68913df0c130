"""`posttrain explore`."""

from collections.abc import Mapping
from typing import Annotated

import typer

from posttrain.cli.settings import Config, Overrides, load_stages
from posttrain.imports import quick_imports

Rows = Annotated[int, typer.Option("--rows", min=0, help="Number of training examples to show.")]


def explore(config: Config = None, overrides: Overrides = None, rows: Rows = 3, *, flags: Mapping[str, str]) -> None:
    """Show the data as a run would see it: rows, lengths, examples, and which tokens are trained."""
    stages = load_stages(config, overrides, flags)
    from posttrain.console import PlainConsole  # these import torch, which takes seconds

    with quick_imports():
        from posttrain.data import explore as show
        from posttrain.planning.plan import StageTokenizers
        from posttrain.training.job import data_of

    console = PlainConsole()
    tokenizers = StageTokenizers(0)
    for stage in stages:
        if stage.name:
            console.rule(f"stage {stage.name}", align="left")
        tokenizer = tokenizers.of(stage)
        show(data_of(stage.config, stage.config.models[0], tokenizer), tokenizer, rows, console)
