r"""Units of measure: those of `units.yaml`. Anything else is not a unit.

A unit is a product of dimensions with a scale: `\text{m/s}`, `\frac{\text{m}}{\text{s}}` and `meters per second` are
the same, and 1 km is 1000 m. Case matters in symbols (mW is not MW), but not in words. Countable things
(`18\text{ students}`) are units too, with a separate dimension for each noun. A size (`million`, `dozen`) is not a
unit: it multiplies the number before it.
"""

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from posttrain.base.files import table_beside
from posttrain.grading.numbers import read_number

_KNOWN = table_beside(__file__, "units.yaml")
_PREFIXES = {symbol: (word, Fraction(factor)) for symbol, (word, factor) in _KNOWN["prefixes"].items()}
_METRIC = _KNOWN["metric"]
_THOUSANDTHS = frozenset(f"m{symbol}".lower() for symbol, (prefixes, _) in _METRIC.items() if "m" in prefixes)
_SHORT, _POWERS, _SIZES = (_KNOWN[name] for name in ("short", "powers", "sizes"))
_IRREGULAR: dict[str, str] = _KNOWN["irregular"]
_TELLING = {word: word for word in _KNOWN["qualities"].split()} | {"tall": "high"}
_COUNTED: frozenset[str] = frozenset(_KNOWN["nouns"].split())
_DROPPED = frozenset(_KNOWN["adjectives"].split()) | _TELLING.keys()

_LONGEST = 80  # maximum number of characters of a unit
_PURE_FRACTION = re.compile(r"\\frac\{((?:[^{}]|\{[^{}]*\})*)\}\{((?:[^{}]|\{[^{}]*\})*)\}")
_DRESSING = re.compile(r"\\text\{([^{}]*)\}|\\(?:cdot|times)(?![a-zA-Z])")
_TOKEN = re.compile(r"\s*(?:(°[CF](?![a-zA-Z])|[^\W\d_]+|[$€£¥₹¢°])|(/)|\^\s*\{?\s*(-?\d)\s*\}?|[ *.()·-])")
# Where a unit may start: a letter after a number or a bracket, or a LaTeX command for words.
_BEGINS = re.compile(
    r"\\frac\{\s*\\text|\\text(?=\{)|\^\{\\circ\}|\\Omega|\\mu|[€£¥₹¢$]|(?<=[\d})°!])\s*(?=[a-zA-Z])|(?<=\\pi)\s+(?=\w)"
)
_MONEY = re.compile(r"(?P<sign>-?)\s*(?P<symbol>[$€£¥₹])\s*(?P<value>-?.*[\d})](?:\s*\\text.*|\s*[a-z]+)?)")
_VALUE_ENDS = re.compile(r"(?:[\w})\]!|.]|\\pi)$")
_SUM = re.compile(r"(?:\s*,|\s+and\b)?\s*(\d+(?:\.\d+)?|\\frac\{\d+\}\{\d+\})\s*([a-zA-Z]+)")


@dataclass(frozen=True, slots=True)
class Unit:
    """`dimensions` with their powers; `scale` in the smallest unit of the kind; `size`, e.g. 10⁶ for `million dollars`.

    `which` contains adjectives that distinguish things of one kind, such as `red` for `red marbles`."""

    dimensions: frozenset[tuple[str, int]]
    scale: Fraction = Fraction(1)
    size: int = 1
    which: frozenset[str] = frozenset()


NO_UNIT = Unit(frozenset())


def split_unit(text: str, letters: bool = False) -> tuple[str, Unit] | None:
    r"""(value, unit) of a tidy string that ends with a known unit or starts with a currency sign; otherwise None.

    `letters`: also accept one-letter units without `\text{}` (`6 m`), which look like a product of variables."""
    if money := _MONEY.fullmatch(text):
        value = money["sign"] + money["value"]
        value, more = split_unit(value) or (value, NO_UNIT)
        unit = read_unit(money["symbol"])
        if unit is None or more.dimensions not in (frozenset(), unit.dimensions):
            return None
        return value, Unit(unit.dimensions, unit.scale, more.size)
    for begin in _BEGINS.finditer(text, max(1, len(text) - _LONGEST)):
        value, tail = text[: begin.start()].strip(), text[begin.start() :].strip()
        if not _VALUE_ENDS.search(value):
            continue
        if tail.startswith(r"^{\circ}") and not read_number(value):
            continue  # the degrees of sin 30° are not a unit of the result
        unit = read_unit(tail)
        if unit and (letters or "\\" in tail or not re.fullmatch(r"[a-zA-Z](?:\s*\^.*)?", tail)):
            return value, unit
    return None


def without_pounds(unit: Unit, beside: Unit) -> Unit:
    """The unit with its pounds read as money or as 16 ounces, whichever the unit `beside` has."""
    powers, others = dict(unit.dimensions), dict(beside.dimensions)
    meant = next((name for name in ("sterling", "ounce") if name in others), None)
    if "pound" not in powers or meant is None:
        return unit
    power = powers.pop("pound")
    powers[meant] = powers.get(meant, 0) + power
    scale = unit.scale * (16**power if meant == "ounce" else 1)
    return Unit(frozenset(powers.items()), Fraction(scale), unit.size, unit.which)


@lru_cache(maxsize=4096)
def read_unit(text: str) -> Unit | None:
    """The unit that the complete string denotes, including sizes before it; None for anything else."""
    text = text.replace(r"^{\circ}", "°").replace(r"\Omega", "Ω").replace(r"\mu", "μ")
    for _ in range(2):
        text = _PURE_FRACTION.sub(r" \1 / \2 ", text)
    text = re.sub(r"μ\s+|°\s*(?=[CF]\b)", lambda m: m[0].strip(), _DRESSING.sub(r" \1 ", text)).strip()
    return _product(text) if len(text) <= _LONGEST else None


def _product(text: str) -> Unit | None:
    found: list[list] = []  # [dimensions, scale, power] of each factor
    which: set[str] = set()
    size, sign, power, end = 1, 1, 1, 0
    while end < len(text):
        token = _TOKEN.match(text, end)
        if token is None:
            return None
        end = token.end()
        word, over, exponent = token.groups()
        if over or word in ("per", "a", "an", "each"):
            if word in ("a", "an") and not found:
                return None
            sign = -1
        elif exponent or word in ("squared", "cubed"):
            if not found or abs(found[-1][1]) != 1:
                return None
            found[-1][1] *= int(exponent) if exponent else _POWERS[word]
        elif word in _POWERS:
            power = _POWERS[word]
        elif word and not found and (times := _SIZES.get(word.lower().removesuffix("s"))):
            size *= times
        elif word and (unit := _word(word)):
            found.append([unit, sign * power])
            power = 1
        elif word and word.lower() not in _DROPPED:
            return None
        elif word:
            which |= {_TELLING[word.lower()]} if word.lower() in _TELLING else set()
    if power != 1 or not (found or size > 1):
        return None
    dimensions: Counter[str] = Counter()
    scale = Fraction(1)
    for unit, exponent in found:
        scale *= unit.scale**exponent
        for dimension, own in unit.dimensions:
            dimensions[dimension] += own * exponent
    if dimensions.keys() & {"celsius", "fahrenheit"}:
        del dimensions["degree"]
    return Unit(frozenset((d, n) for d, n in dimensions.items() if n), scale, size, frozenset(which))


def _word(word: str) -> Unit | None:
    symbols, words = _known()
    if unit := symbols.get(word):
        return unit
    if word.startswith("M") and word.lower() in _THOUSANDTHS:  # Mm is not mm, ML not mL
        return None
    if short := _SHORT.get(word.lower()):
        return _product(short)
    word = word.lower()
    singular = (word, _IRREGULAR.get(word), word.removesuffix("s"), word.removesuffix("es"))
    for name in (*singular, word[:-3] + "y" if word.endswith("ies") else None):
        if name in words:
            return words[name]
        if name in _COUNTED:
            return Unit(frozenset({(name, 1)}))
    return None


@lru_cache(maxsize=1)
def _known() -> tuple[dict[str, Unit], dict[str, Unit]]:
    """Two mappings: symbols as written; and in lower case, words and unambiguous symbols of two or more letters."""
    symbols: dict[str, Unit] = {}
    words: dict[str, Unit] = {}
    for symbol, (prefixes, spelled) in _METRIC.items():
        names = spelled.split()
        for prefix in ("", *prefixes):
            begin, factor = _PREFIXES.get(prefix, ("", Fraction(1)))
            unit = Unit(frozenset({(names[0], 1)}), factor)
            symbols[prefix + symbol] = unit
            words |= {begin + name: unit for name in names}
    for dimension, scales in _KNOWN["others"].items():
        for scale, spelled in scales.items():
            unit = Unit(frozenset({(dimension, 1)}), Fraction(scale))
            symbols |= dict.fromkeys(spelled.split(), unit)
            words |= {name.lower(): unit for name in spelled.split() if len(name) > 1}
    lowered = Counter(symbol.lower() for symbol in symbols)
    words |= {s.lower(): unit for s, unit in symbols.items() if len(s) > 1 and lowered[s.lower()] == 1}
    return symbols, words


def sum_of_units(text: str) -> tuple[Fraction, Unit] | None:
    r"""A sum such as `5\text{ feet }3\text{ inches}`, in its last unit; None for anything else."""
    text = _DRESSING.sub(r" \1 ", text).strip()
    total, units, end = Fraction(0), [], 0
    while end < len(text):
        part = _SUM.match(text, end)
        number, unit = (read_number(part[1]), read_unit(part[2])) if part else (None, None)
        if part is None or number is None or unit is None or unit.size != 1:
            return None
        if units and (unit.dimensions != units[-1].dimensions or unit.scale >= units[-1].scale):
            return None
        total, end = total + number.exact * unit.scale, part.end()
        units.append(unit)
    return (total / units[-1].scale, units[-1]) if len(units) > 1 else None
