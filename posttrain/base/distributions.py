"""Quantiles and tail probabilities of the normal, Student's t, and the binomial distribution with p = 1/2."""

from functools import lru_cache
from math import inf
from statistics import NormalDist


def z_quantile(confidence: float) -> float:
    """The z with P(|Z| < z) = `confidence` for a standard normal Z: 1.96 for 0.95."""
    return NormalDist().inv_cdf((1 + confidence) / 2)


@lru_cache(maxsize=4096)
def t_quantile(confidence: float, freedom: float) -> float:
    """The t with P(|T| < t) = `confidence` for Student's t with `freedom` degrees of freedom, by bisection."""
    low, high = 0.0, 1.0
    while t_outside(high, freedom) > 1 - confidence:
        low, high = high, 2 * high
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return middle
        low, high = (middle, high) if t_outside(middle, freedom) > 1 - confidence else (low, middle)


def t_outside(t: float, freedom: float) -> float:
    """P(|T| > |t|) for Student's t with v = `freedom` degrees of freedom: 1 - I_x(1/2, v/2) at x = t² / (v + t²)."""
    if abs(t) == inf:
        return 0.0
    from mpmath import betainc  # takes a twentieth of a second, and few commands need it

    return float(betainc(0.5, freedom / 2, t * t / (freedom + t * t), 1.0, regularized=True))


def sign_test(wins: int, losses: int) -> tuple[float, float]:
    """The exact two-sided p-value of wins and losses under the hypothesis that they are equally likely, and the mid-p.

    p = 2 · P(X ≤ min(wins, losses)) for X ~ Binomial(wins + losses, 1/2), at most 1. This is McNemar's test if a win is
    a prompt that only one of two models answers correctly, and a loss one that only the other does. mid-p counts the
    probability of the observed counts by half (Fagerland, Lydersen & Laake 2013); its error rate is closer to the
    nominal level, but without a guarantee. Computed in exact integer arithmetic.
    """
    count = wins + losses
    term = total = 1
    for k in range(min(wins, losses)):
        term = term * (count - k) // (k + 1)
        total += term
    return min(1.0, 2 * total / (1 << count)), min(1.0, (2 * total - term) / (1 << count))
