"""`posttrain serve`: the engine that requests join, its texts, and OpenAI's client, unmodified, over HTTP."""

from __future__ import annotations

import ast
import asyncio
import json
import queue
import random
import re
import shutil
import signal
import socket as socket_module
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path

import httpx
import openai
import pytest
import torch
import uvicorn
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from posttrain.base.errors import ConfigError, DataError, EngineError, ModelError, VitalSignError
from posttrain.base.pieces import pieces
from posttrain.batch import Example, Node, pack
from posttrain.cli import main
from posttrain.config import DevicesConfig, ModelConfig
from posttrain.config.schema.judge import ScoreSettings
from posttrain.data import render
from posttrain.engines import Completion, EmbeddedEngine, Sampling, text_of
from posttrain.engines.live import Busy, Ended, Failed, Job, Joining, Live, Token
from posttrain.judges.judge import JudgeInput, SingleJudge
from posttrain.models.adapters import with_adapter
from posttrain.models.load import load_model, load_tokenizer
from posttrain.rewards.learned import LearnedReward
from posttrain.scoring import CHUNK_ELEMENTS, Scorer
from posttrain.serving import listening
from posttrain.serving.app import make_app
from posttrain.serving.host import Host, Served
from posttrain.serving.listening import Guard, bounded_server, listen
from posttrain.serving.texts import Bound, Report, Streamed

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def stories(shared) -> Path:
    return shared / "models/stories260K"


@pytest.fixture(scope="module")
def adapter(stories, tmp_path_factory) -> Path:
    """An adapter that changes what is said."""
    torch.manual_seed(0)
    base = load_model(ModelConfig(path=str(stories)), "lm", torch.float32, CPU)
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.save_pretrained(str(tmp_path_factory.mktemp("adapter")))
    return Path(str(tmp_path_factory.getbasetemp())) / "adapter0"


@pytest.fixture(scope="module")
def reward_model(stories, tmp_path_factory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("reward")
    AutoModelForSequenceClassification.from_pretrained(stories, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(stories).save_pretrained(folder)
    return folder


# The engine ----------------------------------------------------------------------------------------------------------


@contextmanager
def living(policy, tokenizer, **settings) -> Iterator[tuple[Live, queue.Queue]]:
    events: queue.Queue = queue.Queue()
    live = Live(policy, tokenizer, lambda some: [events.put(one) for one in some], **settings)
    try:
        yield live, events
    finally:
        live.close()


def collect(events: queue.Queue, jobs: list[Job]) -> dict[tuple[int, int], Ended]:
    found = {}
    while len(found) < sum(job.sampling.num_generations for job in jobs):
        event = events.get(timeout=30)
        assert not isinstance(event, Failed), event
        if isinstance(event, Ended):
            found[jobs.index(event.job), event.number] = event
    return found


def test_each_request_has_the_completions_it_has_alone(stories, adapter):
    """Of any settings and adapters, whoever else is there, with fewer places than requests."""
    model = ModelConfig(path=str(stories))
    base, tokenizer = load_model(model, "lm", torch.float32, CPU), load_tokenizer(model)
    policy = with_adapter(base, ModelConfig(path=str(adapter)), "other").eval()
    draw = random.Random(0)
    jobs = []
    for seed in range(14):
        sampling = Sampling(
            temperature=draw.choice([0, 0.7, 1.0]),
            top_p=draw.choice([1, 0.9]),
            top_k=draw.choice([0, 0, 9]),
            max_completion_length=draw.randrange(1, 40),
            num_generations=draw.choice([1, 1, 3]),
            stop_token_ids=draw.choice([(2,), (), (432,)]),
            stop=draw.choice([(), ("the",)]),
            seed=seed,
        )
        tokens = [draw.randrange(3, 500) for _ in range(draw.randrange(1, 40))]
        jobs.append(Job(tokens, sampling, draw.choice([None, "other"]), alternatives=draw.choice([0, 3])))
    with living(policy, tokenizer, max_rows=6) as (live, events):
        for job in jobs:
            live.submit(job)
        found = collect(events, jobs)
    differ = 0
    for name in (None, "other"):
        if name is None:
            policy.base_model.disable_adapter_layers()
        else:
            policy.base_model.enable_adapter_layers()
        engine = EmbeddedEngine(policy, tokenizer)
        for place, job in enumerate(jobs):
            [group] = engine.generate([job.tokens], job.sampling, seeds=[job.sampling.seed])
            if job.adapter != name:
                differ += [one.tokens for one in group] != [
                    found[place, n].completion.tokens for n in range(len(group))
                ]
                continue
            for number, alone in enumerate(group):
                ended = found[place, number]
                assert (ended.completion.tokens, ended.completion.finish_reason) == (alone.tokens, alone.finish_reason)
                assert len(ended.alternatives) == (len(alone.tokens) if job.alternatives else 0)
                expected = logprobs(policy, job.tokens, alone.tokens)
                assert ended.completion.logprobs == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-5)
                for token, logprob, likely in zip(
                    alone.tokens, ended.completion.logprobs, ended.alternatives, strict=False
                ):
                    assert [value for _, value in likely] == sorted((v for _, v in likely), reverse=True)
                    assert dict(likely).get(token, logprob) == pytest.approx(logprob, abs=1e-6)
    assert differ > len(jobs) / 2, "the adapter should matter"


def logprobs(policy, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """The model's, at temperature 1, from one pack."""
    [whole] = pack([Example((Node(prompt, children=(Node(tokens, trained=True),)),), 0)], 1000)
    with torch.no_grad():
        return Scorer(policy)(whole).logprob_N


def test_requests_that_leave_or_are_too_many(stories):
    model = ModelConfig(path=str(stories))
    policy, tokenizer = load_model(model, "lm", torch.float32, CPU), load_tokenizer(model)
    long, short = Sampling(max_completion_length=400), Sampling(max_completion_length=3)
    with living(policy, tokenizer, max_rows=1, max_waiting=2) as (live, events):
        first, second, third = Job([5, 6], long, streamed=True), Job([5], long), Job([5], short)
        live.submit(first)
        assert isinstance(events.get(timeout=10), Token)
        live.submit(second)
        live.submit(third)
        with pytest.raises(Busy, match="2 prompts are already waiting"):
            live.submit(Job([5], long))
        with pytest.raises(DataError, match="vocabulary has 512"):
            live.submit(Job([512], long))
        with pytest.raises(DataError, match="there is no adapter x; available: none"):
            live.submit(Job([5], long, adapter="x"))
        live.cancel(second)  # while it waits
        live.cancel(first)  # while it is generated
        seen = [events.get(timeout=10)]
        while seen[-1].job is not third:
            seen.append(events.get(timeout=10))
        assert isinstance(seen[-1], Ended) and {event.job for event in seen[:-1]} <= {first}
        assert live.load == (0, 0)


def test_rows_that_are_idle_have_a_chunk_of_logits_of_their_own(stories, monkeypatch):
    """Of 5 live rows, padded to 8, the logits come 5 at a time."""
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 5 * 512)
    monkeypatch.setattr("posttrain.engines.live.packed_weights", lambda policy, head: nullcontext(4))
    model = ModelConfig(path=str(stories))
    policy, tokenizer = load_model(model, "lm", torch.float32, CPU), load_tokenizer(model)
    with living(policy, tokenizer) as (live, events):
        job = Job([5], Sampling(temperature=0, max_completion_length=4, num_generations=5), alternatives=1)
        live.submit(job)
        found = collect(events, [job])
    assert len({tuple(ended.completion.tokens) for ended in found.values()}) == 1


def test_a_model_that_is_damaged_fails_its_requests_and_goes_on(stories):
    model = ModelConfig(path=str(stories))
    policy, tokenizer = load_model(model, "lm", torch.float32, CPU), load_tokenizer(model)
    sampling = Sampling(temperature=0, max_completion_length=3)
    with living(policy, tokenizer) as (live, events):
        weight = policy.model.norm.weight.data
        good = weight.clone()
        live.call(lambda _: weight.fill_(float("nan"))).result(10)
        live.submit(Job([5], sampling))
        failed = events.get(timeout=10)
        assert isinstance(failed, Failed) and isinstance(failed.error, VitalSignError)
        live.call(lambda _: weight.copy_(good)).result(10)
        live.submit(Job([5], sampling))
        assert isinstance(events.get(timeout=10), Ended)
        with pytest.raises(ZeroDivisionError):
            live.call(lambda _: 1 / 0).result(10)
        live.submit(left := Job([5], Sampling(max_completion_length=500)))
    stopped = events.get_nowait()  # by closing
    assert isinstance(stopped, Failed) and stopped.job is left and "was stopped" in str(stopped.error)


def test_an_engine_without_memory_fails_what_waits(stories, monkeypatch):
    model, ready = ModelConfig(path=str(stories)), threading.Event()
    policy, tokenizer = load_model(model, "lm", torch.float32, CPU), load_tokenizer(model)

    def no_memory(*_):
        assert ready.wait(10)
        raise MemoryError("no room")

    monkeypatch.setattr(Live, "_fresh", no_memory)
    with living(policy, tokenizer) as (live, events):
        live.submit(job := Job([5], Sampling(max_completion_length=3)))
        asked = live.call(lambda _: 1)
        ready.set()
        failed = events.get(timeout=10)
        assert isinstance(failed, Failed) and failed.job is job
        with pytest.raises(MemoryError, match="no room"):
            asked.result(10)
        with pytest.raises(EngineError, match="the engine is closed"):
            live.submit(Job([5], Sampling(max_completion_length=3)))


def test_a_model_that_cannot_generate_is_not_served(stories, monkeypatch):
    """A job that fails has no further events, so its iterator ends, whatever the events before."""
    monkeypatch.setattr(Joining, "turn", lambda self: 1 / 0)
    served = Served(ModelConfig(path=str(stories)), "m", {}, None, None, DevicesConfig(type="cpu"), 4, 4, None)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(asyncio.wait_for(Host.start(served), 30))


# Texts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stops", [(), ("ll",), ("é", "one day"), ("zzz",)])
def test_streamed_pieces_are_the_text(shared, stops):
    tokenizer = AutoTokenizer.from_pretrained(shared / "models/stories260K")
    text = "Hello, one two. Café 你好 🙂 naïve one day all  spaces\n\nend"
    tokens = tokenizer(text, add_special_tokens=False).input_ids
    assert "".join(piece for _, piece in pieces(tokens, tokenizer)) == tokenizer.decode(tokens)
    before = tokenizer("Tim:").input_ids
    for size in (len(tokens), len(tokens) - 3, 5):
        streamed = Streamed(tokenizer, (2,), stops, before)
        parts = [streamed.add(token) for token in [*tokens[:size], 2]] + [streamed.end()]
        whole = text_of(Completion(tokens[:size], [], "length", 0), (), tokenizer, before)
        assert whole.startswith(" Hello") and streamed.sent == len("".join(parts))
        cut = min((whole.find(stop) for stop in stops if stop in whole), default=len(whole))
        assert "".join(parts) == whole[:cut]
        assert stops or sum(map(bool, parts)) > size / 3, "pieces come as they are ready"


# Over HTTP -----------------------------------------------------------------------------------------------------------


@contextmanager
def serving(model: Path, key: str | None = None, **settings) -> Iterator[str]:
    """The address of a server in a thread of this process."""
    defaults = {
        "adapters": {},
        "reward_model": None,
        "template": "alpaca",
        "max_rows": 64,
        "max_waiting": 256,
        "context": None,
    }
    served = Served(ModelConfig(path=str(model)), "stories", devices=DevicesConfig(), **(defaults | settings))
    socket, started, box = listen("127.0.0.1", 0), threading.Event(), {}

    async def serve() -> None:
        try:
            host = await Host.start(served)
            config = uvicorn.Config(Guard(make_app(host), key), log_level="warning", lifespan="off")
            box["server"] = uvicorn.Server(config)
        except Exception as error:
            box["error"] = error
            return
        finally:
            started.set()
        await box["server"].serve([socket])
        host.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    started.wait()
    try:
        if "error" in box:
            raise box["error"]
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        if "server" in box:
            box["server"].should_exit = True
        thread.join()
        socket.close()


@pytest.fixture(scope="module")
def url(stories, adapter, reward_model) -> Iterator[str]:
    with serving(stories, adapters={"other": str(adapter)}, reward_model=str(reward_model)) as address:
        yield address


@pytest.fixture(scope="module")
def client(url) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


QUESTION = [{"role": "user", "content": "Tell a story about a cat."}]


def test_the_openai_client(client, stories):
    assert [model.id for model in client.models.list()] == ["stories", "other"]
    given = {
        "model": "gpt-4o",
        "messages": QUESTION,
        "max_tokens": 20,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**given)
    choice = whole.choices[0]
    assert choice.finish_reason == "length" and whole.model == "gpt-4o" and whole.usage.completion_tokens == 20
    content = choice.logprobs.content
    assert len(content) == 20 and all(one.top_logprobs[0].token == one.token for one in content)  # greedy
    assert "".join(one.token for one in content).strip() == choice.message.content.strip()
    chunks = list(client.chat.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage == whole.usage
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(one.delta.content or "" for one in deltas) == choice.message.content
    assert deltas[-1].finish_reason == "length" and len(deltas) > 10
    streamed = [one.logprobs.content[0] for one in deltas if one.logprobs]
    assert [one.logprob for one in streamed] == [one.logprob for one in content]

    several = client.chat.completions.create(model="m", messages=QUESTION, max_tokens=8, n=3, seed=7)
    again = client.chat.completions.create(model="m", messages=QUESTION, max_tokens=8, n=3, seed=7)
    texts = [one.message.content for one in several.choices]
    assert texts == [one.message.content for one in again.choices] and len(set(texts)) > 1
    other = client.chat.completions.create(**(given | {"model": "other"}))
    assert other.choices[0].message.content != choice.message.content

    asked = {"prompt": ["Once upon a time", "Tim had"], "model": "m", "temperature": 0, "max_tokens": 9, "logprobs": 1}
    found = client.completions.create(**asked)
    assert [one.index for one in found.choices] == [0, 1] and len(found.choices[1].logprobs.tokens) == 9
    echoed = client.completions.create(**(asked | {"prompt": "Once upon a time", "echo": True}))
    assert echoed.choices[0].text == "Once upon a time" + found.choices[0].text
    assert echoed.choices[0].logprobs.token_logprobs[0] is None
    stopped = client.completions.create(**(asked | {"prompt": "Once upon a time", "stop": ["girl"], "max_tokens": 50}))
    assert stopped.choices[0].finish_reason == "stop" and "girl" not in stopped.choices[0].text
    assert (
        client.completions.create(**(asked | {"prompt": [1, 403, 407, 261, 378]})).choices[0].text
        == found.choices[0].text
    )


def test_a_prompt_with_its_own_begin_token_has_one(client):
    def tokens(text):
        return client.completions.create(model="m", prompt=text, max_tokens=1).usage.prompt_tokens

    assert tokens("<s>Once upon") == tokens("Once upon") < tokens("<s>Once<s> upon")


def test_log_probabilities_are_one_computation(client):
    """As lm-eval's `local-completions` compares them: what is continued greedily is reported as the likeliest."""
    greedy = 0
    for start in ("Once upon a time", "Tim had a cat", "Lily saw", "The dog", "One day, a boy", "\u4f60"):
        done = client.completions.create(model="m", prompt=start, max_tokens=12, temperature=0, logprobs=3).choices[0]
        asked = {"prompt": start + done.text, "echo": True, "max_tokens": 1, "temperature": 0, "logprobs": 1}
        echoed = client.completions.create(model="m", **asked).choices[0].logprobs
        assert echoed.token_logprobs[0] is None and echoed.top_logprobs[0] is None
        for value, likely, token in zip(echoed.token_logprobs, echoed.top_logprobs, echoed.tokens, strict=True):
            assert likely is None or (
                likely[token] == value and 1 <= len(likely) <= 2 and max(likely.values()) >= value
            )
        if echoed.tokens[-13:-1] == done.logprobs.tokens:
            pairs = zip(echoed.token_logprobs[-13:-1], echoed.top_logprobs[-13:-1], strict=True)
            assert all(value == max(likely.values()) for value, likely in pairs)
            greedy += 1
    assert greedy >= 4
    warm = client.completions.create(model="m", prompt="Once", max_tokens=40, temperature=3, seed=1, logprobs=2, n=3)
    for choice in warm.choices:
        found = zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True)
        sizes = {len(likely) for token, value, likely in found if likely[token] == value}
        assert sizes == {2, 3}  # the sampled token is one of the two, or is added


@pytest.mark.parametrize("stop", [None, [" little", "\u4f60\u597d"]])
def test_offsets_are_of_the_text_and_pieces_add_up(client, stop):
    for prompt in ("Once upon a time, there was a", [1, 403, 407], "\u00e9", [5, 1, 5], "x\ufffd"):
        asked = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": 30,
            "seed": 2,
            "temperature": 1.5,
            "logprobs": 1,
            "stop": stop,
        }
        whole = client.completions.create(**asked).choices[0]
        chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
        told = [chunk.logprobs for chunk in chunks if chunk.logprobs]
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert [place for one in told for place in one.text_offset] == whole.logprobs.text_offset
        assert [text for one in told for text in one.tokens][:-1] == whole.logprobs.tokens[:-1]
        echoed = client.completions.create(**asked, echo=True).choices[0]
        for text, found in ((whole.text, whole.logprobs), (echoed.text, echoed.logprobs)):
            assert found.text_offset[0] == 0 and found.text_offset == sorted(found.text_offset)
            for place, piece in zip(found.text_offset, found.tokens, strict=True):
                shown = piece.removeprefix("<s>").removesuffix("</s>")
                assert text[place : place + len(shown)] == shown[: len(text) - place]


def test_bytes_are_the_tokens_own(shared):
    """Of characters of several tokens, in vocabularies with bytes to fall back to and of bytes alone."""
    text = " caf\u00e9 \U0001f999\U0001f999 \u4f60\u597d\n"
    for name in ("models/stories260K", "tokenizers/gpt2", "tokenizers/qwen3"):
        tokenizer = AutoTokenizer.from_pretrained(shared / name)
        before, ids = tokenizer("a").input_ids, tokenizer("a" + text).input_ids
        report = Report(tokenizer, before)
        told = [report.add(token, -1.0, [(token, -1.0), (ids[0], -2.0)]) for token in ids[len(before) :]]
        assert (
            "".join(one.text for one in told) == text and bytes(b for one in told for b in one.bytes) == text.encode()
        )
        assert all(one.likely[0].bytes == one.bytes for one in told)
        end = Report(tokenizer, before).add(tokenizer.eos_token_id, -1.0, [])
        assert bytes(end.bytes).decode() == tokenizer.eos_token == end.text


def test_a_stop_token_that_others_follow_is_text_as_in_the_whole(shared):
    """With `ignore_eos`, where the model's stop token is no special one."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "models/stories260K")
    was = tokenizer.convert_tokens_to_ids("\u2581was")
    for tokens in ([was, was, 300], [300, was], [was, 2, was], [was]):
        streamed = Streamed(tokenizer, (was, 2), ())
        text = "".join(map(streamed.add, tokens)) + streamed.end()
        assert text == text_of(Completion(tokens, [], "length", 0), (was, 2), tokenizer, ())


def test_a_reply_and_neutral_values_are_taken_back(client, url):
    reply = client.chat.completions.create(model="m", messages=QUESTION, max_tokens=3, temperature=0)
    said = reply.choices[0].message.model_dump()
    assert {"tool_calls", "annotations", "audio"} <= said.keys()
    messages = [*QUESTION, said, {**said, "tool_calls": [], "reasoning_content": None}, *QUESTION]
    asked = {"model": "m", "messages": messages, "max_tokens": 3, "temperature": 0}
    plain = [{"role": one["role"], "content": one["content"]} for one in messages]
    expected = client.chat.completions.create(**{**asked, "messages": plain}).choices[0].message.content
    neutral = {
        "repetition_penalty": 1.0,
        "top_k": -1,
        "min_tokens": 0,
        "skip_special_tokens": True,
        "min_p": 0,
        "bad_words": [],
    }
    found = client.chat.completions.create(**asked, extra_body=neutral, logit_bias={}, presence_penalty=0)
    assert found.choices[0].message.content == expected
    client.completions.create(model="m", prompt="a", max_tokens=1, extra_body=neutral)
    for name, value in {"repetition_penalty": 1.1, "min_tokens": 2, "top_k": -2, "tool_choice": "required"}.items():
        body = {"messages": QUESTION, "max_tokens": 1, name: value}
        refused = httpx.post(f"{url}/v1/chat/completions", json=body)
        assert refused.status_code == 400 and name in refused.json()["error"]["message"]
    called = [{**said, "tool_calls": [{"id": "a"}]}]
    assert httpx.post(f"{url}/v1/chat/completions", json={"messages": called}).status_code == 400


@pytest.mark.slow
def test_many_clients_get_what_one_gets(client):
    """Greedy tokens and seeded samples; log-probabilities to 1e-4: other neighbours round otherwise."""

    def ask(number: int):
        greedy = number % 2 == 0
        settings = {"temperature": 0} if greedy else {"seed": number, "temperature": 0.8, "top_p": 0.9}
        text = f"Tim has {number} cats. " * (1 + number % 5)
        found = client.completions.create(model="m", prompt=text, max_tokens=12, logprobs=0, **settings)
        return found.choices[0]

    alone = [ask(number) for number in range(32)]
    with ThreadPoolExecutor(32) as threads:
        together = list(threads.map(ask, range(32)))
    for one, other in zip(alone, together, strict=True):
        assert other.logprobs.tokens == one.logprobs.tokens and other.text == one.text
        assert other.logprobs.token_logprobs == pytest.approx(one.logprobs.token_logprobs, abs=1e-4)
    assert len({one.text for one in alone}) > 16


def test_scores_and_rewards(url, stories, reward_model):
    body = {"prompt": "Once upon", "completion": " a time there was", "top_logprobs": 3}
    found = httpx.post(f"{url}/v1/score", json=body).json()
    tokenizer = AutoTokenizer.from_pretrained(stories)
    tokens = tokenizer("Once upon a time there was").input_ids
    assert [one["id"] for one in found["tokens"]] == tokens and found["scored"] == 3
    policy = load_model(ModelConfig(path=str(stories)), "lm", torch.float32, CPU)
    expected = logprobs(policy, tokens[:1], tokens[1:])
    assert [one["logprob"] for one in found["tokens"][1:]] == pytest.approx(expected.tolist(), abs=1e-5)
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(stories)
        distribution = plain(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    entropies = -(distribution.exp() * distribution).sum(-1)
    assert [one["entropy"] for one in found["tokens"][1:]] == pytest.approx(entropies.tolist(), abs=1e-4)
    likely = distribution.topk(3).indices.tolist()
    assert [[a["id"] for a in one["top_logprobs"]] for one in found["tokens"][1:]] == likely
    talk = [*QUESTION, {"role": "assistant", "content": "A cat sat."}]
    scored = httpx.post(f"{url}/v1/score", json={"messages": talk}).json()
    assert "".join(one["text"] for one in scored["tokens"][scored["scored"] :]).strip() == "A cat sat."

    prompts, completions = ["Once upon", "Tim"], [" a time", " ran"]
    found = httpx.post(f"{url}/reward", json={"prompt": prompts, "completion": completions}).json()
    exact = LearnedReward(str(reward_model), DevicesConfig())(prompts, completions, [False, False])
    assert found["rewards"] == pytest.approx(exact, abs=1e-6)


def test_our_own_judges_may_ask_it(url, tmp_path):
    """Twice, as a story is no score; what they need is in the interface."""
    settings = ScoreSettings(base_url=f"{url}/v1", model="m", cache=str(tmp_path), timeout=30)
    with SingleJudge(settings.model_copy(update={"max_tokens": 6})) as judge:
        [judged] = judge([JudgeInput("a question", "an answer")])
    assert judged.unreadable and judged.requests == 2 and judged.completion_tokens == 12
    assert judged.prompt_tokens > 100


def test_a_client_that_leaves_frees_its_row(url):
    def live() -> int:
        return httpx.get(f"{url}/health").json()["live"]

    body = {"prompt": "Once", "max_tokens": 450, "n": 8, "stream": True, "stop": ["never said"]}
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ") and live() == 8
    with pytest.raises(httpx.TimeoutException):
        httpx.post(f"{url}/v1/completions", json=body | {"stream": False}, timeout=0.05)
    until = time.monotonic() + 10
    while live() and time.monotonic() < until:
        time.sleep(0.02)
    assert live() == 0


BAD = [
    ({"prompt": "a", "tempratur": 1}, "tempratur: there is no such parameter"),
    ({"prompt": "a", "temperature": -1}, "temperature: Input should be greater than or equal to 0"),
    ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty is not supported"),
    ({"prompt": "a", "n": 1000}, "n: Input should be less than or equal to 64"),
    ({"prompt": "a", "max_tokens": 100_000}, "max_tokens is 100,000, but prompt and completion together have room for"),
    ({"prompt": "a " * 600}, "start the server with a larger --context"),
    ({"prompt": [999_999]}, "token id 999999"),
    ({"prompt": []}, "prompt 0 is empty"),
    ({"prompt": ""}, "prompt 0 is empty"),
    ({"prompt": ["a", ""]}, "prompt 1 is empty"),
    ({"prompt": [[5], []], "echo": True, "max_tokens": 0}, "prompt 1 is empty"),
    ({"prompt": [5, 999_999], "echo": True, "max_tokens": 0, "logprobs": 1}, "token id 999999"),
    ({"prompt": [[5], [1 << 70]], "echo": True, "max_tokens": 0}, "prompt 1 has the token id 11805"),
    ({}, "prompt: Field required"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens 0 needs echo"),
    ({"prompt": "a", "echo": True, "stream": True}, "echo cannot be streamed"),
    ({"prompt": "a", "stop": [str(n) for n in range(20)]}, "stop: List should have at most"),
    ({"prompt": "a", "stop": ["b", ""]}, "stop.1: String should have at least 1 character"),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=[message[:20] for _, message in BAD])
def test_bad_requests_say_what_is_wrong(url, body, message):
    response = httpx.post(f"{url}/v1/completions", json=body)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_what_is_not_taken(url, client, stories, reward_model):
    post, at = httpx.post, f"{url}/v1/completions"
    body, kind = json.dumps({"prompt": "a", "max_tokens": 1}), {"Content-Type": "application/json"}
    assert post(at, content=body, headers=kind).status_code == 200
    assert post(at, content=body, headers={"Content-Type": "text/plain"}).status_code == 415  # what a page may send
    for origin in ("https://evil.example", "null", "http://["):
        assert post(at, content=body, headers=kind | {"Origin": origin}).status_code == 403
    assert post(at, content=body, headers=kind | {"Origin": url}).status_code == 200
    assert post(at, content=body, headers=kind | {"Host": "evil.example"}).status_code == 403  # a name pointed here
    assert post(at, content=b"x" * (5 << 20), headers=kind).status_code == 413
    assert post(at, content=(b"x" * (1 << 20) for _ in range(5)), headers=kind).status_code == 413
    assert "not JSON" in post(at, content=b"{", headers=kind).json()["error"]["message"]
    for answer in (post(at, content=b'{"prompt": "\xff"}', headers=kind), httpx.get(f"{url}/v2"), httpx.delete(at)):
        assert answer.status_code in (400, 404, 405) and answer.json()["error"]["message"]
    with pytest.raises(openai.BadRequestError, match="role"):
        client.chat.completions.create(model="m", messages=[{"role": "wizard", "content": "a"}])
    message = post(f"{url}/reward", json={"messages": QUESTION}).json()["error"]["message"]
    assert "must end with the assistant's message" in message
    with serving(reward_model, key="secret") as other:
        assert httpx.get(f"{other}/health").status_code == 200
        assert post(f"{other}/reward", json={}).status_code == 401
        key = {"Authorization": "Bearer secret"}
        ok = post(f"{other}/reward", json={"prompt": "a", "completion": "b"}, headers=key | {"Host": "elsewhere"})
        assert ok.status_code == 200 and len(ok.json()["rewards"]) == 1
        assert "cannot generate completions" in post(f"{other}/v1/completions", json={"prompt": "a"}, headers=key).text


def test_the_command_refuses_before_it_loads(stories, adapter, tmp_path, capsys):
    def said(*arguments: object) -> str:
        assert main(["serve", str(stories), *map(str, arguments)]) == 2
        return capsys.readouterr().err

    assert "--host 0.0.0.0 is reachable from other machines" in said("--host", "0.0.0.0")
    assert "write NAME=FOLDER" in said("--adapter", "x")
    assert "there is no folder nowhere" in said("--adapter", "a=nowhere")
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127.0.0.1:{port} \(.*\): --port \d+ is free"):
            listen("127.0.0.1", port)
    with pytest.raises(ModelError, match="has no adapter_config"), serving(stories, adapters={"a": str(tmp_path)}):
        pass


def test_a_key_on_the_command_line_is_visible_to_others(stories, monkeypatch, capsys):
    """Which the command says, naming the variable; a key in the variable opens the same addresses without a word."""
    served = []
    monkeypatch.setattr(listening, "run", lambda start, app_of, socket, name: (socket.close(), served.append(app_of)))
    command = ["serve", str(stories), "--host", "0.0.0.0", "--port", "0"]
    notice = "--api-key is visible to other users of this machine: set POSTTRAIN_API_KEY instead"
    for flags, variable, noticed in ((["--api-key", "k"], "", True), ([], "k", False)):
        monkeypatch.setenv("POSTTRAIN_API_KEY", variable)
        assert main([*command, *flags]) == 0
        assert (notice in capsys.readouterr().err) == noticed
        assert served.pop()(Host(None, None, ())).key == "k"
    monkeypatch.setenv("POSTTRAIN_API_KEY", "")
    assert main(command) == 2 and "set POSTTRAIN_API_KEY, or give --api-key" in capsys.readouterr().err


def test_text_of_a_whole_completion_is_the_streamed_one(stories):
    tokenizer = AutoTokenizer.from_pretrained(stories)
    tokens = tokenizer("a little girl", add_special_tokens=False).input_ids
    streamed = Streamed(tokenizer, (2,), ())
    text = "".join(map(streamed.add, [*tokens, 2])) + streamed.end()
    assert text == text_of(Completion([*tokens, 2], [0.0] * (len(tokens) + 1), "stop", 0), (2,), tokenizer)


@pytest.mark.parametrize("route", ["chat/completions", "render"])
def test_only_a_message_of_the_assistant_is_continued(url, route):
    body = {"messages": QUESTION, "continue_final_message": True, "max_tokens": 1}
    body = body if route != "render" else {name: body[name] for name in ("messages", "continue_final_message")}
    answer = httpx.post(f"{url}/v1/{route}", json=body)
    assert answer.status_code == 400 and "needs the assistant's message at the end" in answer.json()["error"]["message"]
    body["messages"] = [*QUESTION, {"role": "assistant", "content": "Once"}]
    assert httpx.post(f"{url}/v1/{route}", json=body).status_code == 200


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CLOSES_THINKING = CHATML.replace("m.content", "('<t></t>' if loop.last and m.role != 'user' else '') + m.content")
CUTS_THINKING = CHATML.replace("m.content", "m.content.split('</t>')[-1]")


@pytest.mark.parametrize("template", [CHATML, CHATML.replace("m.content", "m.content | trim"), CLOSES_THINKING])
def test_a_reply_is_continued_as_transformers_renders_it(template, stories, tmp_path):
    """Text and tokens of `apply_chat_template(continue_final_message=True)`, also where it is scored."""
    model = with_template(stories, tmp_path / "model", template)
    tokenizer = AutoTokenizer.from_pretrained(model)
    with serving(model, template=None) as address:
        for started in ("Once upon", "Once upon ", "\nOnce", "a", "<s>a"):
            talk = [*QUESTION, {"role": "assistant", "content": started}]
            said = {"messages": talk, "continue_final_message": True}
            text = tokenizer.apply_chat_template(talk, tokenize=False, continue_final_message=True)
            expected = tokenizer(text, add_special_tokens=False).input_ids
            assert httpx.post(f"{address}/v1/render", json=said).json()["tokens"] == expected
            answer = httpx.post(f"{address}/v1/chat/completions", json=said | {"max_tokens": 1}).json()
            assert answer["usage"]["prompt_tokens"] == len(expected)
            scored = httpx.post(f"{address}/v1/score", json={"messages": talk}).json()
            assert [one["id"] for one in scored["tokens"]] == expected
            prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]
            assert expected[: scored["scored"]] == prompt[: scored["scored"]] and scored["scored"] < len(expected)


def test_a_reply_that_the_template_does_not_write_is_scored_as_it_is(stories, tmp_path):
    """What is generated after the prompt: no template writes this thinking of a finished turn."""
    model = with_template(stories, tmp_path / "model", CUTS_THINKING)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt = tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    with serving(model, template=None) as address:
        talk = [*QUESTION, {"role": "assistant", "content": "so</t>Once"}]
        scored = httpx.post(f"{address}/v1/score", json={"messages": talk}).json()
        expected = tokenizer(prompt + "so</t>Once", add_special_tokens=False).input_ids
        assert [one["id"] for one in scored["tokens"]] == expected
        continued = httpx.post(f"{address}/v1/render", json={"messages": talk, "continue_final_message": True})
        assert continued.status_code == 400 and "the chat template rejects" in continued.text


def test_a_reply_without_a_template_is_continued_as_one_text(stories):
    tokenizer = AutoTokenizer.from_pretrained(stories)
    with serving(stories, template="none") as address:
        for started in ("Once", " Once", "upon a"):
            talk = [*QUESTION, {"role": "assistant", "content": started}]
            said = {"messages": talk, "continue_final_message": True}
            found = httpx.post(f"{address}/v1/render", json=said).json()
            assert found["tokens"] == tokenizer(QUESTION[0]["content"] + started).input_ids
            scored = httpx.post(f"{address}/v1/score", json={"messages": talk}).json()
            assert [one["id"] for one in scored["tokens"]] == found["tokens"]


# What strangers send --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "route, body",
    [
        ("/v1/render", {"messages": [{"role": "user", "content": "\ufffd" * 4000}]}),
        ("/v1/completions", {"prompt": "\ufffd" * 4000}),
        ("/v1/completions", {"prompt": "a" * 4_000_000}),
        ("/v1/completions", {"prompt": [5] * 1_000_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 700_000}]}),
        ("/v1/score", {"prompt": "\ufffd" * 500_000, "completion": "a" * 500_000}),
        ("/reward", {"prompt": "a" * 1_500_000, "completion": "b" * 1_500_000}),
        ("/reward", {"prompt": ["a"] * 5000, "completion": ["b"] * 5000}),
        ("/v1/completions", {"prompt": "a", "stop": ["b" * 600, "c" * 600]}),
    ],
)
def test_too_much_is_refused_before_it_is_read(url, route, body):
    """By characters, or by the first tokens; others are answered meanwhile."""
    began = time.monotonic()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(httpx.post, f"{url}{route}", json=body, timeout=60)
        assert httpx.get(f"{url}/health", timeout=30).status_code == 200
        answer = waiting.result()
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert "shorten" in message or "takes up to" in message or "the server reads up to" in message
    print(f"{time.monotonic() - began:.2f} s: {message}")


TOKENIZED = [
    ("/v1/render", {"messages": QUESTION}),
    ("/v1/completions", {"prompt": "Once", "max_tokens": 1}),
    ("/v1/completions", {"prompt": "Once", "max_tokens": 1, "echo": True}),
    ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 1}),
    ("/v1/score", {"prompt": "Once", "completion": " upon"}),
    ("/v1/score", {"messages": [*QUESTION, {"role": "assistant", "content": "Ho."}]}),
]


@pytest.mark.parametrize(
    ("route", "body", "work"),
    [
        *((*request, work) for request in TOKENIZED for work in ("__call__", "decode")),
        ("/reward", {"prompt": "Once", "completion": " upon"}, "__call__"),
    ],
)
def test_others_are_answered_while_the_tokenizer_works(url, route, body, work, monkeypatch):
    """It encodes or decodes until another request has been answered."""
    begun, answered, usual = threading.Event(), threading.Event(), getattr(PreTrainedTokenizerBase, work)

    def slow(*arguments, **settings):
        begun.set()
        assert answered.wait(30)
        return usual(*arguments, **settings)

    monkeypatch.setattr(PreTrainedTokenizerBase, work, slow)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(httpx.post, f"{url}{route}", json=body, timeout=60)
        try:
            assert begun.wait(30)
            assert httpx.get(f"{url}/health", timeout=10).status_code == 200 and not waiting.done()
        finally:
            answered.set()
        assert waiting.result().status_code == 200, waiting.result().text


def test_bytes_that_are_no_character_are_read_in_linear_time(shared):
    """As many decoded tokens per token, however long the text is."""

    class Counting:
        tokens = 0

        def __init__(self, tokenizer):
            self.tokenizer = tokenizer

        def decode(self, ids, **settings):
            self.tokens += len(ids)
            return self.tokenizer.decode(ids, **settings)

    for name in ("models/stories260K", "tokenizers/gpt2"):
        tokenizer = AutoTokenizer.from_pretrained(shared / name)
        for text in ("\ufffd", "\U0001f999", "\x80"):
            ids = tokenizer(text * 400, add_special_tokens=False).input_ids
            for tokens in (ids, ids[1:2] * 1000, [tokenizer.eos_token_id] * 1000):
                counting = Counting(tokenizer)
                assert sum(count for count, _ in pieces(tokens, counting)) == len(tokens)
                assert counting.tokens <= 100 * len(tokens)


def test_a_text_of_many_short_tokens_is_read_up_to_the_context(shared):
    tokenizer = AutoTokenizer.from_pretrained(shared / "models/stories260K")
    read = []

    def counted(text, **settings):
        read.append(len(text))
        return tokenizer(text, **settings)

    counted.get_vocab = tokenizer.get_vocab
    longest = max(map(len, tokenizer.get_vocab()))
    bound = Bound(counted, 20_000)  # pyright: ignore[reportArgumentType]
    text = "\u4f60" * (20_000 * longest)
    with pytest.raises(DataError, match="more than 20,000 tokens: shorten it"):
        bound.check(text)
    assert sum(read) < 40_000
    with pytest.raises(DataError, match="characters; 20,000 tokens have at most"):
        bound.check(text, "a")
    bound.check("a" * 19_000)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


@contextmanager
def bounded(app, **settings) -> Iterator[int]:
    """The port of the server that `posttrain serve` runs, with this application."""
    with listen("127.0.0.1", 0) as socket:
        server = bounded_server(app, lifespan="off", **settings)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([socket])))
        thread.start()
        try:
            yield socket.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


async def answering(scope, receive, send):
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def test_headers_arrive_by_their_deadline(monkeypatch):
    """However often a further line of them comes; a request that is whole is answered."""
    monkeypatch.setattr(listening, "HEADERS_S", 0.2)
    with bounded(answering) as port:
        assert ask_status(port) == 200
        with socket_module.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(HEAD)
            until, closed = time.monotonic() + 10, False
            while not closed and time.monotonic() < until:
                try:
                    connection.sendall(b"X: y\r\n")
                    connection.settimeout(0.01)
                    closed = connection.recv(100) == b""
                except TimeoutError:
                    pass
                except ConnectionError:  # it was closed before the line came
                    closed = True
            assert closed


@pytest.mark.slow
def test_requests_arrive_in_time_or_not_at_all(monkeypatch):
    """Half of the headers, half of a body, and half of a second request; connections are counted."""
    monkeypatch.setattr(listening, "HEADERS_S", 0.3)
    monkeypatch.setattr(listening, "BODY_S", 0.3)
    monkeypatch.setattr(listening, "MOST_CONNECTIONS", 5)
    whole = HEAD + b"Content-Length: 2\r\n\r\n{}"
    with bounded(answering) as port:
        for sent in (b"", HEAD, HEAD + b"Content-Length: 9\r\n\r\n{}", whole + HEAD):
            with socket_module.create_connection(("127.0.0.1", port), timeout=20) as connection:
                connection.sendall(sent)
                received = b""
                while part := connection.recv(1000):  # until the server closes it
                    received += part
                assert received.count(b"200 OK") == sent.count(b"{}") - sent.count(b"9\r\n\r\n{}")
        monkeypatch.setattr(listening, "HEADERS_S", 60.0)
        held = [socket_module.create_connection(("127.0.0.1", port), timeout=20) for _ in range(8)]
        answers = [connection.recv(100) if index >= 5 else b"" for index, connection in enumerate(held)]
        assert all(b"503" in answer for answer in answers[5:])
        for connection in held:
            connection.close()
        until = time.monotonic() + 20
        while (status := ask_status(port)) != 200 and time.monotonic() < until:
            time.sleep(0.02)
        assert status == 200


def ask_status(port: int) -> int:
    return httpx.post(f"http://127.0.0.1:{port}/", json={}).status_code


FROZEN = """
import threading, time
from posttrain.serving.listening import bounded_server, listen
async def app(scope, receive, send):
    print("in", flush=True)
    while True:
        time.sleep(0.01)
socket = listen("127.0.0.1", 0)
print(socket.getsockname()[1], flush=True)
bounded_server(app, lifespan="off").run([socket])
"""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_frozen_server(sent):
    with subprocess.Popen([sys.executable, "-c", FROZEN], stdout=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline())
        with socket_module.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(HEAD + b"\r\n")
            assert process.stdout.readline() == "in\n"
            process.send_signal(sent)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.3)
            process.send_signal(sent)
            assert process.wait(30) == -sent


def raw(url: str, *headers: str) -> int:
    """The status of a request with these headers, which clients would not send."""
    port = int(url.rpartition(":")[2])
    with socket_module.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall("\r\n".join(["GET /v1/models HTTP/1.1", *headers, "Connection: close", "", ""]).encode())
        return int(connection.recv(100).split()[1])


def test_an_ambiguous_site_is_refused(url):
    assert raw(url, "Host: 127.0.0.1") == raw(url, "Host: [::1]:80", "Origin: http://[::1]:80") == 200
    for headers in (
        ("Host: 127.0.0.1", "Host: evil.example"),
        ("Host: 127.0.0.1", "Host: 127.0.0.1"),
        ("Host: 127.0.0.1", "Origin: http://127.0.0.1", "Origin: http://evil.example"),
        *(
            (f"Host: {host}",)
            for host in ("evil.com@127.0.0.1", "127.0.0.1/evil", "127.0.0.1, b", "[::1", "127.0.0.1:x")
        ),
    ):
        assert raw(url, *headers) == 403, headers
    assert raw(url, "Host: evil.example") == 403 == raw(url, "Host: 127.0.0.1", "Origin: http://a@127.0.0.1")


LONE = "\ud800"


@pytest.mark.parametrize(
    "route, body",
    [
        ("/v1/completions", {"prompt": LONE}),
        ("/v1/completions", {"prompt": [LONE, "a"]}),
        ("/v1/completions", {"prompt": "a", "stop": LONE}),
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "model": LONE}),
        ("/v1/completions", {"prompt": "a", LONE: 1}),
        ("/v1/completions", {"prompt": "a", "user": {LONE: LONE}}),
        ("/v1/chat/completions", {"messages": [{"role": LONE, "content": "a"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": LONE}]}]}),
        ("/v1/score", {"prompt": "a", "completion": LONE}),
        ("/v1/render", {"messages": [{"role": "user", "content": LONE}]}),
        ("/reward", {"prompt": LONE, "completion": "b"}),
        ("/reward", {"messages": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": LONE}]]}),
    ],
)
def test_a_lone_surrogate_is_no_text(url, route, body):
    answer = httpx.post(f"{url}{route}", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"], answer.text


# The chat template ----------------------------------------------------------------------------------------------------

THINKS = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %} (now){% endif %}{% endif %}"
)
# What only some messages bring about: hours of loops, and gigabytes by folding constants and at rendering.
TRAPS = (
    "{% for m in messages %}{% if 'loop' in m.content %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}{% elif 'memory' in m.content %}{{ 'a' * 10 ** 10 }}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
FOLDED = "{{ ('a' * 10 ** 10) | length }}{{ messages[0].content }}"


def with_template(stories: Path, folder: Path, template: str) -> Path:
    shutil.copytree(stories, folder)
    tokenizer = AutoTokenizer.from_pretrained(stories)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def test_requests_carry_variables_of_the_template(stories, tmp_path):
    model = with_template(stories, tmp_path / "model", THINKS)
    said = {"messages": [{"role": "user", "content": "Hi."}]}

    def shown(address: str, **more) -> str:
        return httpx.post(f"{address}/v1/render", json=said | more).json()["text"]

    with serving(model, template=None) as address:
        assert shown(address).endswith("user: Hi.\nassistant:")
        for none in (None, {}, {"enable_thinking": True}, {"enable_thinkin": False}):
            assert shown(address, chat_template_kwargs=none).endswith("assistant:"), none
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        assert shown(address, **off).endswith("assistant: (now)")
        counts = [
            httpx.post(f"{address}/v1/chat/completions", json=said | more | {"max_tokens": 1}).json()["usage"]
            for more in ({}, off)
        ]
        assert counts[1]["prompt_tokens"] > counts[0]["prompt_tokens"]
        talk = {"messages": [*said["messages"], {"role": "assistant", "content": "Ho."}]}
        scored = [httpx.post(f"{address}/v1/score", json=talk | more).json()["scored"] for more in ({}, off)]
        assert scored[1] > scored[0]
        for wrong, problem in (
            ({"messages": []}, "chat_template_kwargs: messages is set for every chat template and cannot be changed"),
            ({"a b": 1}, "'a b' cannot be the name"),
            ([], "must be a mapping"),
        ):
            answer = httpx.post(f"{address}/v1/chat/completions", json=said | {"chat_template_kwargs": wrong})
            assert answer.status_code == 400 and problem in answer.json()["error"]["message"]
    with serving(model, template=None, variables={"enable_thinking": False}) as address:
        assert shown(address).endswith("assistant: (now)")
        assert shown(address, chat_template_kwargs={"enable_thinking": True}).endswith("assistant:")
    with serving(model, template="none") as address:
        answer = httpx.post(f"{address}/v1/render", json=said | off)
        assert answer.status_code == 400 and "served without a chat template" in answer.text


def test_a_hostile_template_holds_up_no_other_request(stories, tmp_path, monkeypatch):
    """Its loops end with their time, its memory with the process's; meanwhile the server answers."""
    monkeypatch.setattr(render, "SECONDS", 1.0)
    model = with_template(stories, tmp_path / "model", TRAPS)

    def asked(address: str, text: str) -> httpx.Response:
        given = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        return httpx.post(f"{address}/v1/chat/completions", json=given, timeout=60)

    with serving(model, template=None) as address, ThreadPoolExecutor() as pool:
        assert asked(address, "fine").status_code == 200
        slow = pool.submit(asked, address, "loop")
        answered = 0
        while not slow.done():
            assert httpx.get(f"{address}/health", timeout=30).status_code == 200
            answered += 1
        assert answered > 1 and slow.result().status_code == 400
        assert "the chat template takes more than 1 seconds" in slow.result().text
        for _ in range(2):
            answer = asked(address, "memory")
            assert answer.status_code == 400 and "memory" in answer.text
        assert asked(address, "fine").status_code == 200
    with pytest.raises(DataError, match="the chat template"):
        render.rendered(
            AutoTokenizer.from_pretrained(with_template(stories, tmp_path / "folded", FOLDED)),
            [render.RenderRequest(QUESTION)],
        )


def test_no_template_is_rendered_in_our_own_processes():
    """A template is a program of a stranger: only posttrain/data/render_worker.py, which has limits, compiles one.
    posttrain/base/files.py compiles the package's own files, into which it writes what strangers wrote."""
    root = Path(render.__file__).parents[1]
    using = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            imported = ast.unparse(node) if isinstance(node, ast.Import | ast.ImportFrom) else ""
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if "jinja" in imported or "chat_template_utils" in imported or called.endswith(".apply_chat_template"):
                using.add(path.relative_to(root).as_posix())
    assert using == {"data/render_worker.py", "base/files.py"}
    called = re.findall(r"from_template\(\s*([^,]+,\s*[^,]+),", "".join(f.read_text() for f in root.rglob("*.py")))
    names = {" ".join(arguments.split()) for arguments in called}
    own = {f'__file__, "{name}.jinja"' for name in ("Modelfile", "card.md", "adapter.md")}
    own |= {'__file__, f"{stage}.yaml"'}  # of the quickstart
    assert names == own | {"module: str, name: str"}
