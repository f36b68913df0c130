"""The facts of one run to show, and how two runs differ: in settings, in what they were made with, in metrics."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.base.words import in_units
from posttrain.runs.files import flat
from posttrain.runs.metrics import latest_metrics
from posttrain.runs.progress import duration
from posttrain.runs.summary import RunSummary, read_run

MISSING = "-"
# What run.json has that differs between any two runs.
NO_VERSIONS = ("command", "folder", "models")
CLOCKS = ("time",)


def facts_of(run: RunSummary) -> list[tuple[str, str]]:
    """Names and values of one run, most important first."""
    metrics = [(name, _number(value)) for name, value in run.metrics.items() if name not in ("step", "epoch", "time")]
    facts = [("run", str(run.folder)), ("state", run.state)]
    facts += [("problem", run.problem)] if run.problem else []
    facts += [("tags", run.hashtags)] if run.tags else []
    facts += [("note", run.note)] if run.note else []
    facts += [("reason", run.reason)] if run.reason else []
    facts += [("method", run.method), ("model", run.model), ("data", run.data)]
    if run.started_at:
        facts.append(("started", f"{run.started_at:%Y-%m-%d %H:%M:%S}"))
        if run.ended_at:
            seconds = (run.ended_at - run.started_at).total_seconds()
            facts.append(("ended", f"{run.ended_at:%Y-%m-%d %H:%M:%S}, {duration(seconds)} later"))
    epoch = f", epoch {run.metrics['epoch']:.2f}" if isinstance(run.metrics.get("epoch"), int | float) else ""
    facts.append(("step", f"{run.step:,}{epoch}"))
    saved = [(name, in_units(size)) for name, size in run.saved_models.items()]
    facts += [*metrics, ("size", in_units(run.size)), *saved]
    facts += [(name.replace("_", " "), _number(value)) for name, value in run.counters.items()]
    facts += [("check", f"{check.outcome}: {check.what} ({check.found})") for check in run.checks]
    facts += [(name, str(run.provenance[name])) for name in ("command", "folder", "host") if run.provenance.get(name)]
    if run.facts:
        versions = run.provenance.get("versions") or {}
        facts.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)))
    return facts


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


@dataclass(frozen=True, slots=True)
class Differing:
    """A name with the values of both runs, as text; `change` is the difference of two numbers."""

    name: str
    one: str
    other: str
    change: float | None = None


@dataclass(frozen=True, slots=True)
class Differences:
    """What differs, and how many values are equal, by kind."""

    settings: list[Differing]
    versions: list[Differing]
    metrics: list[Differing]
    equal: dict[str, int]


def differences(one: Path, other: Path) -> Differences:
    """Compare two run folders. Metrics are the latest values of each. Raises RunError if a run.json is damaged."""
    settings = [flat(RunSummary(run).config, lists=True) for run in (one, other)]
    versions = [_versions(run) for run in (one, other)]
    metrics = [latest_metrics(run) for run in (one, other)]
    for values in settings:
        for name in ("name", "output_dir"):
            values.pop(name, None)
    for values in metrics:
        for name in CLOCKS:
            values.pop(name, None)
    kinds = {"settings": settings, "versions": versions, "metrics": metrics}
    found = {kind: _differing(*both) for kind, both in kinds.items()}
    equal = {kind: len(both[0].keys() | both[1].keys()) - len(found[kind]) for kind, both in kinds.items()}
    return Differences(found["settings"], found["versions"], found["metrics"], equal)


def _versions(run: Path) -> dict[str, Any]:
    """What a run was made with: versions, machine, commit, data, content of models."""
    came_from = read_run(run).provenance
    facts = {name: value for name, value in came_from.items() if name not in NO_VERSIONS}
    models = came_from.get("models")
    for setting, named in (models if isinstance(models, dict) else {}).items():
        facts[f"content of {setting}"] = named.get("content") if isinstance(named, dict) else named
    return flat(facts, lists=True)


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Differing]:
    """In the order of the first run, then what only the second has."""
    return [
        Differing(name, _text(name, one), _text(name, other), _change(one.get(name), other.get(name)))
        for name in dict.fromkeys([*one, *other])
        if (name in one) != (name in other) or _exact(one[name]) != _exact(other[name])
    ]


def _exact(value: Any) -> str:
    return json.dumps(value, default=str)


def _text(name: str, values: Mapping[str, Any]) -> str:
    if name not in values:
        return MISSING
    value = values[name]
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else _exact(value)


def _change(one: Any, other: Any) -> float | None:
    numbers = [value for value in (one, other) if isinstance(value, int | float) and not isinstance(value, bool)]
    return numbers[1] - numbers[0] if len(numbers) == 2 else None
