"""The records of an evaluation: `evaluation.sqlite` as it goes, then `answers.jsonl` and `summary.json` (docs/eval.md).

An item's answers are stored in one transaction, so a killed evaluation has whole items and resumes with the others.
"""

import json
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from io import TextIOWrapper
from pathlib import Path
from typing import Any, Self

from posttrain.base.errors import RunError
from posttrain.runs.atomic import cannot_write
from posttrain.runs.files import check_database, load_json, open_regular, save_json, save_rows
from posttrain.runs.folder import FolderLock

log = logging.getLogger("posttrain")

DATABASE, ANSWERS, SUMMARY = "evaluation.sqlite", "answers.jsonl", "summary.json"
FORMAT = 1
BUSY_S = 30.0  # seconds to wait for another program's lock
SCHEMA = """
CREATE TABLE IF NOT EXISTS evaluations (key TEXT PRIMARY KEY, facts TEXT, summary TEXT);
CREATE TABLE IF NOT EXISTS answers (
    key TEXT, position INTEGER, sample INTEGER, suite TEXT, setting TEXT, item TEXT, "group" TEXT, prompt TEXT,
    gold TEXT, completion TEXT, extracted TEXT, verdict TEXT, score REAL, format_and_answer TEXT, tokens INTEGER,
    finish_reason TEXT, seconds REAL, reason TEXT,
    PRIMARY KEY (key, position, sample)
) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion of one item, and what is known about it."""

    suite: str
    setting: str = ""  # of a sweep, such as "temperature=0.6 top_p=0.9"; else ""
    item: str  # the item's id in its suite
    sample: int  # from 0
    group: str = ""  # subject or level; "" without groups
    prompt: str  # as the model reads it
    gold: str | None = None
    completion: str
    extracted: str | None = None  # the answer that the rule found
    verdict: str  # correct, wrong, timeout, crashed, bad_gold, ungraded; scored: by a function
    score: float | None = None  # None: not graded
    format_and_answer: str = ""  # 11, 10, 01, 00; "" if the rule has no format
    tokens: int = 0
    finish_reason: str = ""  # stop, length; "" if nothing was generated
    seconds: float = 0.0  # its share of the time of generation
    reason: str | None = None  # why it is not graded


COLUMNS = tuple(field.name for field in fields(Answer))
_QUOTED = ", ".join(f'"{name}"' for name in COLUMNS)


class EvaluationStore:
    """The database of an evaluation folder, locked for this process; any of its threads may use it.

    Errors of SQLite are RunErrors that name the file.

    With `overwrite`, an evaluation that is started replaces the earlier one, and those of other models (`is_of`) go; a
    damaged database is moved aside.
    """

    def __init__(self, folder: Path, overwrite: bool = False):
        self.path, self._overwrite = folder / DATABASE, overwrite
        self._started: set[str] = set()
        self._of_others: list[str] = []
        self._turn = threading.RLock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(folder, error) from error
        self._lock = FolderLock(folder)
        try:
            self._connection = self._opened()
        except (sqlite3.Error, OSError) as error:
            self._lock.release()
            raise self._refusal(error) from error

    def _opened(self) -> sqlite3.Connection:
        try:
            return _connected(self.path, self._overwrite)
        except sqlite3.DatabaseError as error:
            if not (self._overwrite and _is_damage(error)):
                raise
        aside = self.path.with_name(f"{DATABASE}.damaged")
        os.replace(self.path, aside)
        self.path.with_name(f"{DATABASE}-journal").unlink(missing_ok=True)  # it would be applied to the new one
        log.warning("%s was damaged: it is moved to %s", self.path, aside.name)
        return _connected(self.path, False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._turn:
            self._connection.close()
        self._lock.release()

    def is_of(self, content: str) -> None:
        """Refuse evaluations of another model in this folder; with `overwrite`, the first that starts removes them.

        Raises RunError.
        """
        rows = self._rows("SELECT key, facts FROM evaluations")
        self._of_others = [key for key, facts in rows if json.loads(facts).get("model") != content]
        if self._of_others and not self._overwrite:
            raise RunError(
                f"{self.path} has evaluations of another model, or of this one before it changed "
                f"({', '.join(self._of_others)}): replace them with --overwrite, or give another folder with --output"
            )

    def facts(self, key: str) -> dict[str, Any] | None:
        """What identifies a started evaluation: model, items, settings; None if it has not started."""
        if self._overwrite and key not in self._started:
            return None
        rows = self._rows("SELECT facts FROM evaluations WHERE key = ?", key)
        return json.loads(rows[0][0]) if rows else None

    def summary(self, key: str) -> dict[str, Any] | None:
        """The summary of a finished evaluation."""
        rows = self._rows("SELECT summary FROM evaluations WHERE key = ?", key)
        return json.loads(rows[0][0]) if rows and rows[0][0] else None

    def summaries(self) -> dict[str, dict[str, Any]]:
        """The summaries of all finished evaluations of the folder, in their order."""
        rows = self._rows("SELECT key, summary FROM evaluations WHERE summary IS NOT NULL ORDER BY rowid")
        return {key: json.loads(summary) for key, summary in rows}

    def start(self, key: str, facts: Mapping[str, Any]) -> None:
        """Begin an evaluation; answers of an earlier one with this key, and of other models, are deleted."""
        self._started.add(key)
        replaced, self._of_others = {key, *self._of_others}, []
        for table in ("evaluations", "answers"):  # in this order: answers without an evaluation are never read
            self._write(f"DELETE FROM {table} WHERE key = ?", [(name,) for name in replaced])
        self._write("INSERT INTO evaluations VALUES (?, ?, NULL)", [(key, json.dumps(facts))])

    def add(self, key: str, answers: Sequence[tuple[int, Answer]]) -> None:
        """Store answers with their items' positions, all or none."""
        marks = ", ".join("?" * (len(COLUMNS) + 2))
        rows = [(key, position, *(getattr(answer, name) for name in COLUMNS)) for position, answer in answers]
        self._write(f"INSERT OR REPLACE INTO answers (key, position, {_QUOTED}) VALUES ({marks})", rows)

    def finish(self, key: str, summary: Mapping[str, Any]) -> None:
        self._write("UPDATE evaluations SET summary = ? WHERE key = ?", [(json.dumps(summary), key)])

    def positions(self, key: str) -> set[int]:
        """The items that have their answers."""
        return {row[0] for row in self._rows("SELECT DISTINCT position FROM answers WHERE key = ?", key)}

    def answers(self, key: str | None = None) -> Iterator[Answer]:
        """The answers of one evaluation, or of all that are finished, by suite, item and sample."""
        if key is not None:
            rows = self._rows(f"SELECT {_QUOTED} FROM answers WHERE key = ? ORDER BY position, sample", key)
            yield from (Answer(**dict(zip(COLUMNS, row, strict=True))) for row in rows)
            return
        for finished in self.summaries():
            yield from self.answers(finished)

    def _rows(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        try:
            with self._turn:
                return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise self._refusal(error) from error

    def _write(self, query: str, rows: Sequence[tuple[Any, ...]]) -> None:
        safe = [tuple(_storable(value) for value in row) for row in rows]
        try:
            with self._turn, self._connection:
                self._connection.executemany(query, safe)
        except sqlite3.Error as error:
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> RunError:
        text = str(error)
        if "locked" in text:
            advice = "another program writes it: wait for it, or give another folder with --output"
        elif _is_damage(error):
            advice = "the file is damaged: evaluate again with --overwrite, which moves it aside"
        else:
            advice = "check the disk and the permissions of the folder; what was stored before is kept"
        return RunError(f"{self.path}: {text} ({advice})")


def _connected(path: Path, check: bool) -> sqlite3.Connection:
    """The database with its tables; `check` reads all of it. Raises sqlite3.Error if it is damaged."""
    check_database(path)
    connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)  # `_turn` keeps threads apart
    try:
        with connection:
            connection.executescript(SCHEMA)
        if check and (found := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(f"database disk image is malformed: {found}")
    except BaseException:
        connection.close()
        raise
    return connection


def _is_damage(error: Exception) -> bool:
    return any(words in str(error) for words in ("malformed", "not a database"))


def _storable(value: Any) -> Any:
    """A lone surrogate, which UTF-8 lacks, as its escape."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def write_files(
    folder: Path, store: EvaluationStore, model: Mapping[str, Any], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Write `answers.jsonl` and `summary.json` from the database. Returns the summary."""
    save_rows(folder / ANSWERS, (asdict(answer) for answer in store.answers()))
    summary = {"format": FORMAT, **about, "model": dict(model), "suites": store.summaries()}
    save_json(folder / SUMMARY, summary)
    return summary


def is_evaluation(folder: Path) -> bool:
    return (folder / SUMMARY).is_file() or (folder / DATABASE).is_file()


def read_summary(folder: Path) -> dict[str, Any]:
    """`summary.json` of a finished evaluation. Raises RunError if it is missing, damaged or of another version."""
    if not (folder / SUMMARY).is_file() and (folder / DATABASE).is_file():
        raise RunError(f"{folder} has an evaluation that is not finished: run the same `posttrain eval` again")
    summary = load_json(folder / SUMMARY)
    if not isinstance(summary, dict) or summary.get("format") != FORMAT or not isinstance(summary.get("suites"), dict):
        raise RunError(f"{folder / SUMMARY} is damaged or of another version of posttrain")
    return summary


def read_answers(folder: Path) -> list[Answer]:
    """The answers of a finished evaluation, from `answers.jsonl`. Raises RunError if it is missing or damaged."""
    path, found = folder / ANSWERS, []
    try:
        with TextIOWrapper(open_regular(path), encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = json.loads(line)
                    found.append(Answer(**{name: row[name] for name in COLUMNS}))
                except (ValueError, KeyError, TypeError) as error:
                    raise RunError(f"{path} line {number} is damaged: {error}") from None
    except FileNotFoundError:
        read_summary(folder)  # says whether it is unfinished
        raise RunError(f"{path} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read: {error}") from None
    return found
