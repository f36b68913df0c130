"""What an episode was: its turns, tokens and rewards, in memory and as the rollout store has it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self, get_args

from posttrain.data.render import Message
from posttrain.engines.protocol import Completion, FinishReason
from posttrain.grading.verdict import Grade
from posttrain.rewards.parts import Outcome, RewardInput

StopReason = Literal[
    "completed", "env_done", "max_turns", "max_tokens", "max_tool_calls", "context_overflow", "parse_error",
    "tool_timeout", "env_error",
]  # fmt: skip
Author = Literal["model", "tool", "user"]
Calls = tuple[tuple[str, Mapping[str, Any], bool], ...]  # name, arguments, whether it failed
NO_VERDICT = ("tool_timeout", "env_error")


@dataclass(slots=True)
class Part:
    """A turn in a trajectory's tokens."""

    author: Author
    start: int
    stop: int
    calls: Calls = ()
    # Of a turn that begins a branch of the episode: the number of the tokens before that it follows, below 0 if part of
    # the prompt is omitted too.
    keep: int | None = None

    def moved(self, by: int) -> Self:
        """This turn behind `by` further tokens."""
        keep = None if self.keep is None else self.keep + by
        return replace(self, start=self.start + by, stop=self.stop + by, keep=keep)


@dataclass(slots=True)
class Trajectory:
    """An episode. `tokens` follow the prompt; of these, `trained` are the sampled ones, with a log-probability each."""

    prompt: list[int]
    messages: list[Message]  # without the prompt's
    tokens: list[int] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    stop_reason: StopReason = "completed"
    reason: str = ""  # of an episode without a verdict
    reward: float | None = None  # of the environment
    turn_rewards: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)  # of the environment's last step
    state: Any = None  # the environment's attributes
    title: str = ""  # the environment's class
    version: int = 0
    malformed: int = 0
    tools: Sequence[Mapping[str, Any]] = ()  # JSON schemas
    asked: list[Message] | None = None  # the prompt's messages, if the environment added to those of the row
    tree: int | None = None  # of a group that branches: the number of the episode that its tree began with
    trunk: int | None = None  # of a branch: the number of the episode whose first turns it shares
    shared: int = 0  # of a branch: its first tokens, which the trunk has sampled

    @property
    def has_verdict(self) -> bool:
        return self.stop_reason not in NO_VERDICT

    @property
    def turns(self) -> int:
        """The number of replies."""
        return len(self.reply_lengths)

    @property
    def reply_lengths(self) -> list[int]:
        """The number of tokens of each reply."""
        return [part.stop - part.start for part in self.parts if part.author == "model"]

    @property
    def answer(self) -> str:
        """The last reply; empty without one."""
        replies = [message for message in self.messages if message["role"] == "assistant"]
        return str(replies[-1]["content"]) if replies else ""

    @property
    def finish_reason(self) -> FinishReason:
        """`length` if there was no room for the next turn."""
        return "length" if self.stop_reason in ("max_tokens", "context_overflow") else "stop"

    @property
    def forks(self) -> list[tuple[int, int]]:
        """The first token of each branch, and how many of the tokens before it follows (`Part.keep`)."""
        return [(part.start, part.keep) for part in self.parts if part.keep is not None]

    def paths(self) -> list[Sequence[int]]:
        """The indices of the tokens that each branch has after the prompt, its first ones those of the branch before.

        No branch may leave out part of the prompt."""
        paths, path, begin = list[Sequence[int]](), list[int](), 0
        size = self.parts[-1].stop if self.parts else len(self.tokens)
        if not self.forks:
            return [range(size)]
        for start, keep in (*self.forks, (size, 0)):
            paths.append(path := [*path, *range(begin, start)])
            path, begin = path[:keep], start
        return paths

    def context(self) -> list[int]:
        """The tokens that the next reply follows: the prompt and the last branch."""
        ids, begin = [*self.prompt], 0
        for start, keep in self.forks:
            ids, begin = [*ids, *self.tokens[begin:start]][: len(self.prompt) + keep], start
        return [*ids, *self.tokens[begin:]]

    def replies(self) -> list[Completion]:
        """Its replies, as they were sampled."""
        made, begin = [], 0
        for part in self.parts:
            if part.author == "model":
                end = begin + part.stop - part.start
                tokens = self.tokens[part.start : part.stop]
                made.append(Completion(tokens, self.logprobs[begin:end], "stop", self.version))
                begin = end
        return made

    def stored(self) -> dict[str, Any]:
        """The episode for the rollout store: its environment's class, why it ended, its reward, that of each reply, the
        messages, and each turn's author, span of tokens and calls."""
        own: dict[str, Any] = {} if self.asked is None else {"asked": self.asked}
        if self.tree is not None:
            own |= {"tree": self.tree, "trunk": self.trunk, "shared": self.shared}
        return {
            "environment": self.title, "stop_reason": self.stop_reason, "reason": self.reason, "reward": self.reward,
            "turn_rewards": self.turn_rewards, "turns": [asdict(part) for part in self.parts],
            "messages": self.messages, **own,
        }  # fmt: skip

    @classmethod
    def restored(cls, stored: Mapping[str, Any], tokens: Sequence[int]) -> Self:
        """An episode from the rollout store, without its prompt, its log-probabilities and the environment."""
        return cls(
            [], stored["messages"], [*tokens], parts=[Part(**part) for part in stored["turns"]],
            stop_reason=stored["stop_reason"], reason=stored["reason"], reward=stored["reward"],
            turn_rewards=stored.get("turn_rewards", []), title=stored["environment"], tree=stored.get("tree"),
            trunk=stored.get("trunk"), shared=stored.get("shared", 0),
        )  # fmt: skip

    def add(
        self,
        author: Author,
        tokens: Sequence[int],
        logprobs: Sequence[float] = (),
        calls: Calls = (),
        keep: int | None = None,
    ) -> None:
        """Append a turn; one without log-probabilities is not trained."""
        start = len(self.tokens)
        self.tokens += tokens
        self.trained += [bool(logprobs)] * len(tokens)
        self.logprobs += logprobs
        self.parts.append(Part(author, start, len(self.tokens), calls, keep))


def rewarded_as(trajectory: Trajectory, facts: Mapping[str, Any]) -> RewardInput:
    """An episode as the input of rewards. `facts`: those of its row."""
    if trajectory.stop_reason in NO_VERDICT:
        verdict = "timeout" if trajectory.stop_reason == "tool_timeout" else "crashed"
        grade = Grade(verdict, reason=trajectory.reason)
    elif trajectory.reward is None:
        grade = Grade("not_applicable")
    else:
        grade = Grade("scored", trajectory.reward)
    return RewardInput(
        trajectory.answer,
        trajectory.tokens,
        prompt=facts["prompt"],
        answer=facts["answer"],
        columns=facts["columns"],
        truncated=trajectory.finish_reason == "length",
        episode=Outcome(trajectory.title, grade, trajectory.state, trajectory),
    )


def metrics_of(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Turns and calls of episodes, and the share of each way to end. Calls have TRL's names."""
    count = len(trajectories)
    calls = [failed for each in trajectories for part in each.parts for *_, failed in part.calls]
    reasons = Counter(each.stop_reason for each in trajectories)
    shared = sum(sum(each.trained[: each.shared]) for each in trajectories)
    own = sorted({name for each in trajectories for name in each.metrics})
    values = {name: [each.metrics[name] for each in trajectories if name in each.metrics] for name in own}
    return {
        "turns": sum(each.turns for each in trajectories) / count,
        "tools/call_frequency": len(calls) / count,
        "tools/failure_frequency": sum(calls) / len(calls) if calls else 0.0,
        **{f"episodes/{reason}": reasons[reason] / count for reason in get_args(StopReason)},
        "episodes/forks": sum(len(each.forks) for each in trajectories) / count,
        **({"trees/shared_ratio": shared / max(1, sum(map(sum, (e.trained for e in trajectories))))} if shared else {}),
        **{f"environments/{name}": sum(some) / len(some) for name, some in values.items()},
    }
