"""The supervisor's side of environments: one process for each episode, with a deadline for every request.

with Environments(settings, tools) as environments:
    environments.kinds["calculator"].tools            JSON schemas, from one instance made at the start
    process = environments.start("calculator")        waits while `environment_workers` episodes are live
    process.ask({"reset": row}, seconds)              raises EpisodeError; only this episode ends
"""

import base64
import contextlib
import json
import os
import pickle
import select
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from posttrain.base.errors import RewardError
from posttrain.base.files import settings_folders
from posttrain.base.system import CAN_FORK
from posttrain.config.schema.environments import EnvironmentConfig
from posttrain.grading.process import Template, worker_environment
from posttrain.rewards.python import find_function

BODY = "posttrain.environments.worker:serve"
STARTUP_S = 120.0  # until the template has imported everything
END_S = 10.0  # for `get_reward` and the attributes, unless the environment's own deadline is longer
REPLY_BYTES = 32_000_000


class EpisodeError(Exception):
    """An episode's environment gave no answer: `verdict` is the stop reason, tool_timeout or env_error."""

    def __init__(self, verdict: Literal["tool_timeout", "env_error"], reason: str):
        super().__init__(reason)
        self.verdict: Literal["tool_timeout", "env_error"] = verdict
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Kind:
    """What is known of an environment before its episodes."""

    settings: EnvironmentConfig | None  # None: tools without an environment
    title: str  # its class's name
    tools: tuple[dict[str, Any], ...]  # JSON schemas
    rewards: bool  # whether it has `get_reward`


class EpisodeProcess:
    """The process of one episode. Owned by one thread at a time; `end` may be called from any, and again."""

    def __init__(self, template: Template, ended: threading.Semaphore | None = None):
        self._process = template.fork()
        self._buffer = b""
        self._ended = ended
        self._lock = threading.Lock()
        self._is_ended = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The reply to a request. Raises EpisodeError after `seconds`, for an error, and if the process has ended."""
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise EpisodeError("env_error", f"its process has ended with status {self._process.wait()}") from None
        reply = self._reply(time.monotonic() + seconds, seconds)
        if "error" in reply:
            raise EpisodeError("env_error", str(reply["error"]))
        return reply

    def wait_ready(self, seconds: float = STARTUP_S) -> None:
        """Wait until everything is imported. Raises EpisodeError if it does not start."""
        reply = self._reply(time.monotonic() + seconds, seconds)
        if "ready" not in reply:
            raise EpisodeError("env_error", f"it does not start: {reply.get('failed')}")

    def end(self) -> None:
        """Kill it and free its place."""
        with self._lock:
            if self._is_ended:
                return
            self._is_ended = True
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.forget()
        if self._ended is not None:
            self._ended.release()

    def _reply(self, until: float, seconds: float) -> dict[str, Any]:
        descriptor = self._process.stdout.fileno()
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            if left <= 0:
                self.end()
                raise EpisodeError("tool_timeout", f"no answer within {seconds:g} s")
            if not poller.poll(1000 * min(left, 0.2)):
                continue
            data = os.read(descriptor, 1 << 20)
            if not data:
                raise EpisodeError("env_error", f"its process has ended with status {self._process.wait()}")
            self._buffer += data
            if len(self._buffer) > REPLY_BYTES:
                self.end()
                raise EpisodeError("env_error", f"its reply has more than {REPLY_BYTES:,} bytes")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)


class Environments:
    """The environments of a run, by name; without any, tools alone are the environment None.

    Raises RewardError, before the first episode, for a class or a tool that does not work.
    """

    def __init__(self, settings: Sequence[EnvironmentConfig], tools: Sequence[str], workers: int):
        if not CAN_FORK:
            raise RewardError("environments need a system that can fork processes, which Windows cannot")
        self.settings = {each.name: each for each in settings}
        self._tools = [_module_name(name) for name in tools]
        self._places = threading.Semaphore(workers)
        names = [*self._tools, *(_module_name(each.class_) for each in settings)]
        for name in names:
            find_function(name)  # that it exists, in a file of the user's
        modules = dict.fromkeys(name.partition(":")[0] for name in names)
        environment = worker_environment()
        folders = os.pathsep.join(map(str, settings_folders()))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment["PYTHONPATH"], folders)))
        self._template = Template([BODY, *modules], environment)
        self.kinds: dict[str | None, Kind] = {}
        for name in self.settings or {None: None}:
            self.kinds[name] = self._kind(name)

    def _kind(self, name: str | None) -> Kind:
        settings = self.settings.get(name) if name is not None else None
        process = self._started(name, None)
        try:
            made = process.ask(self._make(name) | {"describe": True}, STARTUP_S)
        except EpisodeError as error:
            what = settings.class_ if settings is not None else ", ".join(self._tools)
            raise RewardError(f"the environment {what} does not work: {error}") from error
        finally:
            process.end()
        return Kind(settings, made["name"], tuple(made["tools"]), made["rewards"])

    def _make(self, name: str | None) -> dict[str, Any]:
        settings = self.settings.get(name) if name is not None else None
        return {
            "make": None if settings is None else _module_name(settings.class_),
            "args": {} if settings is None else dict(settings.args),
            "contract": "tools" if settings is None else settings.contract,
            "tools": self._tools,
        }

    def _started(self, name: str | None, places: threading.Semaphore | None) -> EpisodeProcess:
        process = EpisodeProcess(self._template, places)
        try:
            process.wait_ready()
        except EpisodeError as error:
            process.end()
            raise RewardError(f"the processes of environments do not start: {error}") from error
        return process

    def start(self, name: str | None) -> EpisodeProcess:
        """A new process with a fresh instance; waits for a free place. Raises EpisodeError, RewardError."""
        self._places.acquire()
        process = self._started(name, self._places)
        try:
            made = process.ask(self._make(name), self.seconds(name))
            expected = [tool["function"]["name"] for tool in self.kinds[name].tools]
            if made["tools"] != expected:
                raise EpisodeError("env_error", "its tools are not those of the first instance")
        except BaseException:
            process.end()
            raise
        return process

    def seconds(self, name: str | None) -> float:
        """The deadline of a request."""
        return 30.0 if name is None else self.settings[name].timeout

    def end(self, process: EpisodeProcess, name: str | None) -> tuple[float | None, list[float], Any]:
        """End an episode: its reward, the rewards of its turns, and its attributes. Raises EpisodeError."""
        try:
            reply = process.ask({"end": True}, max(END_S, self.seconds(name)))
            return reply["reward"], reply["turn_rewards"], _state(reply["state"], self.kinds[name].title)
        finally:
            process.end()

    def close(self) -> None:
        """End the template, and with it every process."""
        del self._template

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _state(data: str, title: str) -> Any:
    """An environment's attributes as an object of a class of the same name, for rewards to read."""
    state: Any = type(title, (), {})()
    state.__dict__.update(pickle.loads(base64.b64decode(data)))
    return state


def _module_name(name: str) -> str:
    """`my.py:Env` as `my:Env`."""
    file, colon, attribute = name.rpartition(":")
    return f"{file.removesuffix('.py').replace(os.sep, '.')}{colon}{attribute}"
