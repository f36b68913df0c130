"""The gate of a quantised model: measures how much it differs from the original, and whether that is within limits.

Every check is a number that grows with the damage. It passes if the upper end of its 95 % interval is within the limit.
Passing thus shows that the model is not worse; it is not just a lack of evidence that it is. If only the value is
within the limit, the check is `unsure` and does not pass; more rows make the interval narrower.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import torch
from rich.table import Table
from transformers import PreTrainedModel

from posttrain.base.console import progress, text_table
from posttrain.base.distributions import t_quantile
from posttrain.base.words import counted
from posttrain.batch import Example, pack
from posttrain.config.options import Precision
from posttrain.distillation import Head, compare_distributions, forward_kl
from posttrain.evaluation.records import Answer, scores_by_item
from posttrain.evaluation.statistics import Estimate, mean_by_prompt, paired_difference
from posttrain.models.attention import width_step
from posttrain.models.quantised import weight_errors
from posttrain.scoring import next_token_logits, row_chunks, scored_states, scores_of

CONFIDENCE = 0.95
BATCH, PACK_TOKENS = 32, 4096
TITLES = ("check", "value", "95 % interval", "limit", "")

Verdict = Literal["passed", "unsure", "failed"]


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest accepted values. docs/quantize.md explains where they come from."""

    weights: float  # |W' - W| / |W| of a layer
    kl: float  # nats per token
    flips: float  # share of tokens
    preferences: float  # share of pairs
    drop: float  # loss of accuracy


LIMITS: dict[Precision, Limits] = {
    "int8": Limits(weights=0.05, kl=0.01, flips=0.05, preferences=0.05, drop=0.03),
    "int4": Limits(weights=0.2, kl=0.1, flips=0.15, preferences=0.1, drop=0.03),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One number of the gate. If it is a difference, `before` and `after` are the two values compared."""

    name: str
    value: float
    low: float | None  # None: an exact number, or too few rows for an interval
    high: float | None
    limit: float
    verdict: Verdict
    of: str  # what was measured, in words
    before: float | None = None
    after: float | None = None


def verdict(value: float, high: float | None, limit: float) -> Verdict:
    """The verdict for a value; `high` is the upper end of its interval."""
    if not value <= limit:  # also true for NaN
        return "failed"
    return "passed" if high is not None and high <= limit else "unsure"


def check_weights(original: PreTrainedModel, other: PreTrainedModel, limit: float) -> Check:
    """The largest relative weight error of a quantised layer, which reliably reveals a wrong scale or layer."""
    worst, value = max(weight_errors(original, other).items(), key=lambda item: item[1])
    return Check("weight error", value, None, None, limit, verdict(value, value, limit), f"largest: {worst}")


@torch.no_grad()
def diverge(
    original: PreTrainedModel, other: PreTrainedModel, examples: Sequence[Example]
) -> tuple[list[list[float]], list[list[float]]]:
    """Compare the next-token distributions of two policies over the trained tokens of the examples. Returns for each
    prompt, per token: KL(original ‖ quantised) in nats, and 1 where the most likely tokens differ."""
    device, kls, flips = original.device, [[] for _ in examples], [[] for _ in examples]
    for start in progress(range(0, len(examples), BATCH), "gate: comparing distributions"):
        for packed in pack(examples[start : start + BATCH], PACK_TOKENS, False, width_step(device, PACK_TOKENS)):
            batch = packed.to(device)
            before, after = scored_states(original, batch), scored_states(other, batch)
            ones_N = torch.ones(len(batch.target_N), device=device)
            sides = (Head.of(other), after), (Head.of(original), before)
            compared = compare_distributions(*sides, batch.target_N, ones_N, forward_kl)
            parts = row_chunks(original, len(before))
            greedy_N = torch.cat([next_token_logits(original, before[rows]).argmax(-1) for rows in parts])
            same_N = scores_of(other, after, greedy_N, 1.0).top1_N
            owners = batch.group_S[batch.sequence_N].tolist()
            for owner, kl, same in zip(owners, compared.divergence_N.tolist(), same_N.tolist(), strict=True):
                kls[start + owner].append(kl)
                flips[start + owner].append(1.0 - same)
    return kls, flips


def check_divergence(divergence: Sequence[Sequence[Sequence[float]]], limits: Limits) -> list[Check]:
    """The mean KL per token and the share of greedy flips, with intervals clustered by prompt. See `diverge`."""
    kl, flips = (mean_by_prompt(values, CONFIDENCE) for values in divergence)
    of = f"{counted(kl.answers, 'token')}, {counted(kl.prompts, 'prompt')}"
    half = None if kl.standard_error is None else t_quantile(CONFIDENCE, kl.prompts - 1) * kl.standard_error
    low, high = (None, None) if half is None else (max(0.0, kl.value - half), kl.value + half)
    return [
        Check("KL per token", kl.value, low, high, limits.kl, verdict(kl.value, high, limits.kl), of),
        _flips("greedy flips", flips, limits.flips, of),
    ]


def _flips(name: str, share: Estimate, limit: float, of: str) -> Check:
    return Check(name, share.value, share.low, share.high, limit, verdict(share.value, share.high, limit), of)


def check_margins(before: Sequence[float], after: Sequence[float], limits: Limits) -> list[Check]:
    """A reward model's accuracy on pairs, and the share of pairs whose preferred completion changed."""
    was, now = ([float(margin > 0) for margin in margins] for margins in (before, after))
    flips = mean_by_prompt([[float(old != new)] for old, new in zip(was, now, strict=True)], CONFIDENCE)
    of = counted(len(was), "pair")
    return [drop("accuracy", was, now, limits.drop, of), _flips("preference flips", flips, limits.preferences, of)]


def drop(name: str, before: Sequence[float], after: Sequence[float], limit: float, of: str) -> Check:
    """The decrease of the mean score of the same prompts, with the interval of the paired differences."""
    paired = paired_difference(before, after, CONFIDENCE)
    low, high = (None, None) if paired.low is None or paired.high is None else (-paired.high, -paired.low)
    value = -paired.value or 0.0  # not -0
    return Check(f"{name} lost", value, low, high, limit, verdict(value, high, limit), of, fmean(before), fmean(after))


def check_suite(name: str, before: Sequence[Answer], after: Sequence[Answer], limit: float) -> Check:
    """The loss of accuracy on a suite, over the items that are graded in both evaluations."""
    was, now = ({item: fmean(of) for item, of in scores_by_item(side).items()} for side in (before, after))
    both = [item for item in was if item in now]
    lost = len({answer.item for answer in (*before, *after)}) - len(both)
    of = counted(len(both), "item") + (f", {lost:,} not graded" if lost else "")
    return drop(name, [was[item] for item in both], [now[item] for item in both], limit, of)


def table(checks: Sequence[Check]) -> Table:
    """The checks as a table for the terminal."""
    shown = text_table(*TITLES, left=("check", ""))
    for check in checks:
        shown.add_row(*cells(check))
    return shown


def cells(check: Check) -> tuple[str, ...]:
    """The cells of a check, in the order of TITLES."""
    ends = [_number(check, end) for end in (check.low, check.high) if end is not None]
    return check.name, _number(check, check.value), " to ".join(ends), _number(check, check.limit), check.verdict


def _number(check: Check, value: float) -> str:
    """Format a value: nats and weight errors as plain numbers, shares and accuracies in per cent."""
    if check.name in ("KL per token", "weight error"):
        return f"{value:.2g}" if abs(value) < 1 else f"{value:.3g}"
    return f"{value:.1%}"
