"""Compares two runs bit by bit: their metrics, and every saved tensor and number."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.runs.checkpoint import MODELS, list_checkpoints, saved_step, verify
from posttrain.runs.files import bits, flat, load_json, load_tensors
from posttrain.runs.metrics import read_metrics

if TYPE_CHECKING:
    import torch

CLOCK = ("time", "seconds", "save_seconds")  # differ between equal runs


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference: its step, its file, and the values in both runs."""

    step: int
    file: str
    what: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.file}: {self.what}"


@dataclass(slots=True)
class Comparison:
    """What was compared, and the differences, earliest step first."""

    lines: int = 0  # of metrics.jsonl
    tensors: int = 0
    values: int = 0  # in the tensors
    folders: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)


def compare_runs(one: Path, other: Path) -> Comparison:
    """Compare the metrics (except times) and the saved folders of two run folders that should be equal.

    The saved folders are the checkpoints that both have, their newest, `best` and `final`: weights, optimizer, random
    generators, and the loop's state with a checksum of the rows trained on, in order. Numbers are equal if their bits
    are: NaN equals NaN, 0.0 differs from -0.0.
    """
    seen = Comparison()
    seen.differences += _metrics(one, other, seen)
    names = [{path.name for path in list_checkpoints(run)} for run in (one, other)]
    newest = {list_checkpoints(run)[-1].name for run in (one, other) if list_checkpoints(run)}
    models = {name for name in MODELS for run in (one, other) if (run / name).is_dir()}
    for name in names[0] & names[1] | newest | models:
        seen.folders.append(name)
        seen.differences += _folder(one / name, other / name, seen)
    seen.folders.sort(key=lambda name: (len(name), name))
    seen.differences.sort(key=lambda difference: difference.step)  # stable: metrics come before saved folders
    return seen


def _metrics(one: Path, other: Path, seen: Comparison) -> Iterator[Difference]:
    for number, (a, b) in enumerate(zip_longest(read_metrics(one), read_metrics(other)), start=1):
        where = f"metrics.jsonl line {number}"
        if a is None or b is None:
            yield Difference((a or b or {})["step"], where, f"{_presence(a)} and {_presence(b)}")
            return
        seen.lines += 1
        for name in a | b:
            x, y = json.dumps(a.get(name)), json.dumps(b.get(name))  # exact: floats read back bit for bit
            if name not in CLOCK and x != y:
                yield Difference(min(a["step"], b["step"]), where, f"{name} is {x} and {y}")


def _folder(one: Path, other: Path, seen: Comparison) -> Iterator[Difference]:
    """The differences of two saved folders of the same name."""
    for folder in (one, other):
        problems = verify(folder)
        if problems:
            counterpart = other if folder is one else one
            step = saved_step(counterpart) if not verify(counterpart) else 0
            yield Difference(step, one.name, f"{folder}: {'; '.join(problems)}")
            return
    steps = saved_step(one), saved_step(other)
    if steps[0] != steps[1]:
        # The later one, as the runs may have been equal before it.
        yield Difference(max(steps), one.name, f"made at step {steps[0]} and at step {steps[1]}")
        return
    for name in sorted({path.name for folder in (one, other) for path in folder.glob("*.safetensors")}):
        for what in _tensors(load_tensors(one / name), load_tensors(other / name), seen):
            yield Difference(steps[0], f"{one.name}/{name}", what)
    if (one / "state.json").is_file():
        a, b = (flat(load_json(folder / "state.json")) for folder in (one, other))
        for key in a | b:
            x, y = (json.dumps(values[key]) if key in values else None for values in (a, b))
            if key.rpartition(".")[2] not in CLOCK and x != y:
                yield Difference(steps[0], f"{one.name}/state.json", f"{key} is {x} and {y}")


def _tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], seen: Comparison) -> Iterator[str]:
    for name in sorted(a | b):
        x, y = a.get(name), b.get(name)
        if x is None or y is None:
            yield f"{name} {_presence(x)} and {_presence(y)}"
        elif (x.shape, x.dtype) != (y.shape, y.dtype):
            yield f"{name} is {tuple(x.shape)} {x.dtype} and {tuple(y.shape)} {y.dtype}"
        else:
            seen.tensors, seen.values = seen.tensors + 1, seen.values + x.numel()
            what = first_difference(x, y)
            if what:
                yield f"{name}{what}"


def first_difference(x: torch.Tensor, y: torch.Tensor) -> str | None:
    """The index of the first value whose bits differ, both values, and how many differ; None if all are equal."""
    unequal = bits(x) != bits(y)
    count = int(unequal.sum())
    if not count:
        return None
    at = int(unequal.int().argmax())
    index = [at // math.prod(x.shape[d + 1 :]) % x.shape[d] for d in range(x.ndim)]
    values = (repr(tensor.flatten()[at].item()) for tensor in (x, y))
    return f"[{', '.join(map(str, index))}] is {' and '.join(values)} ({count:,} of {x.numel():,} values differ)"


def _presence(value: object) -> str:
    return "is missing" if value is None else "exists"
