"""Finds the answer in a completion. One pass over the string, whatever its content."""

import re

from posttrain.base.latex import last_box

THINK, THINK_END = "<think>", "</think>"
ANSWER, ANSWER_END = "<answer>", "</answer>"
# A sign after a word, a number or a bracket is an operator: the last number of `5-3` is 3.
_NUMBER = re.compile(r"(?:(?<![\w.)\]}%])[-+])?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)")
_MARKED = re.compile(r"(?:####|^A:)[ \t]*(.*)$", re.MULTILINE)


def after_thinking(text: str) -> str:
    """The part after the last `</think>`; empty if the thinking has not ended."""
    end = text.rfind(THINK_END)
    if text.rfind(THINK) > end:
        return ""
    return text if end < 0 else text[end + len(THINK_END) :]


def last_answer_tag(text: str) -> str | None:
    """The content of the last complete `<answer>…</answer>`."""
    end = text.rfind(ANSWER_END)
    begin = text.rfind(ANSWER, 0, end) if end >= 0 else -1
    return None if begin < 0 else text[begin + len(ANSWER) : end].strip()


def final_answer(text: str) -> str | None:
    """The last balanced box or answer tag after the last `</think>`; of a box inside a tag, the box."""
    rest = after_thinking(text)
    tag = last_answer_tag(rest)
    if tag is None:
        return last_box(rest)
    behind = last_box(rest[rest.rfind(ANSWER_END) :])
    return behind if behind is not None else last_box(tag) or tag


def marked_answer(text: str) -> str | None:
    """The rest of the line after the last `####` (or a line's `A:`), as in GSM8K's solutions."""
    found = _last(_MARKED, text)
    return found[1].strip() if found else None


def last_number(text: str) -> str | None:
    """The last number in a string, as written."""
    found = _last(_NUMBER, text)
    return found.group() if found else None


def first_number(text: str) -> str | None:
    """The first number in a string, as written."""
    found = _NUMBER.search(text)
    return found.group() if found else None


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for match in pattern.finditer(text):
        found = match
    return found
