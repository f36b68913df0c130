"""One episode: the process of its environment while it is live, and its trajectory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, cast

from posttrain.base.words import counted
from posttrain.data.codec import Reply
from posttrain.data.render import Message
from posttrain.data.rows import VARIABLES
from posttrain.environments.process import Environments, EpisodeError, EpisodeProcess
from posttrain.environments.trajectory import Calls, StopReason, Trajectory


@dataclass(frozen=True, slots=True)
class Start:
    """A row that an episode begins with."""

    messages: Sequence[Message]
    row: Mapping[str, Any]  # columns, for `reset`
    environment: str | None = None  # its name; None: the only one
    variables: Any = None  # of the chat template, as the row has them

    def conversation(self) -> list[Message]:
        """The messages before the environment adds to them; without any, an empty one of the user."""
        return [dict(message) for message in self.messages] or [{"role": "user", "content": ""}]


def start_of(facts: Mapping[str, Any]) -> Start:
    """The start of an episode from a row's facts: its messages, its columns, the environment that it names."""
    prompt, columns = facts["prompt"], facts["columns"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    return Start(messages, columns, columns.get("environment"), columns.get(VARIABLES))


@dataclass(frozen=True, slots=True)
class Trunk:
    """What a branch shares: the first replies of another episode."""

    index: int  # of that episode in the run
    trajectory: Trajectory
    replies: int


class Episode:
    """An episode: its process, while it is live, and its trajectory. Owned by one thread at a time."""

    def __init__(self, start: Start, seed: int, environments: Environments):
        self.start, self.seed, self._environments = start, seed, environments
        self.name = environments.name_of(start.environment)
        self._lock, self.process = Lock(), cast(EpisodeProcess | None, None)
        kind = environments.kinds[self.name]
        self.trajectory, self.calls, self._is_over = Trajectory([], [], title=kind.title, tools=kind.tools), 0, False
        self.is_game = kind.is_game
        self.root, self.trunk = 0, cast(Trunk | None, None)  # the episode that its tree begins with; where it branches

    @property
    def inner(self) -> range:
        """The numbers of its own replies that another reply follows."""
        first = 0 if self.trunk is None else self.trunk.replies
        return range(first + 1, self.trajectory.turns) if self.trajectory.has_verdict else range(0)

    def reset(self) -> Sequence[Message]:
        """Start the environment; returns what its `reset` adds to the messages."""
        process = self._environments.start(self.name)
        with self._lock:
            if self._is_over:  # the run ended while it waited for a place
                process.end()
                raise EpisodeError("env_error", "the run has ended")
            self.process = process
        row = {key: value for key, value in self.start.row.items() if key != "environment"}
        return process.ask({"reset": row}, self._environments.seconds(self.name))["messages"]

    def fail(self, error: EpisodeError) -> None:
        """End the episode without a verdict."""
        self.trajectory.stop_reason, self.trajectory.reason = error.verdict, error.reason
        self.end()

    def answer(self, parsed: Reply) -> tuple[list[Message], bool, Calls]:
        """The messages that follow a reply, whether the episode has ended, and the calls."""
        assert self.process is not None
        seconds = self._environments.seconds(self.name)
        if self.is_game:
            step = self.process.ask({"step": parsed.message}, seconds)
            self.trajectory.turn_rewards.append(step["reward"])
            self.trajectory.metrics |= step["metrics"]
            return step["messages"], step["done"], ()
        messages, calls, done = [], [], False
        for call, written in zip(parsed.calls, parsed.message.get("tool_calls", ()), strict=True):
            self.calls += 1
            told = self.process.ask({"call": call.name, "arguments": call.arguments}, seconds)
            result = {"role": "tool", "name": call.name, "tool_call_id": written["id"], "content": told["result"]}
            messages.append(result)
            calls.append((call.name, call.arguments, told["failed"]))
            done = done or told["done"]
        return messages, done, tuple(calls)

    def finish(self, reason: StopReason) -> None:
        """End the episode with its rewards. Raises EpisodeError without a verdict."""
        assert self.process is not None
        self.trajectory.stop_reason = reason
        reward, turns, state = self._environments.end(self.process, self.name)
        self.process = None
        self.trajectory.reward, self.trajectory.state = reward, state
        self.trajectory.turn_rewards = turns or self.trajectory.turn_rewards
        if len(turns) > self.trajectory.turns:
            replies = counted(self.trajectory.turns, "reply", "replies")
            raise EpisodeError("env_error", f"turn_rewards() has {len(turns)} rewards for {replies}")
        if self.is_game and reward is None:
            self.trajectory.reward = sum(self.trajectory.turn_rewards)

    def end(self) -> None:
        """Kill its process. May be called again, and from another thread."""
        with self._lock:
            self._is_over = True
            process, self.process = self.process, None
        if process is not None:
            process.end()
