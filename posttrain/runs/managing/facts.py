"""The facts of one run for display, and the differences of two: in settings, versions and metrics, or bit for bit."""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from posttrain.base.terminal import visible
from posttrain.base.words import in_units
from posttrain.runs.checkpoint import MODELS, list_checkpoints, saved_step, verify
from posttrain.runs.files import as_mapping, bits, flat, load_json, load_tensors
from posttrain.runs.finding import links_in, short
from posttrain.runs.metrics import latest_metrics, read_metrics
from posttrain.runs.progress import duration
from posttrain.runs.summary import RunSummary, read_run

if TYPE_CHECKING:
    import torch

MISSING = "-"
NO_VERSIONS = ("command", "folder", "models")  # provenance that differs between any two runs
CLOCK = ("time", "seconds", "save_seconds")  # metrics that differ even between equal runs


def facts_of(run: RunSummary) -> list[tuple[str, str]]:
    """Names and values of one run, most important first."""
    metrics = [(name, _number(value)) for name, value in run.metrics.items() if name not in ("step", "epoch", "time")]
    facts = [("run", str(run.folder)), ("state", run.state)]
    optional = {"problem": run.problem, "tags": run.hashtags, "note": run.note, "reason": run.reason}
    facts += [(name, value) for name, value in optional.items() if value]
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
    facts += [("link", link) for link in links_in(run.folder)]
    facts += [("check", f"{check.outcome}: {check.what} ({check.found})") for check in run.checks]
    facts += [(name, str(run.provenance[name])) for name in ("command", "folder", "host") if run.provenance.get(name)]
    facts += [(name, _number(value)) for name, value in (run.provenance.get("resolved") or {}).items()]
    if run.facts:
        versions = run.provenance.get("versions") or {}
        facts.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items() if version)))
    return facts


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


# A name with the values of both runs, as text, and the difference of two numbers.
Differing = tuple[str, str, str, float | None]


def differences(one: Path, other: Path) -> dict[str, tuple[list[Differing], int]]:
    """Compare two run folders: what differs, and how many values are equal, for settings, versions and the latest value
    of each metric. Raises RunError if a run.json is damaged."""
    settings = [flat(RunSummary(run).config, lists=True) for run in (one, other)]
    versions = [_versions(run) for run in (one, other)]
    metrics = [latest_metrics(run) for run in (one, other)]
    for values in (*settings, *metrics):
        for name in ("name", "output_dir", "time"):
            values.pop(name, None)
    compared = {}
    for kind, both in {"settings": settings, "versions": versions, "metrics": metrics}.items():
        differing = _differing(*both)
        compared[kind] = differing, len(both[0].keys() | both[1].keys()) - len(differing)
    return compared


def difference_table(one: Path, other: Path) -> Table:
    """The differences of two run folders as a table for a terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    titles = (one.name, other.name) if one.name != other.name else (short(one), short(other))
    for title in ("", *titles):
        table.add_column(Text(visible(title)), overflow="fold")
    table.add_column("B - A", justify="right", no_wrap=True)
    for kind, (rows, equal) in differences(one, other).items():
        table.add_row(f"{kind}: {len(rows)} differ, {equal} are equal", style="bold")
        for name, *values, change in rows:
            cells = (f"  {name}", *values, "" if change is None else f"{change:+.4g}")
            table.add_row(*(Text(visible(cell)) for cell in cells))
    return table


def _versions(run: Path) -> dict[str, Any]:
    """What a run was made with: versions, machine, commit, data, content of models."""
    provenance = read_run(run).provenance
    facts = {name: value for name, value in provenance.items() if name not in NO_VERSIONS}
    for setting, model in as_mapping(provenance.get("models")).items():
        facts[f"content of {setting}"] = model.get("content") if isinstance(model, dict) else model
    return flat(facts, lists=True)


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Differing]:
    """The values that differ, in the order of the first run, followed by those that only the second run has."""
    return [
        (name, _text(name, one), _text(name, other), _change(one.get(name), other.get(name)))
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


Found = Iterator[tuple[int, str, str]]  # the step of a difference, its file, and both values in words


@dataclass(slots=True)
class BitComparison:
    """What was compared, and the differences in words, earliest step first."""

    lines: int = 0  # lines of metrics.jsonl
    tensors: int = 0
    values: int = 0  # values in the tensors
    folders: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def compare_runs(one: Path, other: Path) -> BitComparison:
    """Compare the metrics (except times) and the saved folders of two run folders that should be equal.

    The saved folders are the checkpoints that both runs have, the newest one of each run, `best` and `final`. They have
    weights, optimizer, random generators, and the loop's state with a checksum of the rows trained on, in order.
    Numbers are equal if their bits are equal: NaN equals NaN, but 0.0 differs from -0.0.
    """
    compared = BitComparison()
    found = list(_metric_differences(one, other, compared))
    names = [{path.name for path in list_checkpoints(run)} for run in (one, other)]
    newest = {list_checkpoints(run)[-1].name for run in (one, other) if list_checkpoints(run)}
    models = {name for name in MODELS for run in (one, other) if (run / name).is_dir()}
    for name in names[0] & names[1] | newest | models:
        compared.folders.append(name)
        found += _folder_differences(one / name, other / name, compared)
    compared.folders.sort(key=lambda name: (len(name), name))
    found.sort(key=lambda difference: difference[0])  # stable: metrics come before saved folders
    compared.differences = [f"step {step}, {file}: {what}" for step, file, what in found]
    return compared


def _metric_differences(one: Path, other: Path, compared: BitComparison) -> Found:
    for number, (a, b) in enumerate(zip_longest(read_metrics(one), read_metrics(other)), start=1):
        where = f"metrics.jsonl line {number}"
        if a is None or b is None:
            what = f"{_presence(a)} in the first run, {_presence(b)} in the second"
            yield (a or b or {})["step"], where, what
            return
        compared.lines += 1
        for name in a | b:
            x, y = json.dumps(a.get(name)), json.dumps(b.get(name))  # exact: floats read back bit for bit
            if name not in CLOCK and x != y:
                yield min(a["step"], b["step"]), where, f"{name} is {x} and {y}"


def _folder_differences(one: Path, other: Path, compared: BitComparison) -> Found:
    """The differences of two saved folders of the same name."""
    for folder, counterpart in ((one, other), (other, one)):
        if problems := verify(folder):
            step = saved_step(counterpart) if not verify(counterpart) else 0
            yield step, one.name, f"{folder}: {'; '.join(problems)}"
            return
    steps = saved_step(one), saved_step(other)
    if steps[0] != steps[1]:
        # The later step, because the runs may have been equal before it.
        yield max(steps), one.name, f"made at step {steps[0]} and at step {steps[1]}"
        return
    for name in sorted({path.name for folder in (one, other) for path in folder.glob("*.safetensors")}):
        for what in _tensor_differences(load_tensors(one / name), load_tensors(other / name), compared):
            yield steps[0], f"{one.name}/{name}", what
    if (one / "state.json").is_file():
        a, b = (flat(load_json(folder / "state.json")) for folder in (one, other))
        for key in a | b:
            x, y = (json.dumps(values[key]) if key in values else None for values in (a, b))
            if key.rpartition(".")[2] not in CLOCK and x != y:
                yield steps[0], f"{one.name}/state.json", f"{key} is {x} and {y}"


def _tensor_differences(
    a: "dict[str, torch.Tensor]", b: "dict[str, torch.Tensor]", compared: BitComparison
) -> Iterator[str]:
    for name in sorted(a | b):
        x, y = a.get(name), b.get(name)
        if x is None or y is None:
            yield f"{name} {_presence(x)} in the first run, {_presence(y)} in the second"
        elif (x.shape, x.dtype) != (y.shape, y.dtype):
            yield f"{name} is {tuple(x.shape)} {x.dtype} and {tuple(y.shape)} {y.dtype}"
        else:
            compared.tensors, compared.values = compared.tensors + 1, compared.values + x.numel()
            if what := first_difference(x, y):
                yield f"{name}{what}"


def first_difference(x: "torch.Tensor", y: "torch.Tensor") -> str | None:
    """The index of the first value whose bits differ, both values, and how many differ; None if all are equal."""
    unequal = bits(x) != bits(y)
    if not (count := int(unequal.sum())):
        return None
    at = int(unequal.int().argmax())
    index = [at // math.prod(x.shape[d + 1 :]) % x.shape[d] for d in range(x.ndim)]
    values = (repr(tensor.flatten()[at].item()) for tensor in (x, y))
    return f"[{', '.join(map(str, index))}] is {' and '.join(values)} ({count:,} of {x.numel():,} values differ)"


def _presence(value: object) -> str:
    return "is missing" if value is None else "exists"
