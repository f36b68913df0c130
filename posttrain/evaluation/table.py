"""Evaluations as tables and as a plot."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from posttrain.base.console import PlainConsole, text_table
from posttrain.base.terminal import visible
from posttrain.base.words import counted
from posttrain.reports.chart import Line, chart
from posttrain.reports.drawing import write_drawings

FEW_GROUPS = 8  # groups shown on one line; more are shown in a table
Summaries = Mapping[str, Mapping[str, Any]]  # folder -> summary


def show(summaries: Summaries) -> None:
    """Print every suite of every model, and notes on ungraded answers and incomplete suites."""
    console = PlainConsole()
    console.print(table(summaries))
    for line in notes(summaries):
        console.print(line, soft_wrap=True)
    for _, name, suite in _named(summaries):
        if len(suite["groups"]) > FEW_GROUPS and not suite["setting"]:
            shown = text_table(visible(name), "score", "items", left=[visible(name)])
            for group, facts in suite["groups"].items():
                shown.add_row(visible(group), percent(facts["value"]), f"{facts['items']:,}")
            console.print(shown)


def table(summaries: Summaries) -> Table:
    models = _models(summaries)
    entries = [(models[folder], suite) for folder, summary in summaries.items() for suite in summary["suites"].values()]
    swept = any(suite["setting"] for _, suite in entries)
    most = max((int(k) for _, suite in entries if swept for k in suite.get("pass@k", ())), default=0)
    texts = [*(["model"] if len(summaries) > 1 else []), "suite", *(["setting"] if swept else [])]
    numbers = ["score", "95 % interval", *([f"pass@{most}"] if most else []), "graded", "tokens"]
    shown = text_table(*texts, *numbers, left=texts)
    for model, suite in entries:
        cells = [visible(model)] if len(summaries) > 1 else []
        cells += [f"{suite['suite']}{'*' if suite['partial'] else ''}"]
        cells += [suite["setting"].replace("temperature=", "T ").replace("top_p=", "p ")] if swept else []
        graded = f"{suite['graded']:,}" + (f" of {suite['answers']:,}" if suite["graded"] < suite["answers"] else "")
        passing = [percent(suite.get("pass@k", {}).get(str(most)))] if most else []
        interval = "-" if suite["low"] is None else f"{100 * suite['low']:.1f} to {suite['high']:.1%}"
        cells += [percent(suite["value"]), interval, *passing, graded, f"{suite['tokens']:,}"]
        shown.add_row(*cells)
    return shown


def _models(summaries: Summaries) -> dict[str, str]:
    """The name of each evaluation's model, by folder; the folder itself if two models have one name."""
    names = {folder: str(summary["model"]["name"]) for folder, summary in summaries.items()}
    return {folder: folder if [*names.values()].count(name) > 1 else name for folder, name in names.items()}


def _named(summaries: Summaries) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Every suite with its folder and its name, prefixed by the model's name if there are several models."""
    models = _models(summaries)
    for folder, summary in summaries.items():
        for key, suite in summary["suites"].items():
            yield folder, f"{models[folder]}, {key}" if len(summaries) > 1 else key, suite


def notes(summaries: Summaries) -> Iterator[str]:
    """Findings for which the table has no room."""
    partial: set[tuple[str, str]] = set()  # in a sweep, each suite is noted once
    for folder, name, suite in _named(summaries):
        swept = bool(suite["setting"])
        if suite["partial"] and not (swept and (folder, suite["suite"]) in partial):
            partial.add((folder, suite["suite"]))
            yield f"* {visible(suite['suite'] if swept else name)}: {suite['partial']}"
        yield from (f"{visible(name)}: {line}" for line in _notes_of(suite, swept))


def _notes_of(suite: Mapping[str, Any], swept: bool) -> Iterator[str]:
    if suite["ungraded"]:
        reasons = ", ".join(f"{count:,} {visible(reason)}" for reason, count in suite["ungraded"].items())
        yield f"{counted(sum(suite['ungraded'].values()), 'answer')} not graded: {reasons}"
    if suite["samples"] > 1 and suite["sampling"].get("temperature") == 0:
        yield f"{suite['samples']} answers at temperature 0 are equal: give --temperature"
    if suite["truncated"] and not swept:
        yield f"{counted(suite['truncated'], 'answer')} reached the length limit"
    for measure in ("pass@k", "maj@k") if suite.get("pass@k") and not swept else ():
        yield f"{measure} for k = " + ", ".join(f"{k}: {percent(value)}" for k, value in suite[measure].items())
    if suite["classes"] and not swept:
        yield "format and answer " + ", ".join(f"{kind}: {count:,}" for kind, count in suite["classes"].items())
    if calibration := suite.get("calibration"):
        yield from map(visible, _calibration(calibration))
    if 1 < len(suite["groups"]) <= FEW_GROUPS and not swept:
        groups = suite["groups"].items()
        yield ", ".join(f"{visible(group)} {percent(facts['value'])}" for group, facts in groups)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _calibration(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"{counted(found['parse_failures'], 'answer')} of {found['answers']:,} could not be parsed"
    differ = [kinds for kinds in found["agreement"] if len({part.split()[-1] for part in kinds.split(", ")}) > 1]
    agree = sum(count for kinds, count in found["agreement"].items() if kinds not in differ)
    yield f"string, rule and math_verify agree on {agree:,} of {found['answers']:,} answers"
    yield from (f"    {kinds}: {found['agreement'][kinds]:,}" for kinds in differ)
    rejected = found["golds_rejected"]
    if rejected:
        names = ", ".join(rejected[:5])
        yield f"{len(rejected):,} of {found['golds']:,} golds are rejected as their own answer: {names}"
    else:
        yield f"each of {found['golds']:,} golds is accepted as its own answer"


def write_sweep(summary: Mapping[str, Any], folder: Path) -> Path | None:
    """Write `sweep.svg`: each suite's score, with its interval, over the temperature (a line per top_p), and the tokens
    per answer below. Returns its path; None if the evaluation has no sweep."""
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
        chart(costs, f"tokens per answer over {axis}", x_label=axis, ends=True, zero=[0.0]),
    ]
    path = folder / "sweep.svg"
    write_drawings(path, drawings, columns=1)
    return path
