"""An index of a run's rollouts, in the UI's cache: full-text search and filters over all steps.

The run's database is only read. A thread adds whole steps to the index. Steps that a resumed run has repeated are
recognised by their fingerprints and read again. The index can be deleted at any time.
"""

import hashlib
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any, Self

from posttrain.base.errors import PosttrainError
from posttrain.base.files import table_beside
from posttrain.base.log import log
from posttrain.base.words import by_key
from posttrain.runs.receipt import CompletionReceipt, factor
from posttrain.runs.stored_rollouts import StoredRun
from posttrain.ui.parts import Query

VERSION = 2  # another version has another file
REST_S = 0.003  # seconds to pause after every step, so that pages are served meanwhile
AGE_S = 2.0  # seconds after which the run's database is read again
SCHEMA = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")
SORTS: dict[str, str] = table_beside(__file__, "search.yaml")


class Index:
    """The index of one run's rollouts. A thread reads new steps; meanwhile `progress` is set."""

    def __init__(self, run: Path, cache: Path):
        self.run = run
        name = hashlib.sha256(f"{VERSION} {run.absolute()}".encode()).hexdigest()[:24]
        self.path = cache / f"rollouts-{name}.sqlite"
        self.problem = ""
        self.progress: tuple[int, int] | None = None  # new steps read so far and their total, while the thread works
        self._lock, self._updated = threading.Lock(), -AGE_S
        self._thread: threading.Thread | None = None

    def refresh(self, wait: float = 0.0) -> Self:
        """Start reading new steps and wait for at most `wait` seconds. Does nothing if the thread is still reading, or
        ended less than AGE_S ago."""
        started = None
        with self._lock:
            busy = self._thread is not None and self._thread.is_alive()
            if not busy and time.monotonic() - self._updated >= AGE_S:
                self._thread = started = threading.Thread(target=self._work, name="index", daemon=True)
                started.start()
        if wait and started is not None:
            started.join(wait)
        return self

    def search(self, query: Query, limit: int = 50, offset: int = 0) -> tuple[int, list[dict[str, Any]]]:
        """The number of rollouts that match the filters in an address, among the steps indexed so far, and the rows of
        one page of them."""
        where, values = _conditions(query)
        order = SORTS[query.choice("sort", list(SORTS))]
        with closing(self._opened()) as connection:
            total = connection.execute(f"SELECT COUNT(*) FROM rollouts WHERE {where}", values).fetchone()[0]
            page = f"SELECT * FROM rollouts WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?"
            return total, list(map(dict, connection.execute(page, (*values, limit, offset))))

    def choices(self) -> dict[str, list[str]]:
        """The verdicts, finish reasons and reward parts that occur in the indexed steps."""
        with closing(self._opened()) as connection:
            known = by_key(connection.execute("SELECT kind, value FROM choices ORDER BY value"))
        return {kind: known.get(kind, []) for kind in ("verdict", "ended", "part")}

    def _opened(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self.path, timeout=10.0)
        connection.row_factory = sqlite3.Row
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = OFF")  # an index damaged by a power failure is built again
            if connection.execute("PRAGMA user_version").fetchone()[0] != VERSION:
                connection.executescript(SCHEMA)
                connection.execute(f"PRAGMA user_version = {VERSION}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _work(self) -> None:
        try:
            try:
                self._update()
            except sqlite3.DatabaseError as error:
                if "malformed" not in str(error) and "not a database" not in str(error):
                    raise
                for end in ("", "-wal", "-shm"):
                    self.path.with_name(self.path.name + end).unlink(missing_ok=True)
                self._update()
            self.problem = ""
        except (PosttrainError, sqlite3.Error, OSError) as error:
            self.problem = str(error)
        except Exception as error:  # e.g. a row of another version; the pages work without the index
            log.exception("the rollouts of %s cannot be indexed", self.run)
            self.problem = f"the rollouts cannot be indexed: {type(error).__name__}"
        finally:
            self.progress, self._updated = None, time.monotonic()

    def _update(self) -> None:
        with StoredRun(self.run, looking=True) as stored, closing(self._opened()) as connection:
            current = _fingerprints(stored)
            known = dict(connection.execute("SELECT step, fingerprint FROM steps").fetchall())
            gone = [step for step, fingerprint in known.items() if current.get(step) != fingerprint]
            new = [step for step, fingerprint in current.items() if known.get(step) != fingerprint]
            if not gone and not new:
                return
            with connection:
                for step in gone:
                    _remove(connection, step)
            for done, step in enumerate(new):
                self.progress = done, len(new)
                with connection:  # one transaction: a step is indexed with all its rollouts or not at all
                    _add(connection, step, current[step], stored)
                time.sleep(REST_S)


def _fingerprints(stored: StoredRun) -> dict[int, str]:
    """The fingerprint of each step: the number of completions and a hash of the first completion. It changes when a
    step is repeated."""
    rows = stored.query(
        "SELECT r.step, COUNT(*), (SELECT f.completion FROM rollouts f WHERE f.step = r.step ORDER BY prompt_index, "
        "rollout_index LIMIT 1) FROM rollouts r GROUP BY r.step"
    )
    return {
        step: f"{count} {hashlib.sha256(str(first).encode(errors='replace')).hexdigest()[:16]}"
        for step, count, first in rows
    }


def _remove(connection: sqlite3.Connection, step: int) -> None:
    """Remove a step. Its words are left in the full-text tables, where they match no row, as ids are never reused."""
    connection.execute("DELETE FROM parts WHERE rollout_id IN (SELECT id FROM rollouts WHERE step = ?)", (step,))
    for table in ("rollouts", "prompts", "steps"):
        connection.execute(f"DELETE FROM {table} WHERE step = ?", (step,))


def _add(connection: sqlite3.Connection, step: int, fingerprint: str, stored: StoredRun) -> None:
    rollouts = stored.rollouts(step)
    prompts = {prompt["prompt_index"]: prompt for prompt in stored.prompts(step)}
    _remove(connection, step)
    ids = {}
    for index, prompt in prompts.items():
        ids[index] = connection.execute("INSERT INTO prompts (step) VALUES (?)", (step,)).lastrowid
        connection.execute("INSERT INTO prompt_texts (rowid, text) VALUES (?, ?)", (ids[index], prompt["prompt"]))
    for rollout in rollouts:
        index, completion = rollout["prompt_index"], CompletionReceipt.of(rollout)
        numbers, verdict = completion.numbers, completion.verdict
        row = {
            "step": step, "prompt": index, "rollout": completion.rollout, "prompt_id": ids.get(index),
            "row": prompts[index]["row"] if index in prompts else None, "reward": completion.reward,
            "advantage": completion.advantage, "length": len(completion.tokens), "ended": completion.finish_reason,
            "verdict": verdict, "push": completion.push, "clipped": int(numbers.clipped.sum()),
            "ratio": factor(numbers.furthest_ratio),
        }  # fmt: skip
        insert = f"INSERT INTO rollouts ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})"
        added = connection.execute(insert, list(row.values())).lastrowid
        connection.execute("INSERT INTO completion_texts (rowid, text) VALUES (?, ?)", (added, completion.text))
        graded = [(added, name, part.value) for name, part in completion.parts.items()]
        connection.executemany("INSERT OR REPLACE INTO parts VALUES (?, ?, ?)", graded)
        choices = [("verdict", verdict), ("ended", completion.finish_reason)]
        choices += [("part", name) for name in completion.parts]
        connection.executemany("INSERT OR IGNORE INTO choices VALUES (?, ?)", [pair for pair in choices if pair[1]])
    connection.execute("INSERT INTO steps VALUES (?, ?)", (step, fingerprint))


def words_of(search: str) -> list[str]:
    """The words and "quoted phrases" of a search."""
    pieces = search.split('"')
    return [word for at, piece in enumerate(pieces) for word in ([piece] if at % 2 else piece.split()) if word.strip()]


def _conditions(query: Query) -> tuple[str, list[Any]]:
    """The filters in an address as an SQL condition with its values."""
    conditions, values = ["1"], []

    def need(condition: str, *more: Any) -> None:
        conditions.append(condition)
        values.extend(more)

    search = query.one("find")
    if words := words_of(search):
        # Words are quoted, so that none is an operator of FTS5; the last word matches as a prefix.
        match = " ".join(f'"{word.replace(chr(0), "")}"' for word in words) + ("" if search.endswith('"') else " *")
        need(
            "(id IN (SELECT rowid FROM completion_texts WHERE completion_texts MATCH ?) "
            "OR prompt_id IN (SELECT rowid FROM prompt_texts WHERE prompt_texts MATCH ?))",
            match, match,
        )  # fmt: skip
    column, part = "reward", query.one("part")
    if part:
        column = "(SELECT value FROM parts WHERE rollout_id = id AND name = ?)"
    for name, sign in (("least", ">="), ("most", "<=")):
        if (value := query.number(name)) is not None:
            need(f"{column} {sign} ?", *([part] if part else []), value)
    for name, sign, value in (
        ("step", ">=", query.integer("from")), ("step", "<=", query.integer("to")), ("row", "=", query.integer("row")),
        ("length", ">=", query.integer("shortest")), ("length", "<=", query.integer("longest")),
        ("verdict", "=", query.one("verdict") or None), ("ended", "=", query.one("ended") or None),
    ):  # fmt: skip
        if value is not None:
            need(f"{name} {sign} ?", value)
    return " AND ".join(conditions), values
