"""Evaluations as tables and a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.table import Table

from posttrain.console import PlainConsole
from posttrain.terminal import visible
from posttrain.words import counted

Summaries = Mapping[str, Mapping[str, Any]]  # folder -> summary


def show(found: Summaries) -> None:
    """Print every suite of every model, and below what was not graded and what part of a suite was asked."""
    console = PlainConsole()
    console.print(table(found))
    for line in notes(found):
        console.print(line, soft_wrap=True)


def table(found: Summaries) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    models = {str(summary["model"]["name"]) for summary in found.values()}
    entries = [
        (str(summary["model"]["name"]), suite) for summary in found.values() for suite in summary["suites"].values()
    ]
    if len(models) > 1:
        shown.add_column("model", overflow="fold")
    shown.add_column("suite", overflow="fold")
    swept = any(suite["setting"] for _, suite in entries)
    if swept:
        shown.add_column("setting", overflow="fold")
    for name in ("score", "95 % interval", "graded", "tokens"):
        shown.add_column(name, justify="right")
    for model, suite in entries:
        cells = [visible(model)] if len(models) > 1 else []
        cells += [f"{suite['suite']}{'*' if suite['partial'] else ''}"]
        cells += [suite["setting"].replace("temperature", "T")] if swept else []
        graded = f"{suite['graded']:,} of {suite['answers']:,}"
        cells += [percent(suite["value"]), interval(suite), graded, f"{suite['tokens']:,}"]
        shown.add_row(*cells)
    return shown


def notes(found: Summaries) -> Iterator[str]:
    """What the table has no room for."""
    several = len(found) > 1
    for summary in found.values():
        for key, suite in summary["suites"].items():
            name = f"{summary['model']['name']}, {key}" if several else key
            if suite["partial"]:
                yield f"* {visible(name)}: {suite['partial']}"
            if suite["ungraded"]:
                reasons = ", ".join(f"{count:,} {visible(reason)}" for reason, count in suite["ungraded"].items())
                yield f"{visible(name)}: {counted(sum(suite['ungraded'].values()), 'answer')} not graded: {reasons}"
            if suite["truncated"]:
                yield f"{visible(name)}: {counted(suite['truncated'], 'answer')} reached the length limit"
            if suite.get("pass@k"):
                for measure in ("pass@k", "maj@k"):
                    values = ", ".join(f"{k}: {percent(value)}" for k, value in suite[measure].items())
                    yield f"{visible(name)}: {measure} for k = {values}"
            if suite["classes"]:
                classes = ", ".join(f"{kind}: {count:,}" for kind, count in suite["classes"].items())
                yield f"{visible(name)}: format and answer {classes}"
            if len(suite["groups"]) > 1:
                yield f"{visible(name)}: " + ", ".join(
                    f"{visible(group)} {percent(facts['value'])}" for group, facts in suite["groups"].items()
                )


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def interval(suite: Mapping[str, Any]) -> str:
    return "-" if suite["low"] is None else f"{suite['low']:.1%} to {suite['high']:.1%}"
