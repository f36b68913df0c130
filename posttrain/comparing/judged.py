"""A judge's preferences between two sides: their completions of the same items, in both orders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Table

from posttrain.comparing.differences import Options, p_text
from posttrain.comparing.items import Answers, matched
from posttrain.comparing.sides import Side
from posttrain.config.schema.judge import JudgeSettings
from posttrain.errors import RunError
from posttrain.evaluation.paired import mcnemar
from posttrain.evaluation.records import Answer
from posttrain.evaluation.statistics import mean_by_prompt
from posttrain.judging.pairs import Pair, PairJudge, Preference, Summary, summarise
from posttrain.reports import report
from posttrain.words import counted

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
    """How often a judge prefers B's completions to A's. `p` is the exact test of as many wins as losses."""

    suite: str
    a: str
    b: str
    summary: Summary
    low: float | None
    high: float | None
    p: float
    shown: bool
    left_out: Mapping[str, int]
    asked: Sequence[Asked]


def judge(sides: Sequence[Side], settings: JudgeSettings, options: Options) -> list[Judged]:
    """Ask the judge about the first completion of every item that two sides have, each side against the first.

    Raises RunError if no two sides have completions of the same items, RewardError if the judge cannot be asked.
    """
    tasks = []
    for side in sides[1:]:
        for key in side.suites():
            if key in sides[0].suites():
                ours, theirs = _written(sides[0].by_item(key)), _written(side.by_item(key))
                same = matched(ours, theirs, options.by_id)
                if same.items:
                    pairs = [(item, ours[item][0], theirs[item][0]) for item in same.items]
                    tasks.append((key, side.name, pairs, same.left_out))
    if not tasks:
        raise RunError("there is nothing to judge: no two sides have completions of the same items")
    with PairJudge(settings) as asking:
        return [_judged(asking, key, sides[0].name, name, pairs, out, options) for key, name, pairs, out in tasks]


def _written(answers: Answers) -> Answers:
    """The items that have a completion, with those alone."""
    written = {item: [one for one in several if one.completion] for item, several in answers.items()}
    return {item: several for item, several in written.items() if several}


def _judged(
    asking: PairJudge,
    key: str,
    first: str,
    second: str,
    pairs: Sequence[tuple[str, Answer, Answer]],
    left_out: Mapping[str, int],
    options: Options,
) -> Judged:
    questions = [Pair(a.prompt, b.completion, a.completion, a.gold) for _, a, b in pairs]
    found = asking.compare(questions, f"{key}: judging {second} against {first}")
    summary = summarise(found)
    scores = [[RESULT[one.result]] for one in found if one.result is not None]
    estimate = mean_by_prompt(scores, options.confidence) if scores else None
    p, _ = mcnemar(summary.wins, summary.losses)
    return Judged(
        suite=key,
        a=first,
        b=second,
        summary=summary,
        low=estimate and estimate.low,
        high=estimate and estimate.high,
        p=p,
        shown=p <= 1 - options.confidence,
        left_out=left_out,
        asked=[Asked(*pair, one) for pair, one in zip(pairs, found, strict=True)],
    )


def judged_table(judged: Sequence[Judged], percent: str) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    shown.add_column("judged", overflow="fold")
    for name in ("win rate", f"{percent} interval", "won/lost/tied", "p", "no verdict"):
        shown.add_column(name, justify="right", no_wrap=True)
    for one in judged:
        facts = one.summary
        between = "-" if one.low is None else f"{one.low:.3f} to {one.high:.3f}"
        counts = f"{facts.wins:,}/{facts.losses:,}/{facts.ties:,}"
        rate = "-" if one.low is None else f"{facts.win_rate:.3f}"
        p = p_text(one.p)[2:].removeprefix("= ")
        shown.add_row(f"{one.suite}: {one.b} - {one.a}", rate, between, counts, p, f"{facts.without_verdict:,}")
    return shown


def sentences(judged: Sequence[Judged]) -> Iterator[str]:
    """Who is preferred, the position bias, and what was not judged."""
    for one in judged:
        facts = one.summary
        if one.shown:
            better, worse = (one.b, one.a) if facts.wins > facts.losses else (one.a, one.b)
            yield f"The judge prefers {better} to {worse} on {one.suite} ({p_text(one.p)})."
        else:
            yield f"The judge shows no preference between {one.b} and {one.a} on {one.suite} ({p_text(one.p)})."
        verdicts = facts.wins + facts.losses + facts.ties
        yield (
            f"Position bias: {facts.agree:,} of {counted(verdicts, 'verdict')} are the same in both orders; "
            f"{facts.first:,} follow the first place, {facts.second:,} the second ({p_text(facts.bias_p)})."
        )
        if one.left_out:
            yield "Not judged: " + ", ".join(f"{count:,} {reason}" for reason, count in one.left_out.items()) + "."


def judged_facts(one: Judged) -> dict[str, Any]:
    """For JSON; of the completions, those of flipped or missing verdicts can be found by their items."""
    names = ("a_first", "b_first", "result", "reason", "replies")
    items = [{"item": asked.item, **{name: getattr(asked.preference, name) for name in names}} for asked in one.asked]
    summary = {**asdict(one.summary), "win_rate": one.summary.win_rate if one.low is not None else None}
    facts = {name: getattr(one, name) for name in ("suite", "a", "b", "low", "high", "p", "shown")}
    return {**facts, **summary, "not_judged": dict(one.left_out), "items": items}


def judged_sections(judged: Sequence[Judged]) -> Iterator[report.Section]:
    for one in judged:
        rows = [
            [each.item, each.a.prompt, each.a.completion, each.b.completion, _words(each.preference)]
            for each in one.asked[:SHOWN]
        ]
        more = f" The first {SHOWN}; compare.json has all." if len(one.asked) > SHOWN else ""
        header = ["item", "prompt", one.a, one.b, f"verdict on {one.b}, replies"]
        yield report.Table(f"{one.suite}: judged", header, rows, f"{counted(len(one.asked), 'item')}.{more}")


def _words(one: Preference) -> str:
    return "\n\n".join([one.result or f"no verdict: {one.reason}", *one.replies])
