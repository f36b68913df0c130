"""The runs of a folder, kept between two requests: a run is read again only when its files have changed."""

import threading
import time
from pathlib import Path

from posttrain.reports.series import sparkline
from posttrain.runs import metrics, notes
from posttrain.runs.headline import headline_metrics
from posttrain.runs.summary import DAMAGED, RunSummary, summaries_below

STATES = ("running", "finished", "interrupted", "failed", "killed", DAMAGED)
WATCHED = ("run.json", "config.yaml", metrics.NAME, notes.NAME)  # a change of one of them is a change of the run
AGE_S = 1.0  # the list of folders is walked again after this time


class Runs:
    """The runs below a folder."""

    def __init__(self, root: Path):
        self.root = root
        self._lock = threading.Lock()
        self._known: dict[Path, tuple[object, RunSummary]] = {}
        self._listed: tuple[float, list[RunSummary]] = (-AGE_S, [])
        self._sparks: dict[Path, tuple[object, list[float]]] = {}

    def spark(self, run: RunSummary) -> list[float]:
        """The curve of a run's headline, for the runs that are shown."""
        now, kept = _stamp(run.folder), self._sparks.get(run.folder)
        if kept is None or kept[0] != now:
            kept = self._sparks[run.folder] = now, sparkline(run.folder, curve_metrics(run.method))
        return kept[1]

    def rows(self) -> list[RunSummary]:
        """All runs, the latest first."""
        with self._lock:
            if time.monotonic() - self._listed[0] >= AGE_S:
                known = {}
                for run in summaries_below(self.root):
                    stamp, before = _stamp(run.folder), self._known.get(run.folder)
                    if stamp[0] is not None:  # else removed meanwhile
                        known[run.folder] = before if before and before[0] == stamp else (stamp, run)
                self._known = known
                runs = sorted((run for _, run in known.values()), key=_by_time, reverse=True)
                self._listed = time.monotonic(), runs
            return self._listed[1]

    def find(self, name: str) -> RunSummary | None:
        """The run of this name, if it is in the list: names of addresses are never joined to a path."""
        return next((run for run in self.rows() if run.name == name), None)


def _by_time(run: RunSummary) -> tuple[float, str]:
    return run.started_at.timestamp() if run.started_at else 0.0, run.name


def curve_metrics(method: str) -> list[str]:
    """The metrics of which the first that a run has is the headline's curve: that of the training has more points."""
    names = list(headline_metrics(method))  # each of the validation, then of the training
    return [name for pair in zip(names[1::2], names[::2], strict=True) for name in pair]


def _stamp(folder: Path) -> tuple[object, ...]:
    stamps = []
    for name in WATCHED:
        try:
            facts = (folder / name).stat()
        except OSError:
            stamps.append(None)
        else:
            stamps.append((facts.st_ino, facts.st_size, facts.st_mtime_ns))
    return tuple(stamps)
