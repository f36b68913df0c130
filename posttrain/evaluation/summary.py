"""What the answers of a suite amount to: the metric with its interval, and everything that was not graded, counted."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import Any

from posttrain.evaluation.items import Items
from posttrain.evaluation.records import Answer
from posttrain.evaluation.statistics import majorities_at, mean_by_prompt, passes_at, sizes

CONFIDENCE = 0.95


def summarise(
    items: Items, setting: str, answers: Sequence[Answer], samples: int, sampling: Mapping[str, Any], seconds: float
) -> dict[str, Any]:
    """The summary of one suite with one setting; `answers` are in the order of the items.

    `value` is the mean over all graded answers, with an interval clustered by prompt; None if nothing is graded. It
    never has a score for what was not graded: that is counted under `ungraded`, by reason.
    """
    suite = items.suite
    by_item = [list(group) for _, group in groupby(answers, key=lambda answer: answer.item)]
    scores = [[one.score for one in group if one.score is not None] for group in by_item]
    graded = sum(map(len, scores))
    estimate = mean_by_prompt(scores, CONFIDENCE) if graded else None
    # By verdict; what was never asked by the reason without its details.
    ungraded = Counter(
        one.verdict if one.verdict != "ungraded" else (one.reason or "no reason").partition(": ")[0]
        for one in answers
        if one.score is None
    )
    return {
        "suite": suite.name,
        "setting": setting,
        "source": suite.source,
        "metric": suite.metric,
        "value": estimate and estimate.value,
        "low": estimate and estimate.low,
        "high": estimate and estimate.high,
        "standard_error": estimate and estimate.standard_error,
        "confidence": CONFIDENCE,
        "items": len(items.items),
        "available": suite.items or items.available,
        "partial": items.partial,
        "samples": samples,
        "answers": len(answers),
        "graded": graded,
        "ungraded": dict(ungraded.most_common()),
        "verdicts": dict(Counter(answer.verdict for answer in answers)),
        "classes": dict(sorted(Counter(a.format_and_answer for a in answers if a.format_and_answer).items())),
        **_by_samples(by_item, samples),
        "groups": _by_group(by_item),
        "tokens": sum(answer.tokens for answer in answers),
        "truncated": sum(answer.finish_reason == "length" for answer in answers),
        "seconds": round(seconds, 3),
        "sampling": dict(sampling),
        "rule": suite.rule if suite.kind == "generate" else suite.kind,
        "digest": items.digest,
    }


def _by_samples(by_item: Sequence[Sequence[Answer]], samples: int) -> dict[str, dict[str, float]]:
    """pass@k and maj@k for k = 1, 2, 4 … samples, each over the prompts with at least k graded answers."""
    if samples < 2:
        return {}
    judged = [[one for one in group if one.verdict in ("correct", "wrong")] for group in by_item]
    right = [[one.verdict == "correct" for one in group] for group in judged]
    answers = [([one.extracted for one in group], good) for group, good in zip(judged, right, strict=True)]
    found: dict[str, dict[str, float]] = {"pass@k": {}, "maj@k": {}}
    for k in sizes(samples):
        if passing := passes_at(right, k):
            found["pass@k"][str(k)] = fmean(passing)
            found["maj@k"][str(k)] = fmean(majorities_at(answers, k))
    return found


def _by_group(by_item: Sequence[Sequence[Answer]]) -> dict[str, dict[str, float | None]]:
    """The mean score of each group's graded answers, None without one, and its number of items."""
    groups: dict[str, list[float]] = {}
    items: Counter[str] = Counter()
    for answers in by_item:
        name = answers[0].group
        if name:
            items[name] += 1
            groups.setdefault(name, []).extend(one.score for one in answers if one.score is not None)
    return {
        name: {"value": fmean(scores) if scores else None, "items": items[name]}
        for name, scores in sorted(groups.items())
    }
