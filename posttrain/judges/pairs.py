"""Which of two completions is better: asked in both orders, because judges favour a place (arXiv 2306.05685, 3.3)."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from posttrain.base.distributions import sign_test
from posttrain.config.schema.judge import JudgeSettings
from posttrain.judges.asking import Asked, answers, ask
from posttrain.judges.client import JudgeClient, Message
from posttrain.judges.prompts import PAIR, PAIR_SYSTEM, Prompt, as_text, filled, read_preference, with_reference

Better = Literal["a", "b", "tie"]
Result = Literal["win", "loss", "tie"]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two completions of a prompt; `answer` is the right one, if it is known."""

    prompt: Prompt
    a: str
    b: str
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Preference:
    """The verdict on a pair, from the side of `a`; None if the judge gave none in one of the orders.

    A win or a loss needs both orders to agree, anything else is a tie. `a_first` and `b_first` are the better
    completion according to each order, `replies` the judge's words; the costs are those of both questions.
    """

    result: Result | None
    a_first: Better | None
    b_first: Better | None
    replies: tuple[str, str]
    reason: str | None
    requests: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Summary:
    """Counts of preferences. `win_rate` = (wins + ties / 2) / verdicts, NaN without a verdict.

    Position bias: `agree` pairs have the same verdict in both orders; of the others, `first` prefer whatever comes
    first and `second` whatever comes second (the rest call one order a tie). `bias_p` is the exact two-sided binomial
    test of first = second.
    """

    wins: int
    losses: int
    ties: int
    without_verdict: int
    win_rate: float
    agree: int
    first: int
    second: int
    bias_p: float
    requests: int
    prompt_tokens: int
    completion_tokens: int


class PairJudge:
    """Compares completions in pairs. Raises RewardError if the judge cannot be asked at all."""

    def __init__(self, settings: JudgeSettings):
        self._client = JudgeClient(settings)

    def compare(self, pairs: Sequence[Pair], title: str = "") -> list[Preference]:
        """The preference for each pair, in order; a title shows a progress bar."""
        asked = [ask(self._client, _messages(pair, swapped)) for pair in pairs for swapped in (False, True)]
        found = answers(self._client, asked, read_preference, '"[[A]]", "[[B]]" or "[[C]]"', title)
        return [_preference(found[at], found[at + 1]) for at in range(0, len(found), 2)]

    def close(self) -> None:
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def summarise(preferences: Sequence[Preference]) -> Summary:
    """Wins, losses and ties, the position bias, and the costs."""
    results = Counter(one.result for one in preferences)
    verdicts = results["win"] + results["loss"] + results["tie"]
    orders = Counter((one.a_first, one.b_first) for one in preferences if one.result is not None)
    first, second = orders["a", "b"], orders["b", "a"]
    return Summary(
        results["win"],
        results["loss"],
        results["tie"],
        results[None],
        (results["win"] + results["tie"] / 2) / verdicts if verdicts else math.nan,
        sum(count for (one, other), count in orders.items() if one == other),
        first,
        second,
        sign_test(first, second)[0],
        sum(one.requests for one in preferences),
        sum(one.prompt_tokens for one in preferences),
        sum(one.completion_tokens for one in preferences),
    )


def _messages(pair: Pair, swapped: bool) -> list[Message]:
    a, b = (pair.b, pair.a) if swapped else (pair.a, pair.b)
    values = {"prompt": as_text(pair.prompt), "a": a, "b": b, "answer": pair.answer or ""}
    return [
        {"role": "system", "content": with_reference(PAIR_SYSTEM, pair.answer)},
        {"role": "user", "content": filled(with_reference(PAIR, pair.answer), values)},
    ]


def _preference(first: Asked[str], second: Asked[str]) -> Preference:
    names: dict[str | None, Better | None] = {"A": "a", "B": "b", "C": "tie", None: None}
    swapped: dict[str | None, Better | None] = {"A": "b", "B": "a", "C": "tie", None: None}
    a_first, b_first = names[first.value], swapped[second.value]
    result: Result | None = None
    if a_first is not None and b_first is not None:
        result = ("win" if a_first == "a" else "loss") if a_first == b_first != "tie" else "tie"
    replies = (first.reply, second.reply)
    failed = next((f"{one.failure}: {one.reason}" for one in replies if one.failure), None)
    return Preference(
        result,
        a_first,
        b_first,
        (first.reply.content, second.reply.content),
        failed,
        sum(one.requests for one in replies),
        sum(one.prompt_tokens for one in replies),
        sum(one.completion_tokens for one in replies),
    )
