"""`posttrain explore`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from posttrain.base.imports import quick_imports
from posttrain.base.terminal import say
from posttrain.cli.errors import UsageError
from posttrain.cli.score import Overwrite
from posttrain.cli.settings import Config, Overrides, load_stages

Order = Literal["row", "longest", "shortest"]
Rows = Annotated[int, typer.Option("--rows", min=0, help="Number of examples to show.")]
First = Annotated[int, typer.Option("--first", min=0, metavar="N", help="Show examples from this one on, from 0.")]
Row = Annotated[int | None, typer.Option("--row", min=0, metavar="N", help="Show the examples of this row alone.")]
Sort = Annotated[
    Literal["row", "longest", "shortest"],
    typer.Option("--sort", help="Order of the examples: as in the data, or by their length."),
]
Set = Annotated[str, typer.Option("--set", metavar="NAME", help="train, or the validation set to show examples of.")]
Json = Annotated[bool, typer.Option("--json", help="Print everything as JSON: counts, lengths, rows, findings.")]
NoQuality = Annotated[bool, typer.Option("--no-quality", help="Show the rows without checking them.")]
Against = Annotated[
    list[str] | None,
    typer.Option(
        "--against",
        metavar="SUITE|SUITE=SOURCE|FILE",
        help="Questions to look for in the training rows; repeatable. Default: the suites in the hub's local cache.",
    ),
]
Ngram = Annotated[int, typer.Option("--ngram", help="Words that a question and a row must share: 13 or 8.")]
RewardModel = Annotated[
    str | None, typer.Option("--reward-model", metavar="MODEL", help="Estimate the share of wrong preference labels.")
]
Report = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE.json", help="Write the findings about the rows, with every row."),
]


def explore(
    config: Config = None,
    overrides: Overrides = None,
    rows: Rows = 3,
    first: First = 0,
    row: Row = None,
    sort: Sort = "row",
    set_: Set = "train",
    as_json: Json = False,
    no_quality: NoQuality = False,
    against: Against = None,
    ngram: Ngram = 13,
    reward_model: RewardModel = None,
    report: Report = None,
    overwrite: Overwrite = False,
    *,
    flags: Mapping[str, str],
) -> None:
    """Show the data as a run would see it, and check it: rows, lengths, examples, which tokens are trained; duplicates,
    validation rows in training, questions of evaluation suites, whether length predicts the preferred reply, and with
    --reward-model the share of wrong labels. --json prints the same for programs; the page Data of `posttrain ui` shows
    it.
    """
    if ngram not in (13, 8):
        raise UsageError(f"--ngram {ngram}: it is 13 or 8")
    if no_quality and (against or reward_model or report):
        raise UsageError("--no-quality goes without --against, --reward-model and --report")
    stages = load_stages(config, overrides, flags)
    from posttrain.base.console import PlainConsole  # these import torch, which takes seconds

    with quick_imports():
        from posttrain.config import held_out_together
        from posttrain.data import Selection, overview
        from posttrain.data import explore as show
        from posttrain.inspection.quality import check_quality
        from posttrain.planning.plan import StageTokenizers
        from posttrain.runs.files import ready_to_write, save_json
        from posttrain.training.job import data_of

    if report is not None:
        ready_to_write(report, (), overwrite)
    selection = Selection(rows, first, set_, sort, row)
    console = PlainConsole()
    tokenizers = StageTokenizers(0)
    written: dict[str, object] = {}
    overviews: dict[str, dict[str, Any]] = {}
    for stage in held_out_together(stages):
        if stage.name and not as_json:
            console.rule(f"stage {stage.name}", align="left")
        tokenizer = tokenizers.of(stage)
        prepared = data_of(stage.config, stage.config.models[0], tokenizer)
        if as_json:
            overviews[stage.name] = overview(prepared, tokenizer, selection)
        else:
            show(prepared, tokenizer, selection, console)
        if no_quality:
            continue
        found = check_quality(
            stage.config, prepared, tokenizer, against=against or (), n=ngram, reward_model=reward_model
        )
        written[stage.name] = found.as_json()
        if as_json:
            overviews[stage.name]["findings"] = written[stage.name]
        else:
            console.print()
            found.show(console)
    if as_json:
        say(json.dumps(_of_stages(overviews)))
    if report is not None:
        save_json(report, _of_stages(written))


def _of_stages(found: Mapping[str, object]) -> object:
    """By stage; without a name where there is one alone."""
    return found if len(found) > 1 else next(iter(found.values()))
