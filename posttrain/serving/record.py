"""Records the conversations of agents that use the server, as episodes for training.

turn = recorder.turn(codec, kind, messages, episode)      the tokens to complete: of the conversation so far, and more
recorder.replied(turn, completion)
recorder.reward(turn.episode, 1.0, {})                    stored in rollouts.sqlite

A request continues the conversation whose messages it begins with: the model's replies keep the tokens that were
sampled, and what follows them is appended, never rendered again. Requests that continue one conversation differently
make branches. Messages are compared by role, text and calls, so agents may drop ids and reasoning, and write arguments
with other spaces.
"""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from posttrain.base.errors import DataError, PosttrainError, RunError
from posttrain.base.log import log
from posttrain.data.codec import Codec
from posttrain.data.render import Message
from posttrain.engines import Completion
from posttrain.environments.trajectory import Trajectory, rewarded_as
from posttrain.rewards.compose import Rewards
from posttrain.rewards.parts import CompletionReward
from posttrain.runs.folder import FolderLock
from posttrain.runs.rollouts import GIB, NAME, RolloutStore, StoredPrompt, StoredRollout
from posttrain.runs.stored_rollouts import StoredRun
from posttrain.serving.texts import cut
from posttrain.training.evaluation import parts_of

MOST_GB = 20
MOST_OPEN = 4096  # episodes without a reward
TITLE = "agent"  # names the reward that a client gives
Keys = tuple[str, ...]  # messages as they are compared
Kind = tuple[str, ...]  # the policy's name, and what else a conversation cannot change: tools, template variables


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """A conversation after a reply, or before the first one."""

    messages: Keys
    trajectory: Trajectory
    codec: Codec
    kind: Kind
    prompt: Sequence[Message]
    before: "State | None" = None

    @property
    def path(self) -> Iterator["State"]:
        """This state and those before it."""
        state: State | None = self
        while state is not None:
            yield state
            state = state.before


@dataclass(slots=True)
class Open:
    """An episode without a reward: its states, by their messages, and those that a further turn continues."""

    name: str
    states: dict[Keys, list[State]] = field(default_factory=dict)
    continued: set[State] = field(default_factory=set)
    is_over: bool = False

    @property
    def leaves(self) -> list[State]:
        return [state for state in chain(*self.states.values()) if state not in self.continued]


@dataclass(frozen=True, slots=True)
class Turn:
    """A request: its episode, the state that it continues, the messages behind that, and their tokens."""

    opened: Open
    state: State
    messages: Sequence[Message]
    bridge: Sequence[int]

    @property
    def episode(self) -> str:
        return self.opened.name

    @property
    def tokens(self) -> list[int]:
        """The tokens to complete."""
        return [*self.state.trajectory.prompt, *self.state.trajectory.tokens, *self.bridge]


class Recorder:
    """Records into `folder`, as a further step of its store. Methods may be called from any thread.

    `rewards` add to the reward that a client gives; its name among them is TITLE. Raises RunError for the folder of a
    training run, and for one that another server records into.
    """

    def __init__(self, folder: Path, rewards: Rewards):
        if (folder / "run.json").exists():
            raise RunError(f"--record {folder}: this folder has a training run; give another folder")
        folder.mkdir(parents=True, exist_ok=True)
        self._resources = ExitStack()
        self._resources.callback(FolderLock(folder).release)
        self._resources.enter_context(rewards)
        self.folder, self.rewards = folder, rewards
        self._lock, self._ending = Lock(), Lock()
        self._open = dict[str, Open]()
        # Of each prompt with its facts: its index, and the number of its completions.
        self._stored = dict[tuple[Any, ...], tuple[int, int]]()
        self.step = 1
        if (folder / NAME).is_file():
            with StoredRun(folder) as stored:
                self.step += max(stored.steps(), default=0)
        self._store = RolloutStore(folder, MOST_GB * GIB, self.step)
        self._resources.callback(self._store.close)

    def turn(self, codec: Codec, kind: Kind, messages: Sequence[Message], episode: str | None) -> Turn:
        """What a request continues. `episode`: the name that the client gives; None: that of the conversation.

        Raises DataError if several episodes without a name have the same messages, or too many are open."""
        keys = tuple(map(_key, messages))
        with self._lock:
            opened, state = self._longest(kind, keys, episode) or (self._new(episode), None)
        if state is None:
            if any(map(_is_reply, keys)):
                log.warning("episode %s begins with replies that were not sampled here", opened.name)
            state = State(keys, Trajectory(codec.first(messages), [], title=TITLE), codec, kind, messages)
            return Turn(opened, state, (), ())
        rest = messages[len(state.messages) :]
        tokens = [*state.trajectory.prompt, *state.trajectory.tokens]
        return Turn(opened, state, rest, state.codec.bridge(tokens, rest))

    def _new(self, episode: str | None) -> Open:
        """The episode of a new conversation."""
        name = episode or secrets.token_hex(8)
        if len(self._open) >= MOST_OPEN:  # some may be of requests that failed
            self._open = {name: opened for name, opened in self._open.items() if opened.states}
        if name not in self._open and len(self._open) >= MOST_OPEN:
            raise DataError(f"{MOST_OPEN:,} episodes are open: give them rewards (POST /v1/rewards)")
        return self._open.setdefault(name, Open(name))

    def _longest(self, kind: Kind, keys: Keys, episode: str | None) -> tuple[Open, State] | None:
        """The newest state with the most messages that a request begins with. No reply may follow these, since it would
        be one that was not sampled."""
        opened = [each for each in self._open.values() if episode in (None, each.name) and not each.is_over]
        for count in range(len(keys) - 1, 0, -1):
            if _is_reply(keys[count]):
                break
            same = [(each, each.states.get(keys[:count], [])) for each in opened]
            found = [(each, state) for each, states in same for state in states if state.kind == kind]
            if len({each.name for each, _ in found}) > 1:
                names = ", ".join(each.name for each, _ in found)
                raise DataError(
                    f"the episodes {names} begin with these messages: send the header X-Posttrain-Episode of the first "
                    "response with every request of a conversation"
                )
            if found:
                return found[-1]
        return None

    def replied(self, turn: Turn, completion: Completion, stops: Sequence[str] = ()) -> None:
        """Add the reply to a turn. `stops`: strings before which the client's text ends."""
        state, before = turn.state, turn.state.trajectory
        made = replace(
            before, messages=[*before.messages, *turn.messages], tokens=[*before.tokens], trained=[*before.trained],
            logprobs=[*before.logprobs], parts=[*before.parts], version=completion.version,
            stop_reason="max_tokens" if completion.finish_reason == "length" else "completed",
        )  # fmt: skip
        if turn.bridge:
            is_tool = turn.messages[0]["role"] == "tool"
            calls = [call["function"] for call in before.messages[-1].get("tool_calls") or ()] if is_tool else []
            made.add(
                "tool" if is_tool else "user", turn.bridge,
                calls=tuple((call["name"], call["arguments"], False) for call in calls),
            )  # fmt: skip
        made.add("model", completion.tokens, completion.logprobs)
        reply = state.codec.parse(completion.tokens)
        message = {**reply.message, "content": cut(reply.content, stops)}
        made.messages.append(message)
        made.malformed += reply.malformed
        messages = (*state.messages, *map(_key, turn.messages), _key(message))
        with self._lock:
            if turn.opened.is_over:
                log.warning("a reply came after the reward of episode %s: it is not stored", turn.episode)
                return
            opened = self._open.setdefault(turn.episode, turn.opened)
            after = State(messages, made, state.codec, state.kind, state.prompt, state)
            opened.states.setdefault(messages, []).append(after)
            opened.continued.add(state)

    def reward(self, episode: str, reward: float | None, columns: Mapping[str, Any]) -> list[float | None]:
        """End an episode and store its conversations, each with the sum of this reward and those of the settings, which
        read the `columns`. Returns the sums. Raises DataError for an unknown episode; RewardError and RunError, after
        which the episode is still open."""
        with self._ending:  # rewards are computed for one episode at a time
            with self._lock:
                opened = self._open.get(episode)
                if opened is None or not opened.states:
                    raise DataError(f"there is no open episode {episode!r}: it has had no reply, or has been rewarded")
                opened.is_over = True
            try:
                self._store.check()
                leaves = opened.leaves
                facts = [_facts(leaf, columns) for leaf in leaves]
                inputs = [replace(leaf.trajectory, reward=reward) for leaf in leaves]
                rewarded = self.rewards([rewarded_as(*pair) for pair in zip(inputs, facts, strict=True)])
                self._put(leaves, rewarded, facts)
                self._store.flush()
            except BaseException:
                opened.is_over = False
                raise
            with self._lock:
                self._open.pop(episode, None)
            return list(rewarded.totals)

    def _put(
        self, leaves: Sequence[State], rewards: Sequence[CompletionReward], facts: Sequence[Mapping[str, Any]]
    ) -> None:
        """Store the conversations of an episode. One that shares turns with an earlier one is a branch of it."""
        placed: list[tuple[State, int, int]] = []  # with the number of the completion, and of its tree
        for leaf, reward, fact in zip(leaves, rewards, facts, strict=True):
            key = (*leaf.trajectory.prompt, json.dumps(fact, sort_keys=True, default=str))
            is_new = key not in self._stored
            index, number = self._stored.get(key, (len(self._stored), 0))
            self._stored[key] = index, number + 1
            common = [(_shared(leaf, other), *where) for other, *where in placed]
            shared, trunk, tree = max(common, default=(0, None, number), key=lambda each: each[0])
            trunk, tree = (trunk, tree) if shared else (None, number)
            placed.append((leaf, number, tree))
            made = replace(leaf.trajectory, tree=tree, trunk=trunk, shared=shared, reward=reward.total)
            arrays = {"tokens": np.asarray(made.tokens), "sampler_logprobs": np.asarray(made.logprobs)}
            text = str(leaf.codec.tokenizer.decode(made.tokens))
            stored = StoredRollout(
                index, number, text, reward.total, None, made.finish_reason, made.version, parts_of(reward), arrays,
                np.asarray(made.trained, bool), made.stored(),
            )  # fmt: skip
            shown = "\n".join(str(message["content"]) for message in leaf.prompt)
            asked = [StoredPrompt(index, shown, made.prompt, fact)] if is_new else []
            self._store.add(self.step, 0.0, asked, [stored], first=index)

    def close(self) -> None:
        """Store open episodes without rewards, and end."""
        with self._resources:
            for opened in list(self._open.values()):
                opened.is_over, leaves = True, opened.leaves
                self._put(leaves, [CompletionReward()] * len(leaves), [_facts(leaf, {}) for leaf in leaves])
            self._open.clear()
            try:
                self._store.flush()
            except PosttrainError as error:
                log.error("the last episodes are not stored: %s", error)


def _facts(leaf: State, columns: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a prompt, for rewards and for those who read the store."""
    more = {"answer": columns.get("answer"), "columns": columns, "tools": leaf.codec.tools, "policy": leaf.kind[0]}
    return {"prompt": list(leaf.prompt), **more}


def _shared(one: State, other: State) -> int:
    """The number of tokens of the turns that two conversations share."""
    of_other = set(other.path)
    return next((len(state.trajectory.tokens) for state in one.path if state in of_other), 0)


def _key(message: Message) -> str:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    parts = [[call["name"], _plain(call["arguments"])] for call in calls]
    return json.dumps([message["role"], str(message["content"]).strip(), parts], sort_keys=True)


def _plain(value: Any) -> Any:
    """A JSON value with whole numbers as integers: some clients write 3.0 as 3."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [*map(_plain, value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_reply(key: str) -> bool:
    return json.loads(key)[0] == "assistant"
