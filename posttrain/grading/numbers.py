r"""Reads numbers as people and models write them: `1,234.50`, `10\,000`, `3.2e4`, `0.\overline{3}`, `1\frac12`.

A number is a fraction; nothing is rounded, so 0.333 is not 1/3.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from posttrain.grading.notation import tidy

LONGEST = 1000  # characters
LARGEST_EXPONENT = 1000
_GROUPED = r"\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+"
_DECIMAL = re.compile(rf"(?P<whole>{_GROUPED})?(?:\.(?P<digits>\d*)(?P<rest>.*))?")
_POWER = re.compile(
    r"(?P<factor>[^\\*x^]*?)\s*(?:\\times|\\cdot|\*|x)?\s*(?<![\d.])10\s*\^\s*(?:\{\s*(?P<a>[+-]?\d+)\s*\}|(?P<b>[+-]?\d+))"
)
_EXPONENT = re.compile(r"(?P<factor>.*\d\.?)[eE](?P<exponent>[+-]?\d+)")
_FRACTION = re.compile(r"(?P<whole>\d+)?\s*\\frac\{(?P<over>[^{}]*)\}\{(?P<under>[^{}]*)\}")
_SLASH = re.compile(r"(?:(?P<whole>\d+)\s+)?(?P<over>[^/\s]+)\s*/\s*(?P<under>[^/\s]+)")
_REPEATED = re.compile(r"(?P<digits>\d*?)(?P<block>\d+?)(?P=block)+")


@dataclass(frozen=True, slots=True)
class Number:
    """A number as written: `value` ignores a percent sign, `percent` says whether there is one."""

    value: Fraction
    percent: bool = False

    @property
    def exact(self) -> Fraction:
        return self.value / 100 if self.percent else self.value


def read_number(text: str) -> Number | None:
    """The number if the complete string is a number, otherwise None."""
    if len(text) > LONGEST:
        return None
    text = tidy(text)
    percent = re.fullmatch(r"(.*?)\s*(?:%|\\text\{ ?per ?cent ?\}|\\text\{%\}|per ?cent)", text)
    value = _signed(percent[1] if percent else text)
    return None if value is None else Number(value, percent is not None)


def same_number(gold: Number, answer: Number) -> bool:
    """Whether an answer equals the gold number.

    0.5 and 50% are equal. If only one has a percent sign, numbers with the same digits are also equal (the answer to
    "what percent" may be 50 or 50%), but not below 1: 0.5% does not equal 0.5.
    """
    if gold.exact == answer.exact:
        return True
    return gold.percent != answer.percent and gold.value == answer.value and abs(gold.value) >= 1


def _signed(text: str) -> Fraction | None:
    text = text.strip()
    sign = 1
    while text[:1] in ("+", "-", "$") and text:
        if text[0] == "-":
            sign = -sign
        text = text[1:].lstrip()
        if sign < 0 and text[:1] in ("+", "-"):
            return None  # --5 is a typing error, not 5
    value = _unsigned(text.removesuffix("$").rstrip())
    return None if value is None else sign * value


def _unsigned(text: str) -> Fraction | None:
    if text.startswith("(") and text.endswith(")"):
        return None if "," in text else _signed(text[1:-1]) if _DECIMAL.fullmatch(text[1:-1].lstrip("+-")) else None
    for pattern in (_FRACTION, _SLASH):
        if found := pattern.fullmatch(text):
            return _fraction(found["whole"], found["over"], found["under"])
    if found := _POWER.fullmatch(text):
        return _scaled(found["factor"] or "1", found["a"] or found["b"])
    found = _EXPONENT.fullmatch(text)
    return _scaled(found["factor"], found["exponent"]) if found else _decimal(text)


def _fraction(whole: str | None, over: str, under: str) -> Fraction | None:
    above = _decimal(over.lstrip("+-").strip())
    below = _decimal(under.lstrip("+-").strip())
    if above is None or not below or over.startswith("+") or (whole and over.startswith("-")):
        return None
    signs = over.strip().startswith("-") != under.strip().startswith("-")
    return int(whole or 0) + (-above if signs else above) / below


def _scaled(factor: str, exponent: str) -> Fraction | None:
    value = _decimal(factor.strip())
    if value is None or len(exponent) > 5 or abs(int(exponent)) > LARGEST_EXPONENT:
        return None
    return value * Fraction(10) ** int(exponent)


def _decimal(text: str) -> Fraction | None:
    r"""Read digits with or without separators, a point, a repeating part: `0.1\overline{6}`, `0.1(6)`, `0.1666...`."""
    found = _DECIMAL.fullmatch(text)
    if not found or (found["whole"] is None and not found["digits"] and not found["rest"]):
        return None
    whole = int((found["whole"] or "0").replace(",", "").replace(" ", ""))
    digits, rest = found["digits"] or "", (found["rest"] or "").strip()
    block = ""
    if rest == "..":
        # "3...": its first dot was read as the decimal point
        return None
    if rest.startswith("..."):
        if rest != "..." or len(digits) > 100 or not (repeated := _REPEATED.fullmatch(digits)):
            return None
        digits, block = repeated["digits"], repeated["block"]
        if len(block) * 2 > len(repeated.group()) - len(digits):  # a repeating part must appear at least twice
            return None
    elif rest:
        dotted = re.fullmatch(r"\\(?:overline|bar)\{(\d+)\}|\((\d+)\)|\\dot\{(\d)\}(?:(\d*)\\dot\{(\d)\})?", rest)
        if not dotted:
            return None
        block = dotted[1] or dotted[2] or "".join(part or "" for part in dotted.groups()[2:])
    value = whole + Fraction(int(digits or 0), 10 ** len(digits))
    if block:
        value += Fraction(int(block), (10 ** len(block) - 1) * 10 ** len(digits))
    return value
