"""The gate of a quantised model: what has changed, with intervals, and whether it is within the limits.

Every check is a number that grows with the damage. It passes if the upper end of its 95 % interval is within the limit:
the model is shown not to be worse, rather than not shown to be worse. If only the value is within it, the check is
`unsure`, which does not pass: more rows make the interval narrower.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch
from transformers import PreTrainedModel

from posttrain.base.distributions import t_quantile
from posttrain.base.progress import progress
from posttrain.base.words import counted
from posttrain.batch import Example, pack
from posttrain.config.options import Precision
from posttrain.distillation import compare_distributions
from posttrain.evaluation.pairs import own_margins
from posttrain.evaluation.records import Answer
from posttrain.evaluation.statistics import Estimate, mean_by_prompt, paired_difference
from posttrain.losses.distillation import forward_kl
from posttrain.models.attention import width_step
from posttrain.models.quantised import weight_errors
from posttrain.scoring import next_token_logits, row_chunks, scored_states, scores_of

CONFIDENCE = 0.95
BATCH, PACK_TOKENS = 32, 4096

Verdict = Literal["passed", "unsure", "failed"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest accepted values; where they come from: docs/quantize.md."""

    weights: float  # |W' - W| / |W| of a layer
    kl: float  # nats per token
    flips: float  # share of tokens
    preferences: float  # share of pairs
    drop: float  # of an accuracy


LIMITS: dict[Precision, Limits] = {
    "int8": Limits(weights=0.05, kl=0.01, flips=0.05, preferences=0.05, drop=0.03),
    "int4": Limits(weights=0.2, kl=0.1, flips=0.15, preferences=0.1, drop=0.03),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One number of the gate. `before` and `after` are those that it is the difference of, if it is one."""

    name: str
    value: float
    low: float | None  # None: an exact number, or too few rows for an interval
    high: float | None
    limit: float
    verdict: Verdict
    of: str  # what it was measured on
    before: float | None = None
    after: float | None = None


def verdict(value: float, high: float | None, limit: float) -> Verdict:
    """Whether a value with the upper end of its interval is within the limit."""
    if not value <= limit:  # NaN, too
        return "failed"
    return "passed" if high is not None and high <= limit else "unsure"


def check_weights(original: PreTrainedModel, other: PreTrainedModel, limit: float) -> Check:
    """The largest relative error of a quantised layer's weights, by which a wrong scale or layer is seen exactly."""
    errors = weight_errors(original, other)
    worst, value = max(errors.items(), key=lambda item: item[1])
    return Check("weight error", value, None, None, limit, verdict(value, value, limit), f"largest: {worst}")


@dataclass(frozen=True, slots=True)
class Divergence:
    """Two policies on the same tokens; for each prompt the numbers of its tokens."""

    kl: list[list[float]]  # nats, KL(original ‖ quantised)
    flips: list[list[float]]  # 1 where their most likely tokens differ


@torch.no_grad()
def diverge(original: PreTrainedModel, other: PreTrainedModel, examples: Sequence[Example]) -> Divergence:
    """Compare the next-token distributions of two policies over the trained tokens of the examples."""
    found = Divergence([[] for _ in examples], [[] for _ in examples])
    device = original.device
    for start in progress(range(0, len(examples), BATCH), "gate: comparing distributions"):
        for packed in pack(examples[start : start + BATCH], PACK_TOKENS, False, width_step(device, PACK_TOKENS)):
            here = packed.to(device)
            states = scored_states(original, here), scored_states(other, here)
            ones_N = torch.ones(len(here.target_N), device=device)
            compared = compare_distributions(
                (other, states[1]), (original, states[0]), here.target_N, ones_N, forward_kl
            )
            parts = row_chunks(original, len(states[0]))
            greedy_N = torch.cat([next_token_logits(original, states[0][rows]).argmax(-1) for rows in parts])
            same_N = scores_of(other, states[1], greedy_N, 1.0).top1_N
            owners = here.group_S[here.sequence_N].tolist()
            for owner, kl, same in zip(owners, compared.divergence_N.tolist(), same_N.tolist(), strict=True):
                found.kl[start + owner].append(kl)
                found.flips[start + owner].append(1.0 - same)
    return found


def check_divergence(found: Divergence, limits: Limits) -> list[Check]:
    """The mean KL per token and the share of greedy flips, with intervals clustered by prompt."""
    kl, flips = mean_by_prompt(found.kl, CONFIDENCE), mean_by_prompt(found.flips, CONFIDENCE)
    of = f"{counted(kl.answers, 'token')}, {counted(kl.prompts, 'prompt')}"
    half = None if kl.standard_error is None else t_quantile(CONFIDENCE, kl.prompts - 1) * kl.standard_error
    low, high = (None, None) if half is None else (max(0.0, kl.value - half), kl.value + half)
    return [
        Check("KL per token", kl.value, low, high, limits.kl, verdict(kl.value, high, limits.kl), of),
        _flips("greedy flips", flips, limits.flips, of),
    ]


def _flips(name: str, share: Estimate, limit: float, of: str) -> Check:
    return Check(name, share.value, share.low, share.high, limit, verdict(share.value, share.high, limit), of)


def margins_of(model: PreTrainedModel, examples: Sequence[Example], what: str) -> list[float]:
    """The reward of chosen less that of rejected, for each pair."""
    margins = own_margins(model, model.device)
    return [
        margin
        for start in progress(range(0, len(examples), BATCH), f"gate: rewards of the {what} model")
        for margin in margins(examples[start : start + BATCH])
    ]


def check_margins(before: Sequence[float], after: Sequence[float], limits: Limits) -> list[Check]:
    """A reward model's accuracy on pairs, and the share of pairs whose preferred completion has changed."""
    right, other = ([float(margin > 0) for margin in margins] for margins in (before, after))
    flips = mean_by_prompt([[float(one != two)] for one, two in zip(right, other, strict=True)], CONFIDENCE)
    of = counted(len(right), "pair")
    return [drop("accuracy", right, other, limits.drop, of), _flips("preference flips", flips, limits.preferences, of)]


def drop(name: str, before: Sequence[float], after: Sequence[float], limit: float, of: str) -> Check:
    """How much lower the mean of scores is, prompt by prompt, with the paired interval."""
    paired = paired_difference(before, after, CONFIDENCE)
    low, high = (None, None) if paired.low is None or paired.high is None else (-paired.high, -paired.low)
    value = -paired.value or 0.0  # not -0
    return Check(f"{name} lost", value, low, high, limit, verdict(value, high, limit), of, fmean(before), fmean(after))


def check_suite(name: str, before: Sequence[Answer], after: Sequence[Answer], limit: float) -> Check:
    """The accuracy on a suite, over the items that are graded in both evaluations."""
    one, two = _scores(before), _scores(after)
    both = [item for item in one if item in two]
    lost = len({answer.item for answer in (*before, *after)}) - len(both)
    of = counted(len(both), "item") + (f", {lost:,} not graded" if lost else "")
    return drop(name, [one[item] for item in both], [two[item] for item in both], limit, of)


def _scores(answers: Sequence[Answer]) -> Mapping[str, float]:
    """The mean score of each item with a graded answer."""
    found: dict[str, list[float]] = {}
    for answer in answers:
        if answer.score is not None:
            found.setdefault(answer.item, []).append(answer.score)
    return {item: fmean(scores) for item, scores in found.items()}
