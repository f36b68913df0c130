r"""Splits answers of several parts: members of lists and sets, unknowns with their values, cells of matrices."""

import re

from posttrain.grading.notation import brackets, split_top, tidy
from posttrain.grading.numbers import read_number

_SYMBOL = r"(?:[a-zA-Z]|\\text\{[^{}]*\}|\\[a-zA-Z]+)(?:_\{(?:[^{}]|\{[^{}]*\})*\}|')?"
_TUPLE = rf"\(\s*{_SYMBOL}(?:\s*,\s*{_SYMBOL})+\s*\)"
# A length or an angle by its points, also as a term of a ratio.
_POINTS = r"(?:[A-Z]'?(?:_\{\w+\})?){1,3}"
_DRAWN = r"\\(?:overline|overrightarrow|vec|widehat)\{[^{}]*\}"
_ANGLE = rf"m?\s*(?:\\(?:measured|spherical)?angle\s*(?:{_POINTS}|\\[a-z]+|\w)|∠\s*{_POINTS})"
_LENGTH = rf"(?:[A-Z]'?(?:_\{{\w+\}})?){{2}}|{_DRAWN}|\|(?:\s*(?:{_POINTS}|{_DRAWN}|\\text\{{\w+\}})\s*)\|"
_TERM = rf"(?:{_LENGTH}|{_ANGLE}|{_SYMBOL})"
_RATIO = rf"\\frac\{{\s*{_TERM}\s*\}}\{{\s*{_TERM}\s*\}}|{_TERM}(?:\s*:\s*{_TERM})+|{_TERM}\s*/\s*{_TERM}"
# Of a variable only with a number in brackets: x(y + 1) is a product.
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
    """The members of a list: `1, 2`, `1 and 2`, `x = 1 \\text{ or } x = 2`. Thousands separators do not count."""
    if read_number(text):
        return [text]
    if ", " in text:
        text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return [part for piece in split_top(_JOINED.sub(",", text)) if (part := piece.strip())]


def is_equation(text: str) -> bool:
    r"""Whether there is an equals sign, other than within brackets or the index of a sum."""
    return len(split_top(text, "=")) > 1


def junction(text: str) -> str | None:
    """`and` or `or` between single letters, statements or choices; else None, because either word may join roots."""
    words = set(re.findall(r"\b(?:and|or)\b", text))
    letters = all(re.fullmatch(r"\(?[a-zA-Z]\)?", member) for member in elements(text))
    return words.pop() if len(words) == 1 and letters else None


def members(text: str) -> list[str]:
    """The members of a set in braces, where `1,234` is two members, or of a list."""
    inside = inside_braces(text)
    return split_top(inside) if inside != text and read_number(inside) else elements(inside)


def inside_braces(text: str) -> str:
    """The content of a set's braces; any other string unchanged."""
    inside = brackets(text)
    return inside[1] if inside and inside[0] == r"\{" else text


def both_signs(text: str) -> str:
    """The list with `a + b, a - b` for each member `a \\pm b`."""
    parts = elements(inside_braces(text))
    return tidy(", ".join(dict.fromkeys(PLUS_MINUS.sub(sign, part) for part in parts for sign in "+-")))


def assignments(text: str) -> dict[str, str] | None:
    """Two or more unknowns with their values; None for anything else, also for the roots x_1 and x_2 of one unknown."""
    if "=" not in text or re.search(r"\bor\b", text):
        return None
    found = [ASSIGNED.fullmatch(part) for part in elements(text)]
    if len(found) == 1 and found[0] and found[0]["name"].startswith("("):
        names, values = split_top(found[0]["name"][1:-1]), brackets(found[0]["value"])
        if values is None or values[0] != "(" or len(parts := split_top(values[1])) != len(names):
            return None
        return dict(zip(names, parts, strict=True)) if len(set(names)) == len(names) else None
    given = {one["name"].partition("_")[0]: one["value"] for one in found if one and "=" not in one["value"]}
    return given if len(found) == len(given) > 1 else None


def in_order(names: dict[str, str] | None, text: str) -> list[str]:
    """The values of unknowns, sorted by name as in a tuple; without names, the members of the tuple or list."""
    if names is not None:
        return [names[name] for name in (sorted(names) if all(len(name) == 1 for name in names) else names)]
    inside = brackets(text)
    return split_top(inside[1]) if inside and inside[0] == "(" and inside[2] == ")" else elements(text)


def rows(matrix: re.Match[str]) -> list[list[str]]:
    """The cells of a matrix; LaTeX may end its last row with `\\\\` too."""
    lines = [line.strip() for line in re.split(r"\\\\(?:\[[^\]]*\])?", matrix["rows"])]
    return [[cell.strip() for cell in line.split("&")] for line in lines if line]
