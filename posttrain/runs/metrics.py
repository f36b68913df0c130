"""`metrics.jsonl`: one JSON object per line, with exact numbers, as if the run had never been interrupted.
Also the main metrics of each method, which lists, reports and tables show first."""

import functools
import json
import math
import os
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from posttrain.base.errors import RunError
from posttrain.base.log import log
from posttrain.runs.atomic import LineFile, refusing, write_file, writing
from posttrain.runs.files import open_regular, parse_json, read_regular

NAME = "metrics.jsonl"
TAIL = 1 << 16  # bytes read from the end of the file to find the last lines
LARGEST_STEP = 1 << 53


class MetricsFile:
    """Appends lines to a run's metrics. When `append` returns, the operating system has the line."""

    def __init__(self, folder: Path):
        self.path = folder / NAME
        self._file: LineFile | None = None

    def append(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Write a line and return it: step, epoch (if it is among the metrics), time (Unix, s), then the metrics, which
        are numbers or 0-dimensional tensors. NaN and infinities, which JSON lacks, become null."""
        values = {name: _number(name, value) for name, value in metrics.items()}
        head = {"step": step} | ({"epoch": values["epoch"]} if "epoch" in values else {})
        head["time"] = round(time.time(), 3)
        with writing(self.path):
            self._file = self._file or LineFile(self.path)
            self._file.write(json.dumps(head | values, allow_nan=False))
        return head | values

    def sync(self) -> None:
        """Force appended lines to the disk."""
        if self._file is not None:
            with writing(self.path):
                self._file.sync()

    def truncate(self, step: int, evaluated: bool = True) -> int:
        """Atomically remove every line after `step`, an incomplete last line and, unless `evaluated`, the step's
        validation line; returns the number of removed lines."""
        self.close()
        if not self.path.exists():
            return 0
        lines, cut_short = _read(self.path)
        kept = [
            raw
            for raw, entry in lines
            if entry["step"] < step
            or (entry["step"] == step and (evaluated or not any(name.startswith("eval_") for name in entry)))
        ]
        if len(kept) < len(lines) or cut_short:
            write_file(self.path, b"".join(raw + b"\n" for raw in kept))
        return len(lines) - len(kept) + cut_short

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_metrics(folder: Path | str) -> list[dict[str, Any]]:
    """Every line of a run folder's `metrics.jsonl`, with None for null; empty if there is no file.
    An incomplete last line is dropped with a warning. Raises RunError, with the line number, for any other bad line."""
    path = Path(folder) / NAME
    if not path.exists():
        return []
    lines, cut_short = _read(path)
    if cut_short:
        log.warning("%s: the last line is incomplete and is dropped", path)
    return [entry for _, entry in lines]


def last_metrics(folder: Path) -> dict[str, Any]:
    """The last complete line, or an empty dict. Reads only the end of the file."""
    lines = _tail(folder)
    return _parsed(lines[-1], folder) if lines else {}


def latest_metrics(folder: Path) -> dict[str, Any]:
    """The latest finite value of every metric in the last 64 KiB of the file."""
    entries = (_parsed(line, folder) for line in _tail(folder))
    return {name: value for entry in entries for name, value in entry.items() if value is not None}


def _tail(folder: Path) -> list[bytes]:
    path = folder / NAME
    with refusing(f"cannot read {path}"):
        try:
            with open_regular(path) as file:
                skipped = max(0, os.fstat(file.fileno()).st_size - TAIL)
                file.seek(skipped)
                lines = file.read().split(b"\n")[:-1]
        except FileNotFoundError:  # also of a run that is deleted meanwhile
            return []
    return lines[1:] if skipped and len(lines) > 1 else lines  # the first line may be cut


def first_latest(folder: Path, names: Iterable[str]) -> tuple[int, str, float | None]:
    """The last step, and the first of `names` that has a finite value near the end, with its latest value.
    The name is empty if none has a value. Parses only the lines it needs, to keep lists of hundreds of runs fast."""
    lines = _tail(folder)
    if not lines:
        return 0, "", None
    step = _parsed(lines[-1], folder)["step"]
    for name in names:
        key = json.dumps(name).encode() + b":"
        for line in reversed(lines):
            if key in line and isinstance(value := _parsed(line, folder).get(name), int | float):
                return step, name, value
    return step, "", None


def line_of(raw: bytes) -> dict[str, Any] | None:
    """Parse a line: an object with the step, whose values are finite numbers or null. None if the line is damaged."""
    try:
        entry = parse_json(raw)
    except ValueError:
        return None
    if not isinstance(entry, dict) or type(entry.get("step")) is not int or abs(entry["step"]) > LARGEST_STEP:
        return None
    largest = sys.float_info.max
    valid = (v is None or (isinstance(v, int | float) and abs(v) <= largest) for v in entry.values())
    return entry if all(valid) else None


def _parsed(line: bytes, folder: Path) -> dict[str, Any]:
    if (entry := line_of(line)) is None:
        raise RunError(f"{folder / NAME}: a line near the end is damaged")
    return entry


def _read(path: Path) -> tuple[list[tuple[bytes, dict[str, Any]]], bool]:
    """Each complete line as bytes and as an object, and whether an incomplete line follows."""
    with refusing(f"cannot read {path}"):
        *whole, rest = read_regular(path).split(b"\n")
    lines = []
    for number, raw in enumerate(whole, start=1):
        if (entry := line_of(raw)) is None:
            raise RunError(f"{path}, line {number} is damaged: remove or repair that line")
        lines.append((raw, entry))
    return lines, bool(rest)


def _number(name: str, value: Any) -> float | int | None:
    value = value.item() if hasattr(value, "item") else value
    if not isinstance(value, int | float):
        raise TypeError(f"metric {name} must be a number, not {value!r}")
    return value if math.isfinite(value) else None


# Not on the methods' settings classes, because importing them would double the time of `posttrain runs list`.
PAIRS = ("rewards/accuracies", "rewards/margins")
OF_METHOD = {
    "sft": (),
    "reward": ("accuracy", "margin"),
    **dict.fromkeys(("dpo", "orpo", "cpo", "simpo"), PAIRS),
    "kto": ("rewards/margins",),
}
LABELS = {"rewards/accuracies": "accuracy", "rewards/margins": "margin"}


def of_method(method: str) -> tuple[str, ...]:
    """The main metrics of a method, besides the loss: the reward, for methods that sample."""
    return OF_METHOD.get(method, ("reward",))


def headlines(method: str, metrics: Mapping[str, Any]) -> dict[str, float]:
    """The values of the method's main metrics and the loss, from validation if available, by display name."""
    known = (
        next(((label, metrics[name]) for name, label in choice.items() if metrics.get(name) is not None), None)
        for choice in _choices(method)
    )
    return dict(filter(None, known))


@functools.cache
def headline_metrics(method: str) -> dict[str, str]:
    """The candidates for a run's headline, with their display names; the first that the run has is its headline."""
    return {name: label for choice in _choices(method) for name, label in choice.items()}


def _choices(method: str) -> list[dict[str, str]]:
    """For each main metric, its names in metrics.jsonl (validation before training) with their display names."""
    labels = {name: LABELS.get(name, name) for name in (*of_method(method), "loss")}
    return [{f"eval_{name}": f"validation {label}", name: label} for name, label in labels.items()]
