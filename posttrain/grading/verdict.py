"""The result of grading a completion."""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

# scored: by a judge or a function; not_applicable: according to a function; ungraded: not graded, with a reason
Verdict = Literal["correct", "wrong", "scored", "timeout", "crashed", "bad_gold", "not_applicable", "ungraded"]
VERDICTS: tuple[Verdict, ...] = ("correct", "wrong", "timeout", "crashed", "bad_gold")  # verdicts of rules
# These do not judge the completion, which is counted and dropped from the update and never receives a reward.
NON_VERDICTS = frozenset({"timeout", "crashed", "bad_gold"})
EXTRACTED_CHARACTERS = 1000  # maximum length of a stored answer
# The protocol between a worker and its supervisor.
FORK = "--fork"  # first argument of a worker program that becomes a template
NUMBER = struct.Struct("=i")


class BadGold(Exception):
    """The reference answer cannot be used; the message is the reason."""


def check_text(gold: str | None, **options: object) -> str:
    """The reference answer. Raises BadGold if there is none."""
    if not isinstance(gold, str) or not gold.strip():
        raise BadGold("there is no answer to compare with")
    return gold


@dataclass(frozen=True, slots=True)
class Judgement:
    """A rule's judgement: score, whether the answer is right, the extracted answer, the parts of the score."""

    score: float
    correct: bool
    extracted: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Rule:
    """A way to grade. Both functions run in a worker; `options` are keyword arguments of both.
    `check_gold(gold, **options)` may raise BadGold; if it does not, `judge(completion, gold, **options)` is called."""

    check_gold: Callable[..., object]
    judge: Callable[..., Judgement]


@dataclass(frozen=True, slots=True)
class GradeRequest:
    """One completion to grade: `rule` is the `module:NAME` of a Rule, importable in a worker."""

    rule: str
    completion: str
    gold: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on one completion. `score` is None without a verdict, so that it cannot be mistaken for a reward."""

    verdict: Verdict
    score: float | None = None
    extracted: str | None = None
    seconds: float = 0.0  # from dispatch to the worker
    parts: Mapping[str, float] = field(default_factory=dict)
    reason: str | None = None  # why there is no verdict

    @property
    def counts(self) -> bool:
        """Whether the verdict judges the completion."""
        return self.verdict in ("correct", "wrong", "scored")

    @property
    def format_and_answer(self) -> str:
        """The class 00, 01, 10 or 11 of a rule that separates format and answer; otherwise empty."""
        return "".join(f"{self.parts[name]:.0f}" for name in ("format", "answer") if name in self.parts)


def read_grade(reply: object, seconds: float) -> Grade:
    """A worker's reply as a grade; an invalid reply is a crash. `reply` is parsed JSON."""
    broken = Grade("crashed", seconds=seconds, reason="the worker's reply was invalid")
    if not isinstance(reply, dict) or reply.get("verdict") not in VERDICTS:
        return broken
    verdict = cast(Verdict, reply["verdict"])
    if verdict in NON_VERDICTS:
        return Grade(verdict, seconds=seconds, reason=str(reply.get("reason"))[:EXTRACTED_CHARACTERS])
    parts, extracted = reply.get("parts"), reply.get("extracted")
    if not isinstance(parts, dict):
        return broken
    numbers: list[Any] = [reply.get("score"), *parts.values()]
    if not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
        return broken
    if extracted is not None and not (isinstance(extracted, str) and len(extracted) <= EXTRACTED_CHARACTERS):
        return broken
    return Grade(verdict, float(reply["score"]), extracted, seconds, {k: float(v) for k, v in parts.items()})
