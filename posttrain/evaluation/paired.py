"""Comparison of two evaluations on the same prompts, and of runs that differ by their seeds.

Two models find the same prompts hard, so their difference is surer prompt by prompt than the two means apart (Miller,
"Adding Error Bars to Evals", arXiv 2411.00640, section 4).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

import numpy as np

from posttrain.base.distributions import sign_test, t_quantile, z_quantile
from posttrain.evaluation.statistics import ROUNDING

CHUNK = 1 << 22  # resampled values in memory at a time


@dataclass(frozen=True, slots=True)
class Paired:
    """B's mean score less A's, prompt by prompt."""

    value: float
    standard_error: float | None  # clustered by prompt; None: a single prompt
    low: float | None  # None: no spread to tell it from
    high: float | None
    smallest: float | None  # the difference that would have been detected with the given power
    wins: int  # prompts on which B's mean score is higher
    losses: int
    ties: int


def paired_difference(
    one_C: Sequence[float], other_C: Sequence[float], confidence: float = 0.95, power: float = 0.8
) -> Paired:
    """The difference `other` - `one` of the mean scores of C prompts, with its interval.

    Args:
        one_C, other_C: for each prompt the mean of its graded scores; each prompt counts once.
        confidence: the interval's coverage, and 1 - alpha of the test that `smallest` is about.
        power: probability with which a true difference of `smallest` is detected.

    The standard error, s / √C with ddof 1, is the paired one clustered by prompt (Miller 2024, eq. 8). The interval is
    value ± t·SE with C - 1 degrees of freedom. Where every difference is -1, 0 or 1 (one right or wrong answer each),
    it is that of Bonett & Price (2012), which adds one prompt won and one lost: it covers also for few prompts and
    where few differ, and never has zero width.

    The smallest detectable difference is (z_{confidence} + z_{power}) · SE (Miller 2024, eq. 9), with the standard
    error that the interval has.

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
    smallest = (z_quantile(confidence) + NormalDist().inv_cdf(power)) * used if used else None
    wins, losses = int((difference_C > 0).sum()), int((difference_C < 0).sum())
    return Paired(value, error, low, high, smallest, wins, losses, count - wins - losses)


def _differences(one_C: Sequence[float], other_C: Sequence[float]) -> np.ndarray:
    one, other = np.asarray(one_C, dtype=float), np.asarray(other_C, dtype=float)
    if one.shape != other.shape or one.ndim != 1 or not one.size:
        raise ValueError(f"paired scores are two equally long, not empty lists, got shapes {one.shape}, {other.shape}")
    difference = other - one
    difference[np.abs(difference) < ROUNDING * np.maximum(1, np.abs(one))] = 0  # of equal means, added in another order
    return difference


def _standard_error(value_C: np.ndarray) -> float | None:
    return float(value_C.std(ddof=1)) / sqrt(value_C.size) if value_C.size > 1 else None


def paired_bootstrap(one_C: Sequence[float], other_C: Sequence[float], resamples: int = 10_000, seed: int = 0) -> float:
    """The two-sided p-value of the mean difference `other` - `one`, by resampling prompts with all their answers
    (Efron 1979).

    Args:
        one_C, other_C: for each prompt the mean of its graded scores.
        resamples: number of resamples; the smallest p-value is 1 / (resamples + 1).
        seed: of the resampling; equal seeds give equal results.

    The symmetric bootstrap-t (Hall 1988): each resample's distance from the observed mean is divided by its own
    standard error. The plain percentiles reject too often with few prompts. p is the share of resamples, the
    observed mean included (Davison & Hinkley 1997, eq. 4.12), that are as many standard errors away as the mean is
    from 0. Where all prompts differ by the same, there is nothing to resample, and p is that of the sign test.
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
    """|mean| / standard error of resamples of values whose mean is 0, some resamples at a time."""
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
        flat_R = error_R < ROUNDING * np.abs(centred_C).max()  # one value only: infinitely far
        yield np.where(flat_R, np.inf, np.abs(mean_R) / np.where(flat_R, 1, error_R))


@dataclass(frozen=True, slots=True)
class SeedNoise:
    """The spread of values over runs that differ by their seed alone."""

    deviation: float  # standard deviation over seeds, pooled over the groups
    freedom: int  # its degrees of freedom: runs - groups
    runs: int

    def floor(self, one: int = 1, other: int = 1, confidence: float = 0.95) -> float:
        """The difference of two means, of `one` and `other` runs, that seeds alone exceed with 1 - confidence."""
        return t_quantile(confidence, self.freedom) * self.deviation * sqrt(1 / one + 1 / other)


def seed_noise(groups: Sequence[Sequence[float]]) -> SeedNoise | None:
    """The noise over seeds, from the values of runs, grouped by their settings; None if no group has two runs.

    The deviation is pooled over the groups, s² = Σ (v - mean of its group)² / (runs - groups): that of Student's
    two-sample test.
    """
    repeated = [np.asarray(group, dtype=float) for group in groups if len(group) > 1]
    if not repeated:
        return None
    runs = sum(group.size for group in repeated)
    squares = sum(float(((group - group.mean()) ** 2).sum()) for group in repeated)
    freedom = runs - len(repeated)
    return SeedNoise(sqrt(squares / freedom), freedom, runs)
