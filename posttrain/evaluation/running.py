"""Runs one suite with one setting: answers are graded and stored as they come, so a stopped evaluation can be resumed.

Verdicts come from the suite's rule in supervised workers, or from a user's function.
"""

import importlib
import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, ExitStack
from queue import SimpleQueue
from typing import Any

from posttrain.base.console import counter
from posttrain.base.errors import ConfigError, RunError
from posttrain.base.signals import in_thread
from posttrain.config import TagsConfig
from posttrain.config.schema.suite import OF_ENVIRONMENT, SuiteConfig
from posttrain.evaluation import ifeval
from posttrain.evaluation.answering import Answers, Reply
from posttrain.evaluation.items import Item, Items, text_of
from posttrain.evaluation.records import Answer, EvaluationStore, summarise
from posttrain.evaluation.rules import RULES as OWN_RULES
from posttrain.grading.pool import DEADLINE_S, Pool
from posttrain.grading.verdict import Grade, GradeRequest
from posttrain.rewards.python import RewardFunction
from posttrain.rewards.rules import COMPARES_EXPRESSIONS, modules_of, options_of, prove
from posttrain.rewards.rules import RULES as REWARD_RULES

RULES = REWARD_RULES | OWN_RULES
ANSWERS_AT_ONCE, WAIT_S = 256, 5.0  # completions, or seconds, after which a user's function is called
GRADED = ("extracted", "verdict", "score", "format_and_answer", "reason")  # fields that an answer takes from its grade
GRACE_S = 2.0  # seconds to wait for outstanding verdicts when an evaluation is stopped

Pending = Sequence[Future[Grade] | Grade]
Answered = tuple[Item, list[Reply]]
Graded = tuple[Item, list[Reply], list[Grade]]


class Judge(ExitStack):
    """Grades answers of one suite. Close it, or use it as a context manager.

    Raises ConfigError for an unknown rule or a missing package, RewardError if the grader fails on known pairs."""

    def __init__(self, suite: SuiteConfig, workers: int | None = None, deadline: float = DEADLINE_S):
        super().__init__()
        self._suite, self._rule = suite, suite.rule
        # whether `submit` calls a user's function instead of workers
        self.calls_function = ":" in suite.rule and suite.kind != "preference"
        self._pool: Pool | None = None
        self._takes: set[str] = set()  # arguments of the rule
        self._function: RewardFunction | None = None
        if self.calls_function:
            self._function = RewardFunction(self._rule)
            self.callback(self._function.close)
        elif self._rule not in ("none", OF_ENVIRONMENT) and suite.kind == "generate":
            self._pool = self._started(workers, deadline)
            self.callback(self._pool.close)

    def submit(self, items: Sequence[Item], completions: Sequence[str]) -> Pending:
        """Start grading one completion for each item; the rule's workers run in parallel with the caller."""
        if self._pool is not None:
            return [self._pool.submit(self._request(*pair)) for pair in zip(items, completions, strict=True)]
        if self._suite.kind == "choices":
            return [self._chosen(*pair) for pair in zip(items, completions, strict=True)]
        if self._function is not None:
            return self._by_function(self._function, items, completions)
        return [Grade("ungraded", reason="the suite has no rule")] * len(items)

    def collect(self, pending: Pending) -> list[Grade]:
        """Wait for all grades, and return them in order."""
        if self._pool is None:
            return [grade for grade in pending if isinstance(grade, Grade)]
        return list(self._pool.collect([grade for grade in pending if isinstance(grade, Future)]))

    def _started(self, workers: int | None, deadline: float) -> Pool:
        rule = self._rule
        if rule not in RULES:
            known = ", ".join([*RULES, OF_ENVIRONMENT])
            raise ConfigError(f"suite {self._suite.name}: there is no rule {rule}, only {known} and none")
        module, _, name = RULES[rule].partition(":")
        judge = getattr(importlib.import_module(module), name).judge
        self._takes = {*list(inspect.signature(judge).parameters)[2:]}  # besides the completion and the answer
        if lacking := self._takes - {*self._suite.options, *options_of(rule, TagsConfig())}:
            raise ConfigError(
                f"suite {self._suite.name}: the rule {rule} needs {', '.join(sorted(lacking))}: set options to "
                f"fields of the rows, such as {{{min(lacking)}: {min(lacking)}}}"
            )
        modules = {module, *(modules_of([rule]) if rule in COMPARES_EXPRESSIONS else ())}
        if rule == "ifeval":
            for package in ifeval.MODULES:
                ifeval.package(package)
            modules.add(ifeval.__name__)
        pool = Pool(workers, deadline, modules=tuple(sorted(modules)))
        try:
            if rule in REWARD_RULES:
                prove(pool, rule, TagsConfig(), RULES[rule])
        except BaseException:
            pool.close(keep=False)
            raise
        return pool

    def _request(self, item: Item, completion: str) -> GradeRequest:
        own = {name: value for name, value in item.options.items() if name in self._takes}
        return GradeRequest(RULES[self._rule], completion, item.gold, own | options_of(self._rule, TagsConfig()))

    def _chosen(self, item: Item, completion: str) -> Grade:
        """Whether the choice is the right one; the item's gold answer is the number of the right choice."""
        number = item.gold or ""
        if not number.isdecimal() or int(number) >= len(self._suite.choices):
            return Grade("bad_gold", reason=f"the answer is not the number of a choice: {number!r:.60}")
        right = completion == self._suite.choices[int(number)]
        return Grade("correct" if right else "wrong", float(right), completion.strip())

    def _by_function(self, function: RewardFunction, items: Sequence[Item], completions: Sequence[str]) -> list[Grade]:
        names = dict.fromkeys(name for item in items for name in item.fields)
        columns: dict[str, list[Any]] = {name: [item.fields.get(name) for item in items] for name in names}
        columns |= {"completions": list(completions), "answer": [item.gold for item in items]}
        columns["prompts"] = [text_of(item.prompt) for item in items]
        none = Grade("ungraded", reason=f"{self._rule} returned None")
        return [none if score is None else Grade("scored", score) for score in function(columns)]


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
    """Answer and grade the items, and return the suite's summary; every answer is in `store` under `key`.

    Stored answers of an evaluation with the same `facts` are kept. Raises RunError if the facts differ."""
    if not started(store, key, facts):
        store.start(key, facts)
    done = store.positions(key)
    left = [item for item in items.items if item.position not in done]
    began = time.perf_counter()
    with counter(key, len(left)) as count:

        def stored(graded: Sequence[Graded]) -> None:
            rows = [
                (item.position, _answer(items, setting, answers, item, sample, *pair))
                for item, replies, grades in graded
                for sample, pair in enumerate(zip(replies, grades, strict=True))
            ]
            store.add(key, rows)
            for _ in graded:
                count()

        with Grading(judge, stored) as grading:
            answers(left, grading.add)
    seconds, every = time.perf_counter() - began, list(store.answers(key))
    if done:
        seconds = sum(answer.seconds for answer in every)
    summary = summarise(items, setting, every, samples, sampling, seconds)
    store.finish(key, summary)
    return summary


class Grading(AbstractContextManager["Grading"]):
    """Grades items while others are still being answered.

    `graded` is called in another thread as soon as there are verdicts, however long the next answer takes. Leaving the
    context waits for all verdicts; after an error, at most GRACE_S seconds.
    """

    def __init__(self, judge: Judge, graded: Callable[[Sequence[Graded]], None]):
        self._judge, self._graded = judge, graded
        self._at_once = ANSWERS_AT_ONCE if judge.calls_function else 1
        self._answered: list[Answered] = []
        self._count, self._since = 0, time.monotonic()
        self._submitted: SimpleQueue[tuple[list[Answered], Pending] | None] = SimpleQueue()
        self._left = False
        self._working = in_thread(self._work)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind in (None, KeyboardInterrupt):
                self._submit()
        finally:
            self._submitted.put(None)
            wait([self._working], None if kind is None else GRACE_S)
            self._left = True
        if kind is None:
            self._working.result()

    def add(self, item: Item, replies: list[Reply]) -> None:
        """Add an answered item. If grading or storing an earlier item failed, that error is raised here."""
        if self._working.done():
            self._working.result()
        self._answered.append((item, replies))
        self._count += len(replies)
        if self._count >= self._at_once or time.monotonic() - self._since > WAIT_S:
            self._submit()

    def _submit(self) -> None:
        answered, self._answered = self._answered, []  # first: the user's function, called below, may fail
        pairs = [(item, reply.text) for item, replies in answered for reply in replies if reply.grade is None]
        pending = self._judge.submit([item for item, _ in pairs], [text for _, text in pairs]) if pairs else []
        self._submitted.put((answered, pending))
        self._count, self._since = 0, time.monotonic()

    def _work(self) -> None:
        more = True
        while more and not self._left:
            submitted = [self._submitted.get()]
            while not self._submitted.empty():
                submitted.append(self._submitted.get())
            more = None not in submitted
            self._collect([batch for batch in submitted if batch is not None])

    def _collect(self, submitted: Sequence[tuple[list[Answered], Pending]]) -> None:
        grades = iter(self._judge.collect([grade for _, pending in submitted for grade in pending]))
        graded = [
            (item, replies, [one.grade or next(grades) for one in replies])
            for answered, _ in submitted
            for item, replies in answered
        ]
        if graded:
            self._graded(graded)


def _answer(
    items: Items, setting: str, answers: Answers, item: Item, sample: int, reply: Reply, grade: Grade
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
        tokens=reply.tokens,
        finish_reason=reply.finish_reason,
        seconds=round(reply.seconds, 6),
        episode=reply.episode,
        **{name: getattr(grade, name) for name in GRADED},
    )


def started(store: EvaluationStore, key: str, facts: Mapping[str, Any]) -> bool:
    """Whether an evaluation with these facts was started. Raises RunError if its facts differ."""
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
    """Whether an evaluation with these facts is finished. Raises RunError if its facts differ."""
    return started(store, key, facts) and key in store.summaries()
