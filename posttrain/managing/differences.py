"""How two runs differ: in their settings, in what they were made with, and in their metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.reports.listing import settings_of
from posttrain.store.files import flat
from posttrain.store.metrics import latest_metrics
from posttrain.store.runs import read_run

MISSING = "-"
# What run.json has that differs between any two runs.
NO_VERSIONS = ("command", "folder", "models")
CLOCKS = ("time",)


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
