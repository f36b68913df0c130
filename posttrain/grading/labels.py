r"""Answers that look like expressions but are not: lettered choices, ratios, residues, numbers in other bases."""

import re

from posttrain.grading.notation import split_top
from posttrain.grading.numbers import read_number

_CHOICE = re.compile(
    r"(?:(?i:choice|option|answer)\s*:?\s+)?"
    r"(?:\((?P<a>[A-Z])\)|(?P<b>[A-Z])(?:[.):](?=\s|$)|$))(?P<rest>(?:\s+\S|[\w\\$]).*|)"
)
_TO = re.compile(r"\s*\\text\{to\}\s*|(?<=\d) to (?=\d)")
_NO_TERM = re.compile(r"[=<>,;]|\\(?:text|mid|in|le|ge)(?![a-zA-Z])")
_RESIDUE = re.compile(
    r"(?:[a-zA-Z]\s*\\equiv\s*)?(?P<rest>[^\\]+?)\s*\(?(?:\\[pb]?mod|\\text\{mod\}|\bmod\b)\s*(?P<modulus>.+?)\)?"
)
_BASE = re.compile(
    r"(?P<digits>[0-9A-Z]+)\s*"
    r"(?:_\{(?P<index>.+)\}|(?:\\text\{)?\s*\(?(?:in )?base[- ]?(?P<base>\w*)\)?\s*\}?\s*(?P<more>\w*))"
)
_NUMERALS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


def read_choice(text: str) -> tuple[str, str] | None:
    r"""(letter, rest) of `(C) 42`, `C)`, `\text{C. }42`, `Option C`; None without a label."""
    found = _CHOICE.fullmatch(re.sub(r"^\\text\{([^{}]*)\}", r"\1 ", text).strip())
    if not found:
        return None
    rest = found["rest"].strip()
    if re.search(r"\([A-Z]\)", rest) or re.match(r"(?:\\text\{)?(?:and|or)\b", rest):
        return None  # several labels are not a choice
    return found["a"] or found["b"], rest


def read_ratio(text: str) -> list[str] | None:
    r"""The terms of `3:4`, `1 : \sqrt{2} : 3`, `3 \text{ to } 4`."""
    if ":" not in text and "to" not in text:
        return None
    text = _TO.sub(":", text)
    terms = split_top(text, ":")
    if len(terms) < 2 or _NO_TERM.search(text) or not all(term.strip("0. ") for term in terms):
        return None
    return terms


def read_base(text: str) -> tuple[str, int] | None:
    r"""(digits, base) of `12_3`, `12_{\text{three}}`, `12\text{ in base }3`, `12 (base 3)`."""
    found = _BASE.fullmatch(text)
    if not found:
        return None
    index = found["index"] or found["base"] or found["more"]
    base = re.sub(r"\\text\{([^{}]*)\}", r"\1", index).strip("() ").lower()
    base = str(_NUMERALS.index(base)) if base in _NUMERALS else base
    return (found["digits"].lstrip("0") or "0", int(base)) if base.isdecimal() and len(base) < 4 else None


def read_residue(text: str) -> tuple[int, int] | None:
    r"""(remainder, modulus) of `3 \pmod 7`, `x \equiv 10 \pmod{7}`."""
    found = _RESIDUE.fullmatch(text)
    if not found:
        return None
    rest, modulus = read_number(found["rest"]), read_number(found["modulus"].strip("{} "))
    if not rest or not modulus or modulus.value <= 0 or not (rest.value.denominator == modulus.value.denominator == 1):
        return None
    return int(rest.value % modulus.value), int(modulus.value)
