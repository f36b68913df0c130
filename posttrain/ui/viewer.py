"""The data that all pages read: runs and evaluations below a folder, curves, indexes of rollouts, and models."""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from posttrain.base.errors import PosttrainError, message_of
from posttrain.base.files import default_cache, is_model
from posttrain.base.log import log
from posttrain.base.words import counted
from posttrain.config.options import CompareOptions
from posttrain.evaluation.comparing.differences import Comparison, compare
from posttrain.evaluation.comparing.sources import Source, make_sides, read_source
from posttrain.evaluation.records import ANSWERS, DATABASE, SUMMARY, read_summary
from posttrain.reports.markup import Markup, el, message
from posttrain.reports.series import Series, sparkline
from posttrain.runs.checkpoint import MODELS, list_checkpoints
from posttrain.runs.files import load_json
from posttrain.runs.folder import NOTES
from posttrain.runs.metrics import NAME as METRICS
from posttrain.runs.metrics import headline_metrics
from posttrain.runs.summary import DAMAGED, RunSummary, summaries_below
from posttrain.ui.commands import Commands, Launches
from posttrain.ui.parts import Query, parse
from posttrain.ui.search import Index

STATES = ("running", "finished", "interrupted", "failed", "killed", DAMAGED)
WATCHED = ("run.json", "config.yaml", METRICS, NOTES)  # a run is read again if one of these files changes
SERIES, SMALL = 24, 10_000  # cache sizes: full curves of runs; sparklines and summaries of evaluations
WARM = 100  # runs whose sparklines are read at startup
PATIENCE_S = 0.2  # seconds to wait for the index: a small run is indexed in this time and can be searched at once
MOST_MODELS = 200  # maximum number of models in a list of choices
MOST_CHECKPOINTS = 3  # newest checkpoints listed per run
BESIDE = "evaluations"  # folder next to the folder of runs, where `posttrain eval` writes for models outside runs
DEPTH = 5  # maximum depth of evaluations below a folder
ANSWERED, COMPARED = 6, 2  # cache sizes: answers of evaluations; comparisons
RESAMPLES = 2_000  # bootstrap resamples; few, so that they do not delay a page


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation. `name`: its path below the folder of runs or the folder next to it; RUN/MODEL for an evaluation in
    a run. `suites`: the summaries by key."""

    name: str
    folder: Path
    suites: dict[str, dict[str, Any]]
    problem: str  # why the evaluation cannot be read; empty if it can


Entry = TypeVar("Entry", RunSummary, Evaluation)


class Listing(Generic[Entry]):
    """A list of the entries below a folder. The folder is read again when the list is older than `seconds`."""

    def __init__(self, root: Path, read: Callable[[], list[Entry]], seconds: float):
        self.root, self._read, self._seconds = root, read, seconds
        self._lock = threading.Lock()
        self._listed: tuple[float, list[Entry]] = (-seconds, [])

    def all(self) -> list[Entry]:
        """All entries, the latest first."""
        with self._lock:
            if time.monotonic() - self._listed[0] >= self._seconds:
                entries = self._read()
                self._listed = time.monotonic(), entries  # the age of the list counts from the end of reading
            return self._listed[1]

    def renew(self) -> None:
        """Read the folder again at the next request."""
        self._listed = -self._seconds, []

    def find(self, name: str) -> Entry | None:
        """The entry with this name. Names from addresses are only looked up, never joined to a path."""
        return next((entry for entry in self.all() if entry.name == name), None)


class Runs(Listing[RunSummary]):
    """The runs below a folder; a run is read again only when its files have changed."""

    def __init__(self, root: Path):
        super().__init__(root, self._read_runs, 1.0)
        self._known: dict[tuple[Path, object], RunSummary] = {}
        self._spark = lru_cache(SMALL)(lambda folder, stamp, method: sparkline(folder, curve_metrics(method)))

    def spark(self, run: RunSummary) -> list[float]:
        """The curve of a run's headline metric, reduced to a few points."""
        return self._spark(run.folder, _stamp(run.folder, WATCHED), run.method)

    def _read_runs(self) -> list[RunSummary]:
        found = {(run.folder, _stamp(run.folder, WATCHED)): run for run in summaries_below(self.root)}
        # A run without a stamp of run.json was removed meanwhile.
        self._known = {key: self._known.get(key, run) for key, run in found.items() if key[1][0] is not None}
        started = {run: run.started_at.timestamp() if run.started_at else 0.0 for run in self._known.values()}
        return sorted(started, key=lambda run: (started[run], run.name), reverse=True)


def curve_metrics(method: str) -> list[str]:
    """The candidates for a headline's curve. Training metrics come first, because they have more points."""
    names = list(headline_metrics(method))  # validation and training alternate
    return [name for pair in zip(names[1::2], names[::2], strict=True) for name in pair]


def _stamp(folder: Path, names: Sequence[str]) -> tuple[tuple[int, int, int] | None, ...]:
    """For each file, a value that changes when the file changes, with the time (ns) of the change at its end."""
    stamps = []
    for name in names:
        try:
            facts = (folder / name).stat()
            stamps.append((facts.st_ino, facts.st_size, facts.st_mtime_ns))
        except OSError:
            stamps.append(None)
    return tuple(stamps)


class Evaluations(Listing[Evaluation]):
    """The evaluations below a folder of runs and next to it; one is read again only when its files have changed."""

    def __init__(self, root: Path):
        super().__init__(root, self._read_evaluations, 2.0)
        self._evaluation = lru_cache(SMALL)(_evaluation)
        self._source = lru_cache(ANSWERED)(lambda folder, changed: read_source(str(folder)))
        self._comparison = lru_cache(COMPARED)(self._compare)

    def _read_evaluations(self) -> list[Evaluation]:
        beside = self.root.absolute().parent / BESIDE
        homes = [self.root, *([beside] if beside.is_dir() else [])]
        folders = [(_changed(folder), home, folder) for home in homes for folder in _evaluations_below(home)]
        folders.sort(key=lambda entry: entry[0], reverse=True)
        return [self._evaluation(*entry) for entry in folders]

    def source(self, evaluation: Evaluation) -> Source:
        """The answers of an evaluation. Raises RunError if it is unfinished or damaged."""
        return self._source(evaluation.folder, _changed(evaluation.folder))

    def comparison(self, evaluations: Sequence[Evaluation]) -> Comparison:
        """Compare each evaluation with the first. Raises RunError if they have no suite in common."""
        return self._comparison(tuple((each.name, each.folder, _changed(each.folder)) for each in evaluations))

    def _compare(self, evaluations: Sequence[tuple[str, Path, int]]) -> Comparison:
        sides = make_sides([(name, self._source(folder, changed)) for name, folder, changed in evaluations])
        return compare(sides, CompareOptions(resamples=RESAMPLES))


def _changed(folder: Path) -> int:
    """The time when an evaluation last changed (Unix time in nanoseconds)."""
    return max((stamp[-1] for stamp in _stamp(folder, (SUMMARY, ANSWERS, DATABASE)) if stamp), default=0)


def _evaluation(changed: int, home: Path, folder: Path) -> Evaluation:
    """The evaluation in `folder`, which is below `home`. `changed` is only a part of the cache key."""
    parts = list(folder.relative_to(home).parts) or [folder.name]
    of_run = len(parts) > 2 and parts[-2] == "evaluation"  # RUN/evaluation/MODEL
    name = "/".join([*parts[:-2], parts[-1]] if of_run else parts)
    try:
        suites = {str(key): facts for key, facts in read_summary(folder)["suites"].items() if isinstance(facts, dict)}
        return Evaluation(name, folder, suites, "")
    except (PosttrainError, OSError) as error:
        return Evaluation(name, folder, {}, str(error))


def _evaluations_below(home: Path) -> Iterator[Path]:
    """The evaluation folders below `home`. Folders of models are skipped, because they contain many files."""
    for path, folders, files in os.walk(home):
        if (SUMMARY in files and ANSWERS in files) or DATABASE in files:
            yield Path(path)
        deep = len(Path(path).relative_to(home).parts) >= DEPTH
        models = MODELS if "run.json" in files else ()
        folders[:] = [] if deep else [f for f in folders if f not in models and not f.startswith("checkpoint-")]


class Viewer:
    """Reads the runs below `root`. Indexes and caches are in `cache`, never in a run folder."""

    def __init__(self, root: Path, cache: Path | None = None):
        self.root = root
        self.cache = cache or default_cache() / "ui"
        self.runs = Runs(root)
        self.evaluations = Evaluations(root)
        self.commands = Commands(self.cache / "asked")
        self.launches = Launches(root)
        self.stopped: set[str] = set()  # the processes of runs that were asked to stop
        self._series = lru_cache(SERIES)(Series)
        self._indexes: dict[Path, Index] = {}
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Read in advance what the first page shows."""
        for run in self.runs.all()[:WARM]:
            self.runs.spark(run)

    def series(self, run: Path) -> Series:
        """The curves of a run; only new lines of its metrics are read."""
        return self._series(run).refresh()

    def index(self, run: Path) -> Index:
        """The index of a run's rollouts. Starts reading new steps."""
        with self._lock:
            index = self._indexes.setdefault(run, Index(run, self.cache))
        return index.refresh(PATIENCE_S)


def where(viewer: Viewer) -> Markup:
    """The folder that is served and its runs by state, for the top of every page."""
    counts = Counter(run.state for run in viewer.runs.all())
    states = ", ".join(f"{counts[state]:,} {state}" for state in STATES if counts[state])
    runs = counted(counts.total(), "run") + (f": {states}" if states else "")
    return el("p", el("span", viewer.root.absolute()), el("span", runs), class_="where quiet")


Render = Callable[[Viewer, Query], Markup]
# The action of a button; returns the address to open, None for that of the form. The page shows errors that it raises.
Act = Callable[[Viewer, Query], str | None]
Result = TypeVar("Result")


def attempt(work: Callable[[Viewer, Query], Result], viewer: Viewer, address: str) -> Result | Markup:
    """The content of a page at an address, or what an action of a button returns with the values of the address. An
    error is returned as a message; the stack trace of an unexpected one is logged."""
    try:
        return work(viewer, parse(address))
    except PosttrainError as error:
        return message(message_of(error), "error")
    except Exception as error:  # the page must remain usable whatever error a damaged run causes
        log.exception("a page could not be shown: %s", address)
        return message(f"This cannot be shown: {type(error).__name__}. The log of posttrain ui says more.", "error")


def is_reward_model(folder: str) -> bool:
    """Whether a saved model is a sequence classifier, plain or as an adapter."""
    files = [Path(folder, name) for name in ("adapter_config.json", "config.json")]
    try:
        facts = load_json(next(file for file in files if file.is_file()))
        kinds = facts["task_type"] if "task_type" in facts else " ".join(facts["architectures"])
    except (PosttrainError, KeyError, TypeError):
        return False
    return "SEQ_CLS" in kinds or "ForSequenceClassification" in kinds


def models_below(viewer: Viewer) -> dict[str, str]:
    """The folders of saved models by name: for each run, the latest first, its final model, best model, newest
    checkpoints and quantised models; then those in quantized_models/. Stops at MOST_MODELS models of runs."""
    models: dict[str, str] = {}
    for run in viewer.runs.all():
        at, checkpoints = run.folder, list_checkpoints(run.folder)[::-1][:MOST_CHECKPOINTS]
        folders = [at / "final", at / "best", at / "ema", *checkpoints, *sorted(at.glob("quantized_*/*"))]
        for folder in filter(is_model, folders):
            models[f"{run.name}/{folder.relative_to(at)}"] = str(folder)
            if len(models) >= MOST_MODELS:
                return models
    for folder in filter(is_model, sorted((viewer.root / "quantized_models").glob("*"))):
        models[str(folder.relative_to(viewer.root))] = str(folder)
    return models
