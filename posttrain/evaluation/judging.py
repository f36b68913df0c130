"""Verdicts on the answers of a suite: its rule in supervised workers, or a user's function."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Self

from posttrain.base.errors import ConfigError, RewardError
from posttrain.config import TagsConfig
from posttrain.config.schema.suite import SuiteConfig
from posttrain.evaluation import ifeval
from posttrain.evaluation.items import Item, text_of
from posttrain.evaluation.rules import RULES as OWN_RULES
from posttrain.grading.pool import DEADLINE_S, Pool
from posttrain.grading.verdict import Grade, GradeRequest
from posttrain.rewards.python import RewardFunction
from posttrain.rewards.rules import COMPARES_EXPRESSIONS, canary, modules_of, options_of
from posttrain.rewards.rules import RULES as REWARD_RULES

RULES = REWARD_RULES | OWN_RULES
UNGRADED, SCORED = "ungraded", "scored"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is known about an answer. `score` is None if it is not graded, with the reason."""

    verdict: str  # of posttrain.grading.verdict, or "ungraded"; of a function: "scored"
    score: float | None = None
    extracted: str | None = None
    format_and_answer: str = ""
    reason: str | None = None

    @classmethod
    def of(cls, grade: Grade) -> Outcome:
        classes = grade.format_and_answer if {*grade.parts} == {"format", "answer"} else ""
        return cls(grade.verdict, grade.score, grade.extracted, classes, grade.reason)


Pending = Sequence[Future[Grade] | Outcome]


class Judge:
    """Grades answers of one suite. Close it, or use it as a context manager.

    Raises ConfigError for an unknown rule or a missing package, RewardError if the grader fails the known pairs.
    """

    def __init__(self, suite: SuiteConfig, workers: int | None = None, deadline: float = DEADLINE_S):
        self._suite, self._rule = suite, suite.rule
        self.calls_function = ":" in suite.rule  # of the user's, by `submit`, rather than workers
        self._pool: Pool | None = None
        self._takes: set[str] = set()  # arguments of the rule
        self._function: RewardFunction | None = None
        if self.calls_function:
            self._function = RewardFunction(self._rule)
        elif self._rule != "none" and suite.kind != "choices":
            self._pool = self._started(workers, deadline)

    def submit(self, items: Sequence[Item], completions: Sequence[str]) -> Pending:
        """Start grading one completion for each item; the rule's workers run beside the caller."""
        if self._pool is not None:
            return [self._pool.submit(self._request(*one)) for one in zip(items, completions, strict=True)]
        if self._suite.kind == "choices":
            return [self._chosen(*one) for one in zip(items, completions, strict=True)]
        if self._function is not None:
            return self._by_function(items, completions)
        return [Outcome(UNGRADED, reason="the suite has no rule")] * len(items)

    def collect(self, pending: Pending) -> list[Outcome]:
        """The outcomes in order, when all are ready."""
        if self._pool is None:
            return [one for one in pending if isinstance(one, Outcome)]
        futures = [one for one in pending if isinstance(one, Future)]
        return [Outcome.of(grade) for grade in self._pool.collect(futures)]

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        if self._function is not None:
            self._function.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _started(self, workers: int | None, deadline: float) -> Pool:
        rule = self._rule
        if rule not in RULES:
            raise ConfigError(f"suite {self._suite.name}: there is no rule {rule}; there are {', '.join(RULES)}, none")
        modules = {RULES[rule].partition(":")[0], *(modules_of([rule]) if rule in COMPARES_EXPRESSIONS else ())}
        self._takes = _arguments(rule)
        if lacking := self._takes - {*self._suite.options, *options_of(rule, TagsConfig())}:
            raise ConfigError(
                f"suite {self._suite.name}: the rule {rule} needs {', '.join(sorted(lacking))}, a field of the rows "
                f"each: set options, such as {{{min(lacking)}: {min(lacking)}}}"
            )
        if rule == "ifeval":
            for module in ifeval.MODULES:
                ifeval.package(module)
            modules.add(ifeval.__name__)
        pool = Pool(workers, deadline, modules=tuple(sorted(modules)))
        try:
            self._prove(pool)
        except BaseException:
            pool.close(keep=False)
            raise
        return pool

    def _prove(self, pool: Pool) -> None:
        """Grade the known pairs of the rewards' rules first: a broken grader gives no score."""
        if self._rule not in REWARD_RULES:
            return
        known = [(replace(job, rule=RULES[self._rule]), want) for job, want in canary(self._rule, TagsConfig())]
        grades = pool.grade([job for job, _ in known], count=False)
        wrong = sum(grade.verdict != want for grade, (_, want) in zip(grades, known, strict=True))
        if wrong:
            raise RewardError(
                f"the grader of `{self._rule}` gets {wrong} of {len(known)} known pairs wrong, so nothing is "
                "graded: is another version of sympy or math-verify installed? See constraints.txt"
            )

    def _request(self, item: Item, completion: str) -> GradeRequest:
        own = {name: value for name, value in item.options.items() if name in self._takes}
        options = {**own, **options_of(self._rule, TagsConfig())}
        return GradeRequest(RULES[self._rule], completion, item.gold, options)

    def _chosen(self, item: Item, completion: str) -> Outcome:
        """Whether the choice is the right one, which the item has by its number."""
        number = item.gold or ""
        if not number.isdecimal() or int(number) >= len(self._suite.choices):
            return Outcome("bad_gold", reason=f"the answer is not the number of a choice: {number!r:.60}")
        right = completion == self._suite.choices[int(number)]
        return Outcome("correct" if right else "wrong", float(right), completion.strip())

    def _by_function(self, items: Sequence[Item], completions: Sequence[str]) -> list[Outcome]:
        assert self._function is not None
        names = dict.fromkeys(name for item in items for name in item.fields)
        columns: dict[str, list[Any]] = {name: [item.fields.get(name) for item in items] for name in names}
        columns |= {"completions": list(completions), "answer": [item.gold for item in items]}
        columns["prompts"] = [text_of(item.prompt) for item in items]
        scores = self._function(columns)
        none = Outcome(UNGRADED, reason=f"{self._rule} returned None")
        return [none if score is None else Outcome(SCORED, score) for score in scores]


def _arguments(rule: str) -> set[str]:
    """The arguments of a rule besides the completion and the answer."""
    module, _, name = RULES[rule].partition(":")
    judge = getattr(importlib.import_module(module), name).judge
    return {*list(inspect.signature(judge).parameters)[2:]}
