"""Runs one suite with one setting: asks, grades and stores, and goes on where it was stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from posttrain.errors import RunError
from posttrain.evaluation.answering import Answers, Reply
from posttrain.evaluation.items import Item, Items, text_of
from posttrain.evaluation.judging import UNGRADED, Judge, Outcome, Pending
from posttrain.evaluation.records import Answer, EvaluationStore
from posttrain.evaluation.summary import summarise
from posttrain.progress import counter

# Answers wait for so many others, or so long, before they are graded and stored together.
ANSWERS_AT_ONCE, WAIT_S = 256, 5.0

Graded = tuple[Item, list[Reply], list[Outcome]]


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
    with counter(key, len(left)) as count:

        def stored(graded: Sequence[Graded]) -> None:
            rows = [(item.position, _answer(items, setting, answers, item, *rest)) for item, rest in _flat(graded)]
            store.add(key, rows)
            for _ in graded:
                count()

        grading = Grading(judge, stored)
        answers(left, grading.add)
        grading.finish()
    spent = time.perf_counter() - began
    found = list(store.answers(key))
    seconds = spent if not done else sum(answer.seconds for answer in found)
    summary = summarise(items, setting, found, samples, sampling, seconds)
    store.finish(key, summary)
    return summary


class Grading:
    """Grades items as they are answered, while others are still being answered."""

    def __init__(self, judge: Judge, graded: Callable[[Sequence[Graded]], None]):
        self._judge, self._graded = judge, graded
        self._answered: list[tuple[Item, list[Reply]]] = []
        self._pending: tuple[list[tuple[Item, list[Reply]]], Pending] | None = None
        self._count, self._since = 0, time.monotonic()

    def add(self, item: Item, replies: list[Reply]) -> None:
        self._answered.append((item, replies))
        self._count += len(replies)
        if self._count >= ANSWERS_AT_ONCE or time.monotonic() - self._since > WAIT_S:
            self._submit()

    def finish(self) -> None:
        """Wait for all verdicts."""
        self._submit()
        self._collect()

    def _submit(self) -> None:
        self._collect()  # first: a function of the user is called below, which may fail
        asked = [(item, reply.text) for item, replies in self._answered for reply in replies if not reply.problem]
        pending = self._judge.submit([item for item, _ in asked], [text for _, text in asked])
        self._pending, self._answered = (self._answered, pending), []
        self._count, self._since = 0, time.monotonic()

    def _collect(self) -> None:
        if self._pending is None:
            return
        (answered, pending), self._pending = self._pending, None
        outcomes = iter(self._judge.collect(pending))
        self._graded([(item, replies, [_outcome(reply, outcomes) for reply in replies]) for item, replies in answered])


def _outcome(reply: Reply, outcomes: Iterator[Outcome]) -> Outcome:
    return Outcome(UNGRADED, reason=reply.problem) if reply.problem else next(outcomes)


def _flat(graded: Sequence[Graded]) -> Iterator[tuple[Item, tuple[int, Reply, Outcome]]]:
    for item, replies, outcomes in graded:
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
