"""`posttrain eval`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.base.extras import need
from posttrain.base.imports import quick_imports
from posttrain.base.terminal import say
from posttrain.cli.errors import Interrupted, UsageError
from posttrain.cli.score import Dtype, Variables
from posttrain.cli.settings import Device, devices_from_flag, from_flags, variables_from_flag
from posttrain.config import ModelConfig
from posttrain.config.schema.rollout import RolloutConfig
from posttrain.config.schema.suite import CALIBRATED, LM_EVAL, SuiteConfig

Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL...",
        help="Hub ids, folders, adapters, checkpoints, runs (their newest model), or files with recorded completions.",
    ),
]
Suite = Annotated[
    str | None,
    typer.Option(
        "--suite", "-s", metavar="NAME,...", help="Built-in suites, .yaml files, module:function, lm-eval:TASK."
    ),
]
ListSuites = Annotated[bool, typer.Option("--list", help="List the built-in suites and end.")]
Data = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="[NAME=]FILE", help="Local rows of a suite instead of its source; repeatable."),
]
MaxRows = Annotated[int | None, typer.Option("--max-rows", min=1, help="Items of each suite, evenly spread.")]
NumGenerations = Annotated[
    int | None, typer.Option("--num-generations", "-n", min=1, help="Completions of each prompt; several: with pass@k.")
]
Temperature = Annotated[
    str | None, typer.Option("--temperature", metavar="T[,T...]", help="Sampling temperature; several: a sweep.")
]
TopP = Annotated[
    str | None, typer.Option("--top-p", metavar="P[,P...]", help="Total probability to sample from; several: a sweep.")
]
TopK = Annotated[int, typer.Option("--top-k", min=0, help="Number of most likely tokens; 0: all.")]
MinP = Annotated[float, typer.Option("--min-p", help="Minimum probability, as a share of the most likely token's.")]
MaxLength = Annotated[int | None, typer.Option("--max-completion-length", min=1, help="Longest completion in tokens.")]
Engine = Annotated[str, typer.Option("--engine", help="embedded; transformers (or hf): any architecture; vllm.")]
Template = Annotated[str | None, typer.Option("--template", help="Template of the prompts, as data.template.")]
PromptText = Annotated[str | None, typer.Option("--prompt", help="The question, such as '{problem}'.")]
System = Annotated[str | None, typer.Option("--system-prompt", help="System prompt.")]
Rule = Annotated[str | None, typer.Option("--rule", help="Rule that grades, or module:function.")]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="String that ends a completion; repeatable.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same completions.")]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Folder of the records; default: in the run, else evaluations/."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Evaluate again what is there already.")]
Column = Annotated[
    str,
    typer.Option("--completion-column", help="Column of recorded completions, or a path such as a.solution."),
]
Reference = Annotated[
    str | None, typer.Option("--reference", help="Reference of a policy's implicit reward, for suites of pairs.")
]
Batches = Annotated[
    int | None,
    typer.Option("--num-batches", min=1, help="Batches of 16 pairs, sampled with replacement."),
]
Deadline = Annotated[float, typer.Option("--deadline", help="Time limit of grading one completion, in seconds.")]
Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Grading processes; default: one per core.")]
Export = Annotated[
    str | None,
    typer.Option(
        "--export", metavar="inspect|lm-eval", help="Also write the records for it; alone for a folder of records."
    ),
]
Calibrate = Annotated[
    bool, typer.Option("--calibrate", help="Also compare verifiers: the string, the rule, math_verify; gold with gold.")
]


def eval(
    models: Models = None,
    suite: Suite = None,
    list_suites: ListSuites = False,
    data: Data = None,
    max_rows: MaxRows = None,
    num_generations: NumGenerations = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    max_completion_length: MaxLength = None,
    stop: Stop = None,
    engine: Engine = "embedded",
    seed: Seed = 0,
    template: Template = None,
    chat_template_kwargs: Variables = None,
    prompt: PromptText = None,
    system_prompt: System = None,
    rule: Rule = None,
    completion_column: Column = "completions",
    reference: Reference = None,
    num_batches: Batches = None,
    output: Output = None,
    overwrite: Overwrite = False,
    deadline: Deadline = 2.0,
    workers: Workers = None,
    calibrate: Calibrate = False,
    export: Export = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
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
    if suite is None and export is not None:
        _export(models, export)
        return
    if suite is None:
        raise UsageError("give the suites with --suite, such as --suite gsm8k; posttrain eval --list shows them")
    rollout = from_flags(
        RolloutConfig, {"engine": "transformers" if engine == "hf" else engine, "top_k": top_k, "min_p": min_p}
    )
    temperatures, top_ps = _numbers("temperature", temperature), _numbers("top-p", top_p)
    settings = {
        "template": template,
        "chat_template_kwargs": variables_from_flag(chat_template_kwargs) or None,
        "prompt": prompt,
        "system_prompt": system_prompt,
        "rule": rule,
        "stop": tuple(stop) if stop else None,
    }
    devices = devices_from_flag(device)
    tasks, names = _tasks(suite)
    if tasks:
        need("lm_eval", "lm-eval", f"--suite {LM_EVAL}{tasks[0]}")
    given = {name: value for name, value in settings.items() if value is not None}
    suites = suites_of(names, given, data) if names else []
    _refuse_unread(suites, {"--reference": reference, "--num-batches": num_batches}, calibrate)
    with quick_imports():
        from posttrain.api import evaluate  # these import torch, which takes seconds
        from posttrain.evaluation.items import load_items
        from posttrain.evaluation.table import show, write_sweep
        from posttrain.models.load import load_config
    asked = [*(load_items(one, max_rows) for one in suites), *(f"{LM_EVAL}{task}" for task in tasks)]
    placed = _placed(models, output)
    loadable = {path: from_flags(ModelConfig, {"path": path, "dtype": dtype}) for path, _ in placed.values()}
    for path, model in loadable.items():
        if not Path(path).is_file():
            load_config(model)  # a missing one is an error before the others are evaluated
        elif tasks:
            raise UsageError(f"{path} has recorded completions, which lm-eval's tasks cannot grade: give a model")
    found: dict[str, Mapping[str, Any]] = {}
    try:
        for folder, (path, name) in placed.items():
            evaluated = evaluate(
                path,
                asked,
                max_rows=max_rows,
                num_generations=num_generations,
                temperature=temperatures,
                top_p=top_ps,
                top_k=top_k,
                min_p=min_p,
                max_completion_length=max_completion_length,
                settings=given,
                completion_column=completion_column,
                reference=reference,
                num_batches=num_batches,
                calibrate=calibrate,
                deadline=deadline,
                workers=workers,
                engine=rollout.engine,
                dtype=loadable[path].dtype,
                device=devices,
                output=folder,
                overwrite=overwrite,
                seed=seed,
            )
            found[str(folder)] = {"model": {"name": name}, "suites": evaluated.summary}
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
    if export is not None:
        _export(list(found), export)


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


def suites_of(names: str, settings: Mapping[str, Any], data: Sequence[str] | None) -> list[SuiteConfig]:
    from posttrain.evaluation.suite import find_suite, with_settings

    found = [with_settings(find_suite(name.strip()), settings) for name in names.split(",") if name.strip()]
    twice = {one.name for one in found if [other.name for other in found].count(one.name) > 1}
    if not found or twice:
        raise UsageError(f"--suite names {', '.join(sorted(twice))} twice" if twice else "--suite names no suite")
    sources = _sources(data, [one.name for one in found])
    return [with_settings(one, {"source": sources[one.name]}) if one.name in sources else one for one in found]


def _refuse_unread(suites: Sequence[SuiteConfig], of_pairs: Mapping[str, object], calibrate: bool) -> None:
    """Raise UsageError for an option that none of the suites reads."""
    unread = [name for name, value in of_pairs.items() if value is not None]
    if unread and not any(one.kind == "preference" for one in suites):
        raise UsageError(f"{unread[0]} is read for suites of pairs only, such as hh: none is in --suite")
    if calibrate and not any(one.kind == "generate" and one.rule in CALIBRATED for one in suites):
        rules = " and ".join(sorted(CALIBRATED))
        raise UsageError(f"--calibrate compares verifiers for the rules {rules}: no suite of --suite has one of them")


def _sources(given: Sequence[str] | None, suites: Sequence[str]) -> dict[str, str]:
    """The sources that `--data` names, by suite; without a name it is that of the only suite."""
    from posttrain.evaluation.suite import ALIASES

    found: dict[str, str] = {}
    for text in given or ():
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


def _numbers(name: str, text: str | None) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--{name} is {text!r}; give numbers with commas, such as 0,0.6,1.0") from None
    for value in values:
        from_flags(RolloutConfig, {name.replace("-", "_"): value})
    if len(set(values)) < len(values):
        raise UsageError(f"--{name} has a number twice: {text}")
    return values


def _placed(models: Sequence[str], output: Path | None) -> dict[Path, tuple[str, str]]:
    """The folder of each model's records, with its path and name. Raises UsageError if two have the same."""
    from posttrain.runs.finding import locate_model

    found: dict[Path, tuple[str, str]] = {}
    for model in models:
        place, name, folder = locate_model(model)
        if output is not None:
            folder = output / name.replace("/", "-") if len(models) > 1 else output
        if folder in found:
            if found[folder][0] == place:
                raise UsageError(f"{place} is given twice")
            raise UsageError(
                f"{found[folder][0]} and {place} would be evaluated in one folder, {folder}: evaluate them one by one, "
                "each with its own --output"
            )
        found[folder] = place, name
    return found
