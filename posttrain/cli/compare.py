"""`posttrain compare`."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.base.console import PlainConsole
from posttrain.base.errors import UsageError
from posttrain.base.options import Flag
from posttrain.base.terminal import say
from posttrain.config.options import (
    DATA,
    DEVICE,
    DTYPE,
    MAX_ROWS,
    NUM_GENERATIONS,
    SUITE_ENGINE,
    CompareOptions,
    EvalOptions,
)
from posttrain.config.reading.explain import checked
from posttrain.config.reading.files import parse_value
from posttrain.config.schema.judge import JudgeSettings
from posttrain.config.schema.rollout import EngineName
from posttrain.runs.finding import locate_model

SIDES = typer.Argument(
    metavar="A B…",
    help="Two or more: runs (RUN, RUN@STEP), evaluation folders, files of posttrain score, grade or generate. "
    "NAME=PATH names a side; several paths with the same name are runs that differ only in their seed.",
    show_default=False,
)
JUDGE = Flag(
    "A language model that compares completions: '{base_url: http://localhost:8000/v1, model: NAME}'.", metavar="{...}"
)


def compare(
    sides: Annotated[list[str], SIDES],
    output: Annotated[Path | None, Flag("Folder to write to; default: comparisons/A-B.", "-o")] = None,
    suite: Annotated[
        str | None, Flag("Evaluate the models on these suites, and compare the results.", "-s", metavar="NAME,...")
    ] = None,
    data: Annotated[Sequence[str], DATA] = (),
    max_rows: Annotated[int | None, MAX_ROWS] = None,
    num_generations: Annotated[int | None, NUM_GENERATIONS] = None,
    engine: Annotated[EngineName, SUITE_ENGINE] = "embedded",
    judge: Annotated[str | None, JUDGE] = None,
    *,
    options: CompareOptions,
    dtype: Annotated[str, DTYPE] = "auto",
    device: Annotated[str, DEVICE] = "auto",
) -> None:
    """Compare models item by item: is B better than A, and on which items?

    For the items that both answered, it shows how many B won, lost and tied, the difference with its interval, a test
    (exact McNemar if each item has one right or wrong answer, otherwise a paired bootstrap), and the smallest
    difference that would have been detected. Without a clear difference the verdict is "no difference shown". With
    several seeds per side, a difference must also exceed what seeds cause. compare.json and compare.html list the items
    that flipped, with both texts. With --suite, models are evaluated first, as by `posttrain eval`.

        posttrain compare runs/sft runs/grpo
        posttrain compare runs/grpo@0 runs/grpo
        posttrain compare sft=runs/sft-0 sft=runs/sft-1 grpo=runs/grpo-0
        posttrain compare small.scored.jsonl large.scored.jsonl
        posttrain compare MODEL MODEL --suite gsm8k
    """
    _check(sides, suite, {"--data": data or None, "--max-rows": max_rows, "--num-generations": num_generations})
    settings = _judge_settings(judge)
    from posttrain.evaluation.comparing.differences import Comparison
    from posttrain.evaluation.comparing.differences import compare as compare_sides
    from posttrain.evaluation.comparing.judged import judge as judge_sides
    from posttrain.evaluation.comparing.page import show, write
    from posttrain.evaluation.comparing.sources import make_sides, read_source, split_name

    named = [split_name(side) for side in sides]
    paths = {path: path for _, path in named}
    if suite is not None:
        evaluation = EvalOptions(max_rows=max_rows, num_generations=num_generations, engine=engine)
        paths |= _evaluated(list(paths), suite=suite, data=data, options=evaluation, dtype=dtype, device=device)
    compared = make_sides([(name, read_source(paths[path])) for name, path in named])
    if settings is not None and not any(side.is_scored(key) for side in compared for key in side.suites()):
        comparison = Comparison(compared, [], options)
    else:
        comparison = compare_sides(compared, options, _suite_names(suite))
    judged = judge_sides(compared, settings, options, _suite_names(suite)) if settings else ()
    folder = output or Path("comparisons") / _folder_name([side.name for side in compared])
    write(comparison, folder, judged)
    show(comparison, PlainConsole(), judged)
    say(f"written: {folder}/compare.html, compare.json{', compare.svg' if comparison.suites else ''}")


def _check(sides: Sequence[str], suite: str | None, of_suites: Mapping[str, object]) -> None:
    """Raise UsageError for fewer than two sides, for a side given twice, and for options of suites without a suite."""
    if len(sides) < 2:
        raise UsageError(f"give at least two sides to compare; {sides[0]} is only one")
    from posttrain.evaluation.comparing.sources import split_name

    seen: dict[str, str] = {}
    for side in sides:
        _, path = split_name(side)
        resolved = str(Path(path).expanduser().resolve()) if Path(path).expanduser().exists() else path
        if resolved in seen:
            also = "" if seen[resolved] == side else f" (also as {seen[resolved]})"
            raise UsageError(f"{side} is given twice{also}: a side compared with itself does not differ")
        seen[resolved] = side
    unread = [flag for flag, value in of_suites.items() if value is not None]
    if suite is None and unread:
        raise UsageError(f"{unread[0]} applies to the evaluation of models: name the suites with --suite")


def _judge_settings(text: str | None) -> JudgeSettings | None:
    if text is None:
        return None
    values = parse_value(text, "--judge").values["value"]
    if not isinstance(values, dict):
        raise UsageError(
            f"--judge is {text!r}; give settings such as '{{base_url: http://localhost:8000/v1, model: m}}'"
        )
    return checked(JudgeSettings, values, "a judge", "--judge", UsageError)


def _suite_names(names: str | None) -> list[str]:
    from posttrain.evaluation.suite import find_suite

    return [find_suite(name.strip()).name for name in names.split(",")] if names else []


def _evaluated(paths: Sequence[str], **arguments: Any) -> dict[str, str]:
    """Evaluate the paths that are models or runs, by `eval` with these arguments; returns the folder of each."""
    from posttrain.evaluation.records import is_evaluation

    models = [path for path in paths if not Path(path).is_file() and not is_evaluation(Path(path).expanduser())]
    at_step = next((path for path in models if re.search(r"@\d+$", path) and not Path(path).exists()), None)
    if at_step is not None:
        raise UsageError(f"{at_step} names stored completions; to evaluate a checkpoint, give its folder")
    if not models:
        return {}
    from posttrain.cli.eval import eval

    folders = {path: str(locate_model(path)[2]) for path in models}
    shared = [path for path in models if list(folders.values()).count(folders[path]) > 1]
    if shared:
        raise UsageError(
            f"{' and '.join(shared)} would be evaluated in the same folder, {folders[shared[0]]}: evaluate them with "
            "`posttrain eval` and --output, and compare the folders"
        )
    eval(models=models, **arguments)
    return folders


def _folder_name(names: Sequence[str]) -> str:
    """The names of the sides as one folder name."""
    safe = [re.sub(r"[^\w.@-]+", "-", name).strip("-.")[:40] or "side" for name in names]
    return "-".join(safe[:3]) + (f"-and-{len(safe) - 3}-more" if len(safe) > 3 else "")
