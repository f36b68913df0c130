r"""Whether an answer equals the right one: as text, as a number, part by part, and last by computer algebra.

No false positives: what cannot be shown to be equal is not. Order matters in tuples and intervals, not in sets and
lists; a bracket's kind matters; a unit may be left out but not changed; nothing is rounded.
"""

from __future__ import annotations

import re

from posttrain.grading.extract import last_box
from posttrain.grading.notation import brackets, compact, is_balanced, split_top, tidy
from posttrain.grading.numbers import read_number, same_number

LONGEST = 5000  # characters of an answer: longer ones are no answers
DEEPEST = 5  # brackets within brackets
_UNIT = re.compile(r"(?P<value>.*[^\\\s({\[,])\s*\\text\{(?P<unit>[^{}]*)\}(?:\s*\^\s*\{(?P<power>\d)\})?")
_PLAIN_UNIT = re.compile(
    r"(?P<value>.*\d)\s*(?P<unit>cm|mm|km|kg|mph|dollars?|cents?|degrees?|inch(?:es)?|feet|foot|ft|yards?|miles?|hours?"
    r"|minutes?|seconds?|days?|weeks?|years?|meters?|metres?|units?|square units?|people|students)"
    r"(?:\s*\^\s*\{(?P<power>\d)\})?"
)
_DEGREES = re.compile(r"(?P<value>.*\S)\s*\^\{\\circ\}")
# Words behind a number that change it, or join it to another.
_NO_UNITS = re.compile(
    r"\b(?:and|or|if|mod|not|percent|dozen|hundred|thousand|[mbtr]+illion|pi|squared|cubed|factorial|times|plus|minus"
    r"|negative|below)\b"
)
_LETTER_UNITS = frozenset("mgslh")  # of one letter: `5\text{i}` and `5\text{k}` are other numbers
_UNITS = {"dollars": "dollar", "inches": "inch", "feet": "foot", "ft": "foot", "degrees": "degree"}
_NAME = r"(?:[a-zA-Z]|\\[a-zA-Z]+)(?:_\{[^{}]*\}|')?(?:\s*\([a-zA-Z](?:,\s*[a-zA-Z])*\))?"
_ASSIGNED = re.compile(rf"(?P<name>{_NAME})\s*(?:=|\\in(?![a-zA-Z]))\s*(?P<value>.+)")
_MATRIX = re.compile(r"\\begin\{(?P<kind>[a-z]*(?:matrix|array))\}(?:\{[clr|]*\})?(?P<rows>.*)\\end\{(?P=kind)\}")
_MATRICES = {"pmatrix": "matrix", "bmatrix": "matrix", "array": "matrix", "smallmatrix": "matrix"}
_JOINED = re.compile(r",?\s*(?:\\text\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)\s*|;\s*")
_ORDER = re.compile(r"\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|<=|>=|<|>")
_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", "<=": r"\ge", ">=": r"\le"}
_UNIFIED = {"<=": r"\le", ">=": r"\ge"}


def same_answer(gold: str, answer: str) -> bool:
    """Whether `answer` means `gold`. Both are what stands in a box or tag; only `gold` is trusted to be an answer."""
    if len(answer) > LONGEST or len(gold) > LONGEST:
        return False
    return _same(_bare(gold), _bare(answer), DEEPEST)


def _bare(text: str) -> str:
    inner = last_box(text)
    return tidy(inner if inner is not None and text.strip().startswith(("\\boxed", "$\\boxed", "\\fbox")) else text)


def _same(gold: str, answer: str, depth: int) -> bool:
    if not gold or not answer or depth < 0:
        return False
    if compact(gold) == compact(answer):
        return True
    if not is_balanced(answer) or _is_words(gold) or _is_words(answer):
        return False
    numbers = read_number(gold), read_number(answer)
    if numbers[0] and numbers[1]:
        return same_number(numbers[0], numbers[1])
    (gold, unit), (answer, other) = _without_unit(gold), _without_unit(answer)
    if unit or other:
        return not (unit and other and unit != other) and _same(gold, answer, depth - 1)
    named = _ASSIGNED.fullmatch(gold), _ASSIGNED.fullmatch(answer)
    if (named[0] is None) != (named[1] is None) and not _has_relation(named, gold, answer):
        return _same(named[0]["value"] if named[0] else gold, named[1]["value"] if named[1] else answer, depth - 1)
    for compare in (_as_plus_minus, _as_lists, _as_unions, _as_brackets, _as_matrices, _as_inequalities):
        decided = compare(gold, answer, depth)
        if decided is not None:
            return decided
    from posttrain.grading import symbolic  # a worker has it loaded; nobody else comes here

    if "=" in gold or "=" in answer:
        if named[0] and named[1] and compact(named[0]["name"]) == compact(named[1]["name"]):
            return _same(named[0]["value"], named[1]["value"], depth - 1)
        return symbolic.same_equation(gold, answer)
    return symbolic.same_expression(gold, answer)


def is_readable(gold: str) -> bool:
    """Whether a reference answer means something here: words, a number, or an expression, alone or in brackets."""
    return _readable(_bare(gold), DEEPEST)


def _readable(gold: str, depth: int) -> bool:
    if not gold or depth < 0 or not is_balanced(gold):
        return False
    if _is_words(gold) or read_number(gold) or re.fullmatch(r"[\w\s'.,:()-]+", gold):
        return True
    gold, unit = _without_unit(gold)
    if unit:
        return _readable(gold, depth - 1)
    if named := _ASSIGNED.fullmatch(gold):
        return _readable(named["value"], depth - 1)
    if matrix := _MATRIX.fullmatch(gold):
        return all(_readable(cell, depth - 1) for row in _rows(matrix) for cell in row)
    gold = gold.replace(r"\pm", "+")
    parts = _elements(gold)
    if len(parts) == 1:
        parts = gold.split(r"\cup") if r"\cup" in gold else parts
    if len(parts) == 1 and (inside := brackets(gold)):
        parts = _elements(inside[1]) if inside[1] else []
        return all(_readable(part, depth - 1) for part in parts)
    if len(parts) == 1:
        sides = re.split(r"=|" + _ORDER.pattern, gold)
        if len(sides) > 1:
            return all(_readable(side.strip(), depth - 1) for side in sides)
        return _is_expression(gold)
    return all(_readable(part.strip(), depth - 1) for part in parts)


def _is_expression(text: str) -> bool:
    from posttrain.grading import symbolic

    try:
        symbolic.parse(text)
    except symbolic.Unreadable:
        # Words among signs and numbers in another base are compared as text, letter by letter.
        return "\\text" in text or re.fullmatch(r"[0-9A-Z]+_\{\w+\}", text) is not None
    return True


def _is_words(text: str) -> bool:
    if re.fullmatch(r"\\text\{[^{}]*[A-Za-z]{2}[^{}]*\}", text):
        return True
    return re.fullmatch(r"[A-Za-z]{3,}(?:[ '-][A-Za-z]+)*", text) is not None and not _is_function(text)


def _is_function(text: str) -> bool:
    return text in ("inf", "infinity") or re.match(r"(?:sqrt|sin|cos|tan|log|exp|pi)(?![a-z])", text) is not None


def _without_unit(text: str) -> tuple[str, str]:
    """(value, unit), the unit empty where there is none. A power belongs to its unit: cm^2 is not cm."""
    degrees = _DEGREES.fullmatch(text)
    if degrees and read_number(degrees["value"]):
        return degrees["value"], "degree"
    for pattern in (_UNIT, _PLAIN_UNIT):
        found = pattern.fullmatch(text)
        if found and (unit := " ".join(found["unit"].lower().strip(" .").split())):
            no_unit = unit not in _LETTER_UNITS if len(unit) == 1 else not re.search("[a-z]", unit)
            if no_unit or _NO_UNITS.search(unit):
                return text, ""
            unit = _UNITS.get(unit, unit)
            unit = unit[:-1] if len(unit) > 3 and unit.endswith("s") else unit
            return found["value"].strip(), unit + (found["power"] or "")
    if text.startswith("$") and len(text) > 1:
        return text[1:].strip(), "dollar"
    return text, ""


def _has_relation(named: tuple, gold: str, answer: str) -> bool:
    """Whether the side without a name is itself an equation or inequality, so that the name must stay."""
    text = answer if named[0] else gold
    return "=" in text or _ORDER.search(text) is not None


def _elements(text: str) -> list[str]:
    """The members of a list: `1, 2`, `1 and 2`, `x = 1 \\text{ or } x = 2`. Commas of thousands separate nothing."""
    if read_number(text):
        return [text]
    if ", " in text:
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return [part for piece in split_top(_JOINED.sub(",", text)) if (part := piece.strip())]


def _as_plus_minus(gold: str, answer: str, depth: int) -> bool | None:
    if r"\pm" not in gold and r"\pm" not in answer:
        return None
    sides = [
        ", ".join(part.replace(r"\pm", sign) for part in _elements(text) for sign in ("+", "-")[: 1 + (r"\pm" in part)])
        for text in (gold, answer)
    ]
    return _as_lists(tidy(sides[0]), tidy(sides[1]), depth - 1) or False


def _as_lists(gold: str, answer: str, depth: int) -> bool | None:
    left, right = _elements(gold), _elements(answer)
    sets = [inside[1] for text in (gold, answer) if (inside := brackets(text)) and inside[0] == r"\{"]
    if len(sets) == 2 or (sets and max(len(left), len(right)) > 1):
        # Braces around one of them or both: a set, which a bare list may also mean.
        left, right = (_elements(_inside_braces(text)) for text in (gold, answer))
        return _unordered(left, right, depth)
    if max(len(left), len(right)) == 1:
        return None
    return _unordered(left, right, depth)


def _inside_braces(text: str) -> str:
    inside = brackets(text)
    return inside[1] if inside and inside[0] == r"\{" else text


def _unordered(left: list[str], right: list[str], depth: int) -> bool:
    if len(left) != len(right):
        return False
    rest = list(right)
    for item in left:
        match = next((other for other in rest if _same(item, other, depth - 1)), None)
        if match is None:
            return False
        rest.remove(match)
    return True


def _as_unions(gold: str, answer: str, depth: int) -> bool | None:
    if r"\cup" not in gold and r"\cup" not in answer:
        return None
    left, right = ([part.strip() for part in re.split(r"\\cup(?![a-zA-Z])", text)] for text in (gold, answer))
    return _unordered(left, right, depth)


def _as_brackets(gold: str, answer: str, depth: int) -> bool | None:
    left, right = brackets(gold), brackets(answer)
    for one, other, swap in ((left, answer, False), (right, gold, True)):
        # (x) is x
        if one and one[0] == "(" and one[2] == ")" and len(_elements(one[1])) == 1:
            return _same(other, one[1], depth - 1) if swap else _same(one[1], other, depth - 1)
    if left is None and right is None:
        return None
    if left is None or right is None:
        # an interval against an inequality is decided there; a product such as (x+1)(x+2) is no bracket
        whole = (left or right or ("", "", ""))[1]
        return None if len(_elements(whole)) == 1 or _ORDER.search(gold + answer) else False
    if (left[0], left[2]) != (right[0], right[2]):
        return False
    parts = [split_top(inside[1]) for inside in (left, right)]
    return len(parts[0]) == len(parts[1]) and all(_same(g, a, depth - 1) for g, a in zip(*parts, strict=True))


def _rows(matrix: re.Match[str]) -> list[list[str]]:
    rows = [row.strip() for row in re.split(r"\\\\(?:\[[^\]]*\])?", matrix["rows"])]
    return [[cell.strip() for cell in row.split("&")] for row in rows if row]


def _as_matrices(gold: str, answer: str, depth: int) -> bool | None:
    left, right = _MATRIX.fullmatch(gold), _MATRIX.fullmatch(answer)
    if left is None and right is None:
        return None
    if left is None or right is None:
        return False
    if _MATRICES.get(left["kind"], left["kind"]) != _MATRICES.get(right["kind"], right["kind"]):
        return False  # a determinant (vmatrix) is no matrix
    rows = _rows(left), _rows(right)
    if [len(row) for row in rows[0]] != [len(row) for row in rows[1]]:
        return False
    return all(_same(g, a, depth - 1) for one, two in zip(*rows, strict=True) for g, a in zip(one, two, strict=True))


def _as_inequalities(gold: str, answer: str, depth: int) -> bool | None:
    """Chains such as `2 < x \\le 5`, in either direction, and against the interval `(2, 5]`."""
    if not _ORDER.search(gold) and not _ORDER.search(answer):
        return None
    left, right = _chain(gold), _chain(answer)
    if left is None or right is None:
        intervals = [_interval(chain) if chain else text for chain, text in ((left, gold), (right, answer))]
        return None not in intervals and _same(str(intervals[0]), str(intervals[1]), depth - 1)
    return left[1] == right[1] and all(_same(g, a, depth - 1) for g, a in zip(left[0], right[0], strict=True))


def _chain(text: str) -> tuple[list[str], list[str]] | None:
    """(terms, signs), written so that the first sign points upwards; None for a text without signs."""
    signs = [_UNIFIED.get(sign, sign) for sign in map(str, _ORDER.findall(text))]
    terms = [term.strip() for term in _ORDER.split(text)]
    if not signs:
        return None
    if signs[0] in (">", r"\ge"):
        return terms[::-1], [_FLIPPED[sign] for sign in signs[::-1]]
    return terms, signs


def _interval(chain: tuple[list[str], list[str]]) -> str | None:
    """The interval that an inequality of one bare variable means."""
    terms, signs = chain
    names = [bool(re.fullmatch(r"[a-zA-Z]", term)) for term in terms]
    ends = {"<": "()", r"\le": "[]"}
    if names == [True, False]:
        return rf"(-\infty, {terms[1]}{ends[signs[0]][1]}"
    if names == [False, True]:
        return rf"{ends[signs[0]][0]}{terms[0]}, \infty)"
    if names == [False, True, False] and all(sign in ends for sign in signs):
        return f"{ends[signs[0]][0]}{terms[0]}, {terms[2]}{ends[signs[1]][1]}"
    return None
