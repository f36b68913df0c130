"""What all pages share: the runs of a folder, their series, the indexes of their rollouts, and their models."""

import logging
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from posttrain.base.errors import PosttrainError, message_of
from posttrain.base.paths import default_cache
from posttrain.reports.markup import Markup, message
from posttrain.reports.series import Series
from posttrain.ui.address import Query, parse
from posttrain.ui.commands import Commands, Launches
from posttrain.ui.evaluations import Evaluations
from posttrain.ui.runs import Runs
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
