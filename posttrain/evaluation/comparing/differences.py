"""Differences between the sides of a comparison: the items that both sides have, tests on these items, and verdicts.

No item is dropped without being counted.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import fmean

import numpy as np

from posttrain.base.distributions import sign_test
from posttrain.base.errors import RunError
from posttrain.base.words import by_key, counted
from posttrain.config.options import CompareOptions
from posttrain.evaluation.comparing.sources import Side, settings_that_differ
from posttrain.evaluation.records import Answer
from posttrain.evaluation.statistics import (
    Estimate,
    Paired,
    SeedNoise,
    mean_by_prompt,
    paired_bootstrap,
    paired_difference,
    seed_noise,
)

MCNEMAR, BOOTSTRAP = "exact McNemar", "paired bootstrap"

Answers = Mapping[str, Sequence[Answer]]  # by item


@dataclass(frozen=True, slots=True)
class Shared:
    """The items that both sides have, in A's order.

    `left_out` counts the items that are not compared, by reason; `other_prompts`: items whose prompts differ although
    their right answers are the same, because of another template, chat format or tokenizer.
    """

    items: Sequence[str]
    left_out: Mapping[str, int]
    other_prompts: Sequence[str]
    a_C: Sequence[float] = ()  # mean score of each item
    b_C: Sequence[float] = ()
    single: bool = False  # every item has one graded answer on each side


def matched(a: Answers, b: Answers, by_id: bool = False) -> Shared:
    """Match the items that have the same id and the same prompt; with `by_id`, the id is enough.

    Prompts that differ are attributed to another template if all these items have the same right answer on both sides.
    A few equal answers, such as the letter B of two different questions, prove nothing.
    """
    both = [item for item in a if item in b]
    answers = {item: [*a[item], *b[item]] for item in both}
    differing = [item for item in both if len({answer.prompt for answer in answers[item]}) > 1]
    golds = {item: {answer.gold for answer in answers[item]} for item in differing}
    other_rows = any(len(several - {None}) > 1 for several in golds.values())
    strange = set() if by_id else {item for item in differing if other_rows or None in golds[item]}
    counts = {
        "another question under the same id": len(strange),
        "only in A": len(a) - len(both),
        "only in B": len(b) - len(both),
    }
    return Shared(
        [item for item in both if item not in strange],
        {reason: count for reason, count in counts.items() if count},
        [item for item in differing if item not in strange],
    )


def shared(a: Answers, b: Answers, by_id: bool = False) -> Shared:
    """The items of `matched` that are graded on both sides, with their scores."""
    same = matched(a, b, by_id)
    left_out = Counter(same.left_out)
    scores: dict[str, list[list[float]]] = {}  # of each item, on both sides
    for item in same.items:
        ours, theirs = ([one.score for one in answers[item] if one.score is not None] for answers in (a, b))
        if ours and theirs:
            scores[item] = [ours, theirs]
        else:
            left_out[f"not graded in {'B' if ours else 'A' if theirs else 'both'}"] += 1
    a_C, b_C = ([fmean(each[side]) for each in scores.values()] for side in (0, 1))
    other = [item for item in same.other_prompts if item in scores]
    single = all(len(ours) == len(theirs) == 1 for ours, theirs in scores.values())
    return Shared(list(scores), dict(left_out), other, a_C, b_C, single)


@dataclass(frozen=True, slots=True)
class Flip:
    """An item on which the two sides differ, with the best answer of the better side and the worst of the other."""

    a_score: float
    b_score: float
    a: Answer
    b: Answer


def flips(pairs: Shared, a: Answers, b: Answers) -> list[Flip]:
    """The items whose scores differ, the largest difference first."""
    flipped = [
        Flip(one, other, _extreme(a[item], one > other), _extreme(b[item], other > one))
        for item, one, other in zip(pairs.items, pairs.a_C, pairs.b_C, strict=True)
        if abs(one - other) > 1e-12
    ]
    return sorted(flipped, key=lambda flip: -abs(flip.b_score - flip.a_score))


def _extreme(answers: Sequence[Answer], best: bool) -> Answer:
    graded = [one for one in answers if one.score is not None]
    return (max if best else min)(graded, key=lambda one: one.score or 0.0)


@dataclass(frozen=True, slots=True)
class Value:
    """A side's mean score over all of its graded answers, and the mean of each of its runs."""

    estimate: Estimate | None  # None: nothing is graded
    ungraded: int
    by_run: Sequence[float]


@dataclass(frozen=True, slots=True)
class Difference:
    """B - A on the items that both sides have. `p_adjusted`: adjusted for all differences of the suite (Holm 1979)."""

    a: str
    b: str
    items: Shared
    paired: Paired
    test: str
    p: float
    mid_p: float | None
    p_adjusted: float
    floor: float | None  # difference that seeds alone exceed in 5 % of comparisons; None: not known
    flips: Sequence[Flip]
    shown: bool  # whether a difference is shown: significant, and above the noise over seeds if that is known

    @property
    def better(self) -> str | None:
        return None if not self.shown else self.b if self.paired.value > 0 else self.a

    @property
    def may_be_noise(self) -> bool:
        """Whether seeds alone may cause a difference of this size."""
        return self.floor is not None and abs(self.paired.value) <= self.floor


@dataclass(frozen=True, slots=True)
class Suite:
    """The comparison on one suite."""

    key: str
    metric: str
    values: Mapping[str, Value]
    differences: Sequence[Difference]
    noise: SeedNoise | None
    warnings: Sequence[str]


@dataclass(frozen=True, slots=True)
class Comparison:
    sides: Sequence[Side]
    suites: Sequence[Suite]
    options: CompareOptions
    left_out: Mapping[str, str] = field(default_factory=dict)  # suite -> why it is not compared for all sides


def compare(sides: Sequence[Side], options: CompareOptions | None = None, suites: Sequence[str] = ()) -> Comparison:
    """Compare the sides on every scored suite that at least two of them have, or only on those in `suites`.

    Raises RunError if there is no such suite, or none on which two sides have a graded item in common."""
    options = options or CompareOptions()
    wanted = ((key, side) for side in sides for key in side.suites() if side.metric(key))
    having = by_key((key, side) for key, side in wanted if not suites or key.partition(" ")[0] in suites)
    compared, left_out, problems = [], {}, []
    for key, some in having.items():
        if len(some) < len(sides):
            left_out[key] = f"only {', '.join(side.name for side in some)} {'has' if len(some) == 1 else 'have'} it"
        if len(some) > 1:
            try:
                compared.append(_suite(key, some, options))
            except RunError as error:
                problems.append(error)
                left_out[key] = str(error)
    if problems and not compared:
        raise problems[0]
    if not compared:
        have = "; ".join(f"{side.name}: {', '.join(side.suites()) or 'none'}" for side in sides)
        raise RunError(
            f"there is no scored suite that two of these have in common ({have}): evaluate them on the same suite"
        )
    return Comparison(sides, compared, options, left_out)


def _suite(key: str, sides: Sequence[Side], options: CompareOptions) -> Suite:
    answers = {side.name: side.by_item(key) for side in sides}
    values = {side.name: _value(side, key, answers[side.name], options) for side in sides}
    noise = seed_noise([value.by_run for value in values.values()])
    two = combinations(sides, 2) if options.all_pairs else ((sides[0], side) for side in sides[1:])
    tested, problems = [], []
    for a, b in two:
        try:
            tested.append(_tested(key, a, b, answers[a.name], answers[b.name], noise, options))
        except RunError as error:
            problems.append(error)
    if not tested:
        raise problems[0]
    adjusted, level = holm([one.p for one in tested]), 1 - options.confidence
    differences = [
        replace(one, p_adjusted=p, shown=p <= level and not one.may_be_noise)
        for one, p in zip(tested, adjusted, strict=True)
    ]
    warnings = [*map(str, problems), *_warnings(key, sides, differences, values)]
    return Suite(key, sides[0].metric(key), values, differences, noise, warnings)


def _value(side: Side, key: str, answers: Answers, options: CompareOptions) -> Value:
    groups = [[answer.score for answer in item if answer.score is not None] for item in answers.values()]
    missing = sum(answer.score is None for item in answers.values() for answer in item)
    runs = [[answer.score for answer in run.answers if answer.score is not None] for run in side.runs(key)]
    by_run = [float(np.mean(scores)) for scores in runs if scores]
    return Value(mean_by_prompt(groups, options.confidence) if any(groups) else None, missing, by_run)


def _tested(
    key: str, a: Side, b: Side, ours: Answers, theirs: Answers, noise: SeedNoise | None, options: CompareOptions
) -> Difference:
    pairs = shared(ours, theirs, options.by_id)
    if not pairs.items:
        why = ", ".join(f"{count:,} {reason}" for reason, count in pairs.left_out.items())
        hint = "; if equal ids mean equal items, give --by-id" if "another question" in why else ""
        raise RunError(f"{key}: {a.name} (A) and {b.name} (B) have no graded item in common ({why}){hint}")
    paired = paired_difference(pairs.a_C, pairs.b_C, options.confidence)
    if pairs.single and {*pairs.a_C, *pairs.b_C} <= {0.0, 1.0}:
        test, (p, mid_p) = MCNEMAR, sign_test(paired.wins, paired.losses)
    else:
        p = paired_bootstrap(pairs.a_C, pairs.b_C, options.resamples, options.seed)
        test, mid_p = BOOTSTRAP, None
    floor = None if noise is None else noise.floor(len(a.sources), len(b.sources), options.confidence)
    flipped = flips(pairs, ours, theirs)
    return Difference(a.name, b.name, pairs, paired, test, p, mid_p, p, floor, flipped, shown=False)


def holm(ps: Sequence[float]) -> list[float]:
    """Adjust p-values so that an error in any of them is as rare as in a single test (Holm 1979)."""
    adjusted, highest = [0.0] * len(ps), 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=lambda index: ps[index])):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = highest
    return adjusted


def _warnings(
    key: str, sides: Sequence[Side], differences: Sequence[Difference], values: Mapping[str, Value]
) -> Iterator[str]:
    for name, several in settings_that_differ(sides, key).items():
        shown = ", ".join(f"{side.name} {value}" for side, value in zip(sides, several, strict=True))
        yield f"{name} differs: {shown}"
    for name, value in values.items():
        if value.ungraded:
            yield f"{name}: {counted(value.ungraded, 'answer')} not graded, and not in the mean"
    for one in differences:
        if one.items.left_out:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in one.items.left_out.items())
            compared = counted(len(one.items.items), "item")
            yield f"{one.b} (B) and {one.a} (A) are compared on {compared}; not compared: {reasons}"
        if one.items.other_prompts:
            count = counted(len(one.items.other_prompts), "prompt")
            yield (
                f"{count} of {one.b} and {one.a} differ, such as that of item {one.items.other_prompts[0]}: the "
                "comparison includes the effect of another template or chat format"
            )


def verdict(difference: Difference) -> str:
    """The result of a comparison, in a sentence or two."""
    value, low, high = difference.paired.value, difference.paired.low, difference.paired.high
    a, b, is_shown = difference.a, difference.b, difference.shown
    if is_shown and value < 0:  # from the better side
        value, low, high = -value, None if high is None else -high, None if low is None else -low
    sign = "" if is_shown else "+"
    between = "" if low is None or high is None else f"{interval(low, high, sign)}; "
    amount = f"{value:{sign}.3f} ({between}{p_text(difference.p_adjusted)})"
    if is_shown:
        return f"{difference.better} is better than {a if difference.better == b else b} by {amount}."
    none = f"No difference shown between {b} and {a}: {amount}."
    if difference.may_be_noise:
        return f"{none} Seeds alone may cause up to {difference.floor:.3f}."
    if (smallest := difference.paired.smallest) is None:
        return none
    return f"{none} A difference of {smallest:.3f} would have been detected in 80 % of cases."


def interval(low: float | None, high: float | None, sign: str = "") -> str:
    return "-" if low is None or high is None else f"{low:{sign}.3f} to {high:{sign}.3f}"


def p_text(p: float) -> str:
    return "p < 0.0001" if p < 0.0001 else f"p = {p:.4f}" if p < 0.01 else f"p = {p:.2f}"
