"""The rules, with 20 known pairs for each. The pairs are graded at startup, and a wrong verdict stops the run.

Frameworks have trained for days on all-zero rewards because their grader was broken.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from posttrain.base.errors import RewardError
from posttrain.base.files import table_beside
from posttrain.config import TagsConfig
from posttrain.grading.pool import Pool
from posttrain.grading.verdict import GradeRequest

_TAGGED = ("match_format_exactly", "match_format_approximately", "check_answer", "check_numbers")
RULES = {name: f"posttrain.rewards.tagged:{name.upper()}" for name in _TAGGED}
RULES |= {name: f"posttrain.rewards.maths:{name.upper()}" for name in ("math", "gsm8k", "r1_zero", "question_only")}
TAGGED = frozenset(_TAGGED)
NEEDS_ANSWER = frozenset(RULES) - {"match_format_exactly", "match_format_approximately"}
COMPARES_EXPRESSIONS = frozenset({"math", "r1_zero", "question_only"})  # other rules read numbers and words

_PAIRS = table_beside(__file__, "rules.yaml")


def modules_of(rules: Iterable[str]) -> tuple[str, ...]:
    """The modules that each worker imports before its first job.
    The algebra, which takes seconds to load, is imported only for rules that compare expressions."""
    rules = set(rules)
    algebra = {"posttrain.grading.symbolic"} if rules & COMPARES_EXPRESSIONS else set()
    return tuple(sorted(algebra | {RULES[name].partition(":")[0] for name in rules}))


def options_of(name: str, tags: TagsConfig) -> dict[str, Any]:
    """The keyword arguments of a rule."""
    return {"tags": tags.model_dump()} if name in TAGGED else {}


def canary(name: str, tags: TagsConfig) -> list[tuple[GradeRequest, str]]:
    """20 requests for a rule, each with its known verdict."""
    rule, options = RULES[name], options_of(name, tags)
    if name not in NEEDS_ANSWER:
        end, opened, closed = tags.reasoning_end, tags.solution_start, tags.solution_end
        good = [
            f"{working}{end}{opened}{answer}{closed}"
            for working in ("", "1 + 1")
            for answer in ("2", "x", " 7 ", "no", "1/2")
        ]
        bad = ["", "2", end, opened, closed, f"{opened}2{closed}", f"{end}{opened}2", f"{end}2{closed}"]
        bad += [f"{opened}2{closed}" * 2, f"{closed}2{opened}"]
        texts = [(text, "correct") for text in good] + [(text, "wrong") for text in bad]
        return [(GradeRequest(rule, text, None, options), want) for text, want in texts]
    groups = ["expressions"] if name in COMPARES_EXPRESSIONS else ["numbers", name]
    pairs = [(*pair, want) for group in groups for want, some in _PAIRS[group].items() for pair in some]
    assert len(pairs) == 20, (name, len(pairs))
    return [(GradeRequest(rule, _dressed(name, answer, tags), gold, options), want) for gold, answer, want in pairs]


def _dressed(name: str, answer: str, tags: TagsConfig) -> str:
    """An answer in the format that a rule expects."""
    if name in TAGGED:
        return f"So it is.{tags.reasoning_end}{tags.solution_start}{answer}{tags.solution_end}"
    if name == "gsm8k":
        return f"It was none before.\n#### {answer}"
    if name == "r1_zero":
        return f"So it is. </think> <answer> {answer} </answer>"
    return rf"So it is $\boxed{{{answer}}}$."


def prove(pool: Pool, name: str, tags: TagsConfig, rule: str | None = None) -> None:
    """Grade the known pairs in the pool; `rule` (`module:NAME`), if it is given, replaces the rule of the reward.
    Raises RewardError if a verdict differs from the known verdict."""
    known = [(replace(job, rule=rule or job.rule), want) for job, want in canary(name, tags)]
    grades = pool.grade([job for job, _ in known], count=False)
    wrong = [
        f"{job.completion[-60:]!r} against {job.gold!r}: {grade.verdict} ({grade.reason or 'no reason'}), not {want}"
        for (job, want), grade in zip(known, grades, strict=True)
        if grade.verdict != want
    ]
    if wrong:
        shown = "; ".join(wrong[:3])
        raise RewardError(
            f"the grader of `{name}` gets {len(wrong)} of {len(known)} known pairs wrong, so its verdicts cannot be "
            f"trusted: {shown}. Is a different version of sympy or math-verify installed? See constraints.txt"
        )
