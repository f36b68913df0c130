"""Replies of judges on disk, so that no question is asked twice: `judge.sqlite`."""

import logging
import sqlite3
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from posttrain.base.errors import RewardError

log = logging.getLogger("posttrain")

NAME = "judge.sqlite"
BUSY_S = 30.0  # seconds to wait for another program's lock on the file
SCHEMA = """
CREATE TABLE IF NOT EXISTS replies (
    key TEXT PRIMARY KEY, model TEXT, content TEXT, finish_reason TEXT, prompt_tokens INTEGER,
    completion_tokens INTEGER, seconds REAL, created REAL
) WITHOUT ROWID
"""


@dataclass(frozen=True, slots=True)
class Reply:
    """A judge's reply, or why there is none.

    `failure`: empty, timeout, outage (no connection, HTTP 429 or 5xx), refused (other statuses) or invalid (not a chat
    completion). `requests`: HTTP requests that were made; 0 for a stored reply, or one shared with an equal question.
    """

    content: str = ""
    finish_reason: str = ""
    failure: str = ""
    reason: str = ""
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0


class ReplyCache:
    """The replies in a folder, by the hash of the request. Several threads and several runs may use one folder.

    Raises RewardError if the file cannot be used. A reply that cannot be stored is used all the same.
    """

    def __init__(self, folder: Path):
        self.path = folder / NAME
        self._lock = threading.Lock()
        self._warned = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")  # a killed process loses nothing
            self._connection.execute(SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise self._refusal(error) from error

    def get(self, key: str) -> Reply | None:
        """The reply, whose tokens are not counted again."""
        query = "SELECT content, finish_reason, seconds FROM replies WHERE key = ?"
        with self._lock:
            try:
                row = self._connection.execute(query, (key,)).fetchone()
            except sqlite3.Error as error:
                raise self._refusal(error) from error
        return None if row is None else Reply(row[0], row[1], seconds=row[2])

    def put(self, key: str, model: str, reply: Reply) -> None:
        values = (key, model, reply.content, reply.finish_reason, reply.prompt_tokens, reply.completion_tokens)
        with self._lock:
            try:
                self._connection.execute(
                    "INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (*values, reply.seconds, time.time()),
                )
            except sqlite3.Error as error:
                if not self._warned:
                    log.warning("%s: replies are used, but asked for again by the next run", self._refusal(error))
                self._warned = True

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _refusal(self, error: Exception) -> RewardError:
        remedy = "set another folder (cache), or mend that"
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            remedy = "rename it (and its -wal and -shm files): a new one is made, and the judge is asked again"
        return RewardError(f"the judge's stored replies in {self.path} cannot be used: {error}; {remedy}")
