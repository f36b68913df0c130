"""`posttrain explore` and `posttrain data`: the data as a run sees it, and the known data sets."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich import box
from rich.table import Table

from posttrain.base.console import PlainConsole
from posttrain.base.errors import DataError, UsageError
from posttrain.base.imports import quick_imports
from posttrain.base.options import Flag
from posttrain.base.terminal import say
from posttrain.base.words import counted
from posttrain.cli.settings import Config, Overrides, load_stages
from posttrain.config import Stage, held_out_together
from posttrain.config.options import OVERWRITE
from posttrain.config.schema.datasets import known_set, known_sets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploreOptions:
    """Which rows are shown, and what is checked."""

    rows: Annotated[int, Flag("Number of examples to show.", min=0)] = 3
    first: Annotated[int, Flag("Index of the first example to show, from 0.", min=0, metavar="N")] = 0
    row: Annotated[int | None, Flag("Show only the examples of this row.", min=0, metavar="N")] = None
    sort: Annotated[
        Literal["row", "longest", "shortest"], Flag("Order of the examples: as in the data, or by length.")
    ] = "row"
    set: Annotated[str, Flag("Set whose examples are shown: train, or a validation set.", metavar="NAME")] = "train"
    json: Annotated[bool, Flag("Print everything as JSON: counts, lengths, rows, findings.")] = False
    no_quality: Annotated[bool, Flag("Show the rows without checking them.")] = False
    against: Annotated[
        Sequence[str],
        Flag(
            "Questions to look for in the training rows; repeatable. Default: the suites in the local hub cache.",
            metavar="SUITE|SUITE=SOURCE|FILE",
        ),
    ] = ()
    ngram: Annotated[int, Flag("Consecutive words that a question and a row must share: 13 or 8.")] = 13
    reward_model: Annotated[str | None, Flag("Model that estimates the share of wrong labels.", metavar="MODEL")] = None
    report: Annotated[Path | None, Flag("File for the findings, with all rows concerned.", metavar="FILE.json")] = None
    overwrite: Annotated[bool, OVERWRITE] = False


def explore(
    config: Config = None, overrides: Overrides = None, *, options: ExploreOptions, flags: Mapping[str, str]
) -> None:
    """Show the data as a run would see it, and check it.

    It shows rows, lengths, and examples with their trained tokens. It looks for duplicates, for validation rows and
    questions of evaluation suites among the training rows, checks whether length predicts the preferred reply, and
    estimates with --reward-model the share of wrong labels. --json prints the same for programs, and the Data page of
    `posttrain ui` shows it.
    """
    if options.ngram not in (13, 8):
        raise UsageError(f"--ngram {options.ngram}: it must be 13 or 8")
    if options.no_quality and (options.against or options.reward_model or options.report):
        raise UsageError("--no-quality cannot be combined with --against, --reward-model or --report")
    stages = load_stages(config, overrides, flags)
    with quick_imports():
        from posttrain.planning.plan import StageTokenizers  # these import torch, which takes seconds
        from posttrain.runs.files import ready_to_write, save_json

    if options.report is not None:
        ready_to_write(options.report, (), options.overwrite)
    console, tokenizers = PlainConsole(), StageTokenizers(0)
    overviews: dict[str, dict[str, Any]] = {}
    for stage in held_out_together(stages):
        if stage.name and not options.json:
            console.rule(f"stage {stage.name}", align="left")
        overviews[stage.name] = _explored(stage, tokenizers.of(stage), options, console)
    if options.json:
        say(json.dumps(_of_stages(overviews)))
    if options.report is not None:
        save_json(options.report, _of_stages({name: overview["findings"] for name, overview in overviews.items()}))


def _explored(
    stage: Stage, tokenizer: "PreTrainedTokenizerBase", options: ExploreOptions, console: PlainConsole
) -> dict[str, Any]:
    """Show a stage's data, unless it is printed as JSON. Returns its JSON, with the findings."""
    from posttrain.data import Selection, overview
    from posttrain.data import explore as show
    from posttrain.inspection.quality import check_quality
    from posttrain.training.job import data_of

    selection = Selection(options.rows, options.first, options.set, options.sort, options.row)
    prepared = data_of(stage.config, stage.config.models[0], tokenizer)
    shown = overview(prepared, tokenizer, selection) if options.json else dict[str, Any]()
    if not options.json:
        show(prepared, tokenizer, selection, console)
    if options.no_quality:
        return shown
    against, n, judge = options.against, options.ngram, options.reward_model
    quality = check_quality(stage.config, prepared, tokenizer, against=against, n=n, reward_model=judge)
    if not options.json:
        console.print()
        quality.show(console)
    return shown | {"findings": quality.as_json()}


def _of_stages(by_stage: Mapping[str, object]) -> object:
    """The values by stage; for a single stage, just its value."""
    return by_stage if len(by_stage) > 1 else next(iter(by_stage.values()))


app = typer.Typer(help="List known data sets, and save one for offline use.", no_args_is_help=True)


@app.command("list")
def list_() -> None:
    """List the data sets that data.source knows by a short name, with their formats."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("data.source", "on the hub", "format", "what it is"):
        table.add_column(name, no_wrap=name == "data.source", overflow="fold")
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
        int | None,
        typer.Option("--max-length", min=1, help="Only rows whose texts have at most so many tokens."),
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
