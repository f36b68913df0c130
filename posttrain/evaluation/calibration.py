"""How far verifiers of answers agree: the string, the suite's own rule, math_verify alone; and each gold with itself.

A verifier that rejects right answers hides progress, and one that accepts wrong ones rewards them, so a score is worth
what its verifier is. `posttrain eval --calibrate` grades every stored answer three times:

    string        the extracted answer is the gold's string, white space aside
    rule          the verdict of the suite's rule
    math_verify   the package alone, on the whole completion (Kydlicek 2025)
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from posttrain.base.latex import last_box
from posttrain.base.progress import progress
from posttrain.evaluation.items import Items
from posttrain.evaluation.records import Answer
from posttrain.evaluation.running import RULES
from posttrain.grading.extract import marked_answer
from posttrain.grading.pool import Pool
from posttrain.grading.verdict import GradeRequest

SHOWN = 50  # disagreements that are listed
OWN = "posttrain.evaluation.rules"


def short(gold: str) -> str:
    """The answer alone of a gold that is a whole solution."""
    return marked_answer(gold) or last_box(gold) or gold


def calibrate(items: Items, answers: Sequence[Answer], workers: int | None, deadline: float) -> dict[str, Any]:
    """Agreement of the verifiers on the graded answers, and the golds that the rule does not accept for themselves."""
    graded = [answer for answer in answers if answer.verdict in ("correct", "wrong") and answer.gold is not None]
    golds = {item.id: item.gold for item in items.items if item.gold is not None}
    with Pool(workers, deadline, modules=(OWN, "posttrain.grading.symbolic", "math_verify")) as pool:
        by_string = [GradeRequest(f"{OWN}:STRING", one.extracted or "", short(one.gold or "")) for one in graded]
        by_package = [GradeRequest(f"{OWN}:MATH_VERIFY", one.completion, short(one.gold or "")) for one in graded]
        rule = RULES[items.suite.rule]
        themselves = [GradeRequest(rule, rf"\boxed{{{short(gold)}}}", gold) for gold in golds.values()]
        requests = [*by_string, *by_package, *themselves]
        grades = list(progress(pool.stream(requests, count=False), f"{items.suite.name}: verifiers", len(requests)))
    n = len(graded)
    strings, packages, own = grades[:n], grades[n : 2 * n], grades[2 * n :]
    each = zip(graded, strings, packages, strict=True)
    verdicts = [(one, string.verdict, one.verdict, package.verdict) for one, string, package in each]
    differ = [(one, *three) for one, *three in verdicts if len(set(three)) > 1]
    return {
        "answers": n,
        "parse_failures": sum(answer.extracted is None for answer in graded),
        "agreement": dict(Counter(f"string {a}, rule {b}, math_verify {c}" for _, a, b, c in verdicts).most_common()),
        "disagreements": [
            {
                "item": one.item,
                "sample": one.sample,
                "gold": short(one.gold or ""),
                "extracted": one.extracted,
                "string": a,
                "rule": b,
                "math_verify": c,
            }
            for one, a, b, c in sorted(differ, key=lambda row: row[2] == row[3])[:SHOWN]
        ],
        "golds": len(golds),
        "golds_rejected": [name for name, grade in zip(golds, own, strict=True) if grade.verdict != "correct"],
    }
