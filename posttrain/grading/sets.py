r"""Reads sets of real numbers in all notations: `(2, \infty)`, `x > 2`, `\{x \mid x > 2\}`, `\mathbb{R}`, `\{\}`.

A set is a list of intervals whose ends are strings: the caller decides whether two ends are equal.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from posttrain.grading.notation import brackets, split_top
from posttrain.grading.numbers import read_number

ORDER = re.compile(r"\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|<=|>=|<|>")
_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_UNIFIED = {"<=": r"\le", ">=": r"\ge"}
_LOW, _HIGH = r"-\infty", r"\infty"
_ALL = re.compile(
    r"\\mathbb\{?R\}?|\\mathbf\{R\}|\\Reals?|\\R|ℝ|(?:all |the )?(?:set of )?(?:all )?real(?:s| numbers)|all reals",
    re.I,
)
_NONE = re.compile(r"\\emptyset|\\\{\s*\\\}|(?:the )?(?:empty|null) set|no (?:real )?solutions?|empty", re.I)
_NAME = r"(?:[a-zA-Z]|\\(?:theta|alpha|beta|lambda|mu|phi))"
_BUILDER = re.compile(
    rf"(?P<name>{_NAME})\s*(?:\\in\s*(?P<within>\S+?))?\s*(?:\\mid(?![a-zA-Z])|\\vert|\||:|\\text\{{such that\}})\s*"
    r"(?P<condition>.+)"
)
_MEMBER = re.compile(rf"(?P<name>{_NAME})\s*\\in(?![a-zA-Z])\s*(?P<set>.+)")
_OR = re.compile(r"\\cup(?![a-zA-Z])|,?\s*(?:\\text\{or\}|\bor\b)\s*")
_AND = re.compile(r"\\cap(?![a-zA-Z])|,?\s*(?:\\text\{and\}|\band\b)\s*")
_WITHOUT = re.compile(
    r"\\(?:setminus|backslash)|\\text\{(?:except|but)(?: for)?\}|\b(?:except|but)(?: for)?\b|(?<=\})\s*-(?=\s*\\\{)"
)
_UNEQUAL = re.compile(rf"(?P<name>{_NAME})\s*\\ne(?![a-zA-Z])\s*(?P<value>.+)")
_ABSOLUTE = re.compile(rf"(?:\||\\lvert)\s*(?P<name>{_NAME})(?:\s*(?P<shift>[-+])\s*(?P<by>[^|\\]+))?\s*(?:\||\\rvert)")
# Matches strings that may be such a set, apart from a single bracket.
_PERHAPS = re.compile(
    ORDER.pattern + r"|\\cup|\\cap|\\setminus|\\mathbb|\\mathbf|\\R|ℝ|\\emptyset|\\\{\s*\\\}|\\ne(?![a-zA-Z])|real"
    r"|\\mid|empty|null set|no (?:real )?solution|\\in(?![a-zA-Z])",
    re.I,
)


@dataclass(frozen=True, slots=True)
class Interval:
    """The interval from `low` to `high`; a point if both ends are closed and are the same string."""

    low: str
    low_closed: bool
    high: str
    high_closed: bool


@dataclass(frozen=True, slots=True)
class RealSet:
    """A union of disjoint intervals, and the name of the free variable; empty if it is bound or there is none."""

    intervals: tuple[Interval, ...]
    name: str = ""


def is_set_like(text: str) -> bool:
    """Whether the string may be a set of numbers, apart from a single bracket."""
    return _PERHAPS.search(text) is not None


def read_set(text: str, depth: int = 5) -> RealSet | None:
    """The set of real numbers that a tidy string denotes, or None."""
    text = text.strip()
    if depth < 0 or not text:
        return None
    plain = " ".join(re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).split())
    if _ALL.fullmatch(plain):
        return RealSet((Interval(_LOW, False, _HIGH, False),))
    if _NONE.fullmatch(plain):
        return RealSet(())
    inside = brackets(text)
    if inside and inside[0] == r"\{":
        return _braces(inside[1], depth)
    if found := _MEMBER.fullmatch(text):
        return _named(read_set(found["set"], depth - 1), found["name"])
    if len(parts := _OR.split(text)) > 1:
        return _union([read_set(part, depth - 1) for part in parts])
    if len(parts := _WITHOUT.split(plain)) == 2:
        return _without(read_set(parts[0], depth - 1), parts[1])
    if len(parts := _AND.split(text)) == 2:
        return _both(*(read_set(part, depth - 1) for part in parts))
    if inside and len(ends := split_top(inside[1])) == 2 and inside[0] in "([" and inside[2] in ")]":
        return RealSet((Interval(ends[0], inside[0] == "[", ends[1], inside[2] == "]"),))
    if len(parts := split_top(text)) == 2 and all(ORDER.search(part) for part in parts):
        # the union, as for `x < -1, x > 2`, or the intersection if the two bound an interval, as in `x > 2, x < 5`
        left, right = (read_set(part, depth - 1) for part in parts)
        both = _both(left, right)
        return both if both and both.intervals else _union([left, right])
    if found := _UNEQUAL.fullmatch(text):
        return _named(_without(read_set(r"\mathbb{R}"), found["value"]), found["name"])
    if found := re.fullmatch(rf"(?P<name>{_NAME})\s*=\s*(?P<value>[^=,]+)", text):
        return RealSet((_point(found["value"]),), found["name"])
    return _from_order(text)


def _braces(content: str, depth: int) -> RealSet | None:
    """A set in braces, defined by a condition or by its members."""
    if found := _BUILDER.fullmatch(content):
        if found["within"] and not _ALL.fullmatch(found["within"]):
            return None
        condition = read_set(found["condition"], depth - 1)
        return RealSet(condition.intervals) if condition and condition.name == found["name"] else None
    members = split_top(content)
    is_list = not any(ORDER.search(member) or not member for member in members)
    return RealSet(tuple(map(_point, members))) if is_list else None


def _point(value: str) -> Interval:
    return Interval(value.strip(), True, value.strip(), True)


def _named(found: RealSet | None, name: str) -> RealSet | None:
    return RealSet(found.intervals, name) if found and found.name in ("", name) else None


def _union(parts: list[RealSet | None]) -> RealSet | None:
    whole = [part for part in parts if part is not None]
    names = {part.name for part in whole} - {""}
    if len(whole) < len(parts) or len(names) > 1:
        return None
    return RealSet(tuple(interval for part in whole for interval in part.intervals), "".join(names))


def _both(left: RealSet | None, right: RealSet | None) -> RealSet | None:
    """The intersection, for `x > 2 and x < 5`: one side gives the lower bound, the other the upper bound."""
    if not left or not right or len(left.intervals) != 1 or len(right.intervals) != 1 or left.name != right.name:
        return None
    low, high = (left.intervals[0], right.intervals[0])
    if low.low == _LOW:
        low, high = high, low
    if low.high != _HIGH or high.low != _LOW or low.low == _LOW or high.high == _HIGH:
        return None
    ends = _value(high.high), _value(low.low)
    if ends[0] is not None and ends[1] is not None and ends[0] < ends[1]:
        return RealSet((), left.name)
    return RealSet((Interval(low.low, low.low_closed, high.high, high.high_closed),), left.name)


def _value(text: str) -> Fraction | None:
    """The value of an end that is a plain number."""
    number = read_number(text)
    return number.exact if number else None


def _without(whole: RealSet | None, points: str) -> RealSet | None:
    """All real numbers except some points. Several points must be plain numbers."""
    if whole is None or whole.intervals != (Interval(_LOW, False, _HIGH, False),):
        return None
    inside = brackets(points.strip())
    members = split_top(inside[1] if inside and inside[0] == r"\{" else points)
    if re.search(r"\\pm", points):
        members = [sign + member.replace(r"\pm", "").strip() for member in members for sign in ("-", "")]
    if len(members) > 1:
        values = {member: _value(member) for member in members}
        if any(value is None for value in values.values()):
            return None
        members.sort(key=lambda member: values[member] or 0)
    ends = [_LOW, *(member.strip() for member in members), _HIGH]
    return RealSet(tuple(Interval(low, False, high, False) for low, high in pairwise(ends)))


def chain(text: str) -> tuple[list[str], list[str]] | None:
    """(terms, signs), reversed if the first sign is `>` or `\\ge`; None for a string without signs."""
    signs = [_UNIFIED.get(sign, sign) for sign in map(str, ORDER.findall(text))]
    terms = [term.strip() for term in ORDER.split(text)]
    if not signs:
        return None
    if signs[0] in (">", r"\ge"):
        return terms[::-1], [_FLIPPED[sign] for sign in signs[::-1]]
    return terms, signs


def _from_order(text: str) -> RealSet | None:
    """The set of an inequality in one variable or in an absolute value."""
    found = chain(text)
    if found is None or any(sign in (">", r"\ge") for sign in found[1]):
        return None
    terms, closed = found[0], [sign == r"\le" for sign in found[1]]
    names = [not term or re.fullmatch(_NAME, term) is not None for term in terms]  # `> 1` names nothing
    if names == [True, False]:
        return RealSet((Interval(_LOW, False, terms[1], closed[0]),), terms[0])
    if names == [False, True]:
        return RealSet((Interval(terms[0], closed[0], _HIGH, False),), terms[1])
    if names == [False, True, False]:
        return RealSet((Interval(terms[0], closed[0], terms[2], closed[1]),), terms[1])
    return _absolute(terms, closed) if len(terms) == 2 else None


def _absolute(terms: list[str], closed: list[bool]) -> RealSet | None:
    """The set of `|x - a| < b` or `|x - a| > b` (also <=, >=); None for anything else."""
    inner, outer = (_ABSOLUTE.fullmatch(term) for term in terms)
    if (inner is None) == (outer is None):
        return None
    found, bound = (inner, terms[1]) if inner else (outer, terms[0])
    assert found is not None
    number = _value(bound)
    if number is None or number <= 0:
        return None
    centre = f"{'-' if found['shift'] == '+' else ''}({found['by']})" if found["by"] else "0"
    low, high = f"{centre}-({bound})", f"{centre}+({bound})"
    if inner:
        return RealSet((Interval(low, closed[0], high, closed[0]),), found["name"])
    ends = Interval(_LOW, False, low, closed[0]), Interval(high, closed[0], _HIGH, False)
    return RealSet(ends, found["name"])
