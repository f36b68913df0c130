"""Finds the answer in a completion: in a box, in a tag, after a marker, or as outputs for MMLU and GSM8K state it.

Every search makes a single pass over the string, whatever its content.
"""

import re
from collections.abc import Mapping
from typing import Any

from posttrain.base.words import last_box

THINK, THINK_END = "<think>", "</think>"
ANSWER, ANSWER_END = "<answer>", "</answer>"
# A sign after a word, a number or a bracket is an operator: the last number of `5-3` is 3.
_NUMBER = re.compile(r"(?:(?<![\w.)\]}%])[-+])?\$?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)")
_MARKED = re.compile(r"(?:####|^A:)[ \t]*(.*)$", re.MULTILINE)


def after_thinking(text: str) -> str:
    """The part after the last `</think>`; empty if the thinking does not end."""
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
    """The last balanced box or answer tag after the last `</think>`; if the tag contains a box, the box's content."""
    rest = after_thinking(text)
    tag = last_answer_tag(rest)
    if tag is None:
        return last_box(rest)
    after = last_box(rest[rest.rfind(ANSWER_END) :])
    return after if after is not None else last_box(tag) or tag


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
    last = None
    for match in pattern.finditer(text):
        last = match
    return last


# --- outputs of MMLU and GSM8K ----------------------------------------------------------------------------------------


LETTERS = "ABCD"
# A capital letter on its own, as models write it: B, (B), **B**, \boxed{B}. Not matched: the A of "A cat", the B of
# "B-cells" and "B's", and the A of "A or B", which chooses neither.
LETTER = (
    r"[\s*_(\[{\"'`$]*(?:\\(?:boxed|text)\{+)*([A-D])(?![\w'’]|-\w)"
    r"(?!(?<=A)\s+(?!(?:as|because|since|is|and|for|which)\b)[a-z])(?!\s*(?:or|and|/)\s*\(?[A-D]\b)"
)
# A small letter only where nothing follows, or as a label: "is d.", "b. 4".
SMALL = r"[\s*_(\[{\"'`$]*(?:\\(?:boxed|text)\{+)*([a-d])(?=[)\]}*_$]*(?:[.,;!]?\s*(?:\n|$)))"
SURELY = (
    r"(?:,?\s+(?i:therefore|thus|hence|then|so|clearly|definitely|certainly|probably|(?:most )?likely|indeed|simply"
    r"|just|actually|obviously|option|choice|letter)\b,?)*"
)
STATED = re.compile(
    rf"\b(?i:answer|choice|option)\b[^.\n:=]{{0,40}}?(?:\b(?i:is|be)\b{SURELY}\s*:?|[:=]{SURELY})(?:{LETTER}|{SMALL})"
)
FIRST = re.compile(
    rf"^(?:{LETTER}(?=[)\]}}*_\s]*(?:[.:,\n]|$)|[)\]}}])|{SMALL}|[\s*_]*\(?([a-d])(?:\)|[.):])[*_]*(?=\s+\S))"
)
MARKED = re.compile(
    rf"\((?=[A-D]\)){LETTER}|\*\*(?=[A-D]\W){LETTER}|\\boxed\{{{LETTER}"
    rf"|\b(?i:option|choice|choose|pick|select|guess|say|is|be){SURELY}{LETTER}(?=[)*\s]*[.!]?\s*$)"
    rf"|{LETTER}\s+is\s+(?:the\s+)?(?:correct|right|best|true|answer)\b",
    re.MULTILINE,
)
GSM8K_NUMBER = re.compile(
    r"((?<![\w.)\]}%])[-−]\$?)?"
    r"(\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<![\d.])\.\d+)"
    r"([eE][-+]?\d+(?!\w))?",
    re.ASCII,
)


def parse_mmlu_response(mmlu_example: Mapping[str, Any], model_output: str) -> str | None:
    """The option that a model's output chooses, "A" to "D", or None if it chooses none, or more than one.

    `mmlu_example` has `options`, the strings of A, B, … in order (and `answer`, which is ignored). Tried in turn:

    1. the stated answer ("The correct answer is B.", "Answer: (B)"); if there are several, the last;
    2. a letter at the start of the output ("B", "B. The BK virus", "b) 4");
    3. the only letter that is marked as a choice anywhere ("(B)", "**B**", "I would say B.", "B is correct");
    4. the string of exactly one option, and nothing else ("100").

    Letters without an option are ignored.
    """
    letters = LETTERS[: len(mmlu_example["options"])]
    text = model_output.strip()
    if found := [letter for groups in STATED.findall(text) if (letter := "".join(groups).upper()) in letters]:
        return found[-1]
    if (first := FIRST.match(text)) and (letter := "".join(first.groups("")).upper()) in letters:
        return letter
    marked = {letter for groups in MARKED.findall(text) for letter in groups if letter and letter in letters}
    if marked:
        return marked.pop() if len(marked) == 1 else None
    same = [
        letter
        for letter, option in zip(letters, mmlu_example["options"], strict=False)
        if str(option).strip().casefold() == text.rstrip(".").casefold()
    ]
    return same[0] if len(same) == 1 else None


def parse_gsm8k_response(model_output: str) -> str | None:
    """The last number of a string, as a string that `float` reads, or None.

    Thousands separators are removed ("1,250" gives "1250"); currency signs, percent signs and the full stop of a
    sentence are not part of the number. A minus sign is, unless it subtracts: "-3" and "= −$3" give "-3", "5-2" and
    "5 - 2" give "2".
    """
    found = _last(GSM8K_NUMBER, model_output)
    if not found:
        return None
    minus, digits, exponent = found.groups(default="")
    return f"{'-' if minus else ''}{digits.replace(',', '')}{exponent}"
