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
from posttrain.evaluation.comparing.differences import Answers, holm, interval, matched, p_text
from posttrain.evaluation.comparing.sources import Side
from posttrain.evaluation.records import Answer
from posttrain.evaluation.statistics import mean_by_prompt
from posttrain.judges.judge import Pair, PairJudge, Preference, Summary, summarise
from posttrain.reports.page import Section
from posttrain.reports.page import Table as PageTable

SHOWN = 50  # preferences on the page
RESULT = {"win": 1.0, "tie": 0.5, "loss": 0.0}

Judgement = tuple[Answer, Answer, Preference]  # a completion of each side, and the preference as seen from B


@dataclass(frozen=True, slots=True)
class Judged:
    """How often a judge prefers B's completions to A's. `p`: exact test that wins and losses are equally likely.
    `p_adjusted`: adjusted for all differences of the suite (Holm)."""

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
    items: Sequence[Judgement]


def judge(
    sides: Sequence[Side], settings: JudgeSettings, options: CompareOptions, suites: Sequence[str] = ()
) -> list[Judged]:
    """Compare the completions of every further side with those of the first side, on the suites that both have.

    The judge compares the first completion of every item that both sides have; `suites` limits the suites. Raises
    RunError if no two sides have completions of the same items, RewardError if no request to the judge can be made.
    """
    tasks = []
    for side in sides[1:]:
        for key in side.suites():
            if key in sides[0].suites() and (not suites or key.partition(" ")[0] in suites):
                ours, theirs = _written(sides[0].by_item(key)), _written(side.by_item(key))
                same = matched(ours, theirs, options.by_id)
                if same.items:
                    pairs = [(ours[item][0], theirs[item][0]) for item in same.items]
                    tasks.append((key, side.name, pairs, same.left_out))
    if not tasks:
        raise RunError("there is nothing to judge: no two sides have completions of the same items")
    judged, first = [], sides[0].name
    with PairJudge(settings) as asking:
        for key, second, pairs, left_out in tasks:
            questions = [Pair(a.prompt, b.completion, a.completion, a.gold) for a, b in pairs]
            preferences = asking.compare(questions, f"{key}: judging {second} against {first}")
            items = [(*pair, preference) for pair, preference in zip(pairs, preferences, strict=True)]
            scores = [[RESULT[one.result]] for one in preferences if one.result is not None]
            estimate = mean_by_prompt(scores, options.confidence) if scores else None
            summary = summarise(preferences)
            low, high = (estimate.low, estimate.high) if estimate else (None, None)
            p, _ = sign_test(summary.wins, summary.losses)
            judged.append(Judged(key, first, second, summary, low, high, p, p, False, left_out, items))
    for key in {one.suite for one in judged}:
        indices = [index for index, one in enumerate(judged) if one.suite == key]
        for index, p in zip(indices, holm([judged[index].p for index in indices]), strict=True):
            judged[index] = replace(judged[index], p_adjusted=p, shown=p <= 1 - options.confidence)
    return judged


def _written(answers: Answers) -> Answers:
    """The items whose first completion was generated, even if it is empty."""
    return {item: several for item, several in answers.items() if several[0].completion or several[0].finish_reason}


def judged_table(judged: Sequence[Judged], percent: str) -> Table:
    shown = numbers_table("judged", "win rate", f"{percent} interval", "won/lost/tied", "p", "no verdict")
    for one in judged:
        facts = one.summary
        cells = ["-" if one.low is None else f"{facts.win_rate:.3f}", interval(one.low, one.high)]
        cells += [f"{facts.wins:,}/{facts.losses:,}/{facts.ties:,}", p_text(one.p_adjusted)[2:].removeprefix("= ")]
        shown.add_row(f"{one.suite}: {one.b} - {one.a}", *cells, f"{facts.without_verdict:,}")
    return shown


def sentences(judged: Sequence[Judged]) -> Iterator[str]:
    """Who is preferred, the position bias, and the items that were not judged."""
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
            f"{facts.first:,} follow the first position, {facts.second:,} the second ({p_text(facts.bias_p)})."
        )
        if one.left_out:
            yield "Not judged: " + ", ".join(f"{count:,} {reason}" for reason, count in one.left_out.items()) + "."


def judged_facts(one: Judged) -> dict[str, Any]:
    """A judge's preferences for JSON, with both completions of every item."""
    summary = {**asdict(one.summary), "win_rate": one.summary.win_rate if one.low is not None else None}
    facts = {name: getattr(one, name) for name in ("suite", "a", "b", "low", "high", "p", "p_adjusted", "shown")}
    return {**facts, **summary, "not_judged": dict(one.left_out), "items": [_item_facts(*item) for item in one.items]}


def _item_facts(a: Answer, b: Answer, preference: Preference) -> dict[str, Any]:
    """`result` is B's. `a_first` and `b_first`: the judge's verdict when A, or B, is shown first. `replies`: its
    replies in the same order. In the pair that the judge compared, B was the first."""
    names = {"a": "b", "b": "a", "tie": "tie", None: None}
    return {
        "item": a.item,
        "prompt": a.prompt,
        "a": a.completion,
        "b": b.completion,
        "result": preference.result,
        "a_first": names[preference.b_first],
        "b_first": names[preference.a_first],
        "replies": [*reversed(preference.replies)],
        "reason": preference.reason,
    }


def judged_sections(judged: Sequence[Judged], percent: str) -> Iterator[Section]:
    """The table and the sentences, and the judge's replies on every pair."""
    if judged:
        yield PageTable("Judged", *cells_of(judged_table(judged, percent)), "\n".join(sentences(judged)))
    for one in judged:
        rows = [
            [a.item, a.prompt, a.completion, b.completion, _words(preference, one)]
            for a, b, preference in one.items[:SHOWN]
        ]
        more = f" The first {SHOWN}; compare.json has all." if len(one.items) > SHOWN else ""
        header = ["item", "prompt", one.a, one.b, f"verdict on {one.b}, replies"]
        yield PageTable(
            f"{one.suite}: {one.b} judged against {one.a}", header, rows, f"{counted(len(one.items), 'item')}.{more}"
        )


def _words(one: Preference, about: Judged) -> str:
    """The verdict, and the reply to each question, with the name of the side that was assistant A."""
    replies = [f"[A is {name}] {reply}" for name, reply in zip((about.b, about.a), one.replies, strict=True)]
    return "\n\n".join([one.result or f"no verdict: {one.reason}", *replies])
