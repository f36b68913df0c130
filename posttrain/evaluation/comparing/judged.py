"""A judge's preferences between two sides: their completions of the same items, in both orders."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from posttrain.base.console import cells_of, numbers_table
from posttrain.base.distributions import sign_test
from posttrain.base.errors import RunError
from posttrain.base.words import counted
from posttrain.config.options import CompareOptions
from posttrain.config.schema.judge import JudgeSettings
from posttrain.evaluation.comparing.differences import holm, p_text
from posttrain.evaluation.comparing.items import Answers, matched
from posttrain.evaluation.comparing.sides import Side
from posttrain.evaluation.records import Answer
from posttrain.evaluation.statistics import mean_by_prompt
from posttrain.judges.pairs import Pair, PairJudge, Preference, Summary, summarise
from posttrain.reports.page import Section
from posttrain.reports.page import Table as PageTable

SHOWN = 50  # preferences on the page
RESULT = {"win": 1.0, "tie": 0.5, "loss": 0.0}


@dataclass(frozen=True, slots=True)
class Asked:
    """An item with a completion of each side, and the judge's preference, from the side of B."""

    item: str
    a: Answer
    b: Answer
    preference: Preference


@dataclass(frozen=True, slots=True)
class Judged:
    """How often a judge prefers B's completions to A's. `p` is the exact test of as many wins as losses, `p_adjusted`
    is Holm's for all differences of the suite."""

    suite: str
    a: str
    b: str
    summary: Summary
    low: float | None
    high: float | None
    p: float
    p_adjusted: float
    shown: bool
    left_out: Mapping[str, int]
    asked: Sequence[Asked]


def judge(
    sides: Sequence[Side], settings: JudgeSettings, options: CompareOptions, suites: Sequence[str] = ()
) -> list[Judged]:
    """Ask the judge about the first completion of every item that two sides have, each side against the first, on
    every suite that two of them have, or on those of `suites`.

    Raises RunError if no two sides have completions of the same items, RewardError if the judge cannot be asked.
    """
    tasks = []
    for side in sides[1:]:
        for key in side.suites():
            if key in sides[0].suites() and (not suites or key.partition(" ")[0] in suites):
                ours, theirs = _written(sides[0].by_item(key)), _written(side.by_item(key))
                same = matched(ours, theirs, options.by_id)
                if same.items:
                    pairs = [(item, ours[item][0], theirs[item][0]) for item in same.items]
                    tasks.append((key, side.name, pairs, same.left_out))
    if not tasks:
        raise RunError("there is nothing to judge: no two sides have completions of the same items")
    with PairJudge(settings) as asking:
        found = [_judged(asking, key, sides[0].name, name, pairs, out, options) for key, name, pairs, out in tasks]
    return _adjusted(found, options)


def _adjusted(found: Sequence[Judged], options: CompareOptions) -> list[Judged]:
    """The preferences with their p-values adjusted for the number of those on the same suite."""
    adjusted = dict[int, float]()
    for key in {one.suite for one in found}:
        places = [at for at, one in enumerate(found) if one.suite == key]
        adjusted |= zip(places, holm([found[at].p for at in places]), strict=True)
    return [
        replace(one, p_adjusted=adjusted[at], shown=adjusted[at] <= 1 - options.confidence)
        for at, one in enumerate(found)
    ]


def _written(answers: Answers) -> Answers:
    """The items whose first completion was generated, though it may be empty."""
    return {item: several for item, several in answers.items() if several[0].completion or several[0].finish_reason}


def _judged(
    asking: PairJudge,
    key: str,
    first: str,
    second: str,
    pairs: Sequence[tuple[str, Answer, Answer]],
    left_out: Mapping[str, int],
    options: CompareOptions,
) -> Judged:
    questions = [Pair(a.prompt, b.completion, a.completion, a.gold) for _, a, b in pairs]
    found = asking.compare(questions, f"{key}: judging {second} against {first}")
    summary = summarise(found)
    scores = [[RESULT[one.result]] for one in found if one.result is not None]
    estimate = mean_by_prompt(scores, options.confidence) if scores else None
    p, _ = sign_test(summary.wins, summary.losses)
    return Judged(
        suite=key,
        a=first,
        b=second,
        summary=summary,
        low=estimate and estimate.low,
        high=estimate and estimate.high,
        p=p,
        p_adjusted=p,
        shown=False,
        left_out=left_out,
        asked=[Asked(*pair, one) for pair, one in zip(pairs, found, strict=True)],
    )


def judged_table(judged: Sequence[Judged], percent: str) -> Table:
    shown = numbers_table("judged", "win rate", f"{percent} interval", "won/lost/tied", "p", "no verdict")
    for one in judged:
        facts = one.summary
        between = "-" if one.low is None else f"{one.low:.3f} to {one.high:.3f}"
        counts = f"{facts.wins:,}/{facts.losses:,}/{facts.ties:,}"
        rate = "-" if one.low is None else f"{facts.win_rate:.3f}"
        p = p_text(one.p_adjusted)[2:].removeprefix("= ")
        shown.add_row(f"{one.suite}: {one.b} - {one.a}", rate, between, counts, p, f"{facts.without_verdict:,}")
    return shown


def sentences(judged: Sequence[Judged]) -> Iterator[str]:
    """Who is preferred, the position bias, and what was not judged."""
    for one in judged:
        facts, p = one.summary, p_text(one.p_adjusted)
        if one.shown:
            better, worse = (one.b, one.a) if facts.wins > facts.losses else (one.a, one.b)
            yield f"The judge prefers {better} to {worse} on {one.suite} ({p})."
        else:
            yield f"The judge shows no preference between {one.b} and {one.a} on {one.suite} ({p})."
        verdicts = facts.wins + facts.losses + facts.ties
        yield (
            f"Position bias: {facts.agree:,} of {counted(verdicts, 'verdict')} are the same in both orders; "
            f"{facts.first:,} follow the first place, {facts.second:,} the second ({p_text(facts.bias_p)})."
        )
        if one.left_out:
            yield "Not judged: " + ", ".join(f"{count:,} {reason}" for reason, count in one.left_out.items()) + "."


def judged_facts(one: Judged) -> dict[str, Any]:
    """For JSON, with both completions of every item."""
    summary = {**asdict(one.summary), "win_rate": one.summary.win_rate if one.low is not None else None}
    facts = {name: getattr(one, name) for name in ("suite", "a", "b", "low", "high", "p", "p_adjusted", "shown")}
    items = [_item_facts(asked) for asked in one.asked]
    return {**facts, **summary, "not_judged": dict(one.left_out), "items": items}


def _item_facts(one: Asked) -> dict[str, Any]:
    """`result` is B's; `a_first` and `b_first`: which of the two is better by the question in which A, or B, is first,
    and `replies` are the judge's in this order. To the judge's own records B was the first of the pair."""
    names = {"a": "b", "b": "a", "tie": "tie", None: None}
    said = one.preference
    return {
        "item": one.item,
        "prompt": one.a.prompt,
        "a": one.a.completion,
        "b": one.b.completion,
        "result": said.result,
        "a_first": names[said.b_first],
        "b_first": names[said.a_first],
        "replies": [*reversed(said.replies)],
        "reason": said.reason,
    }


def judged_sections(judged: Sequence[Judged], percent: str) -> Iterator[Section]:
    """The table and the sentences, and what the judge said of every pair."""
    if judged:
        yield PageTable("Judged", *cells_of(judged_table(judged, percent)), "\n".join(sentences(judged)))
    for one in judged:
        rows = [
            [each.item, each.a.prompt, each.a.completion, each.b.completion, _words(each.preference, one)]
            for each in one.asked[:SHOWN]
        ]
        more = f" The first {SHOWN}; compare.json has all." if len(one.asked) > SHOWN else ""
        header = ["item", "prompt", one.a, one.b, f"verdict on {one.b}, replies"]
        yield PageTable(
            f"{one.suite}: {one.b} judged against {one.a}", header, rows, f"{counted(len(one.asked), 'item')}.{more}"
        )


def _words(one: Preference, about: Judged) -> str:
    """The verdict, and the reply to each question, with the side that is assistant A in it."""
    replies = [f"[A is {name}] {reply}" for name, reply in zip((about.b, about.a), one.replies, strict=True)]
    return "\n\n".join([one.result or f"no verdict: {one.reason}", *replies])
