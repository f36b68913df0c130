"""The facts of one run to show, and how two runs differ: in settings, in what they were made with, in metrics."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from posttrain.base.errors import RunError
from posttrain.runs.checks import checks_of
from posttrain.runs.files import flat
from posttrain.runs.finding import read_run
from posttrain.runs.listing import Summary, in_units, settings_of
from posttrain.runs.metrics import latest_metrics
from posttrain.runs.notes import Notes, read_notes
from posttrain.runs.progress import duration

MISSING = "-"
# What run.json has that differs between any two runs.
NO_VERSIONS = ("command", "folder", "models")
CLOCKS = ("time",)


def facts_of(run: Summary) -> list[tuple[str, str]]:
    """Names and values of one run, most important first."""
    facts = [("run", str(run.folder)), ("state", run.state)]
    try:
        notes = read_notes(run.folder)
    except RunError as error:
        notes = Notes(note=str(error))
    facts += [("problem", run.problem)] if run.problem else []
    facts += [("tags", " ".join(f"#{tag}" for tag in notes.tags))] if notes.tags else []
    facts += [("note", notes.note)] if notes.note else []
    facts += [("reason", run.info.reason)] if run.info and run.info.reason else []
    facts += [("method", run.method), ("model", run.model), ("data", run.data)]
    if run.info:
        facts.append(("started", f"{_local(run.info.started):%Y-%m-%d %H:%M:%S}"))
        if run.info.ended:
            ended = _local(run.info.ended)
            seconds = (ended - _local(run.info.started)).total_seconds()
            facts.append(("ended", f"{ended:%Y-%m-%d %H:%M:%S}, {duration(seconds)} later"))
    epoch = f", epoch {run.metrics['epoch']:.2f}" if isinstance(run.metrics.get("epoch"), int | float) else ""
    facts.append(("step", f"{run.step:,}{epoch}"))
    metrics = [(name, _number(value)) for name, value in run.metrics.items() if name not in ("step", "epoch", "time")]
    facts += [*metrics, ("size", in_units(run.size)), *((name, in_units(size)) for name, size in run.models.items())]
    if run.info:
        facts += [(name.replace("_", " "), _number(value)) for name, value in run.info.counters.items()]
        found = checks_of(run.info.checks, run.method, run.step)
        facts += [("check", f"{one.outcome}: {one.what} ({one.found})") for one in found]
        came_from = run.info.provenance
        facts += [(name, str(came_from[name])) for name in ("command", "folder", "host") if came_from.get(name)]
        versions = came_from.get("versions") or {}
        facts.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)))
    return facts


def _local(time: str) -> datetime:
    return datetime.fromisoformat(time).astimezone()


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
    settings = [flat(settings_of(run), lists=True) for run in (one, other)]
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
