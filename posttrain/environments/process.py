"""The supervisor's side of environments: one process for each episode, with a deadline for every request.

with Environments(settings, tools) as environments:
    environments.kinds["calculator"].tools            JSON schemas, from one instance made at the start
    process = environments.start("calculator")        waits while `environment_workers` episodes are live
    process.ask({"reset": row}, seconds)              raises EpisodeError; only this episode ends
"""

import base64
import contextlib
import io
import json
import os
import pickle
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal

from transformers.utils import get_json_schema

from posttrain.base.errors import DataError, RewardError
from posttrain.base.files import settings_folders, table_beside
from posttrain.base.functions import as_module, find_function
from posttrain.base.system import CAN_FORK
from posttrain.config.schema.rollout import EnvironmentConfig
from posttrain.grading.process import Deadlines, Template, worker_environment
from posttrain.grading.worker import named

BODY = "posttrain.environments.worker:serve"
_NAMES = table_beside(__file__, "process.yaml")
BUILT_IN, PLAIN = _NAMES["built_in"], _NAMES["plain"]
KEPT = ("PATH", "HOME", "LANG", "TZ")  # variables, besides those of grading workers
STARTUP_S = 120.0  # until the template has imported everything
TOOLS_S = 30.0  # for a call of a tool without an environment
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

    is_game: bool  # whether it answers messages instead of calls
    title: str  # its class's name; `tools` without an environment
    tools: tuple[dict[str, Any], ...]  # JSON schemas
    rewards: bool  # whether it rewards its episodes


class EpisodeProcess:
    """The process of one episode. Owned by one thread at a time; `end` may be called from any, and again."""

    def __init__(self, template: Template, deadlines: Deadlines, free: Callable[[Any], None]):
        self._process = template.fork()
        self._deadlines, self._free = deadlines, free  # `free` is called at the end
        self._lock = threading.Lock()
        self._is_ended = False

    def ask(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """The reply to a request. Raises EpisodeError after `seconds`, for an error, and if the process has ended."""
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise EpisodeError("env_error", f"what it is to receive cannot be sent: {error}") from None
        reply = self._within(seconds, line)
        if "error" in reply:
            raise EpisodeError("env_error", str(reply["error"]))
        return reply

    def wait_ready(self) -> None:
        """Wait until everything is imported. Raises EpisodeError if it does not start."""
        reply = self._within(STARTUP_S)
        if "ready" not in reply:
            raise EpisodeError("env_error", f"it does not start: {reply.get('failed')}")

    def kill(self) -> None:
        """Kill it without waiting."""
        self._process.kill()

    def end(self) -> None:
        """Kill it and free its place."""
        with self._lock:
            if self._is_ended:
                return
            self._is_ended = True
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.forget()
        self._free(self)

    def _within(self, seconds: float, line: bytes = b"") -> dict[str, Any]:
        """The next reply, after a line is written; the process is killed after `seconds`, which ends both."""
        self._deadlines.start(self, seconds)
        reply = None
        with contextlib.suppress(OSError, ValueError, RecursionError):  # it has ended, or the reply is not JSON
            self._process.stdin.write(line)
            self._process.stdin.flush()
            if read := self._process.stdout.readline(REPLY_BYTES):
                reply = json.loads(read)
            else:
                self._process.wait()
        if not self._deadlines.end(self):
            raise EpisodeError("tool_timeout", f"no answer within {seconds:g} s")
        if not isinstance(reply, dict):
            status = self._process.poll()
            self.kill()
            why = "its reply is not valid" if status is None else f"its process has ended with status {status}"
            raise EpisodeError("env_error", why)
        return reply


class Environments(contextlib.AbstractContextManager["Environments"]):
    """The environments of a run, by name; without any, tools alone are the environment None.

    Raises RewardError, before the first episode, for a class or a tool that does not work.
    """

    def __init__(self, settings: Sequence[EnvironmentConfig], tools: Sequence[str], workers: int):
        if not CAN_FORK:
            raise RewardError("environments need a system that can fork processes, which Windows cannot")
        self.settings, self.workers = {each.name: each for each in settings}, workers
        self._tools = [_module_name(name) for name in tools]
        self._places, self._deadlines = threading.Semaphore(workers), Deadlines()
        self._live, self._is_closed = set[EpisodeProcess](), False
        names = [*self._tools, *(_module_name(each.class_) for each in settings)]
        for name in names:
            _found(name)  # that it exists, in a file of the user's
        modules = dict.fromkeys(name.partition(":")[0] for name in names)
        environment = worker_environment() | {name: os.environ[name] for name in KEPT if name in os.environ}
        folders = os.pathsep.join(map(str, settings_folders()))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment["PYTHONPATH"], folders)))
        # What attributes may be made of: classes of the user's files, not of the built-in environments.
        self._modules = frozenset(modules) - {name.partition(":")[0] for name in BUILT_IN.values()}
        self._template = Template([BODY, *modules], environment)
        self.kinds: dict[str | None, Kind] = {}
        try:
            for name in self.settings or {None: None}:
                self.kinds[name] = self._kind(name)
        except BaseException:
            self.close()
            raise

    def _kind(self, name: str | None) -> Kind:
        settings = self.settings.get(name) if name is not None else None
        self._places.acquire()
        process = self._started()
        try:
            made = process.ask(self._make(name), STARTUP_S)
            served = {schema["function"]["name"]: schema for schema in made["schemas"]}
            tools = [served.get(tool) or _schema(self._tool(settings, tool)) for tool in made["tools"]]
        except EpisodeError as error:
            what = settings.class_ if settings is not None else ", ".join(self._tools)
            raise RewardError(f"the environment {what} does not work: {error}") from error
        finally:
            process.end()
        is_game = settings is not None and settings.contract == "messages"
        return Kind(is_game, made["name"] if settings else "tools", tuple(tools), made["rewards"])

    def _tool(self, settings: EnvironmentConfig | None, name: str) -> Callable[..., Any]:
        """The function of a tool: one of `tools`, or a method of the class, bound as on an instance."""
        for tool in self._tools:
            if (function := _found(tool)).__name__ == name:
                return function
        assert settings is not None
        return MethodType(getattr(_found(_module_name(settings.class_)), name), object())

    def _make(self, name: str | None) -> dict[str, Any]:
        settings = self.settings.get(name) if name is not None else None
        return {
            "make": None if settings is None else _module_name(settings.class_),
            "args": {} if settings is None else dict(settings.args),
            "contract": "tools" if settings is None else settings.contract,
            "folders": [os.getcwd(), *map(str, settings_folders())],
            "tools": self._tools,
        }

    def _started(self) -> EpisodeProcess:
        """A new process in a place that is taken, which it frees at its end."""
        try:
            if self._is_closed:
                raise EpisodeError("env_error", "the run has ended")
            process = EpisodeProcess(self._template, self._deadlines, self._freed)
            self._live.add(process)
        except BaseException as error:
            self._places.release()
            if isinstance(error, OSError):
                raise RewardError(f"the processes of environments do not start: {error}") from error
            raise
        try:
            process.wait_ready()
        except EpisodeError as error:
            process.end()
            raise RewardError(f"the processes of environments do not start: {error}") from error
        return process

    def _freed(self, process: EpisodeProcess) -> None:
        self._live.discard(process)
        self._places.release()

    def start(self, name: str | None) -> EpisodeProcess:
        """A new process with a fresh instance; waits for a free place. Raises EpisodeError, RewardError."""
        self._places.acquire()
        process = self._started()
        try:
            made = process.ask(self._make(name), self.seconds(name))
            expected = [tool["function"]["name"] for tool in self.kinds[name].tools]
            if made["tools"] != expected:
                raise EpisodeError("env_error", "its tools are not those of the first instance")
        except BaseException:
            process.end()
            raise
        return process

    def name_of(self, given: Any) -> str | None:
        """The environment of a row whose column `environment` is `given`. Raises DataError if there is no such one."""
        if given in self.kinds or len(self.kinds) == 1:
            return given if given in self.kinds else next(iter(self.kinds))
        names = ", ".join(map(str, self.kinds))
        raise DataError(f"a row needs the column `environment` to name one of {names}; it has {given!r:.60}")

    def seconds(self, name: str | None) -> float:
        """The deadline of a request."""
        return TOOLS_S if name is None else self.settings[name].timeout

    def end(self, process: EpisodeProcess, name: str | None) -> tuple[float | None, list[float], Any]:
        """End an episode: its reward, the rewards of its turns, and its attributes. Raises EpisodeError."""
        try:
            reply = process.ask({"end": True}, max(END_S, self.seconds(name)))
            return reply["reward"], reply["turn_rewards"], _state(reply["state"], self.kinds[name].title, self._modules)
        finally:
            process.end()

    def close(self) -> None:
        """End every process, then the deadlines. The template ends with its last process, and with this object."""
        self._is_closed = True
        for process in [*self._live]:
            process.end()
        self._deadlines.close()

    def __exit__(self, *exception: object) -> None:
        self.close()


class Attributes(pickle.Unpickler):
    """Reads attributes made of PLAIN and of the classes that these modules define."""

    def __init__(self, data: bytes, modules: Collection[str]):
        super().__init__(io.BytesIO(data))
        self._modules = modules

    def find_class(self, module: str, name: str) -> Any:
        if name in PLAIN.get(module, ()):
            return super().find_class(module, name)
        if module in self._modules:
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module:  # not what the module imports
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is neither plain data nor a class of the environment's file")


def _state(data: str, title: str, modules: Collection[str]) -> Any:
    """An environment's attributes as an object of a class of the same name, for rewards to read."""
    state: Any = type(title, (), {})()
    try:
        state.__dict__.update(Attributes(base64.b64decode(data), modules).load())
    except Exception as error:  # any exception of a damaged pickle, and of the user's classes
        raise EpisodeError("env_error", f"its attributes cannot be read: {error}") from error
    return state


def _schema(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a tool, from its type hints and its docstring."""
    try:
        return get_json_schema(function)
    except Exception as error:
        raise EpisodeError(
            "env_error",
            f"{function.__name__} cannot be a tool: {error} It needs type hints and a Google docstring with Args; a "
            "method that is no tool begins with an underscore",
        ) from error


def _found(name: str) -> Callable[..., Any]:
    """A class or function of a user's file, or a built-in class. Raises RewardError if there is none."""
    return named(name) if name in BUILT_IN.values() else find_function(name)


def _module_name(name: str) -> str:
    """`my.py:Env` as `my:Env`, and the class of a name of BUILT_IN."""
    if ":" not in name and name not in BUILT_IN:
        raise RewardError(f"{name!r} is neither FILE.py:CLASS nor a built-in environment ({', '.join(BUILT_IN)})")
    return BUILT_IN.get(name) or as_module(name)
