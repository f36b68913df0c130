"""`posttrain eval`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.base.errors import UsageError
from posttrain.base.extras import need
from posttrain.base.imports import quick_imports
from posttrain.base.options import Flag, values_of
from posttrain.base.terminal import say
from posttrain.cli.errors import Interrupted
from posttrain.cli.settings import devices_from_flag
from posttrain.config import DevicesConfig, ModelConfig
from posttrain.config.options import DATA, DEVICE, DTYPE, EvalOptions, from_flags
from posttrain.config.schema.rollout import RolloutConfig
from posttrain.config.schema.suite import CALIBRATED, LM_EVAL, SuiteConfig


def eval(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="MODEL...",
            help="Hub ids, folders, adapters, checkpoints, runs (their newest model), or files with recorded "
            "completions.",
        ),
    ] = None,
    suite: Annotated[
        str | None, Flag("Built-in suites, .yaml files, module:function, lm-eval:TASK.", "-s", metavar="NAME,...")
    ] = None,
    list_suites: Annotated[bool, Flag("List the built-in suites and end.", "--list")] = False,
    data: Annotated[Sequence[str], DATA] = (),
    *,
    options: EvalOptions,
    export: Annotated[
        str | None,
        Flag("Also write the records for it; alone for a folder of records.", metavar="inspect|lm-eval"),
    ] = None,
    dtype: Annotated[str, DTYPE] = "auto",
    device: Annotated[str, DEVICE] = "auto",
) -> None:
    """Evaluate models on suites of questions, with intervals.

    Answers are graded as in training and stored as they come, so that a stopped evaluation is resumed. A
    folder per model gets `evaluation.sqlite`, `answers.jsonl` (every answer with its verdict) and `summary.json`. What
    could not be graded is counted, never scored.

        posttrain eval runs/sft --suite gsm8k,math500
        posttrain eval MODEL --suite gsm8k -n 4 --temperature 0.6,1.0
        posttrain eval answers.jsonl --suite gsm8k --completion-column solution
        posttrain eval MODEL --suite lm-eval:hellaswag --max-rows 100
        posttrain eval evaluations/MODEL --export inspect
    """
    if list_suites:
        _list()
        return
    if not models:
        raise UsageError("give a MODEL to evaluate: a folder, a hub id, a run, or a file with recorded completions")
    if suite is None and export is None:
        raise UsageError("give the suites with --suite, such as --suite gsm8k; posttrain eval --list shows them")
    folders = models if suite is None else _evaluated(models, suite, data, options, dtype, devices_from_flag(device))
    if export is not None:
        _export(folders, export)


def _evaluated(
    models: Sequence[str], suite: str, data: Sequence[str], options: EvalOptions, dtype: str, devices: DevicesConfig
) -> list[str]:
    """Evaluate the models and print the tables. Returns the folders."""
    from_flags(RolloutConfig, engine=options.engine, top_k=options.top_k, min_p=options.min_p)
    tasks, names = _tasks(suite)
    if tasks:
        need("lm_eval", "lm-eval", f"--suite {LM_EVAL}{tasks[0]}")
    suites = suites_of(names, options.of_suites, data) if names else []
    _refuse_unread(suites, options)
    with quick_imports():
        from posttrain.api import evaluate  # these import torch, which takes seconds
        from posttrain.evaluation.items import load_items
        from posttrain.evaluation.table import show, write_sweep
        from posttrain.models.load import load_config
    asked = [*(load_items(one, options.max_rows) for one in suites), *(f"{LM_EVAL}{task}" for task in tasks)]
    placed = _placed(models, options.output)
    loadable = {path: from_flags(ModelConfig, path=path, dtype=dtype) for path, _ in placed.values()}
    for path, model in loadable.items():
        if not Path(path).is_file():
            load_config(model)  # a missing one is an error before the others are evaluated
        elif tasks:
            raise UsageError(f"{path} has recorded completions, which lm-eval's tasks cannot grade: give a model")
    found: dict[str, Mapping[str, Any]] = {}
    try:
        for folder, (path, name) in placed.items():
            given = values_of(options) | {"output": folder, "dtype": loadable[path].dtype, "device": devices}
            found[str(folder)] = {"model": {"name": name}, "suites": evaluate(path, asked, **given).summary}
    except KeyboardInterrupt as interrupt:
        raise Interrupted(
            "interrupted: answers so far are stored, and the same command without --overwrite resumes after them"
        ) from interrupt
    show(found)
    for folder, summary in found.items():
        if picture := write_sweep(summary, Path(folder)):
            say(f"written: {picture}")
    for folder in found:
        say(f"written: {folder}")
    return list(found)


def _tasks(suites: str) -> tuple[list[str], str]:
    """The tasks of lm-eval among the names, and the other names."""
    names = [name.strip() for name in suites.split(",")]
    tasks = [name.removeprefix(LM_EVAL) for name in names if name.startswith(LM_EVAL)]
    return tasks, ",".join(name for name in names if not name.startswith(LM_EVAL))


def _export(folders: Sequence[str], to: str) -> None:
    from posttrain.evaluation.exports import export_evaluation

    for folder in folders:
        for path in export_evaluation(Path(folder), to):
            say(f"written: {path}")


def _list() -> None:
    from posttrain.base.console import PlainConsole
    from posttrain.evaluation.suite import suites_table

    PlainConsole().print(suites_table())


def suites_of(names: str, settings: Mapping[str, Any], data: Sequence[str]) -> list[SuiteConfig]:
    from posttrain.evaluation.suite import find_suite, with_settings

    found = [with_settings(find_suite(name.strip()), settings) for name in names.split(",") if name.strip()]
    twice = {one.name for one in found if [other.name for other in found].count(one.name) > 1}
    if not found or twice:
        raise UsageError(f"--suite names {', '.join(sorted(twice))} twice" if twice else "--suite names no suite")
    sources = _sources(data, [one.name for one in found])
    return [with_settings(one, {"source": sources[one.name]}) if one.name in sources else one for one in found]


def _refuse_unread(suites: Sequence[SuiteConfig], options: EvalOptions) -> None:
    """Raise UsageError for an option that none of the suites reads."""
    of_pairs = {"--reference": options.reference, "--num-batches": options.num_batches}
    unread = [name for name, value in of_pairs.items() if value is not None]
    if unread and not any(one.kind == "preference" for one in suites):
        raise UsageError(f"{unread[0]} is read for suites of pairs only, such as hh: none is in --suite")
    if options.calibrate and not any(one.kind == "generate" and one.rule in CALIBRATED for one in suites):
        rules = " and ".join(sorted(CALIBRATED))
        raise UsageError(f"--calibrate compares verifiers for the rules {rules}: no suite of --suite has one of them")


def _sources(given: Sequence[str], suites: Sequence[str]) -> dict[str, str]:
    """The sources that `--data` names, by suite; without a name it is that of the only suite."""
    from posttrain.evaluation.suite import ALIASES

    found: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        name = ALIASES.get(name, name)
        if not equals or (name not in suites and Path(text).exists()):
            if len(suites) > 1:
                raise UsageError(f"--data {text}: with several suites, write NAME={text}, such as {suites[0]}={text}")
            name, path = suites[0], text
        if name not in suites:
            raise UsageError(f"--data {text}: {name} is not one of the suites {', '.join(suites)}")
        found[name] = path
    return found


def _placed(models: Sequence[str], output: Path | str | None) -> dict[Path, tuple[str, str]]:
    """The folder of each model's records, with its path and name. Raises UsageError if two have the same."""
    from posttrain.runs.finding import locate_model

    found: dict[Path, tuple[str, str]] = {}
    for model in models:
        place, name, folder = locate_model(model)
        if output is not None:
            folder = Path(output, name.replace("/", "-") if len(models) > 1 else "")
        if folder in found:
            if found[folder][0] == place:
                raise UsageError(f"{place} is given twice")
            raise UsageError(
                f"{found[folder][0]} and {place} would be evaluated in one folder, {folder}: evaluate them one by one, "
                "each with its own --output"
            )
        found[folder] = place, name
    return found
