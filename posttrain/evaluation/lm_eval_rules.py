"""lm-eval's own judgement of GSM8K, without lm-eval: the filters and the metric of its task `gsm8k`, version 3.

    gsm8k_strict     the first number after `#### `                    (its filter strict-match)
    gsm8k_flexible   the last number, as its regular expression reads  (its filter flexible-extract)

A verdict is lm-eval's for every string, its mistakes included (`18.` is 18, `18.0` is not). The rule `gsm8k` compares
values instead.
"""

import re

from posttrain.grading.verdict import BadGold, Judgement, Rule

STRICT_PATTERN = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE_PATTERN = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
IGNORED = (r",", r"\$", r"(?s).*#### ", r"\.$")


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


def _check_gold(gold: str | None) -> None:
    if not isinstance(gold, str) or not gold.strip():
        raise BadGold("the answer is missing")


GSM8K_STRICT = Rule(_check_gold, gsm8k_strict)
GSM8K_FLEXIBLE = Rule(_check_gold, gsm8k_flexible)
