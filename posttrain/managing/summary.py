"""The facts of one run, as names and values to show."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from posttrain.errors import RunError
from posttrain.reports.checks import checks_of
from posttrain.reports.listing import Summary, in_units
from posttrain.reports.progress import duration
from posttrain.store.notes import Notes, read_notes


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
