"""Episodes: a model and an environment take turns until one of them, or a limit, ends it.

    episodes = Episodes(engine, environments, codecs_of(environments, tokenizer), limits)
    groups = episodes.run(starts, n, sampling, seeds)       n trajectories of each start

Each episode's tokens only grow: the model's replies as they were sampled, and what the template writes of tools and
users (posttrain/data/codec.py). Calls of tools run in threads, each episode in its own process, so that a slow tool
delays no other episode.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, Self, cast

from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError
from posttrain.base.words import counted
from posttrain.config import RolloutConfig
from posttrain.config.schema.environments import EnvironmentConfig
from posttrain.config.schema.suite import SuiteConfig
from posttrain.data.codec import Codec, Reply
from posttrain.data.render import Message
from posttrain.engines import Completion, Engine, Sampling, seed_of
from posttrain.engines.turns import Turn, converse
from posttrain.environments.process import Environments, EpisodeError, EpisodeProcess
from posttrain.environments.trajectory import Calls, StopReason, Trajectory
from posttrain.models.families import positions_of

STARTS = 4  # environments that are reset at a time
SHOWN = 3  # reasons of failures that are logged for each rollout
log = logging.getLogger("posttrain")


@dataclass(frozen=True, slots=True)
class Limits:
    """When an episode ends at the latest."""

    max_completion_length: int  # tokens of all turns, those of tools included
    max_prompt_length: int
    max_turns: int | None = None  # replies
    max_tool_calls: int | None = None
    max_tool_result: int | None = None  # tokens of a tool's result; more are cut. None: without room, the episode ends

    @classmethod
    def of(cls, settings: RolloutConfig | SuiteConfig, room: int, config: Any, most: int | None = None) -> Self:
        """The limits of these settings with prompts of at most `room` tokens, and fewer if the model of this
        transformers configuration has fewer positions. `most`: tokens of all turns; None: those of the settings."""
        most, positions = most or settings.max_completion_length, positions_of(config)
        room = room if positions is None else min(room, positions + 1 - most)
        return cls(most, room, settings.max_turns, settings.max_tool_calls, settings.max_tool_result)


@dataclass(frozen=True, slots=True)
class Start:
    """A row that an episode begins with."""

    messages: Sequence[Message]
    row: Mapping[str, Any]  # columns, for `reset`
    environment: str | None = None  # its name; None: the only one


class Episodes:
    """Runs episodes on an engine. `codecs` are those for the tools of each environment.

    At most `environments.workers` episodes have an environment at a time; others begin when one ends.
    """

    def __init__(
        self,
        engine: Engine,
        environments: Environments,
        codecs: Mapping[str | None, Codec],
        limits: Limits,
    ):
        self.engine, self.codecs, self.environments, self.limits = engine, codecs, environments, limits
        # Each live episode has a thread for its turn, whatever others wait for.
        workers = environments.workers
        self._turns = ThreadPoolExecutor(workers, thread_name_prefix="posttrain-episodes")
        self._starts = ThreadPoolExecutor(min(workers, STARTS), thread_name_prefix="posttrain-episodes-start")

    def run(
        self,
        starts: Sequence[Start],
        n: int,
        sampling: Sampling,
        seeds: Sequence[int],
        seen: Callable[[int, Trajectory], None] = lambda index, trajectory: None,
    ) -> list[list[Trajectory]]:
        """`n` trajectories of each start, in order; number k of start i has the random streams (seeds[i], k, turn).
        `seen` is called with the index of an episode after each of its turns, in that episode's thread.

        An episode with a prompt above `max_prompt_length` ends as `context_overflow`. Raises DataError for a start
        whose environment is not known.
        """
        keys = [(index, number) for index in range(len(starts)) for number in range(n)]
        episodes = [_Episode(starts[index], seed_of(seeds[index], number), self.environments) for index, number in keys]
        begun = [self._starts.submit(self._begin, episode) for episode in episodes]

        def turn(index: int, reply: Completion) -> Turn | None:
            following = self._turn(episodes[index], reply)
            seen(index, episodes[index].trajectory)
            return following

        def follow(index: int, reply: Completion) -> Future[Turn | None]:
            return self._turns.submit(turn, index, reply)

        longest = self.limits.max_prompt_length + self.limits.max_completion_length
        try:
            converse(self.engine, begun, sampling, follow=follow, longest=longest)
        finally:
            for future in begun:
                future.cancel()
            for episode in episodes:
                episode.end()
        made = [episode.trajectory for episode in episodes]
        failed = Counter(f"{each.stop_reason}: {each.reason}" for each in made if not each.has_verdict)
        for why, count in failed.most_common(SHOWN):
            log.warning("%s of %d dropped without a verdict: %s", counted(count, "episode"), len(made), why)
        return [made[index * n : (index + 1) * n] for index in range(len(starts))]

    def close(self) -> None:
        """End the threads."""
        for threads in (self._starts, self._turns):
            threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, episode: _Episode) -> Turn | None:
        """Reset an episode's environment and return its prompt; None if that has failed."""
        codec = self.codecs[episode.name]
        messages = [dict(message) for message in episode.start.messages] or [{"role": "user", "content": ""}]
        try:
            _extend(messages, episode.reset())
            episode.trajectory.prompt = codec.first(messages)
            if len(episode.trajectory.prompt) > self.limits.max_prompt_length:
                return episode.finish("context_overflow")
        except EpisodeError as error:
            return episode.fail(error)
        except DataError as error:
            return episode.fail(EpisodeError("env_error", f"its messages cannot be rendered: {error}"))
        return Turn(episode.trajectory.prompt, episode.seed, self.limits.max_completion_length)

    def _turn(self, episode: _Episode, reply: Completion) -> Turn | None:
        """Add a reply and what the environment answers; None if the episode has ended."""
        trajectory, codec = episode.trajectory, self.codecs[episode.name]
        trajectory.version = reply.version
        trajectory.add("model", reply.tokens, reply.logprobs)
        parsed = codec.parse(reply.tokens)
        trajectory.messages.append(parsed.message)
        trajectory.malformed += parsed.malformed
        try:
            if (ended := self._ended(episode, reply, parsed)) is not None:
                return episode.finish(ended)
            messages, done, calls = episode.answer(parsed)
            ended = "env_done" if done else self._last(episode)
            if not messages:
                return episode.finish(ended or "completed")
            added = codec.bridge([*trajectory.prompt, *trajectory.tokens], self._cut(messages, codec))
            if len(trajectory.tokens) + len(added) < self.limits.max_completion_length:
                trajectory.add("user" if episode.is_game else "tool", added, calls=calls)
                trajectory.messages += messages
            else:  # without the messages, as in TRL
                trajectory.parts[-1].calls, ended = calls, ended or "max_tokens"
            if ended is not None:
                return episode.finish(ended)
        except EpisodeError as error:
            return episode.fail(error)
        except DataError as error:
            if not episode.is_game:
                raise
            return episode.fail(EpisodeError("env_error", f"its messages cannot be rendered: {error}"))
        left = self.limits.max_completion_length - len(trajectory.tokens)
        return Turn(added, seed_of(episode.seed, trajectory.turns), left)

    def _ended(self, episode: _Episode, reply: Completion, parsed: Reply) -> StopReason | None:
        """Why an episode ends with this reply; None if the environment answers it."""
        limits = self.limits
        if reply.finish_reason == "length":
            return "max_tokens"
        if episode.is_game:
            return None
        if not parsed.calls:
            return "parse_error" if parsed.malformed else "completed"
        if limits.max_tool_calls is not None and episode.calls + len(parsed.calls) > limits.max_tool_calls:
            return "max_tool_calls"
        return self._last(episode)

    def _last(self, episode: _Episode) -> StopReason | None:
        """`max_turns` if no further reply may follow. A game answers the last one; a tool is not called by it."""
        most = self.limits.max_turns
        return "max_turns" if most is not None and episode.trajectory.turns >= most else None

    def _cut(self, messages: Sequence[Message], codec: Codec) -> list[Message]:
        """The messages with the results of tools within `max_tool_result` tokens."""
        most = self.limits.max_tool_result
        if most is None:
            return list(messages)
        return [{**m, "content": codec.cut(m["content"], most)} if m["role"] == "tool" else m for m in messages]


class _Episode:
    """An episode: its process, while it is live, and its trajectory. Owned by one thread at a time."""

    def __init__(self, start: Start, seed: int, environments: Environments):
        self.start, self.seed, self._environments = start, seed, environments
        self.name = environments.name_of(start.environment)
        self._lock, self.process = Lock(), cast(EpisodeProcess | None, None)
        kind = environments.kinds[self.name]
        self.trajectory, self.calls, self._is_over = Trajectory([], messages=[], title=kind.title), 0, False
        self.is_game = kind.is_game

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
        for call in parsed.calls:
            self.calls += 1
            told = self.process.ask({"call": call.name, "arguments": call.arguments}, seconds)
            messages.append({"role": "tool", "name": call.name, "content": told["result"]})
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


@contextmanager
def acting(
    environments: Sequence[EnvironmentConfig],
    tools: Sequence[str],
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    limits: Limits,
    workers: int = 64,
    date: str | None = None,
) -> Iterator[Episodes]:
    """Episodes outside of training. Raises RewardError for an environment that does not work, DataError for a chat
    template that cannot be used."""
    with (
        Environments(environments, tools, workers) as made,
        closing(Episodes(engine, made, codecs_of(made, tokenizer, date), limits)) as episodes,
    ):
        yield episodes


def codecs_of(
    environments: Environments, tokenizer: PreTrainedTokenizerBase, date: str | None = None
) -> dict[str | None, Codec]:
    """A codec for the tools of each environment. Raises DataError for a chat template that cannot be used."""
    return {name: Codec(tokenizer, kind.tools, date=date) for name, kind in environments.kinds.items()}


def start_of(facts: Mapping[str, Any]) -> Start:
    """The start of an episode from a row's facts: its messages, its columns, the environment that it names."""
    prompt, columns = facts["prompt"], facts["columns"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    return Start(messages, columns, columns.get("environment"))


def _extend(messages: list[Message], observed: Sequence[Message]) -> None:
    """Add what `reset` returned: a string to the last user message, as TRL does, and messages behind the others."""
    for message in observed:
        if len(observed) == 1 and message["role"] == "user" and messages[-1]["role"] == "user":
            messages[-1]["content"] += message["content"]
        else:
            messages.append(dict(message))
