"""Requests to a model behind an OpenAI-compatible API: paced and retried, with replies stored in `judge.sqlite`."""

import hashlib
import json
import os
import random
import sqlite3
import ssl
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from http.client import HTTPException
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

from posttrain.base.console import progress
from posttrain.base.errors import RewardError
from posttrain.base.files import default_cache
from posttrain.base.log import log
from posttrain.base.signals import result_of
from posttrain.config.schema.judge import JudgeSettings
from posttrain.judges.post import Answer, Pace, Post

PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # pause before the first retry, doubled for each further retry; longest pause
CHARACTERS_PER_TOKEN = 3  # estimates a request's tokens for the limit per minute, until the server has counted them
FEWEST_FAILURES = 4  # minimum of consecutive failures, each after all retries, before the judge counts as down
MISTAKES = {401: "the API key is refused", 403: "access is refused", 404: "there is no such address or model"}
NAME = "judge.sqlite"
BUSY_S = 30.0  # seconds to wait for another program's lock on the file
SCHEMA = Path(__file__).with_suffix(".sql").read_text(encoding="utf-8")

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Reply:
    """A judge's reply, or the reason why there is none.

    `failure`: empty, timeout, outage (no connection, HTTP 429 or 5xx), refused (other statuses), invalid (not a chat
    completion) or unreadable (no verdict). `requests`: number of HTTP requests; 0 for a stored reply, or for a reply
    shared with an equal question. `value`: the score or preference that a judge read from the content.
    """

    content: str = ""
    finish_reason: str = ""
    failure: str = ""
    reason: str = ""
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    value: Any = None


@dataclass(frozen=True, slots=True)
class _Task:
    body: bytes
    key: str
    future: Future[Reply]
    stop: threading.Event


class JudgeClient:
    """Sends requests in threads; each reply is a future. Raises RewardError if the API key is missing or the cache
    folder cannot be used. The key is read from the environment and written only to the header of requests."""

    def __init__(self, settings: JudgeSettings):
        self.settings = settings
        parts = urlsplit(settings.base_url)
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/') or '/v1'}/chat/completions"
        self._key: str | None = None
        if settings.api_key_env is not None:
            self._key = os.environ.get(settings.api_key_env, "").strip()
            if not self._key:
                raise RewardError(f"the judge's key is missing: set the environment variable {settings.api_key_env}")
            if not self._key.isascii() or not self._key.isprintable():
                raise RewardError(f"the value of {settings.api_key_env} has characters that an API key cannot have")
        self._cache = ReplyCache(Path(settings.cache).expanduser() if settings.cache else default_cache() / "judge")
        self._pace = Pace(settings.requests_per_minute, settings.tokens_per_minute)
        self._random = random.Random()  # separate, so that a run's random numbers do not change
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._workers: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._open: set[Post] = set()
        self._pending: dict[str, Future[Reply]] = {}
        self._counted: WeakSet[Future[Reply]] = WeakSet()  # whose costs were counted
        self._stop = threading.Event()
        self._failed_in_row, self._answered = 0, False

    def submit(self, messages: Sequence[Message]) -> Future[Reply]:
        """Ask a question; equal questions share one request. `gather` waits for the reply."""
        settings = self.settings
        sampling = {"temperature": settings.temperature, "max_tokens": settings.max_tokens} | settings.parameters
        kept = {name: value for name, value in sampling.items() if value is not None}
        # Servers reject lone surrogates.
        clean = [{k: v.encode(errors="backslashreplace").decode() for k, v in one.items()} for one in messages]
        text = json.dumps({"model": settings.model, "messages": clean, **kept}, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()
        if key in self._pending:
            return self._pending[key]
        future: Future[Reply] = Future()
        stored = self._cache.get(key)
        if stored is not None:
            future.set_result(stored)
            return future
        self._pending[key] = future
        self._tasks.put(_Task(text.encode(), key, future, self._stop))
        if len(self._workers) < self.settings.concurrency:
            worker = threading.Thread(target=self._work, name="posttrain-judge", daemon=True)
            self._workers.append(worker)
            worker.start()
        return future

    def gather(self, futures: Sequence[Future[Reply]], title: str = "") -> list[Reply]:
        """Wait for the replies, with a progress bar if `title` is given. An interrupted wait cancels the requests."""
        try:
            return [self._result(future) for future in (progress(futures, title) if title else futures)]
        except BaseException:
            self._abort()
            raise
        finally:
            self._pending.clear()
            self._failed_in_row = 0  # the next call tries again

    def _result(self, future: Future[Reply]) -> Reply:
        """The reply, without its costs if they were counted for an equal question."""
        reply = result_of(future)
        if future in self._counted:
            return replace(reply, requests=0, prompt_tokens=0, completion_tokens=0)
        self._counted.add(future)
        return reply

    def close(self) -> None:
        self._abort()
        for _ in self._workers:
            self._tasks.put(None)
        for worker in self._workers:
            if worker.is_alive():  # False if its start was interrupted
                worker.join(1.0)  # a worker that is still connecting ends with the process
        self._workers.clear()
        self._cache.close()

    def _abort(self) -> None:
        self._stop.set()
        with self._lock:
            for post in self._open:
                post.cut()
        self._stop = threading.Event()

    # --- in a worker ------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        for task in iter(self._tasks.get, None):
            if not task.future.set_running_or_notify_cancel():
                continue
            try:
                task.future.set_result(self._tried(task))
            except BaseException as error:  # raised in the waiting thread
                task.future.set_exception(error)

    def _tried(self, task: _Task) -> Reply:
        """The reply, after as many tries as needed and allowed by the settings."""
        started, last = time.monotonic(), Reply(failure="outage", reason="interrupted")
        pause = PAUSE_S
        for tries in range(1, self.settings.retries + 2):
            # After this many consecutive failures, no further question of this call is asked.
            if self._failed_in_row >= max(FEWEST_FAILURES, self.settings.concurrency):
                return replace(last, reason=f"the judge is down: {last.reason}" if tries > 1 else "the judge is down")
            estimate = len(task.body) // CHARACTERS_PER_TOKEN + self.settings.max_tokens
            entry = self._pace.enter(estimate, task.stop)
            if entry is None:
                return last
            reply, wait = self._once(task)
            last = replace(reply, requests=tries, seconds=time.monotonic() - started)
            if not reply.failure:
                entry.tokens = reply.prompt_tokens + reply.completion_tokens
                self._failed_in_row, self._answered = 0, True
                self._cache.put(task.key, self.settings.model, last)
                return last
            if reply.failure == "refused":
                return last
            if wait is not None and wait > self.settings.timeout:
                return replace(last, reason=f"{last.reason}; the server asks to wait {wait:.0f} s, longer than timeout")
            if wait is not None:
                self._pace.hold(wait)
            elif tries <= self.settings.retries:
                task.stop.wait(pause * self._random.uniform(0.5, 1.0))
                pause = min(2 * pause, LONGEST_PAUSE_S)
        with self._lock:
            self._failed_in_row += 1
        return last

    def _once(self, task: _Task) -> tuple[Reply, float | None]:
        """The reply to one request, and the seconds to wait before a retry, if the server sets them."""
        post = Post(self.url, self._key)
        with self._lock:
            self._open.add(post)
        try:
            if task.stop.is_set():
                return Reply(failure="outage", reason="interrupted"), None
            answer = post.send(task.body, self.settings.timeout)
        except TimeoutError as error:
            return Reply(failure="timeout", reason=str(error)), None
        except ssl.SSLCertVerificationError as error:
            return Reply(failure="refused", reason=f"the server's certificate is not valid: {error}"), None
        except (OSError, HTTPException, ValueError) as error:
            return Reply(failure="outage", reason=f"the connection failed: {error or type(error).__name__}"), None
        finally:
            with self._lock:
                self._open.discard(post)
        return self._read(answer), answer.retry_after if answer.status != 200 else None

    def _read(self, answer: Answer) -> Reply:
        """The reply in an HTTP answer. Raises RewardError if the first answers show that the settings are wrong."""
        text = answer.body.decode(errors="replace")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if answer.status == 200:
            return _completion(value) or Reply(failure="invalid", reason=f"not a chat completion: {self._short(text)}")
        for name in ("error", "message", "detail"):  # where OpenAI's and similar servers have their message
            if isinstance(value, dict) and name in value:
                value = value[name]
        message = self._short(value if isinstance(value, str) and value else text)
        reason = f"HTTP {answer.status}{': ' + message if message else ''}"
        if answer.status in MISTAKES and not self._answered:
            raise RewardError(
                f"the judge at {self.url} cannot be used: {MISTAKES[answer.status]} ({reason}); check base_url, model "
                f"({self.settings.model}) and api_key_env ({self.settings.api_key_env or 'not set'})"
            )
        again = answer.status in (408, 409, 425, 429) or answer.status >= 500
        return Reply(failure="outage" if again else "refused", reason=reason)

    def _short(self, text: str) -> str:
        """The start of a server's message, without the API key."""
        return " ".join((text.replace(self._key, "***") if self._key else text).split())[:200]


def _completion(value: Any) -> Reply | None:
    """The reply in a chat completion; None if `value` is not one."""
    try:
        choice = value["choices"][0]
        content = choice["message"]["content"]
    except (LookupError, TypeError):
        return None
    if content is not None and not isinstance(content, str):
        return None
    usage = value.get("usage") or {}
    tokens = [usage.get(name) if isinstance(usage, dict) else 0 for name in ("prompt_tokens", "completion_tokens")]
    prompt, completion = (count if isinstance(count, int) and count >= 0 else 0 for count in tokens)
    reason = choice.get("finish_reason")
    return Reply(content or "", str(reason or ""), prompt_tokens=prompt, completion_tokens=completion)


# --- stored replies ---------------------------------------------------------------------------------------------------


class ReplyCache:
    """Replies stored in a folder, by the hash of the request, so that no question is asked twice.

    Several threads and several runs may use one folder. Raises RewardError if the file cannot be used. A reply that
    cannot be stored is still used.
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
        """The stored reply, without token counts, since they are not counted again; None if there is none."""
        try:
            row = self._execute("SELECT content, finish_reason, seconds FROM replies WHERE key = ?", key)
        except sqlite3.Error as error:
            raise self._refusal(error) from error
        return None if row is None else Reply(row[0], row[1], seconds=row[2])

    def put(self, key: str, model: str, reply: Reply) -> None:
        values = (key, model, reply.content, reply.finish_reason, reply.prompt_tokens, reply.completion_tokens)
        query = "INSERT OR REPLACE INTO replies VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
        try:
            self._execute(query, *values, reply.seconds, time.time())
        except sqlite3.Error as error:
            if not self._warned:
                log.warning("%s: replies are used but not stored; the next run asks again", self._refusal(error))
            self._warned = True

    def _execute(self, query: str, *values: Any) -> tuple[Any, ...] | None:
        with self._lock:
            return self._connection.execute(query, values).fetchone()

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def _refusal(self, error: Exception) -> RewardError:
        remedy = "fix this, or set a different folder (cache)"
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            remedy = "rename it (and its -wal and -shm files): a new file is created, and the judge is asked again"
        return RewardError(f"the judge's stored replies in {self.path} cannot be used: {error}; {remedy}")
