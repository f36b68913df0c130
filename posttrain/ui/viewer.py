"""What all pages share: the runs of a folder, their series, the indexes of their rollouts, and their models."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from posttrain.base.errors import PosttrainError, message_of
from posttrain.base.paths import default_cache
from posttrain.config.options import CompareOptions
from posttrain.evaluation.comparing.differences import Comparison, compare
from posttrain.evaluation.comparing.sides import make_sides
from posttrain.evaluation.comparing.sources import Source, read_source
from posttrain.evaluation.records import ANSWERS, DATABASE, SUMMARY, read_summary
from posttrain.reports.markup import Markup, message
from posttrain.reports.series import Series, sparkline
from posttrain.runs import metrics, notes
from posttrain.runs.checkpoint import MODELS
from posttrain.runs.metrics import headline_metrics
from posttrain.runs.summary import DAMAGED, RunSummary, summaries_below
from posttrain.ui.address import Query, parse
from posttrain.ui.commands import Commands, Launches
from posttrain.ui.search import Index

SERIES = 24  # runs whose curves are held in memory
WARM = 100  # runs whose curves are read before they are asked for
PATIENCE_S = 0.2  # a small run is indexed in this time, and the page shows it at once
MODEL_FILES = ("config.json", "adapter_config.json")
MOST_MODELS = 200  # in a list to choose from
MOST_CHECKPOINTS = 3  # of a run, the newest
log = logging.getLogger("posttrain")


class Viewer:
    """Reads the runs below `root`; indexes and caches lie in `cache`, never in a run."""

    def __init__(self, root: Path, cache: Path | None = None):
        self.root = root
        self.cache = cache or default_cache() / "ui"
        self.runs = Runs(root)
        self._series = lru_cache(SERIES)(Series)
        self.evaluations = Evaluations(root)
        self.commands = Commands(self.cache / "asked")
        self.launches = Launches(root)
        self._indexes: dict[Path, Index] = {}
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Read what the first page shows."""
        for row in self.runs.rows()[:WARM]:
            self.runs.spark(row)

    def series(self, run: Path) -> Series:
        """The curves of a run, read on from where they were left."""
        return self._series(run).refresh()

    def index(self, run: Path) -> Index:
        """The index of a run's rollouts, which starts to read what is new."""
        with self._lock:
            index = self._indexes.setdefault(run, Index(run, self.cache))
        return index.refresh(PATIENCE_S)


Render = Callable[[Viewer, Query], Markup]
Act = Callable[[Viewer, Query], None]  # of a button: raises an error that the page shows
Result = TypeVar("Result")


def rendered(render: Render, viewer: Viewer, address: str) -> Markup:
    """What a page shows at an address; an error becomes a message on it."""
    return _guarded(render, viewer, address)


def perform(act: Act, viewer: Viewer, address: str) -> Markup | None:
    """Perform the action of a button on the values of an address. An error is returned as a message."""
    return _guarded(act, viewer, address)


def _guarded(work: Callable[[Viewer, Query], Result], viewer: Viewer, address: str) -> Result | Markup:
    """The result, or the message of an error; the stack trace of an unexpected one goes to the log."""
    try:
        return work(viewer, parse(address))
    except PosttrainError as error:
        return message(message_of(error), "error")
    except Exception as error:  # the page must stay usable whatever a damaged run makes of it
        log.exception("a page could not be shown: %s", address)
        said = f"This cannot be shown: {type(error).__name__}. The log of posttrain ui has more."
        return message(said, "error")


def models_below(viewer: Viewer) -> dict[str, str]:
    """Name -> folder of every saved model: of each run, the latest first, its final, best and newest checkpoints, and
    the quantised ones."""
    found: dict[str, str] = {}
    for row in viewer.runs.rows():
        for folder in _models_of(row.folder):
            found[f"{row.name}/{folder.relative_to(row.folder)}"] = str(folder)
            if len(found) >= MOST_MODELS:
                return found
    for folder in sorted((viewer.root / "quantized_models").glob("*")):
        if _is_model(folder):
            found[str(folder.relative_to(viewer.root))] = str(folder)
    return found


def _models_of(run: Path) -> list[Path]:
    checkpoints = sorted(run.glob("checkpoint-*"), key=_step, reverse=True)[:MOST_CHECKPOINTS]
    return [
        path
        for path in [run / "final", run / "best", *checkpoints, *sorted(run.glob("quantized_*/*"))]
        if _is_model(path)
    ]


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MODEL_FILES)


def _step(folder: Path) -> int:
    step = folder.name.rpartition("-")[2]
    return int(step) if step.isdecimal() else -1


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


BESIDE = "evaluations"  # where `posttrain eval` puts those of models outside runs, beside `runs`
DEPTH = 5
AGE_S = 2.0
KEPT, COMPARED = 6, 2  # evaluations whose answers, and comparisons that are held in memory
RESAMPLES = 2_000  # of the bootstrap: a page shall not wait


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation folder. `name` is its path below the folder it was found in, of a run RUN/MODEL; `suites` are the
    summaries by key."""

    name: str
    folder: Path
    suites: dict[str, dict[str, Any]]
    problem: str  # why it cannot be read


class Evaluations:
    """The evaluations below a folder of runs, and beside it."""

    def __init__(self, root: Path):
        self.root = root
        self._lock = threading.Lock()
        self._listed: tuple[float, list[Evaluation]] = (-AGE_S, [])
        self._read: dict[Path, tuple[object, Evaluation]] = {}
        self._source = lru_cache(KEPT)(lambda folder, changed: read_source(str(folder)))
        self._comparison = lru_cache(COMPARED)(self._compare)

    def all(self) -> list[Evaluation]:
        """The latest first."""
        with self._lock:
            if time.monotonic() - self._listed[0] >= AGE_S:
                places = [self.root, *([beside] if (beside := self.root.absolute().parent / BESIDE).is_dir() else [])]
                found = [(stamp(folder), place, folder) for place in places for folder in _below(place)]
                found.sort(key=lambda one: one[0], reverse=True)
                self._listed = time.monotonic(), [self._one(*one) for one in found]
            return self._listed[1]

    def find(self, name: str) -> Evaluation | None:
        """By its name in the list: names of addresses are never joined to a path."""
        return next((one for one in self.all() if one.name == name), None)

    def source(self, one: Evaluation) -> Source:
        """Its answers. Raises RunError if it is unfinished or damaged."""
        return self._source(one.folder, stamp(one.folder))

    def comparison(self, several: Sequence[Evaluation]) -> Comparison:
        """Each against the first. Raises RunError if they have no suite in common."""
        return self._comparison(tuple((one.name, one.folder, stamp(one.folder)) for one in several))

    def _compare(self, several: Sequence[tuple[str, Path, float]]) -> Comparison:
        sides = make_sides([(name, self._source(folder, changed)) for name, folder, changed in several])
        return compare(sides, CompareOptions(resamples=RESAMPLES))

    def _one(self, changed: float, place: Path, folder: Path) -> Evaluation:
        kept = self._read.get(folder)
        if kept is None or kept[0] != changed:
            kept = changed, _summary(place, folder)
            self._read[folder] = kept
        return kept[1]


def stamp(folder: Path) -> float:
    """When it was last changed."""
    times = [0.0]
    for name in (SUMMARY, ANSWERS, DATABASE):
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times)


def _summary(place: Path, folder: Path) -> Evaluation:
    parts = list(folder.relative_to(place).parts) or [folder.name]
    inside = len(parts) > 2 and parts[-2] == "evaluation"  # of a run: RUN/evaluation/MODEL
    name = "/".join([*parts[:-2], parts[-1]] if inside else parts)
    try:
        summary = read_summary(folder)
        kept = {str(key): facts for key, facts in summary["suites"].items() if isinstance(facts, dict)}
        return Evaluation(name, folder, kept, "")
    except (PosttrainError, OSError) as error:
        return Evaluation(name, folder, {}, str(error))


def _below(place: Path) -> list[Path]:
    """The evaluation folders there; those of models, which have many files, are not entered."""
    found = []
    for at, folders, files in os.walk(place):
        if (SUMMARY in files and ANSWERS in files) or DATABASE in files:
            found.append(Path(at))
        deep = len(Path(at).relative_to(place).parts) >= DEPTH
        models = MODELS if "run.json" in files else ()
        folders[:] = [] if deep else [one for one in folders if one not in models and not one.startswith("checkpoint-")]
    return found
