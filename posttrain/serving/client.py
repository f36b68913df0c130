"""A client of `posttrain serve`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from posttrain.base.errors import DataError, EngineError

CONNECT_S, READ_S = 10.0, 600.0

Turn = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ScoredToken:
    id: int
    text: str
    logprob: float | None
    entropy: float | None
    alternatives: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class ScoredText:
    """A text's tokens; those from `scored` on are the completion."""

    tokens: tuple[ScoredToken, ...]
    scored: int

    @property
    def completion(self) -> tuple[ScoredToken, ...]:
        return self.tokens[self.scored :]


class Client:
    """Raises DataError for what the server refuses, EngineError if it does not answer."""

    def __init__(self, address: str, key: str | None = None):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # `trust_env` off: a proxy in the environment is not for this machine.
        timeout = httpx.Timeout(READ_S, connect=CONNECT_S)
        self.address = address
        self._http = httpx.Client(base_url=address, headers=headers, timeout=timeout, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def chat(self, turns: Sequence[Turn], **settings: Any) -> Iterator[str]:
        """The pieces of a reply as they come, and its finish reason as the iterator's return value. Closing the
        iterator ends the generation."""
        body = {"messages": list(turns), "stream": True, **settings}
        reason = ""
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
                        reason = choice["finish_reason"] or reason
                        if text := choice["delta"].get("content"):
                            yield text
        except httpx.HTTPError as error:
            raise EngineError(f"the server at {self.address} does not answer: {error}") from error
        return reason

    def score(self, turns: Sequence[Turn], alternatives: int = 0) -> ScoredText:
        """What the model says of each token of the last message, which is the assistant's."""
        found = self._post("/v1/score", {"messages": list(turns), "top_logprobs": alternatives})
        tokens = []
        for token in found["tokens"]:
            likely = tuple((other["text"], other["logprob"]) for other in token.pop("top_logprobs"))
            tokens.append(ScoredToken(**token, alternatives=likely))
        return ScoredText(tuple(tokens), found["scored"])

    def rewards(self, talks: Sequence[Sequence[Turn]]) -> list[float]:
        """The reward model's score of the last message of each conversation."""
        return self._post("/reward", {"messages": [list(talk) for talk in talks]})["rewards"]

    def rendered(self, turns: Sequence[Turn]) -> str:
        """The prompt of a conversation as the model reads it."""
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
