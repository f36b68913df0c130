"""Evaluations as tables and a picture."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from posttrain.base.console import PlainConsole
from posttrain.base.terminal import visible
from posttrain.base.words import counted
from posttrain.reports.chart import Line, chart
from posttrain.reports.drawing import write_drawings

FEW_GROUPS = 8  # in one line; more have a table
Summaries = Mapping[str, Mapping[str, Any]]  # folder -> summary


def show(found: Summaries) -> None:
    """Print every suite of every model, and below what was not graded and what part of a suite was asked."""
    console = PlainConsole()
    console.print(table(found))
    for line in notes(found):
        console.print(line, soft_wrap=True)
    for name, suite in _named(found):
        if len(suite["groups"]) > FEW_GROUPS and not suite["setting"]:
            console.print(_groups(name, suite["groups"]))


def table(found: Summaries) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    models = _models(found)
    entries = [(models[folder], suite) for folder, summary in found.items() for suite in summary["suites"].values()]
    if len(found) > 1:
        shown.add_column("model", overflow="fold")
    shown.add_column("suite", overflow="fold")
    swept = any(suite["setting"] for _, suite in entries)
    if swept:
        shown.add_column("setting", overflow="fold")
    most = max((int(k) for _, suite in entries if swept for k in suite.get("pass@k", ())), default=0)
    for name in ("score", "95 % interval", *([f"pass@{most}"] if most else []), "graded", "tokens"):
        shown.add_column(name, justify="right")
    for model, suite in entries:
        cells = [visible(model)] if len(found) > 1 else []
        cells += [f"{suite['suite']}{'*' if suite['partial'] else ''}"]
        cells += [suite["setting"].replace("temperature=", "T ").replace("top_p=", "p ")] if swept else []
        graded = f"{suite['graded']:,}" + (f" of {suite['answers']:,}" if suite["graded"] < suite["answers"] else "")
        passing = [percent(suite.get("pass@k", {}).get(str(most)))] if most else []
        cells += [percent(suite["value"]), interval(suite), *passing, graded, f"{suite['tokens']:,}"]
        shown.add_row(*cells)
    return shown


def _models(found: Summaries) -> dict[str, str]:
    """The name of each evaluation's model, by folder; the folder where two have one name."""
    names = {folder: str(summary["model"]["name"]) for folder, summary in found.items()}
    return {folder: folder if [*names.values()].count(name) > 1 else name for folder, name in names.items()}


def _named(found: Summaries) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every suite with its name, which has that of its model if there are several."""
    models = _models(found)
    for folder, summary in found.items():
        for key, suite in summary["suites"].items():
            yield (f"{models[folder]}, {key}" if len(found) > 1 else key), suite


def _groups(name: str, groups: Mapping[str, Mapping[str, Any]]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column(visible(name), overflow="fold")
    for column in ("score", "items"):
        shown.add_column(column, justify="right")
    for group, facts in groups.items():
        shown.add_row(visible(group), percent(facts["value"]), f"{facts['items']:,}")
    return shown


def notes(found: Summaries) -> Iterator[str]:
    """What the table has no room for."""
    models = _models(found)
    for folder, summary in found.items():
        said: set[str] = set()
        for key, suite in summary["suites"].items():
            name = f"{models[folder]}, {key}" if len(found) > 1 else key
            swept = bool(suite["setting"])
            if suite["partial"] and not (swept and suite["suite"] in said):
                said.add(suite["suite"])
                yield f"* {visible(suite['suite'] if swept else name)}: {suite['partial']}"
            if suite["ungraded"]:
                reasons = ", ".join(f"{count:,} {visible(reason)}" for reason, count in suite["ungraded"].items())
                yield f"{visible(name)}: {counted(sum(suite['ungraded'].values()), 'answer')} not graded: {reasons}"
            if suite["samples"] > 1 and suite["sampling"].get("temperature") == 0:
                yield f"{visible(name)}: {suite['samples']} answers at temperature 0 are equal: give --temperature"
            if suite["truncated"] and not swept:
                yield f"{visible(name)}: {counted(suite['truncated'], 'answer')} reached the length limit"
            if suite.get("pass@k") and not swept:
                for measure in ("pass@k", "maj@k"):
                    values = ", ".join(f"{k}: {percent(value)}" for k, value in suite[measure].items())
                    yield f"{visible(name)}: {measure} for k = {values}"
            if suite["classes"] and not swept:
                classes = ", ".join(f"{kind}: {count:,}" for kind, count in suite["classes"].items())
                yield f"{visible(name)}: format and answer {classes}"
            if calibration := suite.get("calibration"):
                yield from (f"{visible(name)}: {visible(line)}" for line in _calibration(calibration))
            if 1 < len(suite["groups"]) <= FEW_GROUPS and not swept:
                yield f"{visible(name)}: " + ", ".join(
                    f"{visible(group)} {percent(facts['value'])}" for group, facts in suite["groups"].items()
                )


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def interval(suite: Mapping[str, Any]) -> str:
    return "-" if suite["low"] is None else f"{100 * suite['low']:.1f} to {suite['high']:.1%}"


def _calibration(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"{counted(found['parse_failures'], 'answer')} of {found['answers']:,} could not be parsed"
    verdicts = {kinds: {part.split()[-1] for part in kinds.split(", ")} for kinds in found["agreement"]}
    agree = sum(count for kinds, count in found["agreement"].items() if len(verdicts[kinds]) == 1)
    yield f"string, rule and math_verify agree on {agree:,} of {found['answers']:,} answers"
    for kinds, count in found["agreement"].items():
        if len(verdicts[kinds]) > 1:
            yield f"    {kinds}: {count:,}"
    if found["golds_rejected"]:
        names = ", ".join(found["golds_rejected"][:5])
        yield f"{len(found['golds_rejected']):,} of {found['golds']:,} golds are rejected as their own answer: {names}"
    else:
        yield f"each of {found['golds']:,} golds is accepted as its own answer"


def write_sweep(summary: Mapping[str, Any], folder: Path) -> Path | None:
    """`sweep.svg`: each suite's score with its interval over the temperature, a line per top_p; tokens an answer below.

    None if the evaluation has no sweep.
    """
    swept = [suite for suite in summary["suites"].values() if suite["setting"]]
    if not swept:
        return None
    axis = "temperature" if len({suite["sampling"]["temperature"] for suite in swept}) > 1 else "top_p"
    other = "top_p" if axis == "temperature" else "temperature"
    several = len({suite["sampling"][other] for suite in swept}) > 1
    scores, costs = [], []
    lines = dict.fromkeys((suite["suite"], suite["sampling"][other]) for suite in swept)
    for colour, (name, value) in enumerate(lines):
        line = [s for s in swept if s["suite"] == name and s["sampling"][other] == value and s["value"] is not None]
        line.sort(key=lambda suite: suite["sampling"][axis])
        at = [suite["sampling"][axis] for suite in line]
        label = f"{name}, {other} {value:g}" if several else name
        bars = [(s["value"], s["value"]) if s["low"] is None else (s["low"], s["high"]) for s in line]
        scores.append(Line(label, at, [suite["value"] for suite in line], colour, bars=bars))
        costs.append(Line(label, at, [suite["tokens"] / max(suite["answers"], 1) for suite in line], colour))
    drawings = [
        chart(scores, f"{summary['model']['name']}: score over {axis}, 95 % interval", x_label=axis, ends=True),
        chart(costs, f"tokens an answer over {axis}", x_label=axis, ends=True, zero=[0.0]),
    ]
    path = folder / "sweep.svg"
    write_drawings(path, drawings, columns=1)
    return path
