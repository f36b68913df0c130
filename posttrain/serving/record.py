"""Records the conversations of agents that use the server, as episodes for training.

turn = recorder.turn(codec, messages, episode)      the tokens to complete: those of the conversation so far, and more
recorder.replied(turn, completion)
recorder.reward(turn.episode, 1.0)                  stored in rollouts.sqlite

A request continues the conversation whose messages it begins with: the model's replies keep the tokens that were
sampled, and what follows them is appended, never rendered again. Requests that continue one conversation differently
make branches. Messages are compared by role, text and calls, so agents may drop ids and reasoning, and write arguments
with other spaces.
"""

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from posttrain.base.errors import DataError, RunError
from posttrain.data.codec import Codec
from posttrain.data.render import Message
from posttrain.data.turns import common_prefix
from posttrain.engines import Completion
from posttrain.environments.trajectory import Trajectory, rewarded_as
from posttrain.rewards.compose import Rewards
from posttrain.rewards.parts import CompletionReward, RewardInput
from posttrain.runs.folder import FolderLock
from posttrain.runs.rollouts import GIB, NAME, RolloutStore, StoredPrompt, StoredRollout
from posttrain.runs.stored_rollouts import StoredRun
from posttrain.training.evaluation import parts_of

MOST_GB = 20
MOST_OPEN = 4096  # episodes without a reward
TITLE = "agent"  # names the reward that a client gives
Keys = tuple[str, ...]  # messages as they are compared


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """A conversation after a reply, or before the first one."""

    messages: Keys
    trajectory: Trajectory
    codec: Codec
    prompt: Sequence[Message]


@dataclass(frozen=True, slots=True)
class Turn:
    """A request: the state that it continues, the messages behind that, and their tokens."""

    episode: str
    state: State
    messages: Sequence[Message]
    bridge: Sequence[int]

    @property
    def tokens(self) -> list[int]:
        """The tokens to complete."""
        return [*self.state.trajectory.prompt, *self.state.trajectory.tokens, *self.bridge]


@dataclass(slots=True)
class Open:
    """An episode without a reward: its states, by their messages, and those that a further turn continues."""

    states: dict[Keys, list[State]] = field(default_factory=dict)
    continued: set[State] = field(default_factory=set)

    @property
    def leaves(self) -> list[State]:
        return [state for state in chain(*self.states.values()) if state not in self.continued]


class Recorder:
    """Records into `folder`, as a further step of its store. Methods may be called from any thread.

    `rewards` add to the reward that a client gives; its name among them is TITLE. Raises RunError for the folder of a
    training run, and for one that another server records into.
    """

    def __init__(self, folder: Path, rewards: Rewards, save_tokenizer: Callable[[str], Any]):
        if (folder / "run.json").exists():
            raise RunError(f"--record {folder}: this folder has a training run; give another folder")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder_lock = FolderLock(folder)
        self.folder, self.rewards, self._lock = folder, rewards, Lock()
        self._open, self._stored = dict[str, Open](), dict[tuple[int, ...], int]()  # completions of each prompt
        self.step = 1 + _last_step(folder)
        save_tokenizer(str(folder))  # for those who read the tokens
        self._store = RolloutStore(folder, MOST_GB * GIB, self.step)

    def turn(self, codec: Codec, messages: Sequence[Message], episode: str | None) -> Turn:
        """What a request continues. `episode`: the name that the client gives; None: that of the conversation."""
        keys = tuple(map(_key, messages))
        with self._lock:
            if (episode not in self._open) and len(self._open) >= MOST_OPEN:
                raise DataError(f"{MOST_OPEN:,} episodes are open: give them rewards (POST /v1/rewards)")
            name, state = self._longest(codec, keys, episode)
        if state is None:
            begun = State(keys, Trajectory(codec.first(messages), [], title=TITLE), codec, messages)
            return Turn(episode or secrets.token_hex(8), begun, (), ())
        rest = messages[len(state.messages) :]
        return Turn(name, state, rest, codec.bridge([*state.trajectory.prompt, *state.trajectory.tokens], rest))

    def _longest(self, codec: Codec, keys: Keys, episode: str | None) -> tuple[str, State | None]:
        """The newest state with the most messages that a request begins with. No reply may follow these, since it would
        be one that was not sampled."""
        opened = {name: each for name, each in self._open.items() if episode in (None, name)}
        for count in range(len(keys) - 1, 0, -1):
            if _is_reply(keys[count]):
                break
            for name, each in reversed(opened.items()):
                for state in reversed(each.states.get(keys[:count], [])):
                    if state.codec is codec:
                        return name, state
        return "", None

    def replied(self, turn: Turn, completion: Completion) -> None:
        """Add the reply to a turn."""
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
        made.messages.append(reply.message)
        made.malformed += reply.malformed
        messages = (*state.messages, *map(_key, turn.messages), _key(reply.message))
        with self._lock:
            opened = self._open.setdefault(turn.episode, Open())
            opened.states.setdefault(messages, []).append(State(messages, made, state.codec, state.prompt))
            opened.continued.add(state)

    def reward(self, episode: str, reward: float | None, columns: Mapping[str, Any]) -> list[float | None]:
        """End an episode and store its conversations, each with the sum of this reward and those of the settings, which
        read the `columns`. Returns the sums. Raises DataError for an unknown episode, RewardError, RunError."""
        with self._lock:
            opened = self._open.pop(episode, None)
        if opened is None:
            raise DataError(f"there is no open episode {episode!r}: it has had no reply, or has been rewarded")
        try:
            return self._end(opened.leaves, reward, columns, self.rewards)
        except BaseException:
            with self._lock:
                self._open[episode] = opened  # the client may try again
            raise

    def _end(
        self,
        leaves: Sequence[State],
        reward: float | None,
        columns: Mapping[str, Any],
        rewards: Callable[[Sequence[RewardInput]], Sequence[CompletionReward]],
    ) -> list[float | None]:
        facts = [{"prompt": list(leaf.prompt), "answer": columns.get("answer"), "columns": columns} for leaf in leaves]
        ended = [replace(leaf.trajectory, reward=reward) for leaf in leaves]
        rewarded = rewards([rewarded_as(*pair) for pair in zip(ended, facts, strict=True)])
        with self._lock:
            for group in {tuple(each.prompt): None for each in ended}:
                same = [n for n, each in enumerate(ended) if tuple(each.prompt) == group]
                self._put(
                    group, [leaves[n] for n in same], [ended[n] for n in same], [rewarded[n] for n in same], facts
                )
        self._store.flush()
        return [each.total for each in rewarded]

    def _put(
        self,
        prompt: tuple[int, ...],
        leaves: Sequence[State],
        ended: Sequence[Trajectory],
        rewards: Sequence[CompletionReward],
        facts: Sequence[Mapping[str, Any]],
    ) -> None:
        """Store conversations of one episode that begin with the same prompt: branches of the first."""
        index, first = [*self._stored, prompt].index(prompt), self._stored.get(prompt, 0)
        rows = []
        for number, (leaf, made, reward) in enumerate(zip(leaves, ended, rewards, strict=True)):
            common = [common_prefix(made.tokens, other.tokens) for other in ended[:number]]
            branch = (first + int(np.argmax(common)), max(common)) if common else (None, 0)
            made = replace(made, tree=first, trunk=branch[0], shared=branch[1])
            rows.append(
                StoredRollout(
                    index, first + number, str(leaf.codec.tokenizer.decode(made.tokens)), reward.total, None,
                    made.finish_reason, made.version, parts_of(reward),
                    {"tokens": np.asarray(made.tokens), "sampler_logprobs": np.asarray(made.logprobs)},
                    np.asarray(made.trained, bool), made.stored(),
                )
            )  # fmt: skip
        text = "\n".join(str(message["content"]) for message in leaves[0].prompt)
        asked = StoredPrompt(index, text, prompt, {**facts[0], "tools": leaves[0].codec.tools})
        self._store.add(self.step, 0.0, [] if prompt in self._stored else [asked], rows, first=index)
        self._stored[prompt] = first + len(rows)

    def close(self) -> None:
        """Store open episodes without rewards, and end."""
        for opened in self._open.values():
            self._end(opened.leaves, None, {}, lambda inputs: [CompletionReward() for _ in inputs])
        self._open.clear()
        self._store.close()
        self.rewards.close()
        self._folder_lock.release()


def _key(message: Message) -> str:
    calls = [[call["function"][part] for part in ("name", "arguments")] for call in message.get("tool_calls") or ()]
    return json.dumps([message["role"], str(message["content"]).strip(), calls], sort_keys=True)


def _is_reply(key: str) -> bool:
    return json.loads(key)[0] == "assistant"


def _last_step(folder: Path) -> int:
    if not (folder / NAME).is_file():
        return 0
    with StoredRun(folder) as stored:
        return max((row["step"] for row in stored.summary()), default=0)
