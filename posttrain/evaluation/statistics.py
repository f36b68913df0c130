"""Values of evaluations and their uncertainty: means over answers, pass@k, maj@k; differences between two evaluations
on the same prompts, and between runs with different seeds.

Answers to one prompt are not independent; the prompts are the random sample. So every interval is clustered by
prompt (Miller, "Adding Error Bars to Evals", arXiv 2411.00640). Two models find the same prompts hard, so their
difference is estimated more precisely prompt by prompt than from the two means (section 4 of that paper).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import comb, sqrt
from statistics import NormalDist, fmean
from typing import TypeVar

import numpy as np

from posttrain.base.distributions import sign_test, t_quantile, z_quantile

Group = TypeVar("Group", bound=Sequence)
ROUNDING = 1e-12  # relative to the mean; a smaller standard error is the rounding error of equal numbers
CHUNK = 1 << 22  # resampled values in memory at a time
POWER = 0.8


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over answers with its clustered standard error and interval; None: the scores do not determine it."""

    value: float
    standard_error: float | None  # None: a single prompt
    low: float | None  # None: a single prompt, or equal scores outside of 0 to 1
    high: float | None
    prompts: int  # number of prompts with at least one graded answer
    answers: int  # number of graded answers


def mean_by_prompt(groups: Sequence[Sequence[float]], confidence: float = 0.95) -> Estimate:
    """The mean over all graded answers, with an interval that is clustered by prompt.

    `groups`: for each prompt the scores of its graded answers. Prompts without graded answers are ignored.

    The value is the sum of all scores divided by their number, so a prompt with more graded answers weighs more. The
    standard error is that of Miller (2024), eq. 4, with C / (C - 1) for C prompts (groups of one: s / √n with ddof 1):

        SE² = C / (C - 1) · Σ_c (Σ_i (s_ic - mean))² / N²

    It equals inspect's `stderr(cluster=...)`. Groups of one answer each give the standard error without clusters,
    inspect's `stderr()`.

    For scores between 0 and 1 the interval is Wilson's (1927). Its n is not the number of answers but the effective
    sample size: the number of independent answers with the same standard error, n = p(1 - p) / SE² (Korn & Graubard
    1998), adjusted by (z / t)² for the degrees of freedom C - 1. n is at least N² / Σ N_c², its value if all answers to
    a prompt are the same, and at p = 0 and p = 1 (equal to C if prompts have equally many answers). For scores that are
    0 or 1, n before the adjustment is at most N, its value if answers are independent.

    Few prompts say little about how alike the answers to a prompt are, and near 0 and 1 most prompts say nothing. So
    for scores that are 0 or 1, the estimate of N / n is averaged with its value for identical answers. The estimate
    weighs as much as the number of prompts with a right answer (or with a wrong one, if these are fewer), the other
    value as much as one prompt. The interval then has its coverage near 0 and 1 and for few prompts, where mean ± z·SE
    does not (see `tests/test_statistics.py`). It lies within 0 and 1 and never has zero width. For other scores, the
    interval is mean ± t·SE with C - 1 degrees of freedom.

    Raises ValueError if no prompt has a graded answer.
    """
    sizes_C = np.array([len(group) for group in groups if len(group)])
    if not sizes_C.size:
        raise ValueError("no graded answer")
    score_N = np.concatenate([np.asarray(group, dtype=float) for group in groups if len(group)])
    starts_C = np.concatenate([[0], np.cumsum(sizes_C)[:-1]])
    prompts, answers, value = sizes_C.size, score_N.size, float(score_N.mean())
    error = None
    if prompts > 1:
        off_C = np.add.reduceat(score_N - value, starts_C)
        error = float(np.sqrt((off_C**2).sum() * prompts / (prompts - 1))) / answers
        error = 0.0 if error < ROUNDING * max(1.0, abs(value)) else error
    if score_N.min() >= 0 and score_N.max() <= 1:
        least = answers**2 / float((sizes_C.astype(float) ** 2).sum())
        telling = None
        if np.isin(score_N, (0, 1)).all():
            right_C = np.add.reduceat(score_N, starts_C)
            telling = min(int((right_C > 0).sum()), int((right_C < sizes_C).sum()))
        size = _effective_size(value, error, prompts, answers, least, telling, confidence)
        low, high = wilson(value, size, confidence)
    elif error:
        half = t_quantile(confidence, prompts - 1) * error
        low, high = value - half, value + half
    else:
        low = high = None
    return Estimate(value, error, low, high, prompts, answers)


def _effective_size(
    p: float, error: float | None, prompts: int, answers: int, least: float, telling: int | None, confidence: float
) -> float:
    """The number of independent answers whose mean is as certain as this one; see `mean_by_prompt`.

    `telling`: the number of prompts that show how alike answers are; None if some score is not 0 or 1."""
    if error is None or not 0 < p < 1:
        return least
    freedom = (z_quantile(confidence) / t_quantile(confidence, prompts - 1)) ** 2
    if telling is None:
        return least if error == 0 else max(least, p * (1 - p) / error**2 * freedom)
    alike = answers / least  # N / n if all answers to a prompt are the same
    if alike == 1:
        return least
    estimated = min(max(1.0, answers * error**2 / (p * (1 - p))), alike)
    return answers * (telling + 1) / (telling * estimated + alike) * freedom


def wilson(p: float, n: float, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval of a share p of n independent trials (1927; Brown, Cai & DasGupta 2001)."""
    z = z_quantile(confidence)
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that one of k completions is right: the unbiased estimate from n completions, c of them right.

    1 - C(n - c, k) / C(n, k) for k ≤ n, arXiv 2107.03374, eq. 1."""
    return 1.0 - comb(n - c, k) / comb(n, k)


def passes(groups: Sequence[Sequence[bool | None]], most: int) -> dict[int, float]:
    """pass@k by k: 1, 2, 4 ... and `most` completions per prompt, as the mean over the prompts with at least k counted
    completions. None is a completion without a verdict; it is not counted."""
    judged = [[right for right in group if right is not None] for group in groups]
    return _by_size(judged, most, lambda right, k: pass_at_k(len(right), sum(right), k))


def majorities(groups: Sequence[Sequence[tuple[str | None, bool]]], most: int) -> dict[int, float]:
    """maj@k by k, as in `passes`. The groups have each completion's answer, and whether it is right."""
    return _by_size(groups, most, lambda group, k: maj_at_k([it for it, _ in group], [right for _, right in group], k))


def _by_size(groups: Sequence[Group], most: int, value: Callable[[Group, int], float]) -> dict[int, float]:
    ks = sorted({most, *(1 << power for power in range(most.bit_length()))})
    found = {k: [value(group, k) for group in groups if len(group) >= k] for k in ks}
    return {k: fmean(values) for k, values in found.items() if values}


def maj_at_k(answers: Sequence[str | None], right: Sequence[bool], k: int) -> float:
    """Probability that the majority of k completions is right: the unbiased estimate from n ≥ k of them.

    An answer of None does not vote. All right answers count as one answer, however they are written; wrong answers
    count as one if they are equal strings.

    The mean, over all C(n, k) choices, of the probability that the answer with the most votes is right, where ties
    are broken uniformly at random and a choice without votes is wrong. maj@1 is the accuracy.
    """
    correct = sum(right)
    wrong = Counter(answer for answer, good in zip(answers, right, strict=True) if not good and answer is not None)
    silent = len(answers) - correct - wrong.total()
    return _majority(correct, tuple(sorted(wrong.values())), silent, k)


@lru_cache(maxsize=65_536)
def _majority(correct: int, wrong: tuple[int, ...], silent: int, k: int) -> float:
    """maj@k from the counts of the right answer, of each wrong answer, and of completions without an answer.

    Sums, over the votes v of the right answer, the multivariate hypergeometric weights of all choices in which no wrong
    answer has more than v votes, each divided by 1 + the number of wrong answers with v votes. The choices are counted
    in integers, by dynamic programming over the wrong answers.
    """
    right: Counter[int] = Counter()  # number of choices by the number of wrong answers that tie with the right one
    for votes in range(1, min(correct, k) + 1):
        ways = {(0, 0): 1}  # (votes of wrong answers so far, wrong answers with `votes` votes) -> number of choices
        for count in wrong:
            grown: Counter[tuple[int, int]] = Counter()
            for (used, tied), number in ways.items():
                for some in range(min(count, votes, k - votes - used) + 1):
                    grown[used + some, tied + (some == votes)] += number * comb(count, some)
            ways = grown
        for (used, tied), number in ways.items():
            right[tied] += comb(correct, votes) * number * comb(silent, k - votes - used)
    total = comb(correct + sum(wrong) + silent, k)
    return float(sum((Fraction(number, total * (1 + tied)) for tied, number in right.items()), Fraction(0)))


@dataclass(frozen=True, slots=True)
class Paired:
    """B's mean score minus A's, prompt by prompt."""

    value: float
    standard_error: float | None  # clustered by prompt; None: a single prompt
    low: float | None  # None: no spread to estimate it from
    high: float | None
    smallest: float | None  # the difference that would have been detected with probability POWER
    wins: int  # prompts on which B's mean score is higher
    losses: int
    ties: int


def paired_difference(one_C: Sequence[float], other_C: Sequence[float], confidence: float = 0.95) -> Paired:
    """The difference `other` - `one` of the mean scores of C prompts, with its interval.

    Each prompt counts once, with the mean of its graded scores. `confidence` is the interval's coverage, and 1 - alpha
    of the test for which `smallest` is computed.

    The standard error, s / √C with ddof 1, is the paired one clustered by prompt (Miller 2024, eq. 8). The interval is
    value ± t·SE with C - 1 degrees of freedom. If every difference is -1, 0 or 1 (one right or wrong answer each), it
    is that of Bonett & Price (2012), which adds one prompt won and one lost: it keeps its coverage for few prompts and
    few differences, and never has zero width.

    The smallest difference that is detected with probability POWER is (z_{confidence} + z_{POWER}) · SE (Miller 2024,
    eq. 9), where SE is the standard error from which the interval was computed.

    Raises ValueError if there is no prompt.
    """
    difference_C = _differences(one_C, other_C)
    count, value = difference_C.size, float(difference_C.mean())
    error = _standard_error(difference_C)
    if np.isin(difference_C, (-1, 0, 1)).all():
        added = np.concatenate([difference_C, [1.0, -1.0]])
        centre, used = float(added.mean()), float(added.std()) / sqrt(added.size)
        half = z_quantile(confidence) * used
        low, high = max(-1.0, centre - half), min(1.0, centre + half)
    else:
        used = error
        half = t_quantile(confidence, count - 1) * error if error else None
        low, high = (None, None) if half is None else (value - half, value + half)
    smallest = (z_quantile(confidence) + NormalDist().inv_cdf(POWER)) * used if used else None
    wins, losses = int((difference_C > 0).sum()), int((difference_C < 0).sum())
    return Paired(value, error, low, high, smallest, wins, losses, count - wins - losses)


def _differences(one_C: Sequence[float], other_C: Sequence[float]) -> np.ndarray:
    one, other = np.asarray(one_C, dtype=float), np.asarray(other_C, dtype=float)
    if one.shape != other.shape or one.ndim != 1 or not one.size:
        raise ValueError(f"paired scores must be non-empty lists of equal length; got {one.shape} and {other.shape}")
    difference = other - one
    difference[np.abs(difference) < ROUNDING * np.maximum(1, np.abs(one))] = 0  # equal means, added in another order
    return difference


def _standard_error(value_C: np.ndarray) -> float | None:
    return float(value_C.std(ddof=1)) / sqrt(value_C.size) if value_C.size > 1 else None


def paired_bootstrap(one_C: Sequence[float], other_C: Sequence[float], resamples: int = 10_000, seed: int = 0) -> float:
    """The two-sided p-value of the mean difference `other` - `one`, by resampling prompts with all their answers
    (Efron 1979). Each prompt counts once, with its mean graded score; the smallest p-value is 1 / (resamples + 1).

    The symmetric bootstrap-t (Hall 1988): each resample's distance from the observed mean is divided by its own
    standard error. Plain percentiles reject too often with few prompts. p is the share of resamples that are at
    least as many standard errors from the observed mean as that mean is from 0; the observed mean counts as a resample
    (Davison & Hinkley 1997, eq. 4.12). If all differences are equal, there is nothing to resample, and p is that of the
    sign test.
    """
    difference_C = _differences(one_C, other_C)
    error, observed = _standard_error(difference_C), float(difference_C.mean())
    if not error:
        return sign_test(difference_C.size if observed else 0, 0)[0]
    random = np.random.default_rng(seed)
    distance_R = np.concatenate(list(_standardised(difference_C - observed, random, resamples)))
    far = int((distance_R >= abs(observed) / error - ROUNDING).sum())
    return (far + 1) / (resamples + 1)


def _standardised(centred_C: np.ndarray, random: np.random.Generator, resamples: int) -> Iterator[np.ndarray]:
    """Yield |mean| / standard error of resamples of values whose mean is 0, in blocks of resamples."""
    count = centred_C.size
    value_U, of_U = np.unique(centred_C, return_counts=True)
    few = value_U.size <= count // 8  # then it is faster to sample how often each value occurs, which is multinomial
    rows = max(1, CHUNK // (value_U.size if few else count))
    for start in range(0, resamples, rows):
        some = min(rows, resamples - start)
        if few:
            often_RU = random.multinomial(count, of_U / count, size=some)
            mean_R, square_R = often_RU @ value_U / count, often_RU @ value_U**2 / count
        else:
            value_RC = centred_C[random.integers(count, size=(some, count), dtype=np.int32)]
            mean_R, square_R = value_RC.mean(axis=1), np.einsum("rc,rc->r", value_RC, value_RC) / count
        error_R = np.sqrt(np.maximum(square_R - mean_R**2, 0) / (count - 1))
        flat_R = error_R < ROUNDING * np.abs(centred_C).max()  # all values equal: infinitely far
        yield np.where(flat_R, np.inf, np.abs(mean_R) / np.where(flat_R, 1, error_R))


@dataclass(frozen=True, slots=True)
class SeedNoise:
    """The spread of values over runs that differ only in their seeds."""

    deviation: float  # standard deviation over seeds, pooled over the groups
    freedom: int  # its degrees of freedom: runs - groups
    runs: int

    def floor(self, one: int = 1, other: int = 1, confidence: float = 0.95) -> float:
        """The difference in means of `one` and `other` runs that seeds alone exceed with probability 1 - confidence."""
        return t_quantile(confidence, self.freedom) * self.deviation * sqrt(1 / one + 1 / other)


def seed_noise(groups: Sequence[Sequence[float]]) -> SeedNoise | None:
    """The noise over seeds, from the values of runs, grouped by their settings; None if no group has two runs.

    The deviation is pooled over the groups, s² = Σ (v - mean of its group)² / (runs - groups), as in Student's
    two-sample test.
    """
    repeated = [np.asarray(group, dtype=float) for group in groups if len(group) > 1]
    if not repeated:
        return None
    runs = sum(group.size for group in repeated)
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in repeated)
    freedom = runs - len(repeated)
    return SeedNoise(sqrt(squares / freedom), freedom, runs)
