"""The process of one episode's environment: started from a template, it answers requests until it is ended.

It reads requests from stdin and writes a reply to each, one JSON object per line (`serve` runs in a process that
posttrain/grading/worker.py starts):

    {"make": "module:Class", "args": {…}, "contract": …, "tools": ["module:function"],
     "folders": [where it works, those of settings files]}
                                       {"name": Class, "tools": [names], "schemas": [of a ToolServer's tools],
                                        "rewards": whether it has any}
    {"reset": {column: value}}         {"messages": […], "done": …}; a string of `contract: tools` is one user message
    {"call": NAME, "arguments": {…}}   {"result": text, "failed": whether it raised, "done": …}
    {"step": message}                  {"messages": […], "reward": …, "done": …, "metrics": {…}}
    {"end": true}                      {"reward": …, "turn_rewards": […], "state": pickled attributes in base64}

An exception of `reset`, `step` or `get_reward` is `{"error": text}`: the episode has no verdict. That of a tool is the
tool's result, as in TRL. What the class prints is discarded.
"""

import asyncio
import base64
import contextlib
import inspect
import json
import math
import os
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from posttrain.base.files import remember_settings
from posttrain.base.terminal import visible
from posttrain.environments import ToolServer
from posttrain.grading.worker import end_with, limits, named, say

MEMORY_BYTES = 2_000_000_000  # of address space, beyond what the imports reserve if that is more
RESULT_CHARACTERS = 1_000_000  # of a tool's result; more is cut and counted as a failure
STATE_BYTES = 10_000_000  # of an environment's attributes
NOT_TOOLS = ("reset", "get_reward", "done", "turn_rewards", "close", "step")


def serve(jobs: BinaryIO, replies: BinaryIO, template: int | None = None) -> None:
    """Answer requests until stdin ends."""
    os.setsid()  # what a tool starts ends with it
    limits(MEMORY_BYTES, files_open=False)
    if not end_with(template):
        return
    say(replies, {"ready": []})
    episode = Episode()
    for line in jobs:
        say(replies, episode.answer(json.loads(line)))


class Episode:
    """An environment of one episode, with its tools."""

    def __init__(self) -> None:
        self.environment: Any = None
        self.tools: dict[str, Callable[..., Any]] = {}
        self._loop = asyncio.new_event_loop()

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to a request."""
        kind = next(iter(request))
        answers = {"make": self._make, "reset": self._reset, "call": self._call, "step": self._step, "end": self._end}
        try:
            return answers[kind](request)
        except Exception as error:
            return {"error": f"{kind}: {described(error)}"}

    def _make(self, request: Mapping[str, Any]) -> dict[str, Any]:
        folder, *others = request["folders"]
        os.chdir(folder)
        for other in others:
            remember_settings(Path(other, "settings"))
        if request["make"] is not None:
            self.environment = named(request["make"])(**request["args"])
        if self.environment is not None and not callable(getattr(self.environment, "reset", None)):
            raise TypeError("an environment needs a method `reset`")
        functions = [named(name) for name in request["tools"]]
        served: list[dict[str, Any]] = []
        if isinstance(self.environment, ToolServer):
            served = self._awaited(self.environment.schemas())
        elif request["contract"] == "tools" and self.environment is not None:
            names = (name for name, _ in inspect.getmembers(type(self.environment), inspect.isfunction))
            functions += [getattr(self.environment, n) for n in names if n not in NOT_TOOLS and not n.startswith("_")]
        tools = [(function.__name__, function) for function in functions]
        tools += [(name, partial(self._served, name)) for name in (schema["function"]["name"] for schema in served)]
        for name, tool in tools:
            if name in self.tools:
                raise TypeError(f"two tools are called {name}")
            self.tools[name] = tool
        return {
            "name": type(self.environment).__name__,
            "tools": list(self.tools),
            "schemas": served,
            "rewards": request["contract"] == "messages"
            or any(hasattr(self.environment, name) for name in ("get_reward", "turn_rewards")),
        }

    def _served(self, name: str, /, **arguments: Any) -> Any:
        return self.environment.call(name, arguments)

    def _reset(self, request: Mapping[str, Any]) -> dict[str, Any]:
        given = None if self.environment is None else self._awaited(self.environment.reset(**request["reset"]))
        return {"messages": _messages(given), "done": self._is_done()}

    def _call(self, request: Mapping[str, Any]) -> dict[str, Any]:
        name, failed = request["call"], False
        try:
            if name not in self.tools:
                raise ValueError(f"there is no tool {name}; there are {', '.join(self.tools) or 'none'}")
            result = self._awaited(self.tools[name](**request["arguments"]))
            if isinstance(result, list) and any(isinstance(part, Mapping) and "type" in part for part in result):
                result = _text_of(result)
            text = visible(str(result))
        except Exception as error:
            failed, text = True, visible(str({"error": str(error)}))
        if len(text) > RESULT_CHARACTERS:
            failed, text = True, text[:RESULT_CHARACTERS]
        return {"result": text, "failed": failed, "done": self._is_done()}

    def _step(self, request: Mapping[str, Any]) -> dict[str, Any]:
        step = self._awaited(self.environment.step(request["step"]))
        metrics = {str(name): float(value) for name, value in dict(step.metrics).items()}
        reward = _number(step.reward, "reward")
        return {"messages": _messages(step.messages), "reward": reward, "done": bool(step.done), "metrics": metrics}

    def _end(self, request: Mapping[str, Any]) -> dict[str, Any]:
        get_reward = getattr(self.environment, "get_reward", None)
        reward = None if get_reward is None else self._awaited(get_reward())
        turn_rewards = getattr(self.environment, "turn_rewards", None)
        given = [] if turn_rewards is None else self._awaited(turn_rewards())
        turns = [_number(value, "turn_rewards()") for value in given]
        if get_reward is None and turn_rewards is not None:
            reward = math.fsum(turns)
        reply = {
            "reward": None if reward is None else _number(reward, "get_reward()"),
            "turn_rewards": turns,
            "state": _pickled(self.environment),
        }
        with contextlib.suppress(Exception):
            self._awaited(getattr(self.environment, "close", lambda: None)())
        return reply

    def _is_done(self) -> bool:
        return bool(getattr(self.environment, "done", lambda: False)())

    def _awaited(self, value: Any) -> Any:
        return self._loop.run_until_complete(value) if inspect.isawaitable(value) else value


def described(error: BaseException) -> str:
    """An exception in a line."""
    return visible(f"{type(error).__name__}: {error}")[:500]


def _messages(given: Any) -> list[dict[str, Any]]:
    """Messages as plain text: of a string one of the user, of None none."""
    if given is None:
        return []
    if isinstance(given, str):
        return [{"role": "user", "content": visible(given)}]
    if not isinstance(given, list):
        raise TypeError(f"{type(given).__name__} is neither a string nor a list of messages")
    if given and all(isinstance(part, Mapping) and "type" in part and "role" not in part for part in given):
        return [{"role": "user", "content": _text_of(given)}]  # content blocks
    return [_message(message) for message in given]


def _message(given: Any) -> dict[str, Any]:
    """A message of plain text. Raises TypeError for anything else."""
    content = given.get("content") if isinstance(given, Mapping) else None
    content = _text_of(content) if isinstance(content, list) else content
    if not isinstance(content, str) or not isinstance(given.get("role"), str):
        raise TypeError(f"a message needs a role and a content of text, not {given!r:.200}")
    return {**given, "content": visible(content)}


def _text_of(parts: list[Any]) -> str:
    """The text of content blocks. Raises TypeError for others, such as images."""
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise TypeError(f"a content block of type {kind} is not supported: posttrain trains on text alone")
    return "".join(str(part["text"]) for part in parts)


def _number(value: Any, what: str) -> float:
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise TypeError(f"{what} is {value!r:.60}; a finite number is needed")
    return number


def _pickled(environment: Any) -> str:
    """The attributes of an environment. Raises TypeError, with its name, for one that cannot be pickled."""
    state = None if environment is None else environment.__getstate__()
    attributes = state if isinstance(state, dict) else {}
    for name, value in attributes.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"its attribute {name} cannot be pickled for rewards ({error}): delete it at the end of get_reward, or "
                "keep it outside of the instance"
            ) from None
    data = pickle.dumps(attributes)
    if len(data) > STATE_BYTES:
        raise TypeError(f"its attributes take {len(data):,} bytes; at most {STATE_BYTES:,} are kept for rewards")
    return base64.b64encode(data).decode()
