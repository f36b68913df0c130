"""What all pages share: the runs of a folder, their series, and the indexes of their rollouts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from posttrain.caches import default_folder
from posttrain.errors import PosttrainError, message_of
from posttrain.reports.markup import Markup, el, message
from posttrain.reports.series import Kept
from posttrain.viewing.address import Query, parse
from posttrain.viewing.commands import Commands, Launches
from posttrain.viewing.evaluations import Evaluations
from posttrain.viewing.runs import Runs
from posttrain.viewing.search import Index

WARM = 100  # runs whose curves are read before they are asked for
PATIENCE_S = 0.2  # a small run is indexed in this time, and the page shows it at once
log = logging.getLogger("posttrain")


class Viewer:
    """Reads the runs below `root`; indexes and caches lie in `cache`, never in a run."""

    def __init__(self, root: Path, cache: Path | None = None):
        self.root = root
        self.cache = cache or default_folder() / "ui"
        self.runs = Runs(root)
        self.series = Kept()
        self.evaluations = Evaluations(root)
        self.commands = Commands(self.cache / "asked")
        self.launches = Launches(root)
        self._indexes: dict[Path, Index] = {}
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Read what the first page shows."""
        for row in self.runs.rows()[:WARM]:
            self.runs.spark(row)

    def index(self, run: Path) -> Index:
        """The index of a run's rollouts, which starts to read what is new."""
        with self._lock:
            index = self._indexes.setdefault(run, Index(run, self.cache))
        return index.refresh(PATIENCE_S)


Render = Callable[[Viewer, Query], Markup]
Act = Callable[[Viewer, Query], None]  # of a button: raises an error that the page shows


def rendered(render: Render, viewer: Viewer, address: object, act: Act | None = None) -> Markup:
    """What a page shows at an address, after an act; an error becomes a message on it, its stack trace goes to the
    log."""
    try:
        query, refused = parse(address), None
        try:
            if act is not None:
                act(viewer, query)
        except PosttrainError as error:
            refused = message(message_of(error), "error")
        return el("div", refused, render(viewer, query), class_="shown")
    except PosttrainError as error:
        return el("div", message(message_of(error), "error"), class_="shown")
    except Exception as error:  # the page must stay usable whatever a damaged run makes of it
        log.exception("a page could not be shown: %s", address)
        said = f"This cannot be shown: {type(error).__name__}. The log of posttrain ui has more."
        return el("div", message(said, "error"), class_="shown")
