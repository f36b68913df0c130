r"""Rules that grade answers as right or wrong: `math` and `gsm8k`, and `r1_zero` and `question_only`, which also check
the format.

    math            the last balanced box or answer tag after `</think>` equals the answer
    gsm8k           the number after the last `####` equals the answer; without one, the number in the last box or tag;
                    without either, the last number. `\frac{1}{2}`, `1/2`, `3 \times 10^2` and `9{,}500` are one number
                    each, even within a sentence
    r1_zero         1 if the format is `</think> <answer>…</answer>` and the answer is right, otherwise 0
    question_only   1 if there is a `\boxed{…}` and the answer is right, otherwise 0

The last two report format and answer as parts, which gives the four classes 00, 01, 10 and 11: a right answer in the
wrong format is recognised, but not rewarded. (Tags and rewards are those of "Understanding R1-Zero-Like Training",
Liu et al. 2025.)
"""

import re

from posttrain.base.words import last_box
from posttrain.grading import extract
from posttrain.grading.equality import LONGEST, is_readable, same_answer
from posttrain.grading.notation import tidy
from posttrain.grading.numbers import Number, read_number, same_number
from posttrain.grading.verdict import BadGold, Judgement, Rule, check_text

LINE = 400  # number of characters at the end of a line that are searched for a number
_ONE = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d*\\overline\{\d+\}|\.\d+)?|(?<!\d)\.\d+"
_TEN = r"(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{-?\d+\}"
_BRACES = r"\{(?:[^{}]|\{[^{}]*\})*\}"
# Numbers in a tidied string. Exponents, indices and `m2` are skipped; roots, powers and other fractions match as a
# whole, but not as numbers.
_NUMBERS = re.compile(
    rf"(?P<skipped>[\^_]{_BRACES}|(?<![a-zA-Z])[cdk]?m[23](?!\w))|\\sqrt(?:\[[^\]]*\])?{_BRACES}"
    rf"|(?P<number>(?:(?<![\w.)\]}}%])[-+])?[$€£]?(?:(?:\d+\s*)?\\frac\{{-?[\d.,]+\}}\{{-?[\d.,]+\}}"
    rf"|(?<!/)(?:\d+ )?\d+(?:\.\d+)?\s*/\s*\d+(?:\.\d+)?(?![\d/])|(?:{_ONE})(?:\s*{_TEN}|[eE][+-]?\d+(?!\w))"
    rf"|10\^\{{-?\d+\}}|(?:{_ONE})(?!\s*\\pi|\^\{{[^\\]))(?!\d))|(?:{_ONE})|\\frac{_BRACES}{_BRACES}"
)


def math(completion: str, gold: str) -> Judgement:
    answer = extract.final_answer(completion)
    right = answer is not None and same_answer(_reference(gold), answer)
    return Judgement(float(right), right, answer)


def gsm8k(completion: str, gold: str) -> Judgement:
    rest = extract.after_thinking(completion)
    texts = [text for text in (extract.marked_answer(rest), extract.final_answer(rest), rest) if text]
    answer, given = next((found for text in texts if (found := _number_in(text))), (None, None))
    right = _gsm8k_gold(gold)
    correct = given is not None and right is not None and same_number(right, given)
    return Judgement(float(correct), correct, answer)


def r1_zero(completion: str, gold: str) -> Judgement:
    opened = completion.rfind(f"{extract.THINK_END} {extract.ANSWER}")
    formatted = opened >= 0 and completion.find(extract.ANSWER_END, opened) >= 0
    tag = extract.last_answer_tag(extract.after_thinking(completion)) if formatted else None
    answer = (last_box(tag) or tag) if tag is not None else _loosely(completion)
    return _four_classes(formatted, answer, gold)


def question_only(completion: str, gold: str) -> Judgement:
    box = last_box(extract.after_thinking(completion))
    return _four_classes(box is not None, box if box is not None else _loosely(completion), gold)


def _four_classes(formatted: bool, answer: str | None, gold: str) -> Judgement:
    right = answer is not None and same_answer(_reference(gold), answer)
    both = formatted and right
    return Judgement(float(both), both, answer, {"format": float(formatted), "answer": float(right)})


def _loosely(completion: str) -> str | None:
    """The answer of a completion without the right format: a box or tag anywhere after the thinking, or the last
    number."""
    rest = extract.after_thinking(completion)
    return extract.final_answer(rest) or extract.marked_answer(rest) or extract.last_number(rest)


def _reference(gold: str) -> str:
    """The boxed answer if the data has a complete solution with a box; otherwise `gold` itself."""
    return (last_box(gold) or gold) if "\\boxed" in gold else gold


def _gsm8k_gold(gold: str) -> Number | None:
    return read_number(extract.marked_answer(gold) or gold)


def _number_in(text: str) -> tuple[str, Number] | None:
    """(number as written, its value) of a string that is a number, or of its last number (`18 dollars`, `3 + 4 = 7`).

    None if the last number is part of an expression: the 2 in `\\sqrt{2}` is not an answer."""
    if number := read_number(text):
        return text, number
    line = next((line for line in reversed(text.splitlines()) if any(c.isnumeric() for c in line)), "")
    line = line if len(line) <= LINE else line[-LINE:].partition(" ")[2]
    # a dash is not a minus sign; an underscore before a number is emphasis
    last = None
    for match in _NUMBERS.finditer(tidy(re.sub(r"(?<![\w})\]])_+|[–—]", " ", line))):
        last = last if match["skipped"] else match
    number = read_number(last["number"]) if last and last["number"] else None
    return (last["number"], number) if last and number else None


def check_answer(gold: str | None) -> None:
    gold = check_text(gold)
    if len(_reference(gold)) > LONGEST:
        raise BadGold(f"the answer has {len(gold):,} characters")
    if not is_readable(_reference(gold)):
        raise BadGold(f"there is nothing to compare with in the answer: {gold!r:.60}")


def check_number(gold: str | None) -> None:
    if not isinstance(gold, str) or _gsm8k_gold(gold) is None:
        raise BadGold(f"the answer is not a number, alone or after ####: {gold!r:.60}")


MATH = Rule(check_answer, math)
GSM8K = Rule(check_number, gsm8k)
R1_ZERO = Rule(check_answer, r1_zero)
QUESTION_ONLY = Rule(check_answer, question_only)
