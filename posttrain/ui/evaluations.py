"""The evaluations below a folder: what each says in short, and their answers, kept between two looks."""

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from posttrain.base.errors import PosttrainError
from posttrain.config.options import CompareOptions
from posttrain.evaluation.comparing.differences import Comparison, compare
from posttrain.evaluation.comparing.sides import make_sides
from posttrain.evaluation.comparing.sources import Source, read_source
from posttrain.evaluation.records import ANSWERS, DATABASE, SUMMARY, read_summary
from posttrain.runs.checkpoint import MODELS

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
