"""Values of an evaluation and how sure they are: means over answers, pass@k, maj@k.

Answers to one prompt are not independent: what is sampled at random is the prompt. So every interval is clustered by
prompt (Miller, "Adding Error Bars to Evals", arXiv 2411.00640). Comparisons of two evaluations: `paired.py`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import comb, sqrt
from statistics import fmean

import numpy as np

from posttrain.base.distributions import t_quantile, z_quantile

ROUNDING = 1e-12  # relative to the mean: a smaller standard error is that of equal numbers


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over answers with its clustered standard error and interval; None is what the scores cannot tell."""

    value: float
    standard_error: float | None  # None: a single prompt
    low: float | None  # None: a single prompt or no spread at all, of scores that are not between 0 and 1
    high: float | None
    prompts: int  # with at least one graded answer
    answers: int  # graded


def mean_by_prompt(groups: Sequence[Sequence[float]], confidence: float = 0.95) -> Estimate:
    """The mean over all graded answers, with an interval that is clustered by prompt.

    Args:
        groups: for each prompt the scores of its graded answers. Prompts without one are ignored.
        confidence: the interval's coverage.

    The value is the sum of all scores over their number: a prompt with more graded answers weighs more. The standard
    error is that of Miller (2024), eq. 4, with C / (C - 1) for C prompts (groups of one: s / √n with ddof 1):

        SE² = C / (C - 1) · Σ_c (Σ_i (s_ic - mean))² / N²

    equal to inspect's `stderr(cluster=...)`. The standard error without clusters, inspect's `stderr()`, is that of
    groups of one answer each.

    The interval of scores between 0 and 1 is Wilson's (1927), with the number of independent answers that would have
    this standard error, n = p(1 - p) / SE², in place of the number of answers (Korn & Graubard 1998: the effective
    sample size, adjusted by (z / t)² for the degrees of freedom C - 1). n is not less than N² / Σ N_c², where all
    answers to a prompt are the same (so n = C at p = 0 and p = 1), and of scores that are 0 or 1 not more than N, where
    answers are independent. Few prompts tell little of how alike several answers to one are, and near 0 and 1 most of
    them tell nothing. So of scores that are 0 or 1 the estimate of N / n counts as the prompts do that have a right
    answer, or those that have a wrong one if these are fewer, beside one prompt whose answers are all the same. The
    interval then covers near 0 and 1 and for few prompts, where mean ± z·SE does not (`tests/test_statistics.py` has
    the figures); it stays between 0 and 1 and never has zero width. Other scores: mean ± t·SE with C - 1 degrees of
    freedom.

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
    """The number of independent answers whose mean is as sure as this one; see `mean_by_prompt`.

    `telling` is None for scores other than 0 and 1, else the number of prompts that tell how alike answers are.
    """
    if error is None or not 0 < p < 1:
        return least
    freedom = (z_quantile(confidence) / t_quantile(confidence, prompts - 1)) ** 2
    if telling is None:
        return least if error == 0 else max(least, p * (1 - p) / error**2 * freedom)
    alike = answers / least  # N / n where the answers to a prompt are all the same
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
    """Probability that one of k completions is right: the unbiased estimate from n of which c are (k ≤ n).

    1 - C(n - c, k) / C(n, k), arXiv 2107.03374, eq. 1.
    """
    return 1.0 - comb(n - c, k) / comb(n, k)


def passes(groups: Sequence[Sequence[bool | None]], most: int) -> dict[str, float]:
    """`pass@k` for k = 1, 2, 4 ... up to `most` completions per prompt, as the mean over prompts.

    None is a completion without a verdict, which is not counted; prompts with fewer than k counted completions are not
    in pass@k.
    """
    judged = [[right for right in group if right is not None] for group in groups]
    found = {k: passes_at(judged, k) for k in sizes(most)}
    return {f"pass@{k}": fmean(values) for k, values in found.items() if values}


def sizes(most: int) -> list[int]:
    """1, 2, 4 ... and `most`: the k of pass@k and maj@k."""
    return sorted({most, *(1 << power for power in range(most.bit_length()))})


def passes_at(groups: Sequence[Sequence[bool]], k: int) -> list[float]:
    """pass@k of each prompt with at least k completions; `mean_by_prompt([[v] for v in …])` gives its interval."""
    return [pass_at_k(len(group), sum(group), k) for group in groups if len(group) >= k]


def maj_at_k(answers: Sequence[str | None], right: Sequence[bool], k: int) -> float:
    """Probability that the majority of k completions is right: the unbiased estimate from n ≥ k of them.

    Args:
        answers: the answer of each completion; None does not vote.
        right: whether it is right. All right answers are one answer, however they are written; wrong ones are one
            answer if they are equal strings.
        k: how many of the n completions vote.

    The mean, over all C(n, k) choices, of the probability that the answer with the most votes is right, where a tie
    for the most is broken uniformly at random, and no vote at all is wrong. maj@1 is the accuracy.
    """
    correct = sum(right)
    wrong = Counter(answer for answer, good in zip(answers, right, strict=True) if not good and answer is not None)
    silent = len(answers) - correct - wrong.total()
    return _majority(correct, tuple(sorted(wrong.values())), silent, k)


def majorities_at(groups: Sequence[tuple[Sequence[str | None], Sequence[bool]]], k: int) -> list[float]:
    """maj@k of each prompt, as (answers, right), with at least k completions."""
    return [maj_at_k(answers, right, k) for answers, right in groups if len(answers) >= k]


@lru_cache(maxsize=65_536)
def _majority(correct: int, wrong: tuple[int, ...], silent: int, k: int) -> float:
    """maj@k from the counts of the right answer, of each wrong answer, and of completions without an answer.

    Sums, over the votes v of the right answer, the multivariate hypergeometric weight of all choices in which no wrong
    answer has more than v votes, divided by 1 + the number of those that have v: counted by dynamic programming over
    the wrong answers, in whole numbers.
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
