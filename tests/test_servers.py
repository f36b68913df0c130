"""One or several vLLM servers: who asks which, what is pushed, and servers that die, return, or are of another version.

The servers are stand-ins over real sockets, behind processes that are killed. Two ranks: tests/test_ranks.py.
"""

import contextlib
import json
import logging
import os
import signal
import threading
import time
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from test_engines import PROMPTS, SAMPLED, policy_of, tokens_of
from test_online import train
from test_vllm import at, change
from vllm_stand_in import PROXY, Desk, killable, standing_in

from posttrain.base.errors import EngineError
from posttrain.config.schema.rollout import VllmConfig
from posttrain.engines import EmbeddedEngine, make_engine
from posttrain.engines.vllm import client
from posttrain.engines.vllm.client import POLL_S
from posttrain.runs.metrics import read_metrics
from posttrain.runs.stored_rollouts import StoredRun


@pytest.fixture
def two():
    """Two servers behind processes: their desks, the processes, and the settings that name both."""
    with ExitStack() as resources:
        desks, processes = zip(*(resources.enter_context(killable()) for _ in range(2)), strict=True)
        yield desks, processes, VllmConfig(mode="server", base_url=[one.url for one in processes], timeout=30.0)


def embedded(policy):
    return tokens_of(EmbeddedEngine(policy).generate(PROMPTS, SAMPLED))


def once(work):
    """A function that does it at its first call."""
    left = [work]

    def first():
        if left:
            left.pop()()

    return first


def again(killed, after=0.0):
    """Start a killed process again in another thread, as a supervisor would."""
    thread = threading.Thread(target=lambda: (time.sleep(after), killed.start()))
    thread.start()
    return thread


def test_prompts_are_dealt_out_and_weights_pushed_once_to_each(two):
    desks, _, settings = two
    policy = policy_of()
    with contextlib.closing(make_engine("vllm", policy, vllm=settings)) as engine:
        want = embedded(policy)
        assert tokens_of(engine.generate(PROMPTS, SAMPLED)) == want
        assert [desk.prompts for desk in desks] == [[3], [2]] and len(PROMPTS) == 5
        change(policy)
        engine.load(policy, version=1)
        engine.load(policy, version=1)
        assert tokens_of(engine.generate(PROMPTS, SAMPLED)) == tokens_of(
            EmbeddedEngine(policy).generate(PROMPTS, SAMPLED)
        )
        marks = [desk.loads for desk in desks]
        assert marks[0] == marks[1] and len(marks[0]) == len({*marks[0]}) == 2


def test_a_server_that_dies_and_returns_loses_no_completion(two, caplog):
    """It is killed while it samples; the one beside it is not asked again, and its weights are not pushed again."""
    desks, processes, settings = two
    policy = policy_of()
    with contextlib.closing(make_engine("vllm", policy, vllm=settings)) as engine:
        desks[1].during = once(lambda: (processes[1].kill(), again(processes[1], 0.1)))
        with caplog.at_level(logging.WARNING):
            got = engine.generate(PROMPTS, SAMPLED)
    assert tokens_of(got) == embedded(policy)
    assert [desk.prompts for desk in desks] == [[3], [2, 2]]
    assert [len(desk.loads) for desk in desks] == [1, 2] and [desk.starts for desk in desks] == [1, 2]
    assert f"{processes[1].url} closed the connection" in caplog.text
    assert "6 completions of 2 prompts were in flight" in caplog.text and "is back" in caplog.text
    assert processes[0].url not in caplog.text


def test_a_server_that_does_not_return(two):
    _, processes, settings = two
    policy = policy_of()
    engine = make_engine("vllm", policy, vllm=settings.model_copy(update={"timeout": 2 * POLL_S}))
    processes[0].kill()
    change(policy)
    began = time.monotonic()
    with pytest.raises(EngineError, match=rf"{processes[0].url} has not come back within 1 s .*--resume"):
        engine.load(policy, version=1)
    assert time.monotonic() - began < 20
    processes[0].start()


@pytest.fixture
def ours(monkeypatch):
    """A desk behind the servers that an engine starts itself."""
    with standing_in(desk := Desk()) as url:
        monkeypatch.setattr(client, "PROGRAM", [str(PROXY)])
        monkeypatch.setattr(client, "find_spec", lambda name: name)
        monkeypatch.setenv("BACKING", url.removeprefix("http://"))
        yield desk


def kill(engine):
    [server] = engine.host._mine.values()
    os.kill(server.process._process.pid, signal.SIGKILL)


def test_our_own_server_is_started_again_with_the_weights_a_bounded_number_of_times(ours, caplog):
    policy = policy_of()
    settings = VllmConfig(mode="server", timeout=30.0, max_restarts=2)
    with contextlib.closing(make_engine("vllm", policy, vllm=settings)) as engine:
        want = embedded(policy)
        ours.during = once(lambda: kill(engine))
        assert tokens_of(engine.generate(PROMPTS, SAMPLED)) == want, "killed while it sampled"
        assert (ours.starts, len(ours.loads)) == (2, 2) and "it ended with status -9" in caplog.text
        kill(engine)
        change(policy)
        engine.load(policy, version=1)  # killed between two steps
        assert tokens_of(engine.generate(PROMPTS, SAMPLED)) == tokens_of(
            EmbeddedEngine(policy).generate(PROMPTS, SAMPLED)
        )
        assert ours.starts == 3
        kill(engine)
        with pytest.raises(
            EngineError, match=r"15 completions of 5 prompts were in flight.*lost 3 times.*max_restarts is 2"
        ):
            engine.generate(PROMPTS, SAMPLED)
        assert ours.starts == 3


@pytest.mark.slow
def test_a_silent_server_of_ours_is_replaced(ours):
    """Stopped, as one that hangs: it is killed and started again."""
    policy = policy_of()
    with contextlib.closing(make_engine("vllm", policy, vllm=VllmConfig(mode="server", timeout=1.0))) as engine:
        [server] = engine.host._mine.values()
        os.kill(server.process._process.pid, signal.SIGSTOP)
        got = engine.generate(PROMPTS[:2], SAMPLED)
        assert tokens_of(got) == embedded(policy)[:2] and ours.starts == 2


class PlainVllm(BaseHTTPRequestHandler):
    """`vllm serve`, as it answers without its library."""

    def do_GET(self):
        body = json.dumps({"version": "0.29.1"}).encode() if self.path == "/version" else b""
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format, *args):
        pass


def test_vllms_own_server_is_named_with_its_version():
    bound = HTTPServer(("127.0.0.1", 0), PlainVllm)
    threading.Thread(target=bound.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{bound.server_address[1]}"
    with pytest.raises(EngineError, match=rf"{url} is `vllm serve` of vLLM 0\.29\.1.*with vLLM 0\.32: `python -m"):
        make_engine("vllm", policy_of(), vllm=at(url))
    bound.shutdown()
    bound.server_close()


def rollouts(folder):
    """(step, tokens, reward) of every stored completion, in order."""
    with StoredRun(folder) as stored:
        steps = [line["step"] for line in read_metrics(folder) if "loss" in line]
        return [(step, one["tokens"].tolist(), one["reward"]) for step in steps for one in stored.rollouts(step)]


def test_a_server_that_returns_as_another_version_is_refused(two):
    desks, processes, settings = two
    engine = make_engine("vllm", policy_of(), vllm=settings)
    processes[1].kill()
    desks[1].vllm_version = "0.29.1"
    thread = again(processes[1])
    with pytest.raises(EngineError, match=rf"{processes[1].url} has another version of vLLM: 0\.29\.1, but 0\.32 is"):
        engine.generate(PROMPTS, SAMPLED)
    thread.join()


def test_a_run_without_its_server_is_saved_and_resumed(sums_home, tmp_path):
    """It dies in step 2 for good: no completion is lost, and none is trained on twice."""
    steps = {"max_steps": 3, "batch_size": 4}
    whole = train(sums_home, tmp_path / "whole", {}, training=dict(steps))
    with killable() as (desk, server):
        rollout = {"engine": "vllm", "vllm": {"mode": "server", "base_url": server.url, "timeout": POLL_S}}
        desk.during = lambda: server.kill() if len(desk.prompts) == 2 else None
        with pytest.raises(EngineError, match=f"{server.url} has not come back within"):
            train(sums_home, tmp_path / "died", {}, training=dict(steps), rollout=dict(rollout))
        run = tmp_path / "died/run"
        facts = json.loads((run / "run.json").read_text())
        assert facts["state"] == "failed" and server.url in facts["reason"] and (run / "checkpoint-1").is_dir()
        assert len(rollouts(run)) == 4 * 4
        server.start()
        rollout["vllm"]["timeout"] = 30.0
        train(sums_home, tmp_path / "died", {}, training=dict(steps), rollout=rollout, resume=True)
    assert rollouts(run) == rollouts(whole)
    assert [step for step, *_ in rollouts(run)] == [step for step in range(1, 4) for _ in range(16)]
