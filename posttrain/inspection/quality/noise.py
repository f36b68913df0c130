"""The share of wrong preference labels, from the margins of a reward model that has not seen them.

Model: the label is the one a person who agrees with the reward model up to a temperature T would give, and a share ε of
labels is turned at random. With m = reward of chosen - reward of rejected,

    P(label | m) = (1 - ε) σ(m / T) + ε σ(-m / T).

Where the model is sure, σ is 0 or 1 and the share of contradicted labels is ε: that is what identifies it. ε and T are
the maximum of the likelihood; the interval is that of the profile likelihood (2 Δ log L ≤ 3.84), on ε in [0, 0.5].

Assumptions: the model was not trained on these labels (it would have learned the wrong ones), turned labels do not
depend on the margin, and T > 0, that is, the model is better than chance. A model that is confidently wrong about a
kind of reply adds to ε. Where it is nowhere sure, or sure of all pairs alike, errors of the model and of labels cannot
be distinguished, and the interval is wide.
"""

from dataclasses import dataclass

import numpy as np

Array = np.ndarray

BINS = 500
CONFIDENT = 0.9  # probability of the other label, by the calibrated margin
CHI_SQUARE = 3.841458820694124  # 95 % point with one degree of freedom
SLOPES = np.geomspace(1e-3, 1e3, 121)  # of m / median |m|; the maximum is then refined
STEP = SLOPES[1] / SLOPES[0]
RATES = np.linspace(0.0, 0.5, 251)


@dataclass(frozen=True, slots=True)
class LabelNoise:
    """`contradicted`: pairs in which the model gives the other label 90 % or more; `disagree`: any negative margin.

    `wrong_P`: for each pair the probability that its label was turned.
    """

    pairs: int
    rate: float
    low: float
    high: float
    temperature: float
    disagree: int
    contradicted: Array  # indices of pairs, the surest first
    wrong_P: Array


def label_noise(margin_P: Array) -> LabelNoise:
    """Estimate from the margins (P pairs), of which not all may be 0. Raises ValueError for fewer than 2 pairs."""
    margin_P = np.asarray(margin_P, np.float64)
    scale = float(np.median(np.abs(margin_P[margin_P != 0]))) if (margin_P != 0).any() else 0.0
    if len(margin_P) < 2 or not scale or not np.isfinite(margin_P).all():
        raise ValueError("label noise needs two or more pairs with finite margins that are not all 0")
    x_P = margin_P / scale
    profile_R, slope_R = _profile(x_P)
    best = int(profile_R.argmax())
    inside = RATES[2 * (profile_R[best] - profile_R) <= CHI_SQUARE]
    slope, rate = slope_R[best], float(RATES[best])
    agrees_P = _sigmoid(slope * x_P)
    wrong_P = rate * (1 - agrees_P) / (rate * (1 - agrees_P) + (1 - rate) * agrees_P + 1e-300)
    sure = np.flatnonzero(agrees_P <= 1 - CONFIDENT)
    sure = sure[np.argsort(margin_P[sure], kind="stable")]
    low, high = float(inside.min()), float(inside.max())
    disagree = int((margin_P < 0).sum())
    return LabelNoise(len(margin_P), rate, low, high, scale / slope, disagree, sure, wrong_P)


def _profile(x_P: Array) -> tuple[Array, Array]:
    """For each rate the largest log-likelihood over the slope, and that slope.

    Margins are binned by quantile, as the likelihood depends on them smoothly: at most BINS values.
    """
    values, weights = _binned(x_P)
    _, slope_R = _largest(values, weights, SLOPES)
    return _largest(values, weights, np.geomspace(slope_R.min() / STEP, slope_R.max() * STEP, len(SLOPES)))


def _largest(values: Array, weights: Array, slopes: Array) -> tuple[Array, Array]:
    """For each rate the largest log-likelihood over some slopes, and its slope."""
    p_SB = _sigmoid(np.outer(slopes, values))
    likelihood_RS = np.stack([np.log(rate + (1 - 2 * rate) * p_SB + 1e-300) @ weights for rate in RATES])
    return likelihood_RS.max(1), slopes[likelihood_RS.argmax(1)]


def _binned(x_P: Array, most: int = BINS) -> tuple[Array, Array]:
    if len(x_P) <= most:
        return x_P, np.ones(len(x_P))
    parts = np.array_split(np.sort(x_P), most)
    return np.array([part.mean() for part in parts]), np.array([float(len(part)) for part in parts])


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-np.clip(x, -500, 500)))


def summary(found: LabelNoise) -> str:
    """The estimate in a sentence."""
    wide = found.high - found.low > 0.2
    sure = "" if not wide else "; this model's margins do not tell more"
    return (
        f"{found.rate:.1%} of {found.pairs:,} labels are estimated to be wrong "
        f"(95 % interval {found.low:.1%} to {found.high:.1%}){sure}"
    )
