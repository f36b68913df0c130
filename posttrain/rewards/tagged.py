"""The four rewards of the tagged format, which grade format and answer.

The prompt's generation turn already ends with `<start_working_out>`, so the expected completion is

    …reasoning…<end_working_out><SOLUTION>…answer…</SOLUTION>

    match_format_exactly          +3.0 | 0
    match_format_approximately    +0.5 for each of the last three tags that appears exactly once | -1.0 otherwise
    check_answer                  +5.0 exact | +3.5 stripped | +2.0 within 10 % | +1.5 within 20 % | -2.0 otherwise
    check_numbers                 +3.0 the number in the solution is equal | -1.5 otherwise

Their sum is -6.5 to +12.5. An answer that cannot be read counts as wrong. Tags are settings (`data.tags`). Every
function makes one pass over the string, so no input can take long.
"""

from collections.abc import Mapping
from fractions import Fraction

from posttrain.grading.extract import first_number
from posttrain.grading.numbers import Number, read_number
from posttrain.grading.verdict import BadGold, Judgement, Rule, check_text

Tags = Mapping[str, str]  # the fields of TagsConfig

EXACT_FORMAT = 3.0
TAG_ONCE, TAG_NOT_ONCE = 0.5, -1.0
EXACT, STRIPPED, WITHIN_10, WITHIN_20, WRONG = 5.0, 3.5, 2.0, 1.5, -2.0
NUMBER_EQUAL, NUMBER_WRONG = 3.0, -1.5


def has_format(completion: str, tags: Tags) -> bool:
    """Whether the reasoning ends and is followed by a non-empty solution, which closes at the end of the string."""
    reasoned = completion.find(tags["reasoning_end"])
    opened = completion.find(tags["solution_start"], max(reasoned, 0))
    text = completion.rstrip()
    closed = len(text) - len(tags["solution_end"])
    return (
        reasoned >= 0
        and reasoned + len(tags["reasoning_end"]) <= opened
        and opened + len(tags["solution_start"]) < closed
        and text.endswith(tags["solution_end"])
    )


def solution_of(completion: str, tags: Tags) -> str | None:
    """The content of the last closed solution tag; None if there is none."""
    end = completion.rfind(tags["solution_end"])
    start = completion.rfind(tags["solution_start"], 0, end) if end >= 0 else -1
    return None if start < 0 else completion[start + len(tags["solution_start"]) : end]


def format_exactly(completion: str, gold: str | None, tags: Tags) -> Judgement:
    right = has_format(completion, tags)
    return Judgement(EXACT_FORMAT if right else 0.0, right, solution_of(completion, tags))


def format_approximately(completion: str, gold: str | None, tags: Tags) -> Judgement:
    once = [completion.count(tags[name]) == 1 for name in ("reasoning_end", "solution_start", "solution_end")]
    score = sum(TAG_ONCE if found else TAG_NOT_ONCE for found in once)
    return Judgement(score, all(once), solution_of(completion, tags))


def answer(completion: str, gold: str, tags: Tags) -> Judgement:
    solution = solution_of(completion, tags)
    if solution is None:
        return Judgement(WRONG, False)
    if solution == gold:
        return Judgement(EXACT, True, solution)
    if solution.strip() == gold.strip():
        return Judgement(STRIPPED, True, solution)
    return Judgement(_nearness(read_number(solution), read_number(gold)), False, solution)


def _nearness(given: Number | None, right: Number | None) -> float:
    if given is None or right is None:
        return WRONG
    if right.exact == 0:
        return WITHIN_10 if given.exact == 0 else WRONG
    ratio = given.exact / right.exact
    if Fraction(9, 10) <= ratio <= Fraction(11, 10):
        return WITHIN_10
    return WITHIN_20 if Fraction(8, 10) <= ratio <= Fraction(12, 10) else WRONG


def numbers(completion: str, gold: str, tags: Tags) -> Judgement:
    start = completion.rfind(tags["solution_start"])
    solution = completion[start + len(tags["solution_start"]) :].split(tags["solution_end"])[0] if start >= 0 else ""
    text = solution if read_number(solution) else first_number(solution)
    given, right = read_number(text) if text else None, read_number(gold)
    equal = given is not None and right is not None and given.exact == right.exact
    return Judgement(NUMBER_EQUAL if equal else NUMBER_WRONG, equal, text.strip() if text else None)


def check_number(gold: str | None, tags: Tags) -> None:
    if read_number(check_text(gold)) is None:
        raise BadGold(f"the answer is not a number: {gold!r:.60}")


MATCH_FORMAT_EXACTLY = Rule(lambda gold, tags: None, format_exactly)  # formats need no answer
MATCH_FORMAT_APPROXIMATELY = Rule(lambda gold, tags: None, format_approximately)
CHECK_ANSWER = Rule(check_text, answer)
CHECK_NUMBERS = Rule(check_number, numbers)
