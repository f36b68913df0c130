"""Any request to `posttrain serve` has a valid answer or its error object; no one passes the guard of the pages."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest
from fuzzing import JSON, TEXT, changed, damaged, fuzzed
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from posttrain.config import DevicesConfig, ModelConfig
from posttrain.serving import listening
from posttrain.serving.app import make_app
from posttrain.serving.host import Host, Served
from posttrain.ui.guard import COOKIE
from posttrain.ui.guard import Guard as PageGuard

KEY = "key-of-twelve"
TOKEN = "token-of-ten"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


async def ask(app: Any, method: str, target: str, headers: list[tuple[bytes, bytes]], body: bytes = b"") -> Answer:
    """One request, as a server gives it to an application."""
    path, _, query = target.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
        "path": path, "raw_path": path.encode(errors="replace"), "query_string": query.encode(errors="replace"),
        "headers": headers, "client": ("127.0.0.1", 9), "server": ("127.0.0.1", 8000), "root_path": "", "state": {},
    }  # fmt: skip
    parts = [{"type": "http.request", "body": body[:9], "more_body": True}, {"type": "http.request", "body": body[9:]}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not parts:
            await asyncio.sleep(60)  # a client that waits
        return parts.pop(0)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await app(scope, receive, send)
    start, *rest = sent
    assert [start["type"], *{one["type"] for one in rest}] == ["http.response.start", "http.response.body"]
    found = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in start["headers"]}
    assert not any(character in value for value in found.values() for character in "\r\n\0")
    return Answer(start["status"], found, b"".join(one.get("body", b"") for one in rest))


# --- the interface ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(shared, tmp_path_factory) -> Iterator[Callable[[Callable[[Any], Awaitable[Answer]]], Answer]]:
    """Runs a request to the application of a policy with a reward model, in the loop of its own thread."""
    stories, rewards = shared / "models/stories260K", tmp_path_factory.mktemp("reward")
    AutoModelForSequenceClassification.from_pretrained(stories, num_labels=1).save_pretrained(rewards)
    AutoTokenizer.from_pretrained(stories).save_pretrained(rewards)
    settings = Served(
        ModelConfig(path=str(stories)), "stories", {}, str(rewards), "alpaca", DevicesConfig(), 16, 64, 128
    )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    host = asyncio.run_coroutine_threadsafe(Host.start(settings), loop).result(60)
    app = make_app(host)
    yield lambda asked: asyncio.run_coroutine_threadsafe(asked(app), loop).result(60)
    host.close()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        CHAT,
        {**CHAT, "logprobs": True, "top_logprobs": 2, "n": 2, "temperature": 0, "seed": 3, "stop": ["a"]},
        {**CHAT, "stream": True, "stream_options": {"include_usage": True}, "model": "x"},
        {**CHAT, "messages": [*CHAT["messages"], {"role": "assistant", "content": [{"type": "text", "text": "so"}]}],
         "continue_final_message": True},
    ],
    "/v1/completions": [
        {"prompt": "Once", "max_tokens": 2, "logprobs": 1, "echo": True},
        {"prompt": ["Once", "Tim"], "max_tokens": 2, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
        {"prompt": [5, 6], "max_tokens": 2, "stream": True},
        {"prompt": [[5], [6, 7]], "max_tokens": 1, "ignore_eos": True, "user": "me", "best_of": 1},
    ],
    "/v1/score": [{"prompt": "Once", "completion": " upon", "top_logprobs": 2}, {"messages": CHAT["messages"] * 2}],
    "/v1/render": [{"messages": CHAT["messages"], "continue_final_message": False}],
    "/reward": [
        {"prompt": "a", "completion": "b", "truncated": True},
        {"messages": [[*CHAT["messages"], {"role": "assistant", "content": "x"}]], "truncated": [False]},
    ],
}  # fmt: skip
MOST_TOKENS = 12
EXTRA = st.sampled_from(
    [
        "n",
        "seed",
        "stop",
        "logprobs",
        "top_logprobs",
        "temperature",
        "echo",
        "tools",
        "suffix",
        "stream",
        "model",
        "messages",
    ]
)


@st.composite
def bodies(draw) -> tuple[str, bytes]:
    """A path with the body of a request, with its parts and bytes changed; completions stay short."""
    path = draw(st.sampled_from(sorted(BODIES)))
    body = draw(st.sampled_from(BODIES[path]))
    body = draw(st.just(body) | changed(body, JSON) | st.builds(lambda name, value: {**body, name: value}, TEXT, JSON))
    if isinstance(body, dict):
        body = {**body, draw(EXTRA): draw(JSON)} if draw(st.booleans()) else dict(body)
        asked = body.get("max_tokens")
        if path.startswith("/v1/c") and (asked is None or (isinstance(asked, int) and asked > MOST_TOKENS)):
            body["max_tokens"] = 2
    content = json.dumps(body).encode()
    return path, content if draw(st.integers(0, 3)) else draw(damaged(content))


def is_error(answer: Answer) -> bool:
    """Whether an answer is the interface's error object, as the errors of an HTTP status below 500 must be."""
    assert answer.headers["content-type"] == "application/json"
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and isinstance(error["type"], str)
    assert error["message"] and isinstance(error["message"], str) and isinstance(error["param"], str | None)
    return isinstance(error["code"], str | None)


def check(path: str, answer: Answer) -> None:
    """Whether an answer is that of the interface, by OpenAI's own types."""
    assert answer.status < 500, answer.body
    if answer.status != 200:
        assert answer.status >= 400 and is_error(answer)
        return
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = answer.body.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""] and all(line.startswith("data: ") for line in lines[:-1])
        kind = ChatCompletionChunk if "chat" in path else Completion
        for line in lines[:-2]:
            chunk = json.loads(line[6:])
            if kind is Completion:  # it has no type for the chunks of a stream
                chunk["choices"] = [
                    {**one, "finish_reason": one["finish_reason"] or "stop"} for one in chunk["choices"]
                ]
            kind.model_validate(chunk)
        return
    found = json.loads(answer.body, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    if path == "/v1/chat/completions":
        whole = ChatCompletion.model_validate(found)
        assert all(choice.finish_reason in ("stop", "length") for choice in whole.choices)
    elif path == "/v1/completions":
        for choice in found["choices"]:
            if choice["logprobs"] and choice["logprobs"]["token_logprobs"][:1] == [None]:
                assert choice["logprobs"]["top_logprobs"][0] is None
                choice["logprobs"] |= {
                    name: choice["logprobs"][name][1:] for name in ("token_logprobs", "top_logprobs")
                }
                # of a prompt's first token, which OpenAI's type forgets
        assert [choice.index for choice in Completion.model_validate(found).choices] == [*range(len(found["choices"]))]
    elif path == "/v1/score":
        assert 0 <= found["scored"] <= len(found["tokens"]) and all(one["text"] is not None for one in found["tokens"])
    elif path == "/v1/render":
        assert isinstance(found["text"], str) and all(isinstance(token, int) for token in found["tokens"])
    elif path == "/reward":
        assert all(isinstance(value, float) for value in found["rewards"])


JSON_TYPE = [(b"content-type", b"application/json"), (b"host", b"127.0.0.1:8000")]


@fuzzed(50, 1500, body=bodies())
def test_any_body_has_a_valid_answer_or_an_error(served, body):
    path, content = body
    check(path, served(lambda app: ask(listening.Guard(app), "POST", path, JSON_TYPE, content)))


PATHS = st.sampled_from([*BODIES, "/health", "/v1/models", "/v1/models/stories", "/v1/models/a/b", "/", "/docs", "//"])
METHODS = st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "get", "X", ""])
RAW = st.text(st.characters(max_codepoint=255, exclude_characters="\r\n\0"), max_size=12)
VALUES = RAW | st.sampled_from(
    ["application/json", "Application/JSON; charset=utf-8", "text/plain", "localhost:1", "[::1]", "[", "[::1",
     "evil.example", "127.0.0.1", "http://127.0.0.1", "http://[", f"Bearer {KEY}",
     "Bearer ", "gzip", "0", "-1", "9" * 5000,
     "4194305", "²", "chunked", f"{COOKIE}={TOKEN}", f'{COOKIE}="{TOKEN}"', f"{COOKIE}={TOKEN[:-1]}", "a@b"]
)  # fmt: skip
NAMES = st.sampled_from(
    [
        "host",
        "origin",
        "content-type",
        "content-length",
        "authorization",
        "accept",
        "cookie",
        "transfer-encoding",
        "expect",
    ]
)
HEADERS = st.lists(st.tuples(NAMES, VALUES), max_size=5).map(
    lambda pairs: [(name.encode(), value.encode("latin-1", "replace")) for name, value in pairs]
)


@fuzzed(80, 1500, path=PATHS | TEXT.map("/{}".format), method=METHODS, headers=HEADERS, usual=st.booleans(),
        key=st.sampled_from([None, KEY]), content=st.sampled_from([b"", b"{}", b"null"]))  # fmt: skip
def test_any_path_method_and_headers_are_answered(served, path, method, headers, usual, key, content):
    headers = [*(JSON_TYPE if usual else []), *headers]
    answer = served(lambda app: ask(listening.Guard(app, key), method, path, headers, content))
    assert answer.status < 500, answer.body
    if answer.status >= 400:
        assert is_error(answer) or method == "HEAD"
    last = {name: value for name, value in headers}
    if key is not None and last.get(b"authorization") != f"Bearer {KEY}".encode() and path != "/health":
        assert answer.status in (401, 403), "nothing is answered without the key"


# --- the pages --------------------------------------------------------------------------------------------------------


async def secret(scope: Any, receive: Any, send: Any) -> None:
    """The application behind the guard."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"secret"})


QUERIES = TEXT | st.sampled_from(
    [f"token={TOKEN}", f"a=1&token={TOKEN}&b=2", "token=", "token=x", "token=%ff", "a=%zz&&==&"]
)


PAGES = st.sampled_from(["/", "//evil.example/", "/run", "/\\evil.example", "/é", "///x", "/%2e"])


@fuzzed(100, 6000, path=PAGES | PATHS,
        query=QUERIES, headers=HEADERS, local=st.booleans(), token=st.sampled_from([None, TOKEN]))  # fmt: skip
def test_nobody_gets_past_the_guard_of_the_pages(path, query, headers, local, token):
    answer = asyncio.run(ask(PageGuard(secret, token, local), "GET", f"{path}?{query}", headers))
    assert answer.status in (200, 303, 401, 403)
    assert (answer.status == 200) == (answer.body == b"secret")
    if answer.status == 200:
        cookies, hosts = ([v.decode("latin-1") for n, v in headers if n == name] for name in (b"cookie", b"host"))
        assert token is None or any(TOKEN in cookie for cookie in cookies)
        assert not local or listening.is_loopback(listening.host_name(hosts[0]))
    if answer.status == 303:
        to = urlsplit(answer.headers["location"])
        assert not to.netloc and not to.scheme and not to.path.startswith(("//", "/\\")), "it stays on this site"
        assert TOKEN not in to.query and TOKEN in query
