"""`posttrain explore` and `posttrain data`: the data as a run sees it, and the known data sets."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from posttrain.base.console import PlainConsole, text_table
from posttrain.base.errors import DataError, UsageError
from posttrain.base.imports import quick_imports
from posttrain.base.terminal import say
from posttrain.base.words import counted
from posttrain.cli.settings import Config, Overrides, load_stages
from posttrain.config.options import ExploreOptions
from posttrain.config.schema.datasets import known_set, known_sets


def explore(
    config: Config = None, overrides: Overrides = None, *, options: ExploreOptions, flags: Mapping[str, str]
) -> None:
    """Show the data as a run would see it, and check it.

    It shows rows, lengths, and examples with their trained tokens. It looks for duplicates, for validation rows and
    questions of evaluation suites among the training rows, checks whether length predicts the preferred reply, and
    estimates with --reward-model the share of wrong labels. --json prints the same for programs, and the Data page of
    `posttrain ui` shows it.
    """
    stages = load_stages(config, overrides, flags)
    with quick_imports():
        from posttrain.inspection.quality import explore_stages  # imports torch, which takes seconds

    overviews = explore_stages(stages, options)
    if options.json:
        say(json.dumps(overviews))


app = typer.Typer(help="List known data sets, and save one for offline use.", no_args_is_help=True)


@app.command("list")
def list_() -> None:
    """List the data sets that data.source knows by a short name, with their formats."""
    columns = ("data.source", "on the hub", "format", "what it is")
    table = text_table(*columns, left=columns)
    for name, known in known_sets().items():
        table.add_row(name, known.source, known.format, known.about)
    console = PlainConsole()
    console.print(table)
    console.print("Save one for offline use: posttrain data save NAME FOLDER")


@app.command()
def save(
    sources: Annotated[list[str], typer.Argument(metavar="NAME…", help="Known sets, hub ids, files or folders.")],
    folder: Annotated[Path, typer.Argument(help="A new folder; data.source: FOLDER reads it later.")],
    split: Annotated[
        list[str] | None, typer.Option("--split", help="Only this split; repeatable. Default: all splits.")
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option("--max-rows", min=1, help="Number of rows per split, from the start.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option("--max-length", min=1, help="Only rows whose texts have at most so many tokens.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model whose tokenizer counts for --max-length.")] = None,
) -> None:
    """Save data sets to a folder, for a machine without a network or to avoid changes on the hub.

    Several sets become folders of their own below FOLDER, each with the last part of its name.
    """
    if (max_length is None) != (model is None):
        raise UsageError("--max-length and --model belong together: the model's tokenizer counts the tokens")
    names = {source: Path(source).stem if Path(source).is_file() else Path(source).name for source in sources}
    folders = {source: folder / name if len(sources) > 1 else folder for source, name in names.items()}
    if len(set(folders.values())) < len(sources):
        raise UsageError(f"two of {', '.join(sources)} would be saved in the same folder: save them one by one")
    for source, target in folders.items():
        if source.startswith("builtin:"):
            raise DataError(f"{source} is generated and need not be saved")
        if target.exists():
            raise DataError(f"{target} already exists: choose another folder, or remove it first")
    with quick_imports():
        from posttrain.config import ModelConfig
        from posttrain.data.prompts import tokens_within  # these import torch, which takes seconds
        from posttrain.data.sources import keep
        from posttrain.models.load import load_tokenizer

    fits = tokens_within(load_tokenizer(ModelConfig(path=model)), max_length) if model and max_length else None
    for source, target in folders.items():
        for done in keep(source, target, split, max_rows, fits):
            left_out = f", {done.malformed:,} malformed dropped" if done.malformed else ""
            left_out += f", {done.longer:,} longer than {max_length:,} tokens left out" if done.longer else ""
            say(f"{done.name}: {counted(done.rows, 'row')}, {done.bytes / 2**20:.1f} MiB{left_out}")
        known = known_set(source)
        say(f"saved in {target}; use it with data.source={target}" + (f" (columns as {known.name})" if known else ""))
