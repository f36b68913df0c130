"""Processes of environments: what they answer, and that nothing a class or a tool does reaches beyond its episode."""

import os
import sys
import threading
import time
from operator import methodcaller

import pytest

from posttrain.base.errors import RewardError
from posttrain.config.schema.environments import EnvironmentConfig
from posttrain.environments.process import Environments, EpisodeError

CODE = '''
import asyncio, os, time


class Counter:
    """An environment as TRL has it."""

    made = 0

    def __init__(self, start: int = 0):
        type(self).made += 1
        self.start = start

    def reset(self, **row):
        self.value, self.row = self.start, row
        return f"Count to {row['goal']}." if "goal" in row else None

    def add(self, number: int) -> int:
        """
        Add a number.

        Args:
            number: the number
        """
        self.value += number
        print("noise", flush=True)
        return self.value

    async def later(self, text: str) -> str:
        """
        Echo.

        Args:
            text: a text
        """
        await asyncio.sleep(0.01)
        return text

    def fail(self) -> str:
        """Fail."""
        raise ValueError("no such luck")

    def hang(self) -> str:
        """Hang."""
        time.sleep(60)

    def leave(self) -> str:
        """Leave."""
        os._exit(7)

    def flood(self) -> str:
        """Return two megabytes."""
        return "x" * 2_000_000

    def colours(self) -> str:
        """Return control characters."""
        return "\\x1b[31mred\\x00\\ud800"

    def eat(self) -> str:
        """Take all memory."""
        return str(len(bytearray(40_000_000_000)))

    def secret(self) -> str:
        """Read an environment variable."""
        return str(os.environ.get("MY_API_KEY"))

    def _private(self):
        pass

    def get_reward(self):
        return self.value if self.value >= 0 else None


class Lambda:
    def reset(self, **row):
        self.function = lambda: 1


class Undocumented:
    def reset(self): pass
    def tool(self, x): pass


class BadReset:
    def reset(self, **row): raise RuntimeError("no data")


class Image:
    def reset(self, **row): return [{"type": "image", "image": "x"}]


class Word:
    def reset(self, **row): return None
    def get_reward(self): return "good"


class Moody:
    def __init__(self):
        if os.path.exists("/tmp/none-such-folder"): pass
    def reset(self, **row): return [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


class Game:
    def reset(self, **row): return [{"role": "user", "content": "guess"}]
    async def step(self, message):
        from posttrain.environments import Step
        return Step([{"role": "user", "content": message["content"] + "?"}], 0.5, message["content"] == "end", {"n": 1})


def search(query: str) -> str:
    """
    Search.

    Args:
        query: the words
    """
    return {"found": query}
'''


PARTS = methodcaller("partition", ":")


@pytest.fixture
def made(tmp_path, monkeypatch):
    name = f"my_worlds_{tmp_path.name}"  # a module is imported once in a process
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("MY_API_KEY", "secret")
    opened = []

    def make(cls="Counter", tools=(), workers=4, **more):
        settings = [EnvironmentConfig(**{"name": "e", "class": f"{name}.py:{cls}", "timeout": 5} | more)] if cls else []
        opened.append(Environments(settings, [f"{name}{file}:{tool}" for file, _, tool in map(PARTS, tools)], workers))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def test_an_episode_from_reset_to_reward(made):
    environments = made(tools=[":search"], args={"start": 2})
    kind = environments.kinds["e"]
    names = ["search", "add", "colours", "eat", "fail", "flood", "hang", "later", "leave", "secret"]
    assert [tool["function"]["name"] for tool in kind.tools] == names and kind.rewards and kind.title == "Counter"
    process = environments.start("e")
    assert process.ask({"reset": {"goal": 5}}, 5) == {
        "messages": [{"role": "user", "content": "Count to 5."}],
        "done": False,
    }
    for name, arguments, result, failed in (
        ("add", {"number": 3}, "5", False),
        ("later", {"text": "é"}, "é", False),
        ("search", {"query": "q"}, "{'found': 'q'}", False),
        ("fail", {}, "{'error': 'no such luck'}", True),
        ("add", {"numbr": 3}, "{'error': \"Counter.add() got an unexpected keyword argument 'numbr'\"}", True),
        ("nothing", {}, "{'error': 'there is no tool nothing; there are ", True),
        ("_private", {}, "{'error': 'there is no tool _private;", True),
        ("colours", {}, "\\x1b[31mred\\x00\\ud800", False),
        ("secret", {}, "None", False),
    ):
        reply = process.ask({"call": name, "arguments": arguments}, 5)
        assert reply["result"].startswith(result) and reply["failed"] == failed, reply
    flood = process.ask({"call": "flood", "arguments": {}}, 5)
    assert len(flood["result"]) == 1_000_000 and flood["failed"]
    reward, turns, state = environments.end(process, "e")
    assert (reward, turns, state.value, state.row, type(state).__name__) == (5.0, [], 5, {"goal": 5}, "Counter")


def test_each_episode_has_a_fresh_instance_of_its_own(made):
    environments = made()
    one, two = environments.start("e"), environments.start("e")
    for process, number in ((one, 1), (two, 10)):
        process.ask({"reset": {}}, 5)
        process.ask({"call": "add", "arguments": {"number": number}}, 5)
    assert environments.end(one, "e")[0] == 1 and environments.end(two, "e")[0] == 10 and one.pid != two.pid


@pytest.mark.parametrize(
    ("tool", "verdict", "reason"),
    [
        ("hang", "tool_timeout", "no answer within 0.3 s"),
        ("leave", "env_error", "its process has ended with status 7"),
    ],
)
def test_a_hang_and_a_crash_end_only_their_own_episode(made, tool, verdict, reason):
    environments = made()
    bad, good = environments.start("e"), environments.start("e")
    for process in (bad, good):
        process.ask({"reset": {}}, 5)
    with pytest.raises(EpisodeError, match=reason) as raised:
        bad.ask({"call": tool, "arguments": {}}, 0.3 if tool == "hang" else 5)
    assert raised.value.verdict == verdict
    bad.end()
    assert good.ask({"call": "add", "arguments": {"number": 1}}, 5)["result"] == "1"
    good.end()
    for _ in range(100):
        if not os.path.exists(f"/proc/{bad.pid}"):
            return
        time.sleep(0.05)
    raise AssertionError("its process is still there")


def test_memory_is_limited_and_running_out_is_a_tools_error(made):
    environments = made()
    process = environments.start("e")
    process.ask({"reset": {}}, 5)
    reply = process.ask({"call": "eat", "arguments": {}}, 5)
    assert reply["failed"] and process.ask({"call": "add", "arguments": {"number": 1}}, 5)["result"] == "1"
    process.end()


def test_at_most_some_are_live_and_others_wait(made):
    environments = made(workers=1)
    first = environments.start("e")
    started = threading.Event()
    thread = threading.Thread(target=lambda: (environments.start("e").end(), started.set()))
    thread.start()
    assert not started.wait(0.5)
    first.end()
    assert started.wait(20)
    thread.join()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Undocumented", "tool cannot be a tool: .* It needs type hints and a Google docstring"),
        ("NoSuch", "my_worlds_.* has no function NoSuch"),
    ],
)
def test_a_class_that_does_not_work_is_an_error_at_the_start(made, name, reason):
    with pytest.raises(RewardError, match=reason):
        made(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("BadReset", "reset: RuntimeError: no data"),
        ("Image", "reset: TypeError: a content block of type image is not supported"),
        ("Word", r"end: TypeError: get_reward\(\) is 'good'; a finite number is needed"),
        ("Lambda", "end: TypeError: its attribute function cannot be pickled"),
    ],
)
def test_an_episode_without_a_verdict_says_why(made, name, reason):
    environments = made(name)
    process = environments.start("e")
    with pytest.raises(EpisodeError, match=reason) as raised:
        process.ask({"reset": {}}, 5)
        environments.end(process, "e")
    assert raised.value.verdict == "env_error"
    process.end()


def test_messages_blocks_and_steps(made):
    blocks = made("Moody")
    process = blocks.start("e")
    assert process.ask({"reset": {}}, 5)["messages"] == [{"role": "user", "content": "ab"}]
    process.end()
    game = made("Game", contract="messages")
    assert game.kinds["e"].tools == ()
    process = game.start("e")
    assert process.ask({"reset": {}}, 5)["messages"] == [{"role": "user", "content": "guess"}]
    reply = process.ask({"step": {"role": "assistant", "content": "end"}}, 5)
    assert reply == {
        "messages": [{"role": "user", "content": "end?"}],
        "reward": 0.5,
        "done": True,
        "metrics": {"n": 1.0},
    }
    process.end()


def test_tools_alone(made):
    environments = made(None, tools=[".py:search"])
    assert [tool["function"]["name"] for tool in environments.kinds[None].tools] == ["search"]
    process = environments.start(None)
    assert process.ask({"reset": {"x": 1}}, 5) == {"messages": [], "done": False}
    assert environments.end(process, None)[0] is None
