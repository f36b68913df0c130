"""One episode: the process of its environment while it is live, and its trajectory.

Some episodes of a start branch from others (Tree-GRPO, arXiv 2509.21240): which do, and when they begin.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import chain
from threading import Lock
from typing import Any, cast

import numpy as np

from posttrain.base.words import counted
from posttrain.data.codec import Reply
from posttrain.data.render import Message
from posttrain.data.rows import VARIABLES
from posttrain.engines.turns import Turn
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
            answer = self.process.ask({"call": call.name, "arguments": call.arguments}, seconds)
            result = {"role": "tool", "name": call.name, "tool_call_id": written["id"], "content": answer["result"]}
            messages.append(result)
            calls.append((call.name, call.arguments, answer["failed"]))
            done = done or answer["done"]
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


@dataclass(frozen=True, slots=True)
class Forest:
    """How the episodes of a start branch: the first `trees` begin anew. The others branch from turns of these, an
    equal number in each of `rounds`; those of a later round may also branch from earlier branches."""

    trees: int
    rounds: int = 1

    def rounds_of(self, tree: int, n: int) -> list[list[int]]:
        """The numbers of a tree's episodes by round, of `n` in all; the first round has the one that begins anew."""
        branches = np.arange(tree + self.trees, n, self.trees)
        return [[tree], *(part.tolist() for part in np.array_split(branches, self.rounds) if len(part))]


class Growth:
    """Begins the episodes of a run: those that begin anew at once, branches when the round before them is over.
    `first_turns` are futures. `begin` starts an episode; `repeat` gives a branch its shared turns."""

    def __init__(
        self,
        episodes: Sequence[Episode],
        n: int,
        forest: Forest | None,
        begin: Callable[[Episode], Future[Turn | None]],
        repeat: Callable[[Episode, Trunk], Future[Turn | None]],
    ):
        self.episodes, self.n, self.begin, self.repeat = episodes, n, begin, repeat
        trees = n if forest is None else forest.trees
        self.first_turns = [Future[Turn | None]() for _ in episodes]
        self._lock, self._started = Lock(), list[Future[Turn | None]]()
        self._rounds: dict[int, list[list[int]]] = {}  # of each tree, by the index of its first episode
        for first in range(0, len(episodes), n):
            for tree in range(min(trees, n)):
                rounds = [[tree]] if forest is None else forest.rounds_of(tree, n)
                self._rounds[first + tree] = [[first + number for number in part] for part in rounds]
                for number in chain(*rounds):
                    episodes[first + number].root = first + tree
                    episodes[first + number].trajectory.tree = None if forest is None else tree
        self._live = {root: 1 for root in self._rounds}  # episodes of the current round that are not over

    def plant(self) -> None:
        """Start the episodes that begin anew."""
        for root in self._rounds:
            self._start(root)

    def stop(self) -> None:
        for future in (*self._started, *self.first_turns):
            future.cancel()

    def answered(self, index: int, future: Future[Turn | None]) -> None:
        """Called when it is known what follows in an episode. If this is nothing, branches may begin."""
        if future.cancelled() or future.exception() is not None or future.result() is not None:
            return
        try:
            self._grow(self.episodes[index].root)
        except BaseException as error:  # a callback's error would be lost, and the run would wait for these futures
            for each in self.first_turns:
                if not each.done():
                    each.set_exception(error)
            raise

    def _grow(self, root: int) -> None:
        """Note that an episode of a tree is over; start those of the next round if it was the last one."""
        with self._lock:
            self._live[root] -= 1
            if self._live[root] or len(self._rounds[root]) == 1:
                return
            grown, following = self._rounds[root][:2]
            self._rounds[root][:2] = [[*grown, *following]]
            self._live[root] = len(following)
        nodes = [(trunk, replies) for trunk in grown for replies in self.episodes[trunk].inner]
        order = np.random.default_rng([self.episodes[root].seed, len(grown)]).permutation(len(nodes))
        for position, branch in enumerate(following):
            if nodes:
                trunk, replies = nodes[order[position % len(nodes)]]
                self.episodes[branch].trunk = Trunk(trunk, self.episodes[trunk].trajectory, replies)
                self.episodes[branch].trajectory.trunk = trunk % self.n
            self._start(branch)

    def _start(self, index: int) -> None:
        if self.first_turns[index].set_running_or_notify_cancel():
            self._started.append(started := self.begin(self.episodes[index]))
            started.add_done_callback(partial(self._has_started, index))

    def _has_started(self, index: int, future: Future[Turn | None]) -> None:
        if future.cancelled():
            return
        episode = self.episodes[index]
        if (error := future.exception()) is not None:
            self.first_turns[index].set_exception(error)
        elif future.result() is not None and episode.trunk is not None and not episode.trajectory.shared:
            self._started.append(repeated := self.repeat(episode, episode.trunk))
            repeated.add_done_callback(partial(self._has_started, index))
        else:
            self.first_turns[index].set_result(future.result())
            self.answered(index, future)
