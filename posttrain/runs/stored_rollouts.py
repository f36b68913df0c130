"""Reads a run's stored rollouts and evaluations."""

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.base.errors import RunError
from posttrain.runs.files import check_database, is_regular, parse_json
from posttrain.runs.rollouts import ARRAYS, BUSY_S, NAME, TOKENS

LOOKING_S = 2.0  # seconds to wait for a lock, with `looking`
Rows = list[dict[str, Any]]
NUMBER = int | float | None
# Types of the columns that are not arrays or JSON; they are checked, because SQLite accepts any value in any column.
TYPES: dict[str, Any] = dict.fromkeys(("prompt", "completion", "finish_reason", "dataset"), str)
TYPES |= dict.fromkeys(("step", "prompt_index", "rollout_index", "row", "version", "which"), int)
TYPES |= dict.fromkeys(("epoch", "reward", "advantage", "prompts", "completions", "length"), NUMBER)
TYPES |= dict.fromkeys(("lowest", "highest", "left_out", "truncated"), NUMBER)
PART = {"value": NUMBER, "weight": NUMBER, "verdict": str | None, "extracted": str | None, "reason": str | None}
EPISODE = {
    "environment": str, "stop_reason": str, "reason": str, "reward": NUMBER, "turns": list, "messages": list,
    "turn_rewards": list | None,
}  # fmt: skip
TURN = {"author": str, "start": int, "stop": int, "calls": list}
NEAR_ENDS = 200  # best (or worst) completions, from which those of different prompts are chosen
STEP_ENDS = (
    "SELECT rollouts.completion, reward, advantage, finish_reason, parts, length(rollouts.tokens) / 4 AS length, "
    "rollout_index, prompt_index AS which, prompt, facts FROM rollouts JOIN prompts USING (step, prompt_index) "
    "WHERE step = ?"
)
EVALUATION_ENDS = (
    "SELECT completion, reward, finish_reason, parts, length(tokens) / 4 AS length, row AS which, prompt "
    "FROM evaluations WHERE step = ? AND dataset = ?"
)


class StoredRun(AbstractContextManager["StoredRun"]):
    """The rollouts of a run, read-only; the run may still be active."""

    def __init__(self, folder: Path, looking: bool = False):
        """With `looking`, nothing is written to the folder, not even by SQLite, and waits for locks are short."""
        path = folder / NAME
        if not is_regular(path):
            raise RunError(f"{folder} has no {NAME}: only methods that sample completions write it, with rollout.save")
        self._path = path
        check_database(path)
        self._connection = read_only(path) if looking else sqlite3.connect(path, timeout=BUSY_S)
        self._connection.row_factory = sqlite3.Row

    def __exit__(self, *exception: object) -> None:
        self._connection.close()

    def query(self, query: str, values: Sequence[int | str] = ()) -> list[sqlite3.Row]:
        """The rows of any query. Raises RunError if the file cannot be read."""
        try:
            return self._connection.execute(query, values).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise RunError(f"{self._path} cannot be read: {error}") from error

    def _read_rows(self, query: str, values: Sequence[int | str] = ()) -> Rows:
        """The rows with arrays and JSON decoded. Raises RunError for a damaged row."""
        rows = self.query(query, values)
        try:
            return [_read(row) for row in rows]
        except ValueError as error:  # half of a number, a value of another type, or invalid JSON
            raise RunError(f"{self._path} is damaged: {error}") from error

    def steps(self) -> list[int]:
        return [row["step"] for row in self._read_rows("SELECT DISTINCT step FROM prompts ORDER BY step")]

    def require(self, step: int) -> None:
        """Raise RunError unless the rollouts of this step are in the file."""
        steps = self.steps()
        if step not in steps:
            stored = f"steps {steps[0]} to {steps[-1]}" if steps else "no steps"
            drops = "(rollout.max_database_gb drops old ones; distillation from the data samples none)"
            raise RunError(f"there are no rollouts of step {step}; the file has {stored} {drops}")

    def prompts(self, step: int) -> Rows:
        return self._read_rows("SELECT * FROM prompts WHERE step = ? ORDER BY prompt_index", (step,))

    def rollouts(self, step: int, prompt_index: int | None = None) -> Rows:
        """The completions of a step, or of one of its prompts. Per-token columns are arrays, or None if the method or
        the version that wrote the file does not have them; some tokens may not be trained (`trained_tokens`)."""
        where, values = ("", (step,)) if prompt_index is None else (" AND prompt_index = ?", (step, prompt_index))
        query = f"SELECT * FROM rollouts WHERE step = ?{where} ORDER BY prompt_index, rollout_index"
        return [dict.fromkeys((*ARRAYS, "turns")) | row for row in self._read_rows(query, values)]

    def environments(self) -> list[str]:
        """The classes of environments of the run's episodes."""
        rows = self.query("SELECT DISTINCT json_extract(turns, '$.environment') FROM rollouts WHERE turns IS NOT NULL")
        return sorted(row[0] for row in rows)

    def extremes(self, step: int, count: int, dataset: str | None = None) -> tuple[Rows, Rows]:
        """The `count` best and worst completions of a step by reward, or of its evaluation on `dataset`: one per
        prompt, with the prompt and, for a step, the prompt's facts."""
        query, values = (STEP_ENDS, (step,)) if dataset is None else (EVALUATION_ENDS, (step, dataset))

        def end(order: str) -> Rows:
            rows = self._read_rows(f"{query} AND reward IS NOT NULL ORDER BY reward {order} LIMIT {NEAR_ENDS}", values)
            by_prompt = {row["which"]: row for row in reversed(rows)}
            return sorted(by_prompt.values(), key=lambda row: row["reward"], reverse=order == "DESC")[:count]

        return end("DESC"), end("ASC")

    def last_evaluations(self) -> list[tuple[int, str]]:
        """The last step with rewarded completions of each data set, as pairs (step, data set)."""
        query = "SELECT MAX(step) AS step, dataset FROM evaluations WHERE reward IS NOT NULL GROUP BY dataset"
        return [(row["step"], row["dataset"]) for row in self._read_rows(query)]

    def evaluations(self) -> Rows:
        """The completions of every evaluation, in the order of sampling."""
        rows = self._read_rows("SELECT * FROM evaluations ORDER BY step, dataset, rowid")
        return [{**row, "tokens": row["tokens"].tolist()} for row in rows]

    def summary(self) -> Rows:
        """A row per step: prompts, completions, mean and extreme rewards, completions without a reward, and the share
        of truncated completions."""
        return self._read_rows(
            "SELECT step, COUNT(DISTINCT prompt_index) AS prompts, COUNT(*) AS completions, "
            "AVG(reward) AS reward, MIN(reward) AS lowest, MAX(reward) AS highest, "
            "SUM(reward IS NULL) AS left_out, AVG(finish_reason = 'length') AS truncated "
            "FROM rollouts GROUP BY step ORDER BY step"
        )


def trained_tokens(row: Mapping[str, Any]) -> np.ndarray:
    """Which tokens of a row of `StoredRun.rollouts` are trained (bool); other tokens have log-probability NaN."""
    logprobs = row.get("sampler_logprobs")
    if logprobs is None or len(logprobs) != len(row["tokens"]):
        return np.ones(len(row["tokens"]), bool)
    return ~np.isnan(logprobs)


def of_trained(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of `StoredRun.rollouts` with only the trained tokens and their numbers. Raises RunError if damaged."""
    trained = trained_tokens(row)
    if trained.all():
        return {**row}
    arrays = {name: row[name] for name in ARRAYS if row[name] is not None}
    if any(len(values) != len(trained) for values in arrays.values()):
        raise RunError(f"{NAME}: completion {row['rollout_index']} of prompt {row['prompt_index']} is damaged")
    return {**row, **{name: values[trained] for name, values in arrays.items()}}


def read_only(path: Path) -> sqlite3.Connection:
    """A connection that writes nothing. Raises RunError if the file cannot be opened.

    SQLite creates files beside a database in WAL mode even to read it, unless the database is opened as immutable. That
    is safe without a -wal file, because then no process is writing to it.
    """
    still = "" if path.with_name(f"{path.name}-wal").exists() else "&immutable=1"
    try:
        return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro{still}", timeout=LOOKING_S, uri=True)
    except sqlite3.Error as error:
        raise RunError(f"{path} cannot be read: {error}") from error


def _read(row: sqlite3.Row) -> dict[str, Any]:
    """Decode the arrays and JSON of a row. Raises ValueError for a value that no run writes."""
    decoded = dict(row)
    for name, value in decoded.items():
        if name in ARRAYS and (value is not None or name == "tokens"):
            decoded[name] = np.frombuffer(_typed(name, value, bytes), TOKENS.get(name, np.dtype("<f4")))
        elif name in ("facts", "parts") or (name == "turns" and value is not None):
            decoded[name] = _typed(name, parse_json(_typed(name, value, str)), dict)
            for part in decoded[name].values() if name == "parts" else ():
                for key, kind in PART.items() if isinstance(part, dict) else ():
                    _typed(f"{key} of a reward", part.get(key), kind)
            if name == "turns":
                check_episode(decoded[name])
        elif name in TYPES:
            _typed(name, value, TYPES[name])
    return decoded


def check_episode(episode: Any) -> None:
    """Raise ValueError unless an episode has what `Trajectory.stored` writes."""
    for key, kind in EPISODE.items():
        _typed(f"{key} of an episode", _typed("episode", episode, dict).get(key), kind)
    for turn in episode["turns"]:
        for key, kind in TURN.items():
            _typed(f"{key} of a turn", _typed("turn", turn, dict).get(key), kind)
        for call in turn["calls"]:
            if not isinstance(call, list) or len(call) != 3:
                raise ValueError(f"a turn has {str(call)[:40]!r} as a call")
    for message in episode["messages"]:
        _typed("role of a message", _typed("message", message, dict).get("role"), str)
        for call in message.get("tool_calls") or ():
            function = _typed("call", _typed("call", call, dict).get("function"), dict)
            _typed("name of a call", function.get("name"), str)
            function.setdefault("arguments", {})
    for reward in episode.get("turn_rewards") or ():
        _typed("reward of a turn", reward, int | float)


def _typed(name: str, value: Any, kind: Any) -> Any:
    """Return the value. Raises ValueError if it has another type."""
    if not isinstance(value, kind) or (isinstance(value, int) and abs(value) >= 1 << 63):
        raise ValueError(f"a row has {str(value)[:40]!r} as {name}")
    return value
