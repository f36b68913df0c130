"""Episodes: a model and an environment take turns until one of them, or a limit, ends it.

    episodes = Episodes(engine, environments, codecs_of(environments, tokenizer), limits)
    groups = episodes.run(starts, n, sampling, seeds)       n trajectories of each start

Each episode's tokens only grow: the model's replies as they were sampled, and what the template writes of tools and
users (posttrain/data/codec.py). Calls of tools run in threads, each episode in its own process, so that a slow tool
delays no other episode.

With `Forest`, some episodes of a start branch from others: they share the turns up to an inner one, chosen at random,
and go on with other replies (Tree-GRPO, arXiv 2509.21240). A branch's environment repeats the shared calls.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError
from posttrain.base.log import log
from posttrain.base.words import counted
from posttrain.config import RolloutConfig
from posttrain.config.schema.rollout import EnvironmentConfig, RewrittenTurns
from posttrain.config.schema.suite import SuiteConfig
from posttrain.data.codec import Codec, Reply, RewrittenTurn
from posttrain.data.render import Message
from posttrain.data.rows import RowError, variables_of
from posttrain.data.turns import common_prefix
from posttrain.engines import Completion, Engine, Sampling, seed_of
from posttrain.engines.turns import Turn, converse
from posttrain.environments.episode import Episode, Forest, Growth, Start, Trunk
from posttrain.environments.process import Environments, EpisodeError
from posttrain.environments.trajectory import StopReason, Trajectory
from posttrain.models.families import positions_of

STARTS = 4  # environments that are reset at a time
SHOWN = 3  # reasons of failures that are logged for each rollout


@dataclass(frozen=True, slots=True)
class Limits:
    """When an episode ends at the latest."""

    max_completion_length: int  # tokens of all turns, those of tools included
    max_prompt_length: int
    max_turns: int | None = None  # replies
    max_tool_calls: int | None = None
    max_tool_result: int | None = None  # tokens of a tool's result; more are cut. None: without room, the episode ends
    rewritten_turns: RewrittenTurns = "keep"

    @classmethod
    def of(
        cls,
        settings: RolloutConfig | SuiteConfig,
        room: int,
        config: Any,
        most: int | None = None,
        behavior_version: int = 3,
    ) -> Self:
        """The limits of these settings with prompts of at most `room` tokens, and fewer if the model of this
        transformers configuration has fewer positions. `most`: tokens of all turns; None: those of the settings. Runs
        of a `behavior_version` before 3 keep turns that the template rewrites."""
        most, positions = most or settings.max_completion_length, positions_of(config)
        room = room if positions is None else min(room, positions + 1 - most)
        how = settings.rewritten_turns if behavior_version > 2 else "keep"
        return cls(most, room, settings.max_turns, settings.max_tool_calls, settings.max_tool_result, how)


class Episodes:
    """Runs episodes on an engine. `codecs` are those for the tools of each environment.

    At most `environments.workers` episodes have an environment at a time; others begin when one ends. Raises
    RewrittenTurn for a chat template that rewrites earlier turns if the limits refuse it.
    """

    def __init__(self, engine: Engine, environments: Environments, codecs: Mapping[str | None, Codec], limits: Limits):
        self.engine, self.codecs, self.environments, self.limits = engine, codecs, environments, limits
        if limits.rewritten_turns == "refuse":
            for name, kind in environments.kinds.items():
                following = {"role": "user" if kind.is_game else "tool", "content": ""}
                if kind.is_game or kind.tools:
                    codecs[name].bridge([], [following], after=Reply("", "a thought", thinks=True))
        self._varied: dict[tuple[str | None, str], Codec] = {}  # by environment and variables of rows
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
        forest: Forest | None = None,
    ) -> list[list[Trajectory]]:
        """`n` trajectories of each start, in order; number k of start i has the random streams (seeds[i], k, turn).
        `seen` is called with the index of an episode after each of its turns, in that episode's thread. Which turns the
        branches of a `forest` begin with depends on the seeds and on what was sampled.

        An episode with a prompt above `max_prompt_length` ends as `context_overflow`. Raises DataError for a start
        whose environment is not known.
        """
        keys = [(index, number) for index in range(len(starts)) for number in range(n)]
        episodes = [Episode(starts[index], seed_of(seeds[index], number), self.environments) for index, number in keys]
        growth = Growth(
            episodes,
            n,
            forest,
            begin=lambda episode: self._starts.submit(self._begin, episode),
            repeat=lambda episode, trunk: self._turns.submit(self._branch, episode, trunk),
        )

        def turn(index: int, reply: Completion) -> Turn | None:
            following = self._turn(episodes[index], reply)
            seen(index, episodes[index].trajectory)
            return following

        def follow(index: int, reply: Completion) -> Future[Turn | None]:
            future = self._turns.submit(turn, index, reply)
            future.add_done_callback(partial(growth.answered, index))
            return future

        longest = self.limits.max_prompt_length + self.limits.max_completion_length
        try:
            growth.plant()
            branching = forest is not None
            converse(self.engine, growth.first_turns, sampling, follow=follow, longest=longest, branching=branching)
        finally:
            growth.stop()
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

    def _begin(self, episode: Episode) -> Turn | None:
        """Reset an episode's environment and return its prompt; None if that has failed."""
        messages = episode.start.conversation()
        try:
            codec = self._codec(episode)
            for message in (observed := episode.reset()):
                if len(observed) == 1 and message["role"] == "user" and messages[-1]["role"] == "user":
                    messages[-1]["content"] += message["content"]  # as TRL does with a string
                else:
                    messages.append(dict(message))
            episode.trajectory.asked = messages if observed else None
            episode.trajectory.prompt = codec.first(messages)
            if len(episode.trajectory.prompt) > self.limits.max_prompt_length:
                return episode.finish("context_overflow")
        except EpisodeError as error:
            return episode.fail(error)
        except (DataError, RowError) as error:
            return episode.fail(EpisodeError("env_error", f"its messages cannot be rendered: {error}"))
        return Turn(episode.trajectory.prompt, episode.seed, self.limits.max_completion_length)

    def _branch(self, episode: Episode, trunk: Trunk) -> Turn | None:
        """Repeat the first replies of another episode; None if the environment fails, or gives other answers."""
        own, turn = episode.trajectory, None
        for reply in trunk.trajectory.replies()[: trunk.replies]:
            turn = self._turn(episode, reply)
            if not own.has_verdict:
                return None
            same = trunk.trajectory.prompt == own.prompt and trunk.trajectory.tokens[: len(own.tokens)] == own.tokens
            if turn is None or not same:
                why = "a branch repeated the calls of another episode, with other results"
                return episode.fail(EpisodeError("env_error", why))
        assert turn is not None
        own.shared = len(own.tokens)
        return Turn(own.context(), turn.seed, turn.limit, branches_from=trunk.index)

    def _turn(self, episode: Episode, reply: Completion) -> Turn | None:
        """Add a reply and what the environment answers; None if the episode has ended."""
        trajectory, codec = episode.trajectory, self._codec(episode)
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
            if (most := self.limits.max_tool_result) is not None:
                for message in messages:
                    if message["role"] == "tool":
                        message["content"] = codec.cut(message["content"], most)
            added, keep = self._following(episode, parsed, messages)
            if len(trajectory.tokens) + len(added) < self.limits.max_completion_length:
                own = None if keep is None else keep - len(trajectory.prompt)
                trajectory.add("user" if episode.is_game else "tool", added, calls=calls, keep=own)
                trajectory.messages += messages
            else:  # without the messages, as in TRL
                trajectory.parts[-1].calls, ended = calls, ended or "max_tokens"
            if ended is not None:
                return episode.finish(ended)
        except EpisodeError as error:
            return episode.fail(error)
        except DataError as error:
            if not episode.is_game or isinstance(error, RewrittenTurn):
                raise
            return episode.fail(EpisodeError("env_error", f"its messages cannot be rendered: {error}"))
        left = self.limits.max_completion_length - len(trajectory.tokens)
        return Turn(added, seed_of(episode.seed, trajectory.turns), left, keep)

    def _following(self, episode: Episode, parsed: Reply, messages: Sequence[Message]) -> tuple[list[int], int | None]:
        """The tokens that follow a reply, and how many of those before, the prompt's included, they follow; None: all
        of them. Raises RewrittenTurn if the template rewrites the reply and `rewritten_turns` does not fork."""
        trajectory, codec = episode.trajectory, self._codec(episode)
        context, how = trajectory.context(), self.limits.rewritten_turns
        try:
            return codec.bridge(context, messages, after=None if how == "keep" else parsed), None
        except RewrittenTurn:
            if how != "fork":
                raise
        asked = trajectory.asked or episode.start.conversation()
        whole = codec.first([*asked, *trajectory.messages, *messages])
        keep = common_prefix(context, whole)
        return whole[keep:], keep if keep < len(context) else None

    def _codec(self, episode: Episode) -> Codec:
        """The codec for an episode's tools and the variables of its row."""
        variables = variables_of(episode.start.variables)
        if not variables:
            return self.codecs[episode.name]
        key = episode.name, json.dumps(variables, sort_keys=True)
        if key not in self._varied:
            self._varied[key] = self.codecs[episode.name].varied(variables)
        return self._varied[key]

    def _ended(self, episode: Episode, reply: Completion, parsed: Reply) -> StopReason | None:
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

    def _last(self, episode: Episode) -> StopReason | None:
        """`max_turns` if no further reply may follow. A game answers the last one; a tool is not called by it."""
        most = self.limits.max_turns
        return "max_turns" if most is not None and episode.trajectory.turns >= most else None


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
