"""Differences between the sides of a comparison: their sizes, their tests, and what they amount to in words."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from posttrain.base.distributions import sign_test
from posttrain.base.errors import RunError
from posttrain.base.words import counted
from posttrain.config.options import CompareOptions
from posttrain.evaluation.comparing.items import Answers, Flip, Shared, flips, shared
from posttrain.evaluation.comparing.sides import Side, settings_that_differ
from posttrain.evaluation.paired import Paired, SeedNoise, paired_bootstrap, paired_difference, seed_noise
from posttrain.evaluation.statistics import Estimate, mean_by_prompt

MCNEMAR, BOOTSTRAP = "exact McNemar", "paired bootstrap"


@dataclass(frozen=True, slots=True)
class Value:
    """A side's mean score over all of its graded answers, and the mean of each of its runs."""

    estimate: Estimate | None  # None: nothing is graded
    ungraded: int
    by_run: Sequence[float]


@dataclass(frozen=True, slots=True)
class Difference:
    """B - A on the items that both have. `p_adjusted` is Holm's (1979), for all differences of the suite."""

    a: str
    b: str
    items: Shared
    paired: Paired
    test: str
    p: float
    mid_p: float | None
    p_adjusted: float
    floor: float | None  # what seeds alone exceed in 5 % of comparisons; None: not known
    flips: Sequence[Flip]
    shown: bool  # a difference is shown: significant, and above the noise over seeds where that is known

    @property
    def better(self) -> str | None:
        return None if not self.shown else self.b if self.paired.value > 0 else self.a


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
    left_out: Mapping[str, str] = field(default_factory=dict)  # suite -> why it is not compared for all


def compare(sides: Sequence[Side], options: CompareOptions | None = None, suites: Sequence[str] = ()) -> Comparison:
    """Compare the sides on every scored suite that two of them have, or on those of `suites`.

    Raises RunError if there is none, or none on which two sides have a graded item in common.
    """
    options = options or CompareOptions()
    having: dict[str, list[Side]] = {}
    for side in sides:
        for key in side.suites():
            if side.metric(key) and (not suites or key.partition(" ")[0] in suites):
                having.setdefault(key, []).append(side)
    found, left_out, problems = [], {}, []
    for key, some in having.items():
        if len(some) < len(sides):
            left_out[key] = f"only {', '.join(side.name for side in some)} {'has' if len(some) == 1 else 'have'} it"
        if len(some) > 1:
            try:
                found.append(_suite(key, some, options))
            except RunError as error:
                problems.append(error)
                left_out[key] = str(error)
    if problems and not found:
        raise problems[0]
    if not found:
        have = "; ".join(f"{side.name}: {', '.join(side.suites()) or 'none'}" for side in sides)
        raise RunError(f"there is no scored suite that two of these have in common ({have}): evaluate them on the same")
    return Comparison(sides, found, options, left_out)


def _suite(key: str, sides: Sequence[Side], options: CompareOptions) -> Suite:
    answers = {side.name: side.by_item(key) for side in sides}
    values = {side.name: _value(side, key, answers[side.name], options) for side in sides}
    noise = seed_noise([value.by_run for value in values.values()])
    two = combinations(sides, 2) if options.all_pairs else ((sides[0], side) for side in sides[1:])
    found, problems = [], []
    for a, b in two:
        try:
            found.append(_tested(key, a, b, answers[a.name], answers[b.name], noise, options))
        except RunError as error:
            problems.append(error)
    if not found:
        raise problems[0]
    adjusted = holm([one.p for one in found])
    differences = [_judged(one, p, options) for one, p in zip(found, adjusted, strict=True)]
    warnings = [*map(str, problems), *_warnings(key, sides, differences, values)]
    return Suite(key, sides[0].metric(key), values, differences, noise, warnings)


def _value(side: Side, key: str, answers: Answers, options: CompareOptions) -> Value:
    groups = [[one.score for one in several if one.score is not None] for several in answers.values()]
    missing = sum(one.score is None for several in answers.values() for one in several)
    runs = [[one.score for one in run.answers if one.score is not None] for run in side.runs(key)]
    by_run = [float(np.mean(scores)) for scores in runs if scores]
    return Value(mean_by_prompt(groups, options.confidence) if any(groups) else None, missing, by_run)


def _tested(
    key: str, a: Side, b: Side, ours: Answers, theirs: Answers, noise: SeedNoise | None, options: CompareOptions
) -> Difference:
    pairs = shared(ours, theirs, options.by_id)
    if not pairs.items:
        why = ", ".join(f"{count:,} {reason}" for reason, count in pairs.left_out.items())
        hint = "; give --by-id if their ids alone say which are the same" if "another question" in why else ""
        raise RunError(f"{key}: {a.name} (A) and {b.name} (B) have no graded item in common ({why}){hint}")
    paired = paired_difference(pairs.a_C, pairs.b_C, options.confidence)
    binary = pairs.single and {*pairs.a_C, *pairs.b_C} <= {0.0, 1.0}
    if binary:
        test, (p, mid_p) = MCNEMAR, sign_test(paired.wins, paired.losses)
    else:
        p = paired_bootstrap(pairs.a_C, pairs.b_C, options.resamples, options.seed)
        test, mid_p = BOOTSTRAP, None
    floor = None if noise is None else noise.floor(len(a.sources), len(b.sources), options.confidence)
    flipped = flips(pairs, ours, theirs)
    return Difference(a.name, b.name, pairs, paired, test, p, mid_p, p, floor, flipped, shown=False)


def _judged(one: Difference, p_adjusted: float, options: CompareOptions) -> Difference:
    significant = p_adjusted <= 1 - options.confidence
    above = one.floor is None or abs(one.paired.value) > one.floor
    return replace(one, p_adjusted=p_adjusted, shown=significant and above)


def holm(ps: Sequence[float]) -> list[float]:
    """p-values adjusted for their number, so that an error is made in any of them as rarely as in one (Holm 1979)."""
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
            yield f"{name}: {counted(value.ungraded, 'answer')} not graded, which are in no mean"
    for one in differences:
        if one.items.left_out:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in one.items.left_out.items())
            compared = counted(len(one.items.items), "item")
            yield f"{one.b} (B) and {one.a} (A) are compared on {compared}; not compared: {reasons}"
        if one.items.other_prompts:
            count = counted(len(one.items.other_prompts), "prompt")
            yield (
                f"{count} of {one.b} and {one.a} differ, such as item {one.items.other_prompts[0]}'s: another template "
                "or chat format is part of what is compared"
            )


def verdict(one: Difference) -> str:
    """What a difference amounts to, in a sentence."""
    value, low, high = one.paired.value, one.paired.low, one.paired.high
    if one.shown and value < 0:  # said of the better side
        value, low, high = -value, None if high is None else -high, None if low is None else -low
    sign = "" if one.shown else "+"
    between = "" if low is None or high is None else f"{low:{sign}.3f} to {high:{sign}.3f}; "
    found = f"{value:{sign}.3f} ({between}{p_text(one.p_adjusted)})"
    if one.shown:
        return f"{one.better} is better than {one.a if one.better == one.b else one.b} by {found}."
    said = f"No difference shown between {one.b} and {one.a}: {found}."
    if one.floor is not None and abs(value) <= one.floor:
        return f"{said} Seeds alone may make up to {one.floor:.3f}."
    smallest = one.paired.smallest
    return said if smallest is None else f"{said} One of {smallest:.3f} would have been detected in 80 % of cases."


def p_text(p: float) -> str:
    return "p < 0.0001" if p < 0.0001 else f"p = {p:.4f}" if p < 0.01 else f"p = {p:.2f}"
