"""The client side of `posttrain serve`: requests, servers started by this program, and conversations."""

import atexit
import json
import os
import queue
import secrets
import sys
import threading
from collections import OrderedDict
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from posttrain.base.child import Child
from posttrain.base.errors import DataError, EngineError

CONNECT_S, READ_S = 10.0, 600.0
START_S, STOP_S = 600.0, 8.0  # time limits for starting and stopping a server; reading a large model may be slow
ERROR_CHARACTERS = 2000

Turn = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ScoredToken:
    id: int
    text: str
    logprob: float | None
    entropy: float | None
    alternatives: tuple[tuple[str, float], ...]


class Client:
    """A client of a server. Raises DataError if the server refuses a request, EngineError if it does not answer."""

    def __init__(self, address: str, key: str | None = None):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # Without `trust_env`, because a proxy set in the environment is not for servers on this machine.
        timeout = httpx.Timeout(READ_S, connect=CONNECT_S)
        self.address = address
        self._http = httpx.Client(base_url=address, headers=headers, timeout=timeout, trust_env=False)

    def chat(self, turns: Sequence[Turn], **settings: Any) -> Iterator[str]:
        """Yield the pieces of a reply as they are generated. Closing the iterator stops the generation."""
        body = {"messages": list(turns), "stream": True, **settings}
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise _refusal(response)
                for line in response.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise EngineError(chunk["error"]["message"])
                    for choice in chunk["choices"]:
                        if text := choice["delta"].get("content"):
                            yield text
        except httpx.HTTPError as error:
            raise EngineError(f"the server at {self.address} does not answer: {error}") from error

    def score(self, turns: Sequence[Turn], alternatives: int = 0) -> list[ScoredToken]:
        """The scores of a completion's tokens: of the last message of a conversation, which must be the assistant's."""
        reply = self._post("/v1/score", {"messages": list(turns), "top_logprobs": alternatives})
        tokens = []
        for token in reply["tokens"][reply["scored"] :]:
            likely = tuple((other["text"], other["logprob"]) for other in token.pop("top_logprobs"))
            tokens.append(ScoredToken(**token, alternatives=likely))
        return tokens

    def rewards(self, talks: Sequence[Sequence[Turn]]) -> list[float]:
        """The reward model's score for the last message of each conversation."""
        return self._post("/reward", {"messages": [list(talk) for talk in talks]})["rewards"]

    def rendered(self, turns: Sequence[Turn]) -> str:
        """The prompt of a conversation, as the model reads it."""
        return self._post("/v1/render", {"messages": list(turns)})["text"]

    def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            response = self._http.post(path, json=body)
        except httpx.HTTPError as error:
            raise EngineError(f"the server at {self.address} does not answer: {error}") from error
        if response.status_code != 200:
            raise _refusal(response)
        return response.json()


def _refusal(response: httpx.Response) -> DataError | EngineError:
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"status {response.status_code}"
    return DataError(message) if 400 <= response.status_code < 500 else EngineError(message)


class ModelServer(Child):
    """`posttrain serve MODEL` as a child process on a free local port, with a key that only this program knows. Raises
    EngineError with the server's message if the server does not start."""

    def __init__(self, model: str, options: Sequence[str] = ()):
        key = secrets.token_urlsafe(24)
        command = [sys.executable, "-m", "posttrain", "serve", "--port", "0", "--attached", *options, "--", model]
        super().__init__(command, environment=os.environ | {"POSTTRAIN_API_KEY": key}, session=True, grace=STOP_S)
        try:
            line = self.line(START_S, b"serving ").decode()
        except TimeoutError:
            raise EngineError(f"the server for {model} was not ready within {START_S:g} s") from None
        except EOFError:
            self.status(STOP_S)
            reason = self.last_words()[-ERROR_CHARACTERS:].rpartition("error: ")[2]
            self.end()
            raise EngineError(reason or f"the server for {model} ended before it was ready") from None
        self.client = Client(line.rpartition(" at ")[2].partition("/v1")[0], key)


class ModelServers:
    """Servers for the models in use: at most `most`; the least recently used one is stopped first. Thread-safe."""

    def __init__(self, most: int = 2):
        self._most, self._servers, self._lock = most, OrderedDict[tuple[str, ...], ModelServer](), threading.Lock()
        atexit.register(self.close)

    def client(self, model: str, options: Sequence[str] = ()) -> Client:
        """The client of a model's server. Starts the server if needed; raises EngineError if that fails."""
        key = (model, *options)
        with self._lock:  # one at a time: two models that load at once may not fit in memory
            server = self._servers.pop(key, None)
            if server is None or not server.is_alive:
                while len(self._servers) >= self._most:
                    self._servers.popitem(last=False)[1].end()
                server = ModelServer(model, options)
            self._servers[key] = server
            return server.client

    def close(self) -> None:
        with self._lock:
            while self._servers:
                self._servers.popitem()[1].end()


SETTINGS = {"temperature": float, "top_p": float, "top_k": int, "min_p": float, "max_tokens": int, "seed": int}


@dataclass
class Talk:
    """A conversation with a served model. `settings`: request settings. The system prompt is not among the turns."""

    client: Client
    settings: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def ask(self, text: str) -> Iterator[str]:
        """Yield the pieces of the reply to `text`. The part that has been read is kept in the conversation."""
        self.turns.append({"role": "user", "content": text})
        yield from self._reply()

    def again(self) -> Iterator[str]:
        """Yield the pieces of another reply to the last question. Raises DataError if there is no question."""
        self._drop("assistant")
        if not self.turns:
            raise DataError("there is no question yet")
        yield from self._reply()

    def take_back(self) -> None:
        """Remove the last question and its reply."""
        self._drop("assistant")
        self._drop("user")

    def change(self, name: str, value: str) -> None:
        """Change a setting; an empty value resets it to the default. Raises DataError for an unknown name or a wrong
        value."""
        if name not in SETTINGS:
            raise DataError(f"there is no setting {name}; the settings are {', '.join(SETTINGS)}")
        self.settings.pop(name, None)
        if value:
            try:
                self.settings[name] = SETTINGS[name](value)
            except ValueError:
                raise DataError(f"{name} is {value!r}; give a number") from None

    def prompt(self) -> str:
        """The prompt that the model reads before its next reply."""
        return self.client.rendered(self.messages or [{"role": "user", "content": ""}])

    def _reply(self) -> Iterator[str]:
        parts: list[str] = []
        try:
            for part in self.client.chat(self.messages, **self.settings):
                parts.append(part)
                yield part
        finally:
            if parts:
                self.turns.append({"role": "assistant", "content": "".join(parts)})
            else:
                self._drop("user")  # the question was not answered, so it can be asked again

    def _drop(self, role: str) -> None:
        if self.turns and self.turns[-1]["role"] == role:
            del self.turns[-1]


def together(replies: Sequence[Iterator[str]]) -> Generator[tuple[int, str]]:
    """Yield the pieces of all replies, each with the number of its reply; when all have ended, raise the first error.
    Closing the iterator closes all replies."""
    found: queue.SimpleQueue[tuple[int, str | BaseException | None]] = queue.SimpleQueue()
    stop = threading.Event()

    def read(number: int, reply: Iterator[str]) -> None:
        error = None
        try:
            for piece in reply:
                found.put((number, piece))
                if stop.is_set():
                    break
        except BaseException as raised:
            error = raised
        finally:
            if (close := getattr(reply, "close", None)) is not None:
                close()
            found.put((number, error))

    for pair in enumerate(replies):
        threading.Thread(target=read, args=pair, daemon=True).start()
    left, errors = len(replies), []
    try:
        while left:
            number, piece = found.get()
            if isinstance(piece, str):
                yield number, piece
                continue
            left -= 1
            errors += [piece] if piece is not None else []
    finally:
        stop.set()
    if errors:
        raise errors[0]
