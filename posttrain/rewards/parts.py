"""What a completion is rewarded for: the input of rewards, the parts, their total, and the metrics of several."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from posttrain.grading.verdict import NON_VERDICTS, VERDICTS, Grade
from posttrain.judges.judge import COSTS, Judged

CLASSES = ("00", "01", "10", "11")  # first digit: format right; second digit: answer right


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode ended: the class of its environment, that one's grade, and what reward functions receive.

    The grade is `scored`, with the environment's reward; `not_applicable` without one; `timeout` or `crashed` if the
    environment failed, and then the completion is dropped."""

    title: str
    grade: Grade
    environment: Any = None  # its attributes
    trajectory: Any = None


@dataclass(frozen=True, slots=True)
class RewardInput:
    """A completion to reward. `prompt` is a string or a list of messages; `columns` are the row's other columns.

    `truncated`: the completion reached the length limit. `thinking`: its prompt ends with `<think>`. `episode`: that of
    a completion with several turns; `text` is then its last reply."""

    text: str
    tokens: Sequence[int] = ()
    prompt: str | list[dict[str, Any]] = ""
    answer: str | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)
    truncated: bool = False
    thinking: bool = False
    episode: Outcome | None = None


@dataclass(frozen=True, slots=True)
class TrainerState:
    """How far training is, as reward functions see it; the names are those of transformers."""

    global_step: int = 0  # completed steps
    max_steps: int = 0
    epoch: float = 0.0


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One unweighted reward of a completion. A value of None: the reward does not apply, or has no verdict."""

    name: str
    weight: float
    value: float | None
    grade: Grade | None = None  # for rules and judges
    overdue: bool | None = None  # whether the call exceeded its deadline; None: the reward has no deadline
    may_not_apply: bool = False  # whether it is a user's function, which may return None
    extra: Mapping[str, Any] = field(default_factory=dict)  # what the function noted about the completion
    logged: Mapping[str, float] = field(default_factory=dict)  # metrics that the function logged in this call

    @property
    def counts(self) -> bool:
        """Whether the reward has a verdict, or does not apply: False for a missed deadline or a missing verdict."""
        return not self.overdue and (self.grade is None or self.grade.counts)


@dataclass(frozen=True, slots=True)
class CompletionReward:
    """The weighted sum of a completion's rewards, and its parts. With a total of None, the completion is dropped."""

    total: float | None = None
    parts: tuple[RewardPart, ...] = ()

    @property
    def lacks_verdict(self) -> bool:
        """Whether there is no reward because a verdict is missing, rather than because no reward applies."""
        return self.total is None and not all(part.counts for part in self.parts if part.weight)


class Rewarded(tuple[CompletionReward, ...]):
    """The rewards of several completions, in their order."""

    @property
    def totals(self) -> tuple[float | None, ...]:
        return tuple(reward.total for reward in self)

    def metrics(self) -> dict[str, float]:
        """Metrics of a step under TRL's names: reward, reward_std, rewards/{name}/mean, rewards/{name}/std.

        Also the number of dropped completions; per rule, the count of each verdict; and for `r1_zero` and
        `question_only` the shares of the classes 00, 01, 10 and 11 (first digit: format right; second: answer right).
        Empty if there are no rewards.
        """
        columns = list(zip(*(reward.parts for reward in self), strict=True))
        if not columns:
            return {}
        totals = [total for total in self.totals if total is not None]
        metrics = _moments("reward", "reward_std", totals)
        metrics["rewards/left_out"] = float(len(self) - len(totals))
        if any(parts[0].may_not_apply for parts in columns):
            rows = [reward for reward in self if reward.total is None and not reward.lacks_verdict]
            metrics["rewards/not_applicable"] = float(len(rows))
        for parts in columns:
            metrics |= _metrics_of(parts)
        return metrics


def _metrics_of(parts: Sequence[RewardPart]) -> dict[str, float]:
    """The metrics of one reward over all completions: its mean and spread, and those of a rule's verdicts and classes,
    a judge's failures and costs, or a function's deadline and what it logged."""
    values = [part.value for part in parts if part.value is not None]
    grades = [part.grade for part in parts if part.grade is not None]
    first, late = parts[0], sum(bool(part.overdue) for part in parts)
    prefix = f"rewards/{first.name}"
    metrics = _moments(f"{prefix}/mean", f"{prefix}/std", values)
    if first.may_not_apply:
        metrics[f"{prefix}/not_applicable"] = float(sum(part.value is None and part.counts for part in parts))
    if first.overdue is not None:
        metrics[f"{prefix}/timeout"] = float(late)
    for name in dict.fromkeys(name for part in parts for name in part.logged):
        metrics[f"{prefix}/{name}"] = statistics.fmean(part.logged[name] for part in parts if name in part.logged)
    if not grades:
        return metrics
    verdicts = Counter(grade.verdict for grade in grades)
    judged = [grade for grade in grades if isinstance(grade, Judged)]
    numbers: dict[str, float] = {
        verdict: verdicts[verdict] for verdict in (sorted(NON_VERDICTS) if judged or first.may_not_apply else VERDICTS)
    }
    if judged:
        numbers |= {name: sum(getattr(grade, name) for grade in judged) for name in ("unreadable", *COSTS)}
    else:
        classes = Counter(grade.format_and_answer for grade in grades if grade.counts and grade.parts)
        numbers |= {name: classes[name] / classes.total() for name in CLASSES if classes}
    return metrics | {f"{prefix}/{name}": float(number) for name, number in numbers.items()}


def _moments(mean: str, std: str, values: Sequence[float]) -> dict[str, float]:
    """Mean and sample standard deviation of the values under these names, if there are any values."""
    if not values:
        return {}
    return {mean: statistics.fmean(values), std: statistics.stdev(values) if len(values) > 1 else 0.0}
