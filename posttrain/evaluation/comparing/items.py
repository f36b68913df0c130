"""Which items two sides share, and their scores on them. Nothing is dropped without being counted."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from posttrain.evaluation.records import Answer

Answers = Mapping[str, Sequence[Answer]]


@dataclass(frozen=True, slots=True)
class Matched:
    """The items that two sides both have, in A's order.

    `left_out` counts, by reason, the items that are not compared; `other_prompts` are items whose prompt reads
    differently though their right answer is the same: another template, chat format or tokenizer.
    """

    items: Sequence[str]
    left_out: Mapping[str, int]
    other_prompts: Sequence[str]


@dataclass(frozen=True, slots=True)
class Shared(Matched):
    """Those of them that are graded on both sides."""

    a_C: Sequence[float]  # mean score of each item
    b_C: Sequence[float]
    single: bool  # every item has one graded answer on each side


def matched(a: Answers, b: Answers, by_id: bool = False) -> Matched:
    """Two items are the same if their ids and their prompts are. With `by_id` the id is enough.

    Prompts that read differently are of another template if every such item has its own right answer on both sides: a
    few equal ones, such as the letter B of two other questions, prove nothing.
    """
    both = [item for item in a if item in b]
    answers = {item: [*a[item], *b[item]] for item in both}
    differing = [item for item in both if len({one.prompt for one in answers[item]}) > 1]
    golds = {item: {one.gold for one in answers[item]} for item in differing}
    other_rows = any(len(several - {None}) > 1 for several in golds.values())
    strange = [] if by_id else [item for item in differing if other_rows or None in golds[item]]
    counts = {
        "another question under the same id": len(strange),
        "only in A": len(a) - len(both),
        "only in B": len(b) - len(both),
    }
    dropped = set(strange)
    return Matched(
        [item for item in both if item not in dropped],
        {reason: count for reason, count in counts.items() if count},
        [item for item in differing if item not in dropped],
    )


def shared(a: Answers, b: Answers, by_id: bool = False) -> Shared:
    """The items of two sides that are the same (`matched`) and graded on both."""
    same = matched(a, b, by_id)
    items, left_out = [], Counter(same.left_out)
    a_C: list[float] = []
    b_C: list[float] = []
    single = True
    for item in same.items:
        mine, yours = ([one.score for one in answers[item] if one.score is not None] for answers in (a, b))
        if not mine or not yours:
            left_out["not graded in both" if not mine and not yours else f"not graded in {'B' if mine else 'A'}"] += 1
            continue
        items.append(item)
        a_C.append(fmean(mine))
        b_C.append(fmean(yours))
        single = single and len(mine) == len(yours) == 1
    compared = set(items)
    other = [item for item in same.other_prompts if item in compared]
    return Shared(items, dict(left_out), other, a_C, b_C, single)


@dataclass(frozen=True, slots=True)
class Flip:
    """An item on which the two sides differ, with an answer of each: for the better side its best, else its worst."""

    item: str
    prompt: str
    gold: str | None
    a_score: float
    b_score: float
    a: Answer
    b: Answer


def flips(pairs: Shared, a: Answers, b: Answers) -> list[Flip]:
    """The items whose scores differ, the largest difference first."""
    differing = [
        (item, one, other)
        for item, one, other in zip(pairs.items, pairs.a_C, pairs.b_C, strict=True)
        if abs(one - other) > 1e-12
    ]
    found = []
    for item, one, other in sorted(differing, key=lambda three: -abs(three[2] - three[1])):
        ours, theirs = _extreme(a[item], one > other), _extreme(b[item], other > one)
        found.append(Flip(item, ours.prompt, ours.gold, one, other, ours, theirs))
    return found


def _extreme(answers: Sequence[Answer], best: bool) -> Answer:
    graded = [one for one in answers if one.score is not None]
    return (max if best else min)(graded, key=lambda one: one.score or 0.0)
