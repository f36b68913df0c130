"""The runs of a folder as rows, kept between two looks: a run is read again only when its files have changed."""

import math
import re
import threading
import time
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from posttrain.base.errors import PosttrainError
from posttrain.evaluation.comparing.sources import config_of
from posttrain.reports.series import sparkline
from posttrain.runs import metrics, rollouts
from posttrain.runs.files import flat, open_regular
from posttrain.runs.headline import headline_metrics, headlines
from posttrain.runs.listing import runs_below, summarise
from posttrain.runs.lock import is_locked

STATES = ("running", "finished", "interrupted", "failed", "killed", "damaged")
WATCHED = ("run.json", "config.yaml", metrics.NAME)  # a change of one of them is a change of the run
AGE_S = 1.0  # the list of folders is walked again after this time
TAIL = 1 << 16
PROGRESS = re.compile(rb"step (\d+)/(\d+) .*?(?:ETA (\S+(?: \d\d[smhd])?))?\r?\n")


@dataclass(frozen=True, slots=True)
class Row:
    """A run in the table. `name` is its path below the folder of runs, the only way to name it in an address."""

    name: str
    folder: Path
    state: str
    problem: str  # why it failed, or cannot be read
    method: str
    model: str
    data: str
    metric: str  # of the headline, with its name
    value: float | None
    step: int
    total: int | None
    eta: str
    size: int
    started: datetime | None
    ended: datetime | None
    alarms: dict[str, int] = field(default_factory=dict)

    @property
    def has_rollouts(self) -> bool:
        return (self.folder / rollouts.NAME).is_file()


class Runs:
    """The runs below a folder."""

    def __init__(self, root: Path):
        self.root = root
        self._lock = threading.Lock()
        self._rows: dict[Path, tuple[object, Row]] = {}
        self._listed: tuple[float, list[Row]] = (-AGE_S, [])
        self._sparks: dict[Path, tuple[object, list[float]]] = {}

    def spark(self, row: Row) -> list[float]:
        """The curve of a run's headline, for the rows that are shown."""
        now, kept = _stamp(row.folder), self._sparks.get(row.folder)
        if kept is None or kept[0] != now:
            kept = self._sparks[row.folder] = now, sparkline(row.folder, curve_metrics(row.method))
        return kept[1]

    def rows(self) -> list[Row]:
        """All runs, the latest first."""
        with self._lock:
            if time.monotonic() - self._listed[0] >= AGE_S:
                found = [row for folder in _folders(self.root) if (row := self._row(folder)) is not None]
                known = {row.folder for row in found}
                self._rows = {folder: kept for folder, kept in self._rows.items() if folder in known}
                found.sort(key=lambda row: (row.started.timestamp() if row.started else 0.0, row.name), reverse=True)
                self._listed = time.monotonic(), found
            return self._listed[1]

    def find(self, name: str) -> Row | None:
        """The run of this name, if it is in the list: names of addresses are never joined to a path."""
        return next((row for row in self.rows() if row.name == name), None)

    def _row(self, folder: Path) -> Row | None:
        stamp = _stamp(folder)
        kept = self._rows.get(folder)
        if kept is None or kept[0] != stamp:
            try:
                kept = stamp, _read(folder, str(folder.relative_to(self.root)))
            except (PosttrainError, OSError):  # removed meanwhile
                return None
            self._rows[folder] = kept
        row = kept[1]
        if row.state in ("running", "killed"):  # its process may have been killed
            row = replace(row, state="killed" if is_locked(folder) is False else "running")
        return row if row.state == "running" else replace(row, eta="")


def settings(folder: Path) -> dict[str, Any]:
    """The settings of a run with dotted names; empty if they cannot be read."""
    return flat(config_of(folder) or {}, lists=True)


def curve_metrics(method: str) -> list[str]:
    """The metrics of which the first that a run has is the headline's curve: that of the training has more points."""
    names = list(headline_metrics(method))  # each of the validation, then of the training
    return [name for pair in zip(names[1::2], names[::2], strict=True) for name in pair]


def log_tail(folder: Path) -> str:
    """The end of training.log, from a whole line on."""
    return _tail(folder, TAIL).decode("utf-8", "replace")


def _folders(root: Path) -> list[Path]:
    while True:
        try:
            return runs_below(root)
        except FileNotFoundError:  # a run was removed during the walk
            if not root.is_dir():
                return []


def _stamp(folder: Path) -> object:
    found = []
    for name in WATCHED:
        try:
            facts = (folder / name).stat()
        except OSError:
            found.append(None)
        else:
            found.append((facts.st_ino, facts.st_size, facts.st_mtime_ns))
    return tuple(found)


def _read(folder: Path, name: str) -> Row:
    found = summarise(folder)
    values = headlines(found.method, found.metrics)
    label, value = next(iter(values.items()), ("", None))
    total, eta = (None, "") if found.state == "finished" else _progress(folder)
    info = found.info
    return Row(
        name=folder.name if name == "." else name,
        folder=folder,
        state=found.state,
        problem=found.problem or (info.reason if info else None) or "",
        method=found.method,
        model=found.model,
        data=found.data,
        metric=label,
        value=value if value is None or math.isfinite(value) else None,
        step=found.step if isinstance(found.step, int) else 0,
        total=total,
        eta=eta,
        size=found.size,
        started=_when(info.started) if info else None,
        ended=_when(info.ended) if info else None,
        alarms={
            name.removeprefix("alarms/"): int(count)
            for name, count in found.metrics.items()
            if name.startswith("alarms/") and isinstance(count, int | float)
        },
    )


def _when(time: str | None) -> datetime | None:
    try:
        return datetime.fromisoformat(time).astimezone() if time else None
    except (ValueError, TypeError):
        return None


def _progress(folder: Path) -> tuple[int | None, str]:
    """The number of steps and the remaining time, from the last line of progress in the log."""
    found = PROGRESS.findall(_tail(folder, 1 << 14))
    return (int(found[-1][1]), found[-1][2].decode()) if found else (None, "")


def _tail(folder: Path, size: int) -> bytes:
    try:
        with open_regular(folder / "training.log") as file:
            end = file.seek(0, 2)
            file.seek(max(0, end - size))
            lines = file.read()
    except OSError:
        return b""
    return lines if end <= size else lines.partition(b"\n")[2]
