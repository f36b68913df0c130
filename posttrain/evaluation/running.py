"""Runs one suite with one setting: asks, grades and stores block by block, and goes on where it was stopped."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posttrain.errors import RunError
from posttrain.evaluation.answering import Answers, Reply
from posttrain.evaluation.items import Item, Items, text_of
from posttrain.evaluation.judging import UNGRADED, Judge, Outcome
from posttrain.evaluation.records import Answer, EvaluationStore
from posttrain.evaluation.summary import summarise
from posttrain.progress import progress

BLOCK = 256  # answers between two commits: what a kill can lose


def run(
    items: Items,
    answers: Answers,
    judge: Judge,
    samples: int,
    *,
    store: EvaluationStore,
    key: str,
    setting: str = "",
    facts: Mapping[str, Any],
    sampling: Mapping[str, Any],
) -> dict[str, Any]:
    """The summary of the suite; every answer is in `store` under `key`.

    Answers that are there already, of an evaluation with the same `facts`, are kept. Raises RunError if they are of
    other facts.
    """
    _begin(store, key, facts)
    done = store.positions(key)
    left = [item for item in items.items if item.position not in done]
    began = time.perf_counter()
    for block in blocks(left, answers, judge, samples, what=f"{key}"):
        store.add(
            key,
            [
                (item.position, _answer(items, setting, answers, item, sample, reply, outcome))
                for item, sample, reply, outcome in _flat(block)
            ],
        )
    spent = time.perf_counter() - began
    found = list(store.answers(key))
    seconds = spent if not done else sum(answer.seconds for answer in found)
    summary = summarise(items, setting, found, samples, sampling, seconds)
    store.finish(key, summary)
    return summary


Block = list[tuple[Item, list[Reply], list[Outcome]]]


def blocks(items: Sequence[Item], answers: Answers, judge: Judge, samples: int, what: str) -> Iterator[Block]:
    """Items with their replies and outcomes, in order. A block is graded while the next one is generated."""
    size = max(1, BLOCK // samples)
    waiting = None
    for start in progress(range(0, len(items), size), what):
        some = items[start : start + size]
        replies = answers(some)
        asked = [
            (item, reply) for item, group in zip(some, replies, strict=True) for reply in group if not reply.problem
        ]
        pending = judge.submit([item for item, _ in asked], [reply.text for _, reply in asked])
        if waiting is not None:
            yield _graded(judge, *waiting)
        waiting = some, replies, pending
    if waiting is not None:
        yield _graded(judge, *waiting)


def _graded(judge: Judge, items: Sequence[Item], replies: Sequence[list[Reply]], pending: Any) -> Block:
    outcomes = iter(judge.collect(pending))
    return [
        (item, group, [Outcome(UNGRADED, reason=reply.problem) if reply.problem else next(outcomes) for reply in group])
        for item, group in zip(items, replies, strict=True)
    ]


def _flat(block: Block) -> Iterator[tuple[Item, int, Reply, Outcome]]:
    for item, replies, outcomes in block:
        for sample, (reply, outcome) in enumerate(zip(replies, outcomes, strict=True)):
            yield item, sample, reply, outcome


def _answer(
    items: Items, setting: str, answers: Answers, item: Item, sample: int, reply: Reply, outcome: Outcome
) -> Answer:
    return Answer(
        suite=items.suite.name,
        setting=setting,
        item=item.id,
        sample=sample,
        group=item.group,
        prompt=answers.prompts.get(item.position, text_of(item.prompt)),
        gold=item.gold,
        completion=reply.text,
        extracted=outcome.extracted,
        verdict=outcome.verdict,
        score=outcome.score,
        format_and_answer=outcome.format_and_answer,
        tokens=reply.tokens,
        finish_reason=reply.finish_reason,
        seconds=round(reply.seconds, 6),
        reason=outcome.reason,
    )


def _begin(store: EvaluationStore, key: str, facts: Mapping[str, Any]) -> None:
    before = store.facts(key)
    if before is None:
        store.start(key, facts)
        return
    differ = sorted(name for name in before.keys() | facts.keys() if before.get(name) != facts.get(name))
    if differ:
        raise RunError(
            f"{store.path} has an evaluation of {key} with another {', '.join(differ)}: replace it with --overwrite, "
            "or give another folder with --output"
        )
