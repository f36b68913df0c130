"""`posttrain explore`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from posttrain.base.errors import UsageError
from posttrain.base.imports import quick_imports
from posttrain.base.options import Flag
from posttrain.base.terminal import say
from posttrain.cli.settings import Config, Overrides, load_stages
from posttrain.config import Stage, held_out_together
from posttrain.config.options import OVERWRITE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from posttrain.base.console import PlainConsole


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploreOptions:
    """What is shown of the rows, and what is checked."""

    rows: Annotated[int, Flag("Number of examples to show.", min=0)] = 3
    first: Annotated[int, Flag("Show examples from this one on, from 0.", min=0, metavar="N")] = 0
    row: Annotated[int | None, Flag("Show the examples of this row alone.", min=0, metavar="N")] = None
    sort: Annotated[
        Literal["row", "longest", "shortest"], Flag("Order of the examples: as in the data, or by their length.")
    ] = "row"
    set: Annotated[str, Flag("train, or the validation set to show examples of.", metavar="NAME")] = "train"
    json: Annotated[bool, Flag("Print everything as JSON: counts, lengths, rows, findings.")] = False
    no_quality: Annotated[bool, Flag("Show the rows without checking them.")] = False
    against: Annotated[
        Sequence[str],
        Flag(
            "Questions to look for in the training rows; repeatable. Default: the suites in the hub's local cache.",
            metavar="SUITE|SUITE=SOURCE|FILE",
        ),
    ] = ()
    ngram: Annotated[int, Flag("Words that a question and a row must share: 13 or 8.")] = 13
    reward_model: Annotated[str | None, Flag("Estimate the share of wrong preference labels.", metavar="MODEL")] = None
    report: Annotated[Path | None, Flag("Write the findings about the rows, with every row.", metavar="FILE.json")] = (
        None
    )
    overwrite: Annotated[bool, OVERWRITE] = False


def explore(
    config: Config = None, overrides: Overrides = None, *, options: ExploreOptions, flags: Mapping[str, str]
) -> None:
    """Show the data as a run would see it, and check it: rows, lengths, examples, which tokens are trained; duplicates,
    validation rows in training, questions of evaluation suites, whether length predicts the preferred reply, and with
    --reward-model the share of wrong labels. --json prints the same for programs; the page Data of `posttrain ui` shows
    it.
    """
    if options.ngram not in (13, 8):
        raise UsageError(f"--ngram {options.ngram}: it is 13 or 8")
    if options.no_quality and (options.against or options.reward_model or options.report):
        raise UsageError("--no-quality goes without --against, --reward-model and --report")
    stages = load_stages(config, overrides, flags)
    from posttrain.base.console import PlainConsole  # these import torch, which takes seconds

    with quick_imports():
        from posttrain.planning.plan import StageTokenizers
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
        save_json(options.report, _of_stages({name: one["findings"] for name, one in overviews.items()}))


def _explored(
    stage: Stage, tokenizer: "PreTrainedTokenizerBase", options: ExploreOptions, console: "PlainConsole"
) -> dict[str, Any]:
    """Show a stage's data unless it is for JSON. Returns what JSON has of it, and the findings."""
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
    found = check_quality(
        stage.config,
        prepared,
        tokenizer,
        against=options.against,
        n=options.ngram,
        reward_model=options.reward_model,
    )
    if not options.json:
        console.print()
        found.show(console)
    return shown | {"findings": found.as_json()}


def _of_stages(found: Mapping[str, object]) -> object:
    """By stage; without a name where there is one alone."""
    return found if len(found) > 1 else next(iter(found.values()))
