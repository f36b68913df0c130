"""The run folder as the ranks after the first one see it: they read it, and write nothing but their own log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from posttrain.errors import reason_of
from posttrain.store.logs import LOGGER
from posttrain.store.run import Run, State

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

    def write_config(self, config_yaml: str) -> None: ...

    def set_state(self, state: State, reason: str | None = None) -> None: ...

    def set_counters(self, counters: Mapping[str, int]) -> None: ...

    def record_check(self, name: str, found: Mapping[str, Any]) -> None: ...

    def add_provenance(self, facts: Mapping[str, Any]) -> None: ...

    def write_results(self, results: Mapping[str, Any]) -> None: ...

    def write_final_results(self, results: Mapping[str, Any]) -> None: ...

    def log(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def follow(self, follower: Callable[[dict[str, Any]], None]) -> None: ...

    def save_checkpoint(self, step: int, write: Callable[[Path], None], limit: int | None) -> Path:
        return self.folder / f"checkpoint-{step}"

    def save_model(self, folder: Path, step: int, write: Callable[[Path], None]) -> None: ...

    def rewind(self, step: int, evaluated: bool = True) -> None: ...

    def start_over(self, provenance: Mapping[str, Any]) -> None: ...

    def on_failure(self, save: Callable[[BaseException], None]) -> None:
        self._save = save

    def close(self) -> None: ...

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
