r"""Units of measure: a list of known units in their usual spellings. Anything else is not a unit.

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

from posttrain.grading.numbers import read_number

_PREFIXES = {
    "k": ("kilo", Fraction(1000)), "M": ("mega", Fraction(10**6)), "G": ("giga", Fraction(10**9)),
    "d": ("deci", Fraction(1, 10)), "c": ("centi", Fraction(1, 100)), "m": ("milli", Fraction(1, 1000)),
    "μ": ("micro", Fraction(1, 10**6)), "n": ("nano", Fraction(1, 10**9)), "p": ("pico", Fraction(1, 10**12)),
}  # fmt: skip
# symbol: (prefixes in use, words; the first word names the dimension)
_METRIC = {
    "m": ("kdcmμnp", "meter metre"), "g": ("kcmμ", "gram gramme"), "s": ("mμnp", "second sec"),
    "L": ("dcmμ", "liter litre"), "N": ("kM", "newton"), "J": ("kMG", "joule"), "W": ("kMGm", "watt"),
    "Pa": ("kMG", "pascal"), "V": ("kmμ", "volt"), "A": ("mμn", "ampere amp"), "Hz": ("kMG", "hertz"),
    "T": ("mμ", "tesla"), "eV": ("kMG", "electronvolt"), "mol": ("mμ", "mole"), "cal": ("k", "calorie"),
    "Ω": ("kM", "ohm"), "K": ("", "kelvin"),
}  # fmt: skip
_THOUSANDTHS = frozenset(f"m{symbol}".lower() for symbol, (prefixes, _) in _METRIC.items() if "m" in prefixes)
# dimension: {scale: spellings}
_OTHERS = {
    "inch": {1: "inch in", 12: "foot ft", 36: "yard yd", 63360: "mile mi"},
    "second": {60: "minute min", 3600: "hour hr h", 86400: "day", 604800: "week wk"},
    "month": {1: "month", 12: "year yr"},
    "ounce": {1: "ounce oz", 16: "lb"}, "sterling": {1: "£ gbp"}, "pound": {1: "pound"},
    "spoon": {1: "teaspoon tsp", 3: "tablespoon tbsp", 48: "cup", 96: "pint", 192: "quart qt", 768: "gallon gal"},
    "cent": {1: "cent ¢", 100: "dollar buck $ usd"},
    "euro": {1: "euro € eur"}, "yen": {1: "yen ¥ jpy"}, "rupee": {1: "rupee ₹ rs inr"}, "yuan": {1: "yuan rmb cny"},
    "degree": {1: "degree deg °"}, "radian": {1: "radian rad"}, "celsius": {1: "celsius °C"},
    "fahrenheit": {1: "fahrenheit °F"}, "knot": {1: "knot"}, "acre": {1: "acre"}, "hectare": {1: "hectare ha"},
    "ton": {1: "ton tonne"}, "atmosphere": {1: "atmosphere atm"}, "decibel": {1: "decibel dB"},
    "byte": {1: "byte", 10**3: "kilobyte KB", 10**6: "megabyte MB", 10**9: "gigabyte GB"},
    "bit": {1: "bit", 10**3: "kilobit kb Kb", 10**6: "megabit Mb", 10**9: "gigabit Gb"},
    "unit": {1: "unit"}, "ordinal": {1: "th st nd rd"},
}  # fmt: skip
_SHORT = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "kmph": "km/h", "fps": "ft/s", "mpg": "mi/gal", "l": "L"}
_SHORT |= {"ml": "mL", "dl": "dL", "cl": "cL", "sqft": "ft^{2}", "cc": "cm^{3}", "lbs": "lb", "meters": "meter"}
_NOUNS = (
    "person child man woman boy girl kid student teacher adult friend member player worker employee customer guest "
    "passenger voter visitor family class team group pair couple set row column page book letter word digit number "
    "integer value solution root factor divisor multiple prime way case arrangement combination permutation outcome "
    "subset sequence function pattern path route point line segment side edge vertex face angle diagonal triangle "
    "rectangle polygon circle cube region piece part tile block brick box bag basket bottle jar crate carton pack "
    "packet package container bucket barrel glass plate bowl egg apple orange banana pear peach plum grape lemon "
    "cherry strawberry melon tomato potato carrot onion cookie cake cupcake pie pizza slice sandwich candy chocolate "
    "muffin donut doughnut loaf meal serving ticket coin penny nickel dime bill card stamp sticker marble ball "
    "balloon toy doll puzzle game match goal vote pencil pen crayon marker notebook sheet paper picture photo painting "
    "song movie story chapter question problem test quiz lesson assignment paperclip ribbon bead button shirt sock "
    "shoe hat dress jacket shelf chair table desk bed door window room house home building floor store shop car truck "
    "bus bike bicycle train plane boat ship wheel tire trip lap step stair jump flight seat dog cat puppy kitten "
    "rabbit horse cow pig goat chicken duck bird bee ant spider insect butterfly frog turtle animal pet tree flower "
    "rose tulip plant seed leaf branch stick stone rock item thing object gift present toothpick dot star color "
    "colour night shift revolution rotation cycle turn session event interval term element entry position place "
    "candle lamp bulb phone computer machine robot message email call token chip ring necklace bracelet"
)
_IRREGULAR = {"people": "person", "children": "child", "men": "man", "women": "woman", "feet": "foot"}
_IRREGULAR |= {"vertices": "vertex", "leaves": "leaf", "loaves": "loaf", "shelves": "shelf", "pence": "penny"}
# Words beside a unit: adjectives are ignored; qualities specify the counted things and may be omitted but not changed.
_ADJECTIVES = "away apart total altogether remaining different distinct possible ordered whole"
_QUALITIES = "left right small large red blue green yellow white black old long high wide deep"
_TELLING = {word: word for word in _QUALITIES.split()} | {"tall": "high"}
_COUNTED, _DROPPED = frozenset(_NOUNS.split()), frozenset(_ADJECTIVES.split()) | _TELLING.keys()
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "squared": 2, "cubed": 3}
_SIZES = {"dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}

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
    text = re.sub(
        r"μ\s+|°\s*(?=[CF]\b)", lambda m: m[0].strip(), _DRESSING.sub(lambda m: f" {m[1] or ''} ", text)
    ).strip()
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
    for dimension, scales in _OTHERS.items():
        for scale, spelled in scales.items():
            unit = Unit(frozenset({(dimension, 1)}), Fraction(scale))
            symbols |= dict.fromkeys(spelled.split(), unit)
            words |= {name.lower(): unit for name in spelled.split() if len(name) > 1}
    lowered = Counter(symbol.lower() for symbol in symbols)
    words |= {s.lower(): unit for s, unit in symbols.items() if len(s) > 1 and lowered[s.lower()] == 1}
    return symbols, words


def sum_of_units(text: str) -> tuple[Fraction, Unit] | None:
    r"""A sum such as `5\text{ feet }3\text{ inches}`, in its last unit; None for anything else."""
    text = _DRESSING.sub(lambda m: f" {m[1] or ''} ", text).strip()
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
