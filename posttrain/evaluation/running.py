"""Runs one suite with one setting: asks, grades and stores, and resumes where it was stopped."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Self

from posttrain.base.errors import RunError
from posttrain.base.progress import counter
from posttrain.evaluation.answering import Answers, Reply
from posttrain.evaluation.items import Item, Items, text_of
from posttrain.evaluation.judging import UNGRADED, Judge, Outcome, Pending
from posttrain.evaluation.records import Answer, EvaluationStore
from posttrain.evaluation.summary import summarise

# Completions wait for so many others, or so long, before a function of the user's is called with all of them.
ANSWERS_AT_ONCE, WAIT_S = 256, 5.0
GRACE_S = 2.0  # for verdicts that are still to come when an evaluation is stopped

Answered = tuple[Item, list[Reply]]
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
            rows = [
                (item.position, _answer(items, setting, answers, item, sample, *one))
                for item, replies, outcomes in graded
                for sample, one in enumerate(zip(replies, outcomes, strict=True))
            ]
            store.add(key, rows)
            for _ in graded:
                count()

        with Grading(judge, stored) as grading:
            answers(left, grading.add)
    spent = time.perf_counter() - began
    found = list(store.answers(key))
    seconds = spent if not done else sum(answer.seconds for answer in found)
    summary = summarise(items, setting, found, samples, sampling, seconds)
    store.finish(key, summary)
    return summary


class Grading:
    """Grades items as they are answered, while others are still being answered.

    `graded` is called in another thread as soon as verdicts are there, however long the next answer takes. Leaving the
    context waits for all verdicts; after an error, for those that come within GRACE_S.
    """

    def __init__(self, judge: Judge, graded: Callable[[Sequence[Graded]], None]):
        self._judge, self._graded = judge, graded
        self._at_once = ANSWERS_AT_ONCE if judge.calls_function else 1
        self._answered: list[Answered] = []
        self._count, self._since = 0, time.monotonic()
        self._submitted: SimpleQueue[tuple[list[Answered], Pending] | None] = SimpleQueue()
        self._failure: BaseException | None = None  # of the thread
        self._left = False
        self._thread = threading.Thread(target=self._work, name="posttrain-evaluation", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind in (None, KeyboardInterrupt):
                self._submit()
        finally:
            self._submitted.put(None)
            self._thread.join(None if kind is None else GRACE_S)
            self._left = True
        if kind is None and self._failure is not None:
            raise self._failure

    def add(self, item: Item, replies: list[Reply]) -> None:
        """Raises what grading or storing an earlier item has raised."""
        if self._failure is not None:
            raise self._failure
        self._answered.append((item, replies))
        self._count += len(replies)
        if self._count >= self._at_once or time.monotonic() - self._since > WAIT_S:
            self._submit()

    def _submit(self) -> None:
        answered, self._answered = self._answered, []  # first: a function of the user's is called below, which may fail
        asked = [(item, reply.text) for item, replies in answered for reply in replies if not reply.problem]
        pending = self._judge.submit([item for item, _ in asked], [text for _, text in asked]) if asked else []
        self._submitted.put((answered, pending))
        self._count, self._since = 0, time.monotonic()

    def _work(self) -> None:
        try:
            more = True
            while more and not self._left:
                some = [self._submitted.get()]
                while not self._submitted.empty():
                    some.append(self._submitted.get())
                more = None not in some
                self._collect([one for one in some if one is not None])
        except BaseException as error:  # raised in the main thread
            self._failure = error

    def _collect(self, submitted: Sequence[tuple[list[Answered], Pending]]) -> None:
        outcomes = iter(self._judge.collect([one for _, pending in submitted for one in pending]))
        graded = [
            (
                item,
                replies,
                [Outcome(UNGRADED, reason=one.problem) if one.problem else next(outcomes) for one in replies],
            )
            for answered, _ in submitted
            for item, replies in answered
        ]
        if graded:
            self._graded(graded)


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
