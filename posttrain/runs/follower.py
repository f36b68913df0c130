"""The run folder as the ranks after the first one see it: they read it, and write nothing but their own log."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from posttrain.base.errors import reason_of
from posttrain.runs.logs import LOGGER
from posttrain.runs.run import Run, State

LOGS = "logs"
log = logging.getLogger(LOGGER)


class Follower(Run):
    """A run that another process writes."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._save: Callable[[BaseException], None] = lambda error: None

    @property
    def state(self) -> State:
        return "running"

    @property
    def resumed(self) -> bool:
        return False

    def _nothing(self, *given: Any, **named: Any) -> None: ...

    write_config = set_state = set_counters = record_check = add_provenance = write_results = _nothing
    write_final_results = log = follow = save_model = rewind = start_over = close = _nothing

    def save_checkpoint(self, step: int, write: Callable[[Path], None], limit: int | None) -> Path:
        return self.folder / f"checkpoint-{step}"

    def on_failure(self, save: Callable[[BaseException], None]) -> None:
        self._save = save

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            log.error("%s", reason_of(error), exc_info=error)
            self._save(error)


@contextmanager
def own_log(folder: Path, rank: int) -> Iterator[None]:
    """Send what this process prints to `logs/rank-N.log` of the run folder."""
    with ExitStack() as resources:
        (folder / LOGS).mkdir(exist_ok=True)
        file = resources.enter_context((folder / LOGS / f"rank-{rank}.log").open("a", encoding="utf-8", buffering=1))
        resources.enter_context(redirect_stdout(file))
        resources.enter_context(redirect_stderr(file))
        yield
