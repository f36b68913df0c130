"""The curves of a run: `metrics.jsonl` as columns, read incrementally. Damaged lines are counted."""

import bisect
import math
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from posttrain.runs.files import open_regular, read_regular
from posttrain.runs.metrics import NAME, line_of

AXES = ("step", "tokens", "hours")
FACTS = ("step", "epoch", "time", "num_tokens", "num_updates")  # entries of a line that are not metrics
HEADLINE_POINTS = 48  # maximum points of a sparkline

Points = tuple[Sequence[float], Sequence[float]]  # x, y


class Series:
    """The metrics of one run. `refresh` reads appended lines, or the whole file if it was truncated or replaced."""

    def __init__(self, folder: Path):
        self.path = folder / NAME
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self.damaged = 0
        self.cut_short = False  # whether the last line is incomplete
        self._read, self._file = 0, None
        self._line = {name: array("d") for name in AXES}
        self._columns: dict[str, tuple[array, array]] = {}  # metric -> line numbers, values

    def refresh(self) -> Self:
        with self._lock:
            try:
                facts = self.path.stat()
                if (facts.st_ino, True) != (self._file, facts.st_size >= self._read):
                    self._clear()
                    self._file = facts.st_ino
                if facts.st_size > self._read:
                    with open_regular(self.path) as file:
                        file.seek(self._read)
                        whole, newline, _ = file.read().rpartition(b"\n")  # an incomplete line is read later
                    self._read += len(whole) + len(newline)
                    for raw in whole.splitlines():
                        self._take(raw)
                self.cut_short = facts.st_size > self._read
            except FileNotFoundError:
                self._clear()
            except OSError:
                self.damaged += 1
        return self

    def _take(self, raw: bytes) -> None:
        line = line_of(raw)
        if line is None:
            self.damaged += bool(raw.strip())
            return
        steps, tokens, hours = (self._line[name] for name in AXES)
        at, seconds, seen = len(steps), line.get("time"), line.get("num_tokens")
        steps.append(line["step"])
        tokens.append(seen if seen is not None else tokens[-1] if tokens else 0.0)
        hours.append(seconds / 3600 if seconds is not None else hours[-1] if hours else 0.0)
        for name, value in line.items():
            if name not in FACTS:
                numbers, values = self._columns.setdefault(name, (array("l"), array("d")))
                numbers.append(at)
                values.append(math.nan if value is None else float(value))

    @property
    def names(self) -> list[str]:
        return list(self._columns)

    @property
    def steps(self) -> Sequence[float]:
        return self._line["step"]

    def points(self, metric: str, axis: str = "step") -> Points:
        """The points of a metric over an axis. Hours count from the run's first line; non-finite values are NaN."""
        numbers, values = self._columns.get(metric, (array("l"), array("d")))
        line = self._line[axis]
        start = line[0] if axis == "hours" and line else 0.0
        return [line[number] - start for number in numbers], list(values)

    def at(self, step: int) -> dict[str, float]:
        """The training metrics from the first line with a loss or a reward, at the step or soon after it."""
        steps = self._line["step"]
        first = bisect.bisect_left(steps, step)
        for number in range(first, min(first + 50, len(steps))):
            metrics = {}
            for name, (numbers, values) in self._columns.items():
                at = bisect.bisect_left(numbers, number)
                if not name.startswith("eval_") and at < len(numbers) and numbers[at] == number:
                    metrics[name] = values[at]
            if "loss" in metrics or "reward" in metrics:
                return {"step": steps[number], **metrics}
        return {}

    def last(self) -> dict[str, float]:
        """The last finite value of every metric."""
        finite = {name: next(filter(math.isfinite, reversed(v)), None) for name, (_, v) in self._columns.items()}
        return {name: value for name, value in finite.items() if value is not None}


def sparkline(folder: Path, metrics: Sequence[str]) -> list[float]:
    """At most HEADLINE_POINTS values, spread over the whole file, of the first metric that has at least two."""
    try:
        lines = read_regular(folder / NAME).split(b"\n")[:-1]
    except OSError:
        return []
    every = max(1, math.ceil(len(lines) / HEADLINE_POINTS))
    read = [line_of(raw) or {} for raw in lines[(len(lines) - 1) % every :: every]]  # includes the last line
    curves = ([float(line[name]) for line in read if isinstance(line.get(name), int | float)] for name in metrics)
    return next((values for values in curves if len(values) > 1), [])


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """The exponential moving average with this weight of the past, with bias correction; gaps are kept."""
    if not 0 < weight < 1:
        return list(values)
    smooth, mean, share = [], 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            mean, share = weight * mean + (1 - weight) * value, weight * share + (1 - weight)
        smooth.append(mean / share if math.isfinite(value) else math.nan)
    return smooth


def thinned(xs: Sequence[float], ys: Sequence[float], most: int) -> Points:
    """About `most` points: the first, the last, and the lowest and highest of each segment."""
    if len(xs) <= most:
        return xs, ys
    stretch, kept = math.ceil(2 * len(xs) / most), {0, len(xs) - 1}
    for start in range(0, len(xs), stretch):
        some = [at for at in range(start, min(start + stretch, len(xs))) if math.isfinite(ys[at])]
        if some:
            kept |= {min(some, key=ys.__getitem__), max(some, key=ys.__getitem__)}
        else:
            kept.add(start)  # a gap
    order = sorted(kept)
    return [xs[at] for at in order], [ys[at] for at in order]
