"""Environments of other packages, unmodified: MCP and OpenEnv servers, SkyRL-Gym, verifiers (`make test-env`)."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from test_episodes import END, call, results
from test_episodes import run as run  # the fixture
from test_record import TEMPERATURE, agent
from test_serve import serving
from transformers import AutoTokenizer

from posttrain.base.errors import RewardError
from posttrain.cli import main
from posttrain.data.codec import Codec
from posttrain.runs.stored_rollouts import StoredRun, trained_tokens

MCP = '''
from mcp.server.mcpserver import MCPServer

server = MCPServer("notes")
notes = []


@server.tool()
def note(text: str) -> str:
    """Keep a note."""
    notes.append(text)
    return f"{len(notes)} kept"


@server.tool()
def read(number: int) -> str:
    """Read a note by its number."""
    return notes[number - 1]


server.run()
'''


def test_the_tools_of_an_mcp_server(run, tmp_path):
    """Each episode has a server of its own; what a tool raises is its result."""
    pytest.importorskip("mcp", reason="needs the package: make test-env")
    (tmp_path / "notes.py").write_text(MCP)
    script = [
        call("note", '{"text": "a \\u00fc"}'), call("note", '{"text": "b"}'), call("read", '{"number": 1}'),
        call("read", '{"number": 9}'), call("erase"), "Done." + END,
    ]  # fmt: skip
    [[first, second]] = run({"Row 0": script}, n=2, cls="mcp", args={"server": "notes.py"}, timeout=60)
    for made in (first, second):
        assert made.stop_reason == "completed", made.reason
        told = results(made)
        assert told[:3] == ["1 kept", "2 kept", "a ü"] and "error" in told[3] and "there is no tool erase" in told[4]


SLOW = """
import os, time
from mcp.server.mcpserver import MCPServer

server = MCPServer("slow")


@server.tool()
def wait(file: str) -> str:
    "Wait."
    open(file, "w").write(str(os.getpid()))
    time.sleep(60)


server.run()
"""


def test_a_server_that_hangs_in_a_tool_ends_with_its_episode(run, tmp_path):
    pytest.importorskip("mcp", reason="needs the package: make test-env")
    (tmp_path / "slow.py").write_text(SLOW)
    file = tmp_path / "pid"
    arguments = json.dumps({"file": str(file)})
    [[made]] = run({"Row 0": [call("wait", arguments)]}, cls="mcp", args={"server": "slow.py"}, timeout=20)
    assert made.stop_reason == "tool_timeout", made.reason
    process, until = Path(f"/proc/{file.read_text()}/stat"), time.monotonic() + 20
    while process.exists() and process.read_text().rpartition(")")[2].split()[0] != "Z" and time.monotonic() < until:
        time.sleep(0.05)
    assert time.monotonic() < until


@pytest.mark.parametrize(
    ("cls", "args"),
    [("mcp", {"server": "/bin/sh"}), ("skyrl", {"environment": "os:system"}), ("mcp", {"server": "missing.py"})],
)
def test_settings_name_no_programs_of_others(run, cls, args):
    pytest.importorskip({"mcp": "mcp", "skyrl": "skyrl_gym"}[cls], reason="needs the package: make test-env")
    if cls == "mcp":
        with pytest.raises(RewardError, match="is no file in the current folder"):
            run({"Row 0": []}, cls=cls, args=args)
        return
    [[made]] = run({"Row 0": ["ls" + END]}, cls=cls, args=args, contract="messages")
    assert made.stop_reason == "env_error" and "belongs to Python" in made.reason


OPENENV = """
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    message: str


class Heard(Observation):
    text: str = ""


class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.secret, self._state = "", State()

    def reset(self, seed=None, episode_id=None, secret="yes", **more):
        self.secret = secret
        return Heard(text="Say the word.")

    def step(self, action, **more):
        right = action.message == self.secret
        return Heard(text=f"Not {action.message}.", reward=1.0 if right else -0.25, done=right)

    @property
    def state(self):
        return self._state


uvicorn.run(create_fastapi_app(Echo, Say, Heard, max_concurrent_envs=8), port=int(sys.argv[1]), log_level="error")
"""


@pytest.fixture
def openenv(tmp_path):
    """The address of a server."""
    pytest.importorskip("openenv.core", reason="needs the package: make test-env")
    (tmp_path / "echo.py").write_text(OPENENV)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen([sys.executable, str(tmp_path / "echo.py"), str(port)])
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{url}/health", timeout=1).close()
            break
        except OSError:
            assert server.poll() is None
            time.sleep(0.1)
    yield url
    server.kill()
    server.wait()


def test_a_client_of_an_openenv_server(run, openenv):
    """Observations are messages of the user, rewards those of the turns; a column reaches the server's `reset`."""
    rows, scripts = (
        [{"secret": "oak"}, {"secret": "elm"}],
        {"Row 0": ["ash" + END, "oak" + END], "Row 1": ["elm" + END]},
    )
    arguments = {"base_url": openenv, "shows": "text", "columns": ["secret"]}
    [[first], [second]] = run(scripts, rows, cls="openenv", contract="messages", args=arguments, timeout=60)
    assert (first.stop_reason, first.turn_rewards, first.reward) == ("env_done", [-0.25, 1.0], 0.75), first.reason
    assert [m["content"] for m in first.messages] == ["ash", "Not ash.", "oak"] and second.reward == 1.0


SKYRL = '''
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput


class Hot(BaseTextEnv):
    """Find a number from hints."""

    def __init__(self, env_config, extras={}):
        super().__init__()
        self.secret, self.step_cost = extras["secret"], env_config.cost

    def step(self, action):
        self.turns += 1
        right = action.strip() == str(self.secret)
        hints = [] if right else [{"role": "user", "content": "cold"}]
        return BaseTextEnvStepOutput(
            observations=hints, reward=1.0 if right else -self.step_cost, done=right, metadata={"turns": self.turns}
        )


'''


def test_environments_of_skyrl_gym(run, tmp_path):
    """One that comes with it, and one of the user's own."""
    pytest.importorskip("skyrl_gym", reason="needs the package: make test-env")
    (tmp_path / "hot_env.py").write_text(SKYRL)
    arguments = {"environment": "hot_env.py:Hot", "config": {"cost": 0.5}}
    settings = {"cls": "skyrl", "contract": "messages", "timeout": 60}
    [[made]] = run({"Row 0": ["1" + END, "3" + END]}, [{"secret": 3}], args=arguments, **settings)
    assert (made.stop_reason, made.turn_rewards, made.metrics) == ("env_done", [-0.5, 1.0], {"turns": 2.0}), made.reason
    row = {"reward_spec": {"ground_truth": "12"}}
    [[right], [wrong]] = run({"Row 0": ["#### 12" + END], "Row 1": ["#### 13" + END]}, [row, row],
                             args={"environment": "gsm8k"}, **settings)  # fmt: skip
    assert right.reward > wrong.reward and right.stop_reason == "env_done", json.dumps([right.reason, wrong.reason])


VERIFIERS = """
import verifiers.v1 as vf


class Row(vf.TaskData):
    answer: int


class Calculator(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    def calculate(self, expression: str) -> str:
        "Add numbers."
        return str(sum(map(int, expression.split("+"))))


class SumConfig(vf.TaskConfig):
    has_calculator: bool = False


class Sum(vf.Task[Row, vf.State, SumConfig]):
    @classmethod
    def toolsets(cls, config):
        return [Calculator(vf.ToolsetConfig())] if config.has_calculator else []

    @vf.reward(weight=0.5)
    async def near(self, trace: vf.Trace) -> float:
        said = trace.last_reply
        return 1 / (1 + abs(int(said) - self.data.answer)) if said.isdigit() else 0.0

    @vf.reward
    async def called(self, trace: vf.Trace) -> float:
        return float(trace.num_turns > 1)


class SumsConfig(vf.TasksetConfig):
    task: SumConfig = SumConfig()


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        return [Sum(Row(prompt=f"{a}+{b}=?", answer=a + b), self.config.task) for a, b in ((314, 159), (271, 828))]


__all__ = ["Sums"]

if __name__ == "__main__":
    Calculator.run()
"""

PLAYED = """
import asyncio, json, sys
import verifiers.v1 as vf

address, sampling = sys.argv[1], vf.Sampling(**json.loads(sys.argv[2]))
agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}


async def play(has_calculator):
    taskset = {"id": "sums", "task": {"has_calculator": has_calculator}}
    env = vf.load_environment(vf.SingleAgentEnvConfig(taskset=taskset, agent=agent))
    async with env.serving():
        for number, task in enumerate(env.taskset):
            name = f"{has_calculator} {number}"
            client = vf.EvalClientConfig(base_url=f"{address}/v1", headers={"X-Posttrain-Episode": name})
            episode = await env.run_episode(task, vf.ModelContext("m", client, sampling))
            assert episode.ok, [*episode.errors, *episode.traces[0].errors]
            [trace] = episode.traces
            messages = [message.model_dump() for message in trace.messages]
            told = {"episode": name, "reward": trace.reward, "sampled": trace.num_output_tokens, "messages": messages}
            print(json.dumps(told))


asyncio.run(play(False))
asyncio.run(play(True))
"""


def test_a_taskset_of_verifiers_is_recorded(calculator_home, tmp_path, monkeypatch):
    """verifiers plays and rewards, our server answers and records. The packages of its harness, which `uv` would
    download, are those installed here."""
    pytest.importorskip("verifiers", reason="needs the package: make test-env")
    (tmp_path / "sums.py").write_text(VERIFIERS)
    (tmp_path / "play.py").write_text(PLAYED)
    uv = tmp_path / "uv"
    uv.write_text(f'#!/bin/sh\ncase "$*" in *--help) echo --script;; "python find"*) echo {sys.executable};; esac\n')
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("HOME", str(tmp_path))
    model, folder = calculator_home / "model", tmp_path / "recorded"
    with serving(model, template=None, record=tmp_path / "tried") as address:
        client = OpenAI(base_url=f"{address}/v1", api_key="none")
        tried = range(400)  # the model calls for one question in twenty
        seed = next(seed for seed in tried if len(agent(client, "314+159=?", seed)[0]) == 4)
    with serving(model, template=None, record=folder) as address:
        sampling = json.dumps({"temperature": TEMPERATURE, "max_tokens": 40, "seed": seed})
        done = subprocess.run(
            [sys.executable, str(tmp_path / "play.py"), address, sampling], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        played = [json.loads(line) for line in done.stdout.splitlines()]
        for one in played:
            body = {"episode": one["episode"], "reward": one["reward"]}
            assert httpx.post(f"{address}/v1/rewards", json=body).json()["rewards"] == [one["reward"]]
    with StoredRun(folder) as stored:
        rows, prompts = stored.rollouts(1), stored.prompts(1)
    assert len(rows) == len(prompts) == len(played) == 4 and len(played[2]["messages"]) == 4
    tokenizer = AutoTokenizer.from_pretrained(model)
    for one, row, prompt in zip(played, rows, prompts, strict=True):
        asked, *followed = one["messages"]
        codec, turns = Codec(tokenizer, prompt["facts"]["tools"] or ()), row["turns"]["turns"]
        replies = [row["tokens"][turn["start"] : turn["stop"]] for turn in turns if turn["author"] == "model"]
        assert prompt["tokens"].tolist() == codec.first([{"role": "user", "content": asked["content"]}])
        sampled = [message for message in followed if message["role"] == "assistant"]
        assert said([codec.parse(reply.tolist()).message for reply in replies]) == said(sampled)
        assert said(row["turns"]["messages"]) == said(followed)
        assert row["reward"] == one["reward"] and trained_tokens(row).sum() == one["sampled"]
    assert played[2]["reward"] >= 1 > played[0]["reward"]
    output = tmp_path / "good.jsonl"
    assert main(["rollouts", str(folder), "--to", "sft", "--above", "0.9", "--output", str(output)]) == 0
    good = [json.loads(line) for line in output.read_text().splitlines()]
    talks = [said([*row["prompt"], *row["completion"]]) for row in good]
    assert said(played[2]["messages"]) in talks and said(played[0]["messages"]) not in talks


def said(messages):
    """Role, text and calls of messages, of verifiers' or of ours."""
    return [(each["role"], each["content"] or "", [*map(called, each.get("tool_calls") or ())]) for each in messages]


def called(made):
    function = made.get("function", made)
    arguments = function["arguments"]
    return function["name"], json.loads(arguments) if isinstance(arguments, str) else arguments
