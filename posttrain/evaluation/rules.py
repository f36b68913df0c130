"""Grading rules for suites, in addition to the reward rules. They run in workers, so this imports nothing slow.

    gsm8k, math   the verdicts of the rewards with these names, with the classes of format and answer
    letter        the option that the completion chooses (MMLU)
    refusal       whether the completion refuses
    ifeval        whether it follows every instruction (needs lm-eval's checker)
    gsm8k_strict     lm-eval's rule: the first number after `#### ` (its filter strict-match)
    gsm8k_flexible   lm-eval's rule: the last number, as its regular expression reads (its filter flexible-extract)

The format of `gsm8k` is right if the answer is marked (a box, an answer tag, ####); that of `math`, if the answer is in
a box or an answer tag. The answer is read from there; without the format, it is the last number or expression. The
rules of lm-eval (its task `gsm8k`, version 3) give lm-eval's verdict for every string, including its mistakes: `18.` is
18, but `18.0` is not.
"""

import re
from collections.abc import Sequence
from typing import Any

from posttrain.base.files import table_beside
from posttrain.evaluation import ifeval
from posttrain.grading import extract
from posttrain.grading.verdict import BadGold, Judgement, Rule, check_text
from posttrain.rewards import maths

REFUSING = re.compile("|".join(table_beside(__file__, "refusals.yaml")), re.IGNORECASE)
# patterns of lm-eval's task `gsm8k`
STRICT_PATTERN = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE_PATTERN = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
IGNORED = (r",", r"\$", r"(?s).*#### ", r"\.$")
NO_LIMIT: Any = None  # turns off math_verify's time limit, a signal: workers have a deadline
OPENING = 400  # characters searched for a refusal; later phrases are often warnings after an answer


def gsm8k(completion: str, gold: str) -> Judgement:
    found = maths.gsm8k(completion, gold)
    rest = extract.after_thinking(completion)
    marked = extract.marked_answer(rest) is not None or extract.final_answer(rest) is not None
    return Judgement(found.score, found.correct, found.extracted, {"format": float(marked), "answer": found.score})


def math(completion: str, gold: str) -> Judgement:
    found = maths.math(completion, gold)
    if found.extracted is not None:
        return Judgement(found.score, found.correct, found.extracted, {"format": 1.0, "answer": found.score})
    loose = maths.question_only(completion, gold)
    return Judgement(0.0, False, loose.extracted, {"format": 0.0, "answer": loose.parts["answer"]})


def letter(completion: str, gold: str, choices: Sequence[str]) -> Judgement:
    rest = extract.after_thinking(completion)
    chosen = extract.parse_mmlu_response({"options": choices}, extract.last_answer_tag(rest) or rest)
    return Judgement(float(chosen == gold), chosen == gold, chosen)


def check_letter(gold: str | None, choices: Sequence[str]) -> None:
    letters = extract.LETTERS[: len(choices)]
    if gold is None or gold not in letters:
        raise BadGold(f"the answer is not one of the letters {', '.join(letters)}: {gold!r:.60}")


def refusal(completion: str, gold: str | None) -> Judgement:
    """Whether a completion opens with a phrase of refusal. This judges words, not harm: read the answers, too."""
    found = REFUSING.search(extract.after_thinking(completion).replace("’", "'")[:OPENING])
    return Judgement(float(found is not None), found is not None, found[0].strip() if found else None)


def string(completion: str, gold: str) -> Judgement:
    """Whether the extracted answer `completion` equals the gold string, ignoring white space."""
    right = "".join(completion.split()) == "".join(gold.split())
    return Judgement(float(right), right, completion)


def math_verify(completion: str, gold: str) -> Judgement:
    """The verdict of the package math_verify (Kydlicek 2025) on a whole completion."""
    from math_verify import parse, verify

    given = parse(completion, parsing_timeout=NO_LIMIT)
    right = bool(verify(parse(f"${gold}$", parsing_timeout=NO_LIMIT), given, timeout_seconds=NO_LIMIT))
    return Judgement(float(right), right, str(given[-1])[:200] if given else None)


def gsm8k_strict(completion: str, gold: str) -> Judgement:
    found = STRICT_PATTERN.search(completion)
    return _judged(found[1].strip() if found else None, gold)


def gsm8k_flexible(completion: str, gold: str) -> Judgement:
    found = [one or other for one, other in FLEXIBLE_PATTERN.findall(completion)]
    return _judged(found[-1].strip() if found else None, gold)


def _judged(answer: str | None, gold: str) -> Judgement:
    right = answer is not None and _compared(answer) == _compared(gold)
    return Judgement(float(right), right, answer)


def _compared(text: str) -> str:
    for pattern in IGNORED:
        text = re.sub(pattern, "", text)
    return text.lower()


GSM8K = Rule(maths.check_number, gsm8k)
MATH = Rule(maths.check_answer, math)
LETTER = Rule(check_letter, letter)
REFUSAL = Rule(lambda gold: None, refusal)  # there is no answer to check
STRING = Rule(maths.check_answer, string)  # for `--calibrate`
MATH_VERIFY = Rule(maths.check_answer, math_verify)
IFEVAL = Rule(ifeval.check, ifeval.followed)
GSM8K_STRICT = Rule(check_text, gsm8k_strict)
GSM8K_FLEXIBLE = Rule(check_text, gsm8k_flexible)
NAMES = ("GSM8K", "MATH", "LETTER", "IFEVAL", "GSM8K_STRICT", "GSM8K_FLEXIBLE", "REFUSAL")
RULES = {name.lower(): f"posttrain.evaluation.rules:{name}" for name in NAMES}
