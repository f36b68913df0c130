"""`posttrain data`: the data sets known by a short name, and saving one for offline use."""

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from posttrain.base.console import PlainConsole
from posttrain.base.errors import DataError
from posttrain.base.terminal import say
from posttrain.base.words import counted
from posttrain.config.schema.datasets import KNOWN, known_set, name_of

app = typer.Typer(help="Known data sets, and saving one for offline use.", no_args_is_help=True)


@app.command("list")
def list_() -> None:
    """List the data sets that data.source knows by a short name, with their columns mapped."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("data.source", "on the hub", "format", "what it is"):
        table.add_column(name, no_wrap=name == "data.source", overflow="fold")
    for name, known in KNOWN.items():
        table.add_row(name, known.source, known.format, known.about)
    console = PlainConsole()
    console.print(table)
    console.print("Save one for offline use: posttrain data save NAME FOLDER")


@app.command()
def save(
    source: Annotated[str, typer.Argument(metavar="NAME", help="A known set, a hub id, a file or a folder.")],
    folder: Annotated[Path, typer.Argument(help="A new folder; data.source: FOLDER reads it later.")],
    split: Annotated[
        list[str] | None, typer.Option("--split", help="Only this split; repeatable. Default: all splits.")
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option("--max-rows", min=1, help="Number of rows of each split, from the start.")
    ] = None,
) -> None:
    """Save a data set to a folder, for a machine without a network or against changes on the hub."""
    if source.startswith("builtin:"):
        raise DataError(f"{source} is made on the spot and needs no saving")
    if folder.exists():
        raise DataError(f"{folder} already exists: choose another folder, or remove it first")
    from posttrain.data.sources import keep  # imports torch, which takes seconds

    for done in keep(source, folder, split, max_rows):
        left_out = f", {done.malformed:,} malformed dropped" if done.malformed else ""
        say(f"{done.name}: {counted(done.rows, 'row')}, {done.bytes / 2**20:.1f} MiB{left_out}")
    name = name_of(known_set(source))
    say(f"saved in {folder}; use it with data.source={folder}" + (f" (columns as {name})" if name else ""))
