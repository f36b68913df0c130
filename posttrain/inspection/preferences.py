"""Preference pairs: whether length predicts which reply is preferred, and the share of wrong labels.

The share is estimated from the margins of a reward model that has not seen the labels. Assumed: a person who agrees
with the reward model up to a temperature T gives the labels, and a share ε of the labels is then flipped at random.
With m = reward of chosen - reward of rejected,

    P(label | m) = (1 - ε) σ(m / T) + ε σ(-m / T).

Where the model is certain, σ is 0 or 1 and the share of contradicted labels is ε; these pairs identify ε. ε and T
maximise the likelihood; the interval is that of the profile likelihood (2 Δ log L ≤ 3.84), for ε in [0, 0.5].

Further assumptions: the model was not trained on these labels (it would have learned the wrong ones), flips do not
depend on the margin, and T > 0: the model is better than chance. A model that is confidently wrong about a kind of
reply adds to ε. If the model is certain of no pair, or equally certain of all pairs, its errors cannot be distinguished
from wrong labels, and the interval is wide.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.base.errors import ConfigError
from posttrain.base.threads import sharing_cores
from posttrain.base.words import by_key
from posttrain.config import ModelConfig
from posttrain.config.schema.run import RunConfig
from posttrain.data import Options, prepare
from posttrain.evaluation import pairs
from posttrain.evaluation.statistics import Estimate, mean_by_prompt
from posttrain.models.devices import compute_dtype, take_device
from posttrain.models.families import check_longest
from posttrain.models.load import check_embeddings, is_reward_model, load_model, load_tokenizer

Array = np.ndarray

BINS = 500
CONFIDENT = 0.9  # probability of the other label, from the calibrated margin
CHI_SQUARE = 3.841458820694124  # 95 % point with one degree of freedom
SLOPES = np.geomspace(1e-3, 1e3, 121)  # factors of m / median |m|; the grid is then refined at the maximum
STEP = SLOPES[1] / SLOPES[0]
RATES = np.linspace(0.0, 0.5, 251)


@dataclass(frozen=True, slots=True)
class LengthBias:
    """`longer`: the share of pairs in which the longer reply is chosen, with its interval, clustered by prompt.
    `auc`: the probability that a random chosen reply is longer than a random rejected one, ties counted half."""

    pairs: int
    equal: int  # pairs of equal length, not counted in `longer`
    longer: Estimate | None
    auc: float
    chosen_mean: float
    rejected_mean: float


def length_bias(chosen: Array, rejected: Array, prompts: Sequence[int] | Array) -> LengthBias:
    """Compute the length bias from the token counts of each pair's replies, and a key of each pair's prompt."""
    lengths = zip(chosen.tolist(), rejected.tolist(), map(int, prompts), strict=True)
    by_prompt = by_key((prompt, float(one > other)) for one, other, prompt in lengths if one != other)
    longer = mean_by_prompt(list(by_prompt.values())) if by_prompt else None
    equal = int((chosen == rejected).sum())
    return LengthBias(len(chosen), equal, longer, auc(chosen, rejected), float(chosen.mean()), float(rejected.mean()))


def auc(positive: Array, negative: Array) -> float:
    """P(positive > negative) + P(equal) / 2, the area under the ROC curve (Mann-Whitney)."""
    ordered = np.sort(negative)
    below = np.searchsorted(ordered, positive, side="left") + np.searchsorted(ordered, positive, side="right")
    return float(below.sum() / (2 * len(positive) * len(negative)))


@sharing_cores()
def margins_of(config: RunConfig, path: str) -> tuple[Array, Array]:
    """Return the row numbers of the training pairs, without ties, and the reward of chosen minus that of rejected.

    Rows held out for validation are scored, too. The reward model's tokenizer is used. Raises ConfigError if the
    method does not train on pairs, or the model is not a reward model.
    """
    if config.method.kind != "pair":
        raise ConfigError(f"--reward-model scores preference pairs, but method {config.method.type} has none")
    model = ModelConfig(path=path)
    if not is_reward_model(model):
        raise ConfigError(f"--reward-model {path} is not a reward model; `posttrain train method=reward` trains one")
    tokenizer = load_tokenizer(model)
    data = config.data.model_copy(update={"validation": None, "excluded": ()})
    dataset = prepare(data, tokenizer, "pair", Options(seed=config.seed)).train
    device = take_device(config.devices)
    loaded = load_model(model, "reward", compute_dtype(model, device), device)
    check_longest(loaded.config, dataset.longest)
    check_embeddings(loaded, tokenizer, path)
    _, once = np.unique(dataset.rows, return_index=True)  # a weighted source repeats rows
    once = once[~dataset.ties[once]]
    once = once[np.argsort(-dataset.lengths[once], kind="stable")]
    margins = pairs.margins_of(loaded, map(dataset.__getitem__, once.tolist()), len(once), "scoring pairs")
    order = np.argsort(dataset.rows[once], kind="stable")
    return dataset.rows[once][order], np.array(margins)[order]


@dataclass(frozen=True, slots=True)
class LabelNoise:
    """The estimated share of wrong labels, `rate`, with its interval from `low` to `high`.

    `contradicted`: pairs whose other label has a probability of 90 % or more by the model. `disagree`: number of
    negative margins. `wrong_P`: for each pair, the probability that its label was flipped.
    """

    pairs: int
    rate: float
    low: float
    high: float
    temperature: float
    disagree: int
    contradicted: Array  # indices of pairs, the most certain first
    wrong_P: Array

    def __str__(self) -> str:
        wide = "; this model's margins determine it no better" if self.high - self.low > 0.2 else ""
        return (
            f"{self.rate:.1%} of {self.pairs:,} labels are estimated to be wrong "
            f"(95 % interval {self.low:.1%} to {self.high:.1%}){wide}"
        )


def label_noise(margin_P: Array) -> LabelNoise:
    """Estimate from P margins. Raises ValueError for fewer than 2, if all are 0, or if one is not finite."""
    margin_P = np.asarray(margin_P, np.float64)
    scale = float(np.median(np.abs(margin_P[margin_P != 0]))) if (margin_P != 0).any() else 0.0
    if len(margin_P) < 2 or not scale or not np.isfinite(margin_P).all():
        raise ValueError("label noise needs two or more pairs with finite margins that are not all 0")
    x_P = margin_P / scale
    values, weights = x_P, np.ones(len(x_P))
    if len(x_P) > BINS:  # quantiles are enough, because the likelihood is smooth in the margins
        parts = np.array_split(np.sort(x_P), BINS)
        values = np.array([part.mean() for part in parts])
        weights = np.array([float(len(part)) for part in parts])
    _, slope_R = _largest(values, weights, SLOPES)
    near = np.geomspace(slope_R.min() / STEP, slope_R.max() * STEP, len(SLOPES))
    profile_R, slope_R = _largest(values, weights, near)
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


def _largest(values: Array, weights: Array, slopes: Array) -> tuple[Array, Array]:
    """For each rate, the largest log-likelihood over `slopes`, and its slope."""
    p_SB = _sigmoid(np.outer(slopes, values))
    likelihood_RS = np.stack([np.log(rate + (1 - 2 * rate) * p_SB + 1e-300) @ weights for rate in RATES])
    return likelihood_RS.max(1), slopes[likelihood_RS.argmax(1)]


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-np.clip(x, -500, 500)))
