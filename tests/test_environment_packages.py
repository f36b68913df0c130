"""Environments of other packages, unmodified: an MCP server, an OpenEnv server, SkyRL-Gym (`make test-env`)."""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from test_episodes import END, call, results
from test_episodes import run as run  # the fixture

from posttrain.base.errors import RewardError

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
    pytest.importorskip("mcp")
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
    pytest.importorskip("mcp")
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
    pytest.importorskip({"mcp": "mcp", "skyrl": "skyrl_gym"}[cls])
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
    pytest.importorskip("openenv.core")
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
    pytest.importorskip("skyrl_gym")
    (tmp_path / "hot_env.py").write_text(SKYRL)
    arguments = {"environment": "hot_env.py:Hot", "config": {"cost": 0.5}}
    settings = {"cls": "skyrl", "contract": "messages", "timeout": 60}
    [[made]] = run({"Row 0": ["1" + END, "3" + END]}, [{"secret": 3}], args=arguments, **settings)
    assert (made.stop_reason, made.turn_rewards, made.metrics) == ("env_done", [-0.5, 1.0], {"turns": 2.0}), made.reason
    row = {"reward_spec": {"ground_truth": "12"}}
    [[right], [wrong]] = run({"Row 0": ["#### 12" + END], "Row 1": ["#### 13" + END]}, [row, row],
                             args={"environment": "gsm8k"}, **settings)  # fmt: skip
    assert right.reward > wrong.reward and right.stop_reason == "env_done", json.dumps([right.reason, wrong.reason])
