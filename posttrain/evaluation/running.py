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

# Answers of a block, which is what a kill can lose: blocks grow while they take less than `SHORT_S`, and shrink above
# `LONG_S`. Their size changes no answer.
FIRST_BLOCK, LEAST_BLOCK, MOST_BLOCK = 32, 4, 1024
SHORT_S, LONG_S = 5.0, 30.0


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
    if not started(store, key, facts):
        store.start(key, facts)
    done = store.positions(key)
    left = [item for item in items.items if item.position not in done]
    began = time.perf_counter()

    def stored() -> Iterator[Item]:
        """Every item, once its answers are stored."""
        for block in blocks(left, answers, judge, samples):
            rows = [(item.position, _answer(items, setting, answers, item, *rest)) for item, rest in _flat(block)]
            store.add(key, rows)
            yield from (item for item, _, _ in block)

    for _ in progress(stored(), key, len(left)):
        pass
    spent = time.perf_counter() - began
    found = list(store.answers(key))
    seconds = spent if not done else sum(answer.seconds for answer in found)
    summary = summarise(items, setting, found, samples, sampling, seconds)
    store.finish(key, summary)
    return summary


Block = list[tuple[Item, list[Reply], list[Outcome]]]


def blocks(items: Sequence[Item], answers: Answers, judge: Judge, samples: int) -> Iterator[Block]:
    """Items with their replies and outcomes, in order. A block is graded while the next one is generated."""
    size, waiting, start = FIRST_BLOCK, None, 0
    while start < len(items):
        some = items[start : start + max(1, size // samples)]
        start += len(some)
        began = time.perf_counter()
        replies = answers(some)
        spent = time.perf_counter() - began
        size = min(2 * size, MOST_BLOCK) if spent < SHORT_S else max(size // 2, LEAST_BLOCK) if spent > LONG_S else size
        asked = [
            (item, reply) for item, group in zip(some, replies, strict=True) for reply in group if not reply.problem
        ]
        if waiting is not None:  # stored before a function of the user is called, which may fail
            yield _graded(judge, *waiting)
        waiting = some, replies, judge.submit([item for item, _ in asked], [reply.text for _, reply in asked])
    if waiting is not None:
        yield _graded(judge, *waiting)


def _graded(judge: Judge, items: Sequence[Item], replies: Sequence[list[Reply]], pending: Any) -> Block:
    outcomes = iter(judge.collect(pending))
    return [
        (item, group, [Outcome(UNGRADED, reason=reply.problem) if reply.problem else next(outcomes) for reply in group])
        for item, group in zip(items, replies, strict=True)
    ]


def _flat(block: Block) -> Iterator[tuple[Item, tuple[int, Reply, Outcome]]]:
    for item, replies, outcomes in block:
        for sample, (reply, outcome) in enumerate(zip(replies, outcomes, strict=True)):
            yield item, (sample, reply, outcome)


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


def started(store: EvaluationStore, key: str, facts: Mapping[str, Any]) -> bool:
    """Whether there are answers of an evaluation with these facts. Raises RunError if they are of other facts."""
    before = store.facts(key)
    if before is None:
        return False
    differ = sorted(name for name in before.keys() | facts.keys() if before.get(name) != facts.get(name))
    if differ:
        raise RunError(
            f"{store.path} has an evaluation of {key} that differs in {', '.join(differ)}: replace it with "
            "--overwrite, or give another folder with --output"
        )
    return True


def finished(store: EvaluationStore, key: str, facts: Mapping[str, Any]) -> bool:
    """Whether an evaluation with these facts has its summary. Raises RunError as `started`."""
    return started(store, key, facts) and store.summary(key) is not None
