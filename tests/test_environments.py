"""Processes of environments: what they answer, and that nothing a class or a tool does reaches beyond its episode."""

import os
import pickle
import signal
import sys
import threading
import time
from collections import Counter
from datetime import date
from operator import methodcaller

import numpy as np
import pytest

from posttrain.base.errors import RewardError
from posttrain.config.schema.rollout import EnvironmentConfig
from posttrain.environments.process import Attributes, Environments, EpisodeError

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

    def junk(self) -> str:
        """Write to every open file, so to the replies too."""
        for number in range(3, 30):
            try:
                os.write(number, b"no json\\n")
            except OSError:
                pass
        return "x"

    def odd(self) -> str:
        """Return what has no text."""
        class Odd:
            def __str__(self):
                raise ValueError("no text")
        return Odd()

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
    names = ["search", "add", "colours", "eat", "fail", "flood", "hang", "junk", "later", "leave", "odd", "secret"]
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
        ("odd", {}, "{'error': 'no text'}", True),
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
    assert (
        environments.end(one, "e")[0] == 1
        and environments.end(two, "e")[0] == 10
        and one._process.pid != two._process.pid
    )


@pytest.mark.parametrize(
    ("tool", "verdict", "reason"),
    [
        ("hang", "tool_timeout", "no answer within 0.3 s"),
        ("leave", "env_error", "its process has ended with status 7"),
        ("junk", "env_error", "its reply is not valid"),
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
        if not os.path.exists(f"/proc/{bad._process.pid}"):
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


def test_a_stopped_process_ends_a_long_request_at_its_deadline(made):
    """A pipe holds 64 KB, so the request is not yet written when the deadline comes."""
    process = made().start("e")
    os.kill(process._process.pid, signal.SIGSTOP)
    with pytest.raises(EpisodeError, match=r"no answer within 0\.5 s") as raised:
        process.ask({"reset": {"goal": "x" * 1_000_000}}, 0.5)
    assert raised.value.verdict == "tool_timeout"
    process.end()


def test_a_start_that_fails_frees_its_place(made, monkeypatch):
    environments = made(workers=1)
    with monkeypatch.context() as patch:
        patch.setattr(environments._template, "fork", lambda: os.open("/no/such/file", 0))
        with pytest.raises(RewardError, match="the processes of environments do not start"):
            environments.start("e")
    environments.start("e").end()


class Hostile:
    def __init__(self, function, *arguments):
        self.made = function, arguments

    def __reduce__(self):
        return self.made


@pytest.mark.parametrize("value", [Hostile(os.system, "true"), Hostile(eval, "1"), sys.exit])
def test_attributes_are_plain_data_and_classes_of_the_file(value):
    """The process worked on what a model wrote: its pickle may come from there."""
    with pytest.raises(pickle.UnpicklingError, match="neither plain data nor a class"):
        Attributes(pickle.dumps({"a": value}), {"my_world"}).load()
    plain = {"a": [1, {2.5}, "x", None, (b"y",)], "b": Counter("ab"), "c": np.arange(3), "d": date(2026, 1, 2)}
    read = Attributes(pickle.dumps(plain), set()).load()
    assert read.keys() == plain.keys() and read["c"].tolist() == [0, 1, 2] and read["b"] == plain["b"]


def test_a_dotted_name_does_not_reach_into_what_a_file_imports(made):
    environments = made()
    [module] = environments._modules
    for name in ("os.system", "os", "time"):
        hostile = b"\x80\x04" + pickle.SHORT_BINUNICODE + bytes([len(module)]) + module.encode()
        hostile += pickle.SHORT_BINUNICODE + bytes([len(name)]) + name.encode() + pickle.STACK_GLOBAL + pickle.STOP
        with pytest.raises(pickle.UnpicklingError, match="neither plain data nor a class"):
            Attributes(hostile, environments._modules).load()
