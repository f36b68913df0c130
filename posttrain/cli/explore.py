"""`posttrain explore`."""

from collections.abc import Mapping
from typing import Annotated

import typer

from posttrain.cli.settings import Config, Overrides, load_settings

Rows = Annotated[int, typer.Option("--rows", min=0, help="How many training examples to show.")]


def explore(config: Config = None, overrides: Overrides = None, rows: Rows = 3, *, flags: Mapping[str, str]) -> None:
    """Show the data as a run would see it: rows, lengths, examples, and which tokens are trained."""
    settings = load_settings(config, overrides, flags)
    from rich.console import Console  # these import torch, which takes seconds

    from posttrain.data import explore as show
    from posttrain.data import prepare_run
    from posttrain.models.load import load_tokenizer

    tokenizer = load_tokenizer(settings.models[0])
    show(prepare_run(settings, tokenizer), tokenizer, rows, Console())
