"""Records of an evaluation (docs/eval.md): `evaluation.sqlite` while it runs, then `answers.jsonl` and `summary.json`.

An item's answers are stored in one transaction: a killed evaluation has complete items, and resumes with the others.
"""

import json
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from io import TextIOWrapper
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from posttrain import __version__
from posttrain.base.errors import RunError
from posttrain.base.log import log
from posttrain.base.words import by_key
from posttrain.evaluation.statistics import majorities, mean_by_prompt, passes
from posttrain.runs.files import check_database, load_json, make_folder, open_regular, save_json, save_rows, storable
from posttrain.runs.folder import FolderLock
from posttrain.runs.stored_rollouts import check_episode

if TYPE_CHECKING:
    from posttrain.evaluation.items import Items  # imports torch

DATABASE, ANSWERS, SUMMARY = "evaluation.sqlite", "answers.jsonl", "summary.json"
FORMAT = 1
CONFIDENCE = 0.95
BUSY_S = 30.0  # seconds to wait for another program's lock
SCHEMA = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One completion of one item, with its prompt and its grade."""

    suite: str
    setting: str = ""  # of a sweep, such as "temperature=0.6 top_p=0.9"; otherwise ""
    item: str  # the item's id in its suite
    sample: int  # from 0
    group: str = ""  # subject or level; "" without groups
    prompt: str  # as the model reads it
    gold: str | None = None
    completion: str
    extracted: str | None = None  # the answer that the rule found
    verdict: str  # correct, wrong, timeout, crashed, bad_gold, ungraded, scored (by a function)
    score: float | None = None  # None: not graded
    format_and_answer: str = ""  # 11, 10, 01, 00; "" if the rule has no format
    tokens: int = 0
    finish_reason: str = ""  # stop, length; "" if nothing was generated
    seconds: float = 0.0  # its share of the generation time
    reason: str | None = None  # why the completion is not graded
    episode: Mapping[str, Any] | None = None  # of several turns, of which `completion` is the last reply


COLUMNS = tuple(field.name for field in fields(Answer))
_QUOTED = ", ".join(f'"{name}"' for name in COLUMNS)


class EvaluationStore(AbstractContextManager["EvaluationStore"]):
    """The database of an evaluation folder, locked for this process; any thread of the process may use it.

    SQLite errors become RunErrors that name the file. With `overwrite`, starting an evaluation removes the earlier one
    and evaluations of other models (see `is_of`), and a damaged database is moved aside.
    """

    def __init__(self, folder: Path, overwrite: bool = False):
        self.path, self._overwrite = folder / DATABASE, overwrite
        self._started: set[str] = set()
        self._of_others: list[str] = []
        self._turn = threading.RLock()
        make_folder(folder)
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
        self.path.with_name(f"{DATABASE}-journal").unlink(missing_ok=True)  # it would be applied to the new database
        log.warning("%s is damaged and was moved to %s", self.path, aside.name)
        return _connected(self.path, False)

    def __exit__(self, *_: object) -> None:
        with self._turn:
            self._connection.close()
        self._lock.release()

    def is_of(self, content: str) -> None:
        """Raise RunError if the folder has evaluations of another model; with `overwrite`, `start` removes them."""
        rows = self._rows("SELECT key, facts FROM evaluations")
        self._of_others = [key for key, facts in rows if json.loads(facts).get("model") != content]
        if self._of_others and not self._overwrite:
            raise RunError(
                f"{self.path} has evaluations of another model, or of this one before it changed "
                f"({', '.join(self._of_others)}): replace them with --overwrite, or give another folder with --output"
            )

    def facts(self, key: str) -> dict[str, Any] | None:
        """What identifies a started evaluation: model, items, settings; None if it was not started."""
        if self._overwrite and key not in self._started:
            return None
        rows = self._rows("SELECT facts FROM evaluations WHERE key = ?", key)
        return json.loads(rows[0][0]) if rows else None

    def summaries(self) -> dict[str, dict[str, Any]]:
        """The summaries of all finished evaluations of the folder, in their order."""
        rows = self._rows("SELECT key, summary FROM evaluations WHERE summary IS NOT NULL ORDER BY rowid")
        return {key: json.loads(summary) for key, summary in rows}

    def start(self, key: str, facts: Mapping[str, Any]) -> None:
        """Start an evaluation. Evaluations with the same key, and of other models, are deleted with their answers."""
        self._started.add(key)
        replaced, self._of_others = {key, *self._of_others}, []
        for table in ("evaluations", "answers"):  # in this order: answers without an evaluation are never read
            self._write(f"DELETE FROM {table} WHERE key = ?", [(name,) for name in replaced])
        self._write("INSERT INTO evaluations VALUES (?, ?, NULL)", [(key, json.dumps(facts))])

    def add(self, key: str, answers: Sequence[tuple[int, Answer]]) -> None:
        """Store answers with their items' positions: all of them, or none."""
        marks = ", ".join("?" * (len(COLUMNS) + 2))
        rows = [(key, position, *(getattr(answer, name) for name in COLUMNS)) for position, answer in answers]
        self._write(f"INSERT OR REPLACE INTO answers (key, position, {_QUOTED}) VALUES ({marks})", rows)

    def finish(self, key: str, summary: Mapping[str, Any]) -> None:
        self._write("UPDATE evaluations SET summary = ? WHERE key = ?", [(json.dumps(summary), key)])

    def positions(self, key: str) -> set[int]:
        """The positions of the items that are answered."""
        return {row[0] for row in self._rows("SELECT DISTINCT position FROM answers WHERE key = ?", key)}

    def answers(self, key: str) -> Iterator[Answer]:
        """The answers of an evaluation, ordered by item and sample."""
        for row in self._rows(f"SELECT {_QUOTED} FROM answers WHERE key = ? ORDER BY position, sample", key):
            facts = dict(zip(COLUMNS, row, strict=True))
            yield Answer(**facts | {"episode": facts["episode"] and json.loads(facts["episode"])})

    def _rows(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        try:
            with self._turn:
                return self._connection.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise self._refusal(error) from error

    def _write(self, query: str, rows: Sequence[tuple[Any, ...]]) -> None:
        safe = [tuple(map(storable, row)) for row in rows]
        try:
            with self._turn, self._connection:
                self._connection.executemany(query, safe)
        except sqlite3.Error as error:
            raise self._refusal(error) from error

    def _refusal(self, error: Exception) -> RunError:
        text = str(error)
        if "locked" in text:
            advice = "another program is writing to it: wait until it ends, or give another folder with --output"
        elif _is_damage(error):
            advice = "the file is damaged: evaluate again with --overwrite, which moves it aside"
        else:
            advice = "check the disk and the permissions of the folder; what was stored before is kept"
        return RunError(f"{self.path}: {text} ({advice})")


def _connected(path: Path, check: bool) -> sqlite3.Connection:
    """Open the database and create its tables; with `check`, read all of it. Raises sqlite3.Error if it is damaged."""
    check_database(path)
    connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)  # `_turn` serialises threads
    try:
        with connection:
            connection.executescript(SCHEMA)
            if "episode" not in {row[1] for row in connection.execute("PRAGMA table_info(answers)")}:
                connection.execute("ALTER TABLE answers ADD COLUMN episode TEXT")  # made by an earlier version
        if check and (found := connection.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(f"database disk image is malformed: {found}")
    except BaseException:
        connection.close()
        raise
    return connection


def _is_damage(error: Exception) -> bool:
    return any(words in str(error) for words in ("malformed", "not a database"))


def summarise(
    items: "Items", setting: str, answers: Sequence[Answer], samples: int, sampling: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
    """The summary of one suite with one setting; `answers` are in the order of the items.

    `value` is the mean over all graded answers, with an interval clustered by prompt; None if nothing is graded.
    Answers that are not graded have no score; `ungraded` counts them by reason.
    """
    suite = items.suite
    by_item = list(by_key((answer.item, answer) for answer in answers).values())
    scores = [[answer.score for answer in group if answer.score is not None] for group in by_item]
    graded = sum(map(len, scores))
    estimate = mean_by_prompt(scores, CONFIDENCE) if graded else None
    # By verdict; for the verdict `ungraded`, by the reason without its details.
    ungraded = Counter(
        answer.verdict if answer.verdict != "ungraded" else (answer.reason or "no reason").partition(": ")[0]
        for answer in answers
        if answer.score is None
    )
    return {
        "suite": suite.name,
        "setting": setting,
        "source": suite.source,
        "metric": suite.metric,
        **{name: estimate and getattr(estimate, name) for name in ("value", "low", "high", "standard_error")},
        "confidence": CONFIDENCE,
        "items": len(by_item),
        "available": suite.items or items.available,
        "partial": items.partial,
        "samples": samples,
        "answers": len(answers),
        "graded": graded,
        "ungraded": dict(ungraded.most_common()),
        "verdicts": dict(Counter(answer.verdict for answer in answers)),
        "classes": dict(sorted(Counter(a.format_and_answer for a in answers if a.format_and_answer).items())),
        **_by_samples(by_item, samples),
        "groups": _by_group(by_item),
        "tokens": sum(answer.tokens for answer in answers),
        "truncated": sum(answer.finish_reason == "length" for answer in answers),
        "seconds": round(seconds, 3),
        "sampling": dict(sampling),
        "rule": suite.rule if suite.kind == "generate" else suite.kind,
        "digest": items.digest,
    }


def _by_samples(by_item: Sequence[Sequence[Answer]], samples: int) -> dict[str, dict[str, float]]:
    """pass@k and maj@k for k = 1, 2, 4 … samples, each over the prompts with at least k graded answers."""
    if samples < 2:
        return {}
    judged = [
        [(answer.extracted, answer.verdict == "correct") for answer in group if answer.verdict in ("correct", "wrong")]
        for group in by_item
    ]
    shares = {"pass@k": passes([[right for _, right in group] for group in judged], samples)}
    shares["maj@k"] = majorities(judged, samples)
    return {name: {str(k): share for k, share in by_size.items()} for name, by_size in shares.items()}


def _by_group(by_item: Sequence[Sequence[Answer]]) -> dict[str, dict[str, float | None]]:
    """Each group's mean score over graded answers (None if there are none) and its number of items."""
    groups: dict[str, dict[str, float | None]] = {}
    for name, items in sorted(by_key((answers[0].group, answers) for answers in by_item if answers[0].group).items()):
        scores = [answer.score for answers in items for answer in answers if answer.score is not None]
        groups[name] = {"value": fmean(scores) if scores else None, "items": len(items)}
    return groups


def write_files(
    folder: Path, store: EvaluationStore, model: Mapping[str, Any], created: str | None = None
) -> dict[str, Any]:
    """Write `answers.jsonl` and `summary.json` from the database. Returns the summary."""
    suites = store.summaries()
    rows = (asdict(answer) for key in suites for answer in store.answers(key))
    save_rows(folder / ANSWERS, ({k: v for k, v in row.items() if v or k != "episode"} for row in rows))
    about = {"format": FORMAT, "posttrain": __version__} | ({"created": created} if created else {})
    summary = {**about, "model": dict(model), "suites": suites}
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
        raise RunError(f"{folder / SUMMARY} is damaged, or from another version of posttrain")
    return summary


def scores_by_item(answers: Sequence[Answer]) -> dict[str, list[float]]:
    """The scores of each item with a graded answer, in order."""
    return by_key((answer.item, answer.score) for answer in answers if answer.score is not None)


def read_answers(folder: Path) -> list[Answer]:
    """The answers of a finished evaluation, from `answers.jsonl`. Raises RunError if it is missing or damaged."""
    path, answers = folder / ANSWERS, []
    try:
        with TextIOWrapper(open_regular(path), encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    row = {"episode": None} | json.loads(line)  # which earlier versions do not have
                    answers.append(Answer(**{name: row[name] for name in COLUMNS}))
                    if answers[-1].episode is not None:
                        check_episode(answers[-1].episode)
                except (ValueError, KeyError, TypeError) as error:
                    raise RunError(f"{path} line {number} is damaged: {error}") from None
    except FileNotFoundError:
        read_summary(folder)  # raises RunError if it is unfinished
        raise RunError(f"{path} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read: {error}") from None
    return answers
