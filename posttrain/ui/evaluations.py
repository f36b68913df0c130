"""The evaluations below a folder: what each says in short, and their answers, kept between two looks."""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from posttrain.base.errors import PosttrainError
from posttrain.evaluation.comparing.differences import Comparison, Options, compare
from posttrain.evaluation.comparing.sides import make_sides
from posttrain.evaluation.comparing.sources import Source, read_source
from posttrain.evaluation.records import ANSWERS, DATABASE, SUMMARY, read_summary
from posttrain.runs.checkpoint import MODELS

BESIDE = "evaluations"  # where `posttrain eval` puts those of models outside runs, beside `runs`
DEPTH = 5
AGE_S = 2.0
KEPT = 6  # evaluations whose answers are held in memory
RESAMPLES = 2_000  # of the bootstrap: a page shall not wait
Made = TypeVar("Made")


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
        self._sources: OrderedDict[Any, Any] = OrderedDict()

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
        return self._kept(("source", one.folder, stamp(one.folder)), lambda: read_source(str(one.folder)))

    def comparison(self, several: Sequence[Evaluation]) -> Comparison:
        """Each against the first. Raises RunError if they have no suite in common."""
        named = [(one.name, self.source(one)) for one in several]
        key = ("comparison", *(one.folder for one in several), *(stamp(one.folder) for one in several))
        return self._kept(key, lambda: compare(make_sides(named), Options(resamples=RESAMPLES)))

    def _kept(self, key: object, make: Callable[[], Made]) -> Made:
        with self._lock:
            if key in self._sources:
                self._sources.move_to_end(key)
                return self._sources[key]
        made = make()
        with self._lock:
            self._sources[key] = made
            while len(self._sources) > KEPT:
                self._sources.popitem(last=False)
        return made

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
