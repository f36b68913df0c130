r"""Forms of answers that are not single expressions.

Lists and sets with their members, unknowns with their values, cells of matrices; lettered choices, ratios, residues,
numbers in other bases; dates, times of day and telephone numbers, so that none is read as a difference or a quotient.
"""

import re
from dataclasses import dataclass
from typing import Literal

from posttrain.grading.notation import brackets, split_top, tidy
from posttrain.grading.numbers import read_number

_SYMBOL = r"(?:[a-zA-Z]|\\text\{[^{}]*\}|\\[a-zA-Z]+)(?:_\{(?:[^{}]|\{[^{}]*\})*\}|')?"
_TUPLE = rf"\(\s*{_SYMBOL}(?:\s*,\s*{_SYMBOL})+\s*\)"
# A length or an angle, named by its points; also as a term of a ratio.
_POINTS = r"(?:[A-Z]'?(?:_\{\w+\})?){1,3}"
_DRAWN = r"\\(?:overline|overrightarrow|vec|widehat)\{[^{}]*\}"
_ANGLE = rf"m?\s*(?:\\(?:measured|spherical)?angle\s*(?:{_POINTS}|\\[a-z]+|\w)|∠\s*{_POINTS})"
_LENGTH = rf"(?:[A-Z]'?(?:_\{{\w+\}})?){{2}}|{_DRAWN}|\|(?:\s*(?:{_POINTS}|{_DRAWN}|\\text\{{\w+\}})\s*)\|"
_TERM = rf"(?:{_LENGTH}|{_ANGLE}|{_SYMBOL})"
_RATIO = rf"\\frac\{{\s*{_TERM}\s*\}}\{{\s*{_TERM}\s*\}}|{_TERM}(?:\s*:\s*{_TERM})+|{_TERM}\s*/\s*{_TERM}"
# The value of a function, with a number or symbols in brackets: x(y + 1) is a product.
_VALUE = (
    r"(?:[a-wA-W](?:_\{\w+\})?(?:'+|\^\{(?:-1|\(\w\)|'+)\})?|\\(?:phi|psi|sigma|tau|varphi|mu|Gamma|zeta))"
    r"\s*\(\s*(?:-?\d+(?:\.\d+)?|-?\\frac\{-?\d+\}\{\d+\}|[a-zA-Z](?:,\s*[a-zA-Z])*|\\[a-z]+)(?:,\s*-?\d+)*\s*\)"
    r"|(?:P|E|\\text\{(?:P|E|Pr|Var|Cov|area|Area|rank|tr|dim|deg)\}|\\Pr|n)\s*[(\[][^=()\[\]]*[)\]]"
    rf"|\\(?:sin|cos|tan|cot|sec|csc)\s*\(?\s*(?:{_ANGLE}|[A-Z](?![a-zA-Z(])|\\(?:alpha|beta|gamma|theta|phi))\s*\)?"
)
_DETERMINANT = rf"(?:\\(?:det|dim|deg)|\\text\{{(?:det|tr|rank)\}})\s*(?:\(\s*{_SYMBOL}\s*\)|{_SYMBOL})"
FIGURE = re.compile(rf"{_ANGLE}|{_LENGTH}|{_VALUE}|{_DETERMINANT}")
_NAME = rf"(?:{_TUPLE}|{_RATIO}|{FIGURE.pattern}|{_SYMBOL}(?:\s*\([a-zA-Z](?:,\s*[a-zA-Z])*\))?)"
ASSIGNED = re.compile(rf"(?P<name>{_NAME})\s*(?:=|\\in(?![a-zA-Z]))\s*(?P<value>.+)")
MATRIX = re.compile(r"\\begin\{(?P<kind>[a-z]*(?:matrix|array))\}(?:\{[clr|]*\})?(?P<rows>.*)\\end\{(?P=kind)\}")
_JOINED = re.compile(r",?\s*(?:\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)\s*|;\s*")
PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])")


def elements(text: str) -> list[str]:
    """The members of a list: `1, 2`, `1 and 2`, `x = 1 \\text{ or } x = 2`. Thousands separators are ignored."""
    if read_number(text):
        return [text]
    if ", " in text:
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return [part for piece in split_top(_JOINED.sub(",", text)) if (part := piece.strip())]


def is_equation(text: str) -> bool:
    r"""Whether there is an equals sign outside brackets and outside the index of a sum."""
    return len(split_top(text, "=")) > 1


def junction(text: str) -> str | None:
    """`and` or `or` between single letters (statements or choices); otherwise None: either word may join roots."""
    words = set(re.findall(r"\b(?:and|or)\b", text))
    letters = all(re.fullmatch(r"\(?[a-zA-Z]\)?", member) for member in elements(text))
    return words.pop() if len(words) == 1 and letters else None


def members(text: str) -> list[str]:
    """The members of a set in braces, where `1,234` is two members, or of a list."""
    inside = inside_braces(text)
    return split_top(inside) if inside != text and read_number(inside) else elements(inside)


def inside_braces(text: str) -> str:
    """The content of a set's braces; any other string is unchanged."""
    inside = brackets(text)
    return inside[1] if inside and inside[0] == r"\{" else text


def both_signs(text: str) -> str:
    """The list with each member `a \\pm b` replaced by `a + b, a - b`."""
    parts = elements(inside_braces(text))
    return tidy(", ".join(dict.fromkeys(PLUS_MINUS.sub(sign, part) for part in parts for sign in "+-")))


def assignments(text: str) -> dict[str, str] | None:
    """Two or more unknowns with their values; None otherwise, including for the roots x_1 and x_2 of one unknown."""
    if "=" not in text or re.search(r"\bor\b", text):
        return None
    found = [ASSIGNED.fullmatch(part) for part in elements(text)]
    if len(found) == 1 and found[0] and found[0]["name"].startswith("("):
        names, inside = split_top(found[0]["name"][1:-1]), brackets(found[0]["value"])
        if inside is None or inside[0] != "(" or len(parts := split_top(inside[1])) != len(names):
            return None
        return dict(zip(names, parts, strict=True)) if len(set(names)) == len(names) else None
    values = {one["name"].partition("_")[0]: one["value"] for one in found if one and "=" not in one["value"]}
    return values if len(found) == len(values) > 1 else None


def in_order(names: dict[str, str] | None, text: str) -> list[str]:
    """The values of unknowns, sorted by name as in a tuple; without names, the members of the tuple or list."""
    if names is not None:
        return [names[name] for name in (sorted(names) if all(len(name) == 1 for name in names) else names)]
    inside = brackets(text)
    return split_top(inside[1]) if inside and inside[0] == "(" and inside[2] == ")" else elements(text)


def rows(matrix: re.Match[str]) -> list[list[str]]:
    """The cells of a matrix, whose last row may also end with `\\\\`."""
    lines = [line.strip() for line in re.split(r"\\\\(?:\[[^\]]*\])?", matrix["rows"])]
    return [[cell.strip() for cell in line.split("&")] for line in lines if line]


# --- labels and figures -----------------------------------------------------------------------------------------------


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


# --- dates, times and telephone numbers -------------------------------------------------------------------------------


_MONTHS = ("january", "february", "march", "april", "may", "june", "july", "august", "september", "october")
_MONTHS += ("november", "december")
_WEEKDAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_SHORT = {"sept": "september", "tues": "tuesday", "thur": "thursday", "thurs": "thursday"}


def _any_of(names: tuple[str, ...]) -> str:
    """A pattern for full names and for their first three letters."""
    more = "|".join(short for short, name in _SHORT.items() if name in names)
    return "|".join([*names, more, *(name[:3] for name in names)])


# A quick test that most answers fail.
_PERHAPS = re.compile(rf":|\d ?-|/\d+/|\d ?[ap]\.? ?m\b|clock|noon|midnight|\b(?:{_any_of(_MONTHS + _WEEKDAYS)})\b")
_MONTH = rf"(?P<month>{_any_of(_MONTHS)})\b\.?"
_DAY = r"(?:the )?(?P<day>\d{1,2})(?:st|nd|rd|th)?"
_WEEKDAY = rf"(?:{_any_of(_WEEKDAYS)})\b\.?,? ?"
_DATES = [
    re.compile(pattern)
    for pattern in (
        rf"(?:{_WEEKDAY})?{_MONTH} ?{_DAY}(?:,? ?(?P<year>\d{{4}}))?",
        rf"(?:{_WEEKDAY})?{_DAY} ?(?:of )?{_MONTH}(?:,? ?(?P<year>\d{{4}}))?",
        rf"{_MONTH}(?:,? ?(?P<year>\d{{4}}))?",
        r"(?P<year>\d{4})(?P<sign>[-/])(?P<month>\d{1,2})(?P=sign)(?P<day>\d{1,2})",
    )
]
# The order of day and month is unknown unless one is above 12.
_FIGURES = re.compile(r"(?P<one>\d{1,2})(?P<sign>[-/])(?P<two>\d{1,2})(?P=sign)(?P<year>\d{4}|\d{2})")
_YEARS = re.compile(r"(?P<first>1[5-9]\d\d|20\d\d) ?- ?(?P<last>1[5-9]\d\d|20\d\d|\d\d)")
_TELEPHONE = re.compile(r"(?:\+?\d{1,2}[- ])?(?:\(\d{3}\) ?|\d{3}[- ])?\d{3}-\d{4}")
_TIME = re.compile(
    r"(?P<hour>\d{1,2})(?: ?: ?(?P<minute>[0-5]\d))?(?: ?: ?(?P<second>[0-5]\d))?"
    r" ?(?:(?P<half>[ap])\.? ?m\.?|(?P<clock>o'clock))?"
)


@dataclass(frozen=True, slots=True)
class Occasion:
    """A date (year, month and day, each may be unknown), time of day in seconds, span of years, or telephone number."""

    kind: Literal["date", "time", "weekday", "figures"]
    value: tuple
    half_known: bool = True  # whether a time has a.m. or p.m.

    def same(self, other: "Occasion") -> bool:
        """Whether both mean the same; a time without a.m. or p.m. may be either of the two."""
        if self.half_known == other.half_known or self.kind != "time" or other.kind != "time":
            return (self.kind, self.value) == (other.kind, other.value)
        known, open_ = (self, other) if self.half_known else (other, self)
        twelve = 12 * 3600
        may_be_either = 3600 <= open_.value[0] < 13 * 3600
        return known.value == open_.value or (may_be_either and known.value[0] % twelve == open_.value[0] % twelve)


def read_occasion(text: str) -> Occasion | None:
    """The date, time of day, span of years or telephone number in a tidy string, or None."""
    text = " ".join(re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).lower().split())
    if not _PERHAPS.search(text) or len(text) > 60:
        return None
    for pattern in _DATES:
        if found := pattern.fullmatch(text):
            parts = found.groupdict()
            return _date(parts.get("year"), parts["month"], parts.get("day"))
    if found := _FIGURES.fullmatch(text):
        one, two = int(found["one"]), int(found["two"])
        if max(one, two) > 12 and len(found["year"]) == 4:
            return _date(found["year"], str(min(one, two)), str(max(one, two)))
        return Occasion("figures", (one, two, int(found["year"])))
    if found := _YEARS.fullmatch(text):
        first, last = int(found["first"]), int(found["last"])
        if last >= 100 or last == (first + 1) % 100:
            return Occasion("figures", (first, last % 100))
    if _TELEPHONE.fullmatch(text):
        return Occasion("figures", (re.sub(r"\D", "", text),))
    if found := re.fullmatch(_WEEKDAY, text):
        return Occasion("weekday", (_number(found.group(), _WEEKDAYS),))
    if text in ("noon", "midnight"):
        return Occasion("time", (12 * 3600 * (text == "noon"),))
    found = _TIME.fullmatch(text)
    if not found or not (found["minute"] or found["half"] or found["clock"]):
        return None
    hour, half = int(found["hour"]), found["half"]
    if hour > (12 if half else 24) or (half and hour == 0):
        return None
    if half:
        hour = hour % 12 + 12 * (half == "p")
    seconds = hour * 3600 + int(found["minute"] or 0) * 60 + int(found["second"] or 0)
    return Occasion("time", (seconds,), half is not None)


def _date(year: str | None, month: str, day: str | None) -> Occasion | None:
    number = int(month) if month.isdigit() else 1 + _number(month, _MONTHS)
    if not 1 <= number <= 12 or (day and not 1 <= int(day) <= 31):
        return None
    return Occasion("date", (int(year) if year else None, number, int(day) if day else None))


def _number(name: str, names: tuple[str, ...]) -> int:
    return next(number for number, full in enumerate(names) if full[:3] == name[:3])
