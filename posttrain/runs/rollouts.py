"""`rollouts.sqlite`: every completion that a run was trained on, with all numbers behind its gradient.

A step is one transaction, written by a background thread: it is stored with all its groups or not at all. A checkpoint
waits until the steps before it are on disk, and a resumed run first deletes the steps after its checkpoint, so that no
rollout is lost or stored twice. If a step cannot be written, the run saves it in a checkpoint and stops; the resumed
run writes it. When the file reaches its size limit, the oldest steps are deleted.

Per-token numbers are little-endian arrays (float32; int32 for tokens, uint8 for flags): one array per completion, one
number per token. A token that the model did not sample, such as a tool's output, is not trained on: its numbers are
NaN, its flags 0.
"""

import queue
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.base.errors import RunError
from posttrain.base.log import log
from posttrain.runs.files import check_database, storable

NAME = "rollouts.sqlite"
SCHEMA = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")
TABLES = ("prompts", "rollouts", "evaluations")
TOKENS = {"tokens": np.dtype("<i4"), "clipped": np.dtype("u1")}  # all other arrays are float32
FACTS = (
    "prompt_index", "rollout_index", "completion", "reward", "advantage", "finish_reason", "version", "parts", "turns",
)  # fmt: skip
ARRAYS = (
    "tokens", "sampler_logprobs", "old_logprobs", "new_logprobs", "ref_logprobs", "advantages", "clipped", "old_values",
    "returns", "entropies", "penalties",
)  # fmt: skip
BUSY_S = 30.0  # seconds to wait for another program's lock on the file
WAITING = 4  # maximum steps in the queue; when it is full, training waits for the disk
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class StoredPrompt:
    """A prompt of a step. `facts` are the inputs of rewards: prompt, answer, columns."""

    row: int
    text: str
    tokens: Sequence[int]
    facts: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """A completion of a step; `parts` has each reward's value and, for rules, the verdict. In `arrays`, `tokens` has
    every token; the other arrays have a number for each trained token."""

    prompt_index: int
    rollout_index: int
    completion: str
    reward: float | None
    advantage: float | None
    finish_reason: str
    version: int
    parts: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray | None]
    trained: np.ndarray | None = None  # which tokens are trained, bool; None: all
    turns: Mapping[str, Any] | None = None  # of an episode: why it ended, and the author, span and calls of each turn

    def array(self, name: str) -> np.ndarray | None:
        """The array with a number for each token; NaN, or 0 for a flag, for tokens that are not trained."""
        values = self.arrays.get(name)
        if values is None or self.trained is None or name == "tokens":
            return values
        spread = np.zeros(len(self.trained), bool) if name in TOKENS else np.full(len(self.trained), np.nan)
        spread[self.trained] = values
        return spread


@dataclass(frozen=True, slots=True)
class StoredEvaluation:
    """A completion of a validation prompt."""

    row: int
    prompt: str
    completion: str
    reward: float | None
    finish_reason: str
    parts: Mapping[str, Any]
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Write:
    step: int
    epoch: float
    prompts: Sequence[StoredPrompt] = ()
    rollouts: Sequence[StoredRollout] = ()
    dataset: str = ""
    evaluations: Sequence[StoredEvaluation] = ()
    first: int = 0  # the index of the first prompt


class RolloutStore:
    """Writes a run's rollouts. `check` and `flush` raise RunError if something could not be written."""

    def __init__(self, folder: Path, max_bytes: int, after: int, checkpoint: Path | None = None):
        """Open or create the file; delete steps later than `after`; write the steps saved in `checkpoint`, from which
        the run resumes."""
        self.path, self.max_bytes = folder / NAME, max_bytes
        try:
            self._connection = _connect(self.path)
            with self._connection as connection:
                connection.executescript(SCHEMA)
                existing = {row[1] for row in connection.execute("PRAGMA table_info(rollouts)")}
                for name, type in {**dict.fromkeys(ARRAYS, "BLOB"), "turns": "TEXT"}.items():
                    if name not in existing:  # in a file from an earlier version
                        connection.execute(f"ALTER TABLE rollouts ADD COLUMN {name} {type}")
                for table in TABLES:
                    connection.execute(f"DELETE FROM {table} WHERE step > ?", (after,))
                if checkpoint is not None and (checkpoint / NAME).is_file():
                    _write_saved(connection, checkpoint / NAME)
        except sqlite3.Error as error:
            raise _refusal(self.path, error) from error
        self._waiting: queue.Queue[_Write | None] = queue.Queue(WAITING)
        self._failed: Exception | None = None
        self._unwritten: list[_Write] = []
        self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)
        self._thread.start()

    def add(
        self,
        step: int,
        epoch: float,
        prompts: Sequence[StoredPrompt],
        rollouts: Sequence[StoredRollout],
        first: int = 0,
    ) -> None:
        """Queue a step, or a part of one whose prompts begin with number `first`, for writing; if writing fails, it is
        kept for `save_unwritten`."""
        self._waiting.put(_Write(step, epoch, prompts, rollouts, first=first))

    def add_evaluation(self, step: int, dataset: str, evaluations: Sequence[StoredEvaluation]) -> None:
        """Queue an evaluation of a data set for writing; it replaces an earlier one of the same step."""
        self._waiting.put(_Write(step, 0.0, dataset=dataset, evaluations=evaluations))

    def check(self) -> None:
        """Raise RunError if something could not be written."""
        if self._failed is not None:
            raise _refusal(self.path, self._failed) from self._failed

    def flush(self) -> None:
        """Wait until everything queued so far is on disk."""
        self._waiting.join()
        self.check()

    def save_unwritten(self, folder: Path, until: int) -> None:
        """Save unwritten steps up to `until` in a checkpoint's folder; the store of a resumed run writes them."""
        self._waiting.join()
        writes = [write for write in self._unwritten if write.step <= until]
        if not writes:
            return
        check_database(folder / NAME)
        with closing(sqlite3.connect(folder / NAME)) as connection:
            connection.executescript(SCHEMA)
            for write in writes:
                _insert(connection, write)
            connection.commit()

    def close(self) -> None:
        """Write the queue and end the thread. Raises nothing, as that would hide the error of a failed run."""
        self._waiting.put(None)
        self._thread.join()
        if self._failed is not None:
            log.warning("%s", _refusal(self.path, self._failed))

    def _work(self) -> None:
        with closing(self._connection) as connection:
            while (write := self._waiting.get()) is not None:
                try:
                    if self._failed is None:
                        with connection:  # one transaction
                            _insert(connection, write)
                            self._make_room(connection, write.step)
                except Exception as error:  # any error: without this thread, `add` would wait forever
                    self._failed = error
                if self._failed is not None:
                    self._unwritten.append(write)
                self._waiting.task_done()
            self._waiting.task_done()

    def _make_room(self, connection: sqlite3.Connection, newest: int) -> None:
        """Delete the oldest steps while the file exceeds its limit; the newest step is always kept."""

        def number(name: str) -> int:
            return connection.execute(f"PRAGMA {name}").fetchone()[0]

        while number("page_size") * (number("page_count") - number("freelist_count")) > self.max_bytes:
            oldest = connection.execute("SELECT MIN(step) FROM prompts").fetchone()[0]
            if oldest is None or oldest >= newest:
                return
            for table in TABLES:
                connection.execute(f"DELETE FROM {table} WHERE step <= ?", (oldest,))


def _refusal(path: Path, error: Exception) -> RunError:
    """The error for a file that cannot be used, with the remedy."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary code
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return RunError(
            f"{path} is damaged: {error}. Training does not need it: rename it (and its -wal and -shm files), then "
            "continue with --resume, which creates a new one; `sqlite3 FILE .recover` may save its content"
        )
    remedies = {sqlite3.SQLITE_FULL: "Free disk space"}
    remedies |= dict.fromkeys((sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED), "End the program that locks it")
    remedy = remedies.get(code, "Fix that")
    return RunError(f"{path} cannot be written: {error}. {remedy}, then continue with --resume")


def _insert(connection: sqlite3.Connection, write: _Write) -> None:
    for index, prompt in enumerate(write.prompts, write.first):
        place = {"step": write.step, "prompt_index": index, "row": prompt.row, "epoch": write.epoch}
        _put(connection, "prompts", place | {"prompt": prompt.text, "tokens": prompt.tokens, "facts": prompt.facts})
    for rollout in write.rollouts:
        facts = {name: getattr(rollout, name) for name in FACTS}
        _put(connection, "rollouts", {"step": write.step} | facts | {name: rollout.array(name) for name in ARRAYS})
    connection.execute("DELETE FROM evaluations WHERE step = ? AND dataset = ?", (write.step, write.dataset))
    for evaluation in write.evaluations:
        facts = {field.name: getattr(evaluation, field.name) for field in fields(evaluation)}
        _put(connection, "evaluations", {"step": write.step, "dataset": write.dataset} | facts)


def _put(connection: sqlite3.Connection, table: str, row: Mapping[str, Any]) -> None:
    """Insert a row. Its columns are given by name, because files from earlier versions have another order."""
    arrays = {name: np.asarray(row[name]) for name in ARRAYS if row.get(name) is not None}
    row = {**row, **{name: values.astype(TOKENS.get(name, "<f4")).tobytes() for name, values in arrays.items()}}
    values = [*map(storable, row.values())]
    connection.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", values)


def _write_saved(connection: sqlite3.Connection, file: Path) -> None:
    """Write the steps that `save_unwritten` saved in `file`."""
    connection.commit()  # no file can be attached within a transaction
    connection.execute("ATTACH DATABASE ? AS unwritten", (str(file),))
    connection.execute(
        "DELETE FROM main.evaluations WHERE (step, dataset) IN (SELECT step, dataset FROM unwritten.evaluations)"
    )
    for table in TABLES:
        columns = ", ".join(f'"{row[1]}"' for row in connection.execute(f"PRAGMA unwritten.table_info({table})"))
        connection.execute(f"INSERT OR REPLACE INTO main.{table} ({columns}) SELECT {columns} FROM unwritten.{table}")
    connection.commit()
    connection.execute("DETACH DATABASE unwritten")


def _connect(path: Path) -> sqlite3.Connection:
    check_database(path)
    connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)  # the writer's thread uses it
    connection.execute("PRAGMA journal_mode = WAL")  # readers and the writer do not block each other
    connection.execute("PRAGMA synchronous = FULL")
    return connection
