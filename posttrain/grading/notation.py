r"""Normalises the notation of an answer, so that only spellings of the same answer become the same string.

`tidy` normalises (`10\,000`, fullwidth digits, `\dfrac`), `compact` prepares comparison letter by letter; `brackets`
and `split_top` read tuples, intervals, sets and lists.
"""

import re
import unicodedata
from collections.abc import Iterable
from itertools import accumulate

from posttrain.base.files import table_beside

_KNOWN = table_beside(__file__, "notation.yaml")
_CHARACTERS, _COMMANDS = _KNOWN["characters"], _KNOWN["commands"]
_SUPER, _SUB = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n"), str.maketrans("₀₁₂₃₄₅₆₇₈₉ₙ", "0123456789n")
_RAISED, _LOWERED = re.compile("[⁰¹²³⁴-⁹⁻⁺ⁿ]+"), re.compile("[₀-₉ₙ]+")
# typographic spaces become spaces; the fullwidth forms of ASCII become ASCII
_TABLE = {ord(c): " " for c in "        　"}
_TABLE |= {0xFF01 + n: chr(0x21 + n) for n in range(94)} | {ord(c): text for c, text in _CHARACTERS.items()}

_SPACING = re.compile(
    r"(?<!\\)\\[,;:!> ]|\\q?quad(?![a-zA-Z])|(?<!\\)~|\\(?:thinspace|displaystyle|textstyle|limits)(?![a-zA-Z])"
)
# Between groups of three digits: a space, or a comma that braces or a negative space distinguish from a list's comma.
_MARK = (
    r"\s*(?:(?:\\!\s*)*\{\s*,\s*\}(?:\s*(?:\\[!,]|~))*|(?:\\!\s*)+,?(?:\s*\\!)*|,(?:\s*\\!)+|\{\\,\}|\\[,;:]|\\ |~"
    r"|\\thinspace(?![a-zA-Z]))\s*"
)
_GROUPS = re.compile(rf"(?<![\d.])\d{{1,3}}(?:{_MARK}\d{{3}})+(?!\d)")
_DECIMALS = re.compile(r"(?<=\d)\.\d{3}(?:\\[,!]\d{3})*\\[,!]\d{1,3}(?!\d)")
_SIZES = re.compile(r"\\(?:left|right|[bB]ig{1,2}[lrm]?)(?![a-zA-Z])\s*")
_FRACTIONS = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_ROOT_SIGN = re.compile(r"√\s*(\d+|[a-zA-Z])")
_MARKDOWN = re.compile(r"\s*(\*{1,3}|_{1,3}|`+)(?=[^\s*_`])([^*`]*[^\s*_`])\1\s*")
_BOLD = re.compile(r"(?:^|(?<=[=:] ))\*\*([^\s*](?:[^*]*[^\s*])?)\*\*(?=[\s.,;]|$)")
_NESTED = r"((?:[^{}]|\{[^{}]*\})*)"  # the content of braces
_COLOUR = r"\\(?:textcolor|color|colorbox|fcolorbox\s*\{[^{}]*\})\s*(?:\[[^\[\]]*\])?\s*\{[^{}]*\}"
_SWITCH = (
    rf"(?:{_COLOUR}|\\(?:bf|it|sf|tt|sl|sc|em|bfseries|itshape|normalfont|boldmath|tiny|small|normalsize|large|Large"
    r"|LARGE|huge|Huge|scriptstyle)(?![a-zA-Z]))"
)
_STYLED = re.compile(
    rf"\{{\s*{_SWITCH}\s*{_NESTED}\}}|(?:{_SWITCH}|\\(?:underline|uline|emph|ensuremath)(?![a-zA-Z]))\s*\{{{_NESTED}\}}"
)
_STYLE = re.compile(rf"(?:{_SWITCH}|\\(?:underline|uline|emph|ensuremath|strut|noindent|centering)(?![a-zA-Z]))\s*")
_FONT = re.compile(r"\\(?:mathbf|mathit|mathsf|mathtt|textbf|textit|textsf|boldsymbol|bm|pmb)\s*\{([^{}]*)\}")
_ROMAN = re.compile(r"\{\s*\\rm(?![a-zA-Z])\s*([^{}]*)\}|\\rm\s+(?=([a-zA-Z]))")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
_WORDS = re.compile(
    r"\\(?:text|textrm|textnormal|textup|textsc|mathrm|operatorname\*?|mbox|rm)(?![a-zA-Z])\s*\{([^{}]*)\}"
)
# Letters with a meaning in mathematics (e, i, dx), and names of functions, in roman type.
_SYMBOLS = re.compile(r"\\text\{([eid])\}")
_FUNCTION = re.compile(
    r"(?<![\d}) ])( ?)\\text\{((?:arc)?(?:sin|cos|tan)h?|cot|csc|log|ln|exp|gcd|lcm|max|det)\}(?=\s*[\w\\({^_|])"
)
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![a-zA-Z])")
# Commands with the number of their arguments. The exponent of 2^10 is read as 10, although LaTeX reads it as 1.
_ARGUMENTS = {"^": 1, "_": 1, r"\sqrt": 1, r"\frac": 2, r"\binom": 2, r"\dbinom": 2, r"\tbinom": 2}
_TOKENS = re.compile(r"\\[a-zA-Z]+|\\.|\s+|(?<=[\^_])-?\d+|(?<=[\^_] )-?\d+|.")
_ONE = re.compile(r"\d+(?:\.\d+)?|[a-zA-Z]|\\text\{[^{}]*\}|\([^()]*\)")
_COMMAND = re.compile(r"\\(?:" + "|".join(sorted((c[1:] for c in _COMMANDS), key=len, reverse=True)) + r")(?![a-zA-Z])")
_NOT_EQUAL = re.compile(r"\\not\s*=|(?<=[\sa-zA-Z])!=|=/=")
_OVER = re.compile(r"\{([^{}]*)\\(over|choose)(?![a-zA-Z])([^{}]*)\}")
_ORDINAL = re.compile(r"(?<=\d)\s*\^\s*(?:\{\s*(?:\\text\{)?(?:st|nd|rd|th)\}?\s*\}|\\text\{(?:st|nd|rd|th)\}|th\b)")
_FRENCH = re.compile(r"([\[\]])([^\[\]]*,[^\[\]]*)([\[\]])")  # ]2,5[ is (2,5)
_CURRENCY = re.compile(r"\\text\{([$€£¥₹%])\}")
_WRAPPED = ((r"\(", r"\)"), (r"\[", r"\]"))
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_LONG_WORD = re.compile(r"[A-Za-z]{3,}")  # shorter words may be symbols: mW, MW
_DOLLAR = re.compile(r"(?<!\\)\$")
_ESCAPED = re.compile(r"(?<!\\)\\([$%])")  # not after the two backslashes of a new line
_CONDITION = re.compile(r"[a-zA-Z]\s*(?:\\in[^|:]*)?(?:\\mid(?![a-zA-Z])|\||:)")
PASSES = 4
DEEPEST = 25  # maximum nesting depth of braces that are tidied
OPENING, CLOSING = "([{⟨", ")]}⟩"


def tidy(text: str) -> str:
    """The string without formatting. Words inside `\\text{…}` keep their braces, so that they remain words."""
    for number in range(PASSES):
        before, text = text, _tidied(text, delimiters=number == 0)
        if text == before:
            break
    return text


def _tidied(text: str, delimiters: bool) -> str:
    """One pass of `tidy`. `delimiters`: drop pairs of dollar signs; in later passes they mark amounts of money."""
    text = _RAISED.sub(lambda m: f"^{{{m[0].translate(_SUPER)}}}", text)
    text = _LOWERED.sub(lambda m: f"_{{{m[0].translate(_SUB)}}}", text)
    text = "".join(_plain(c) for c in _ROOT_SIGN.sub(r"\\sqrt{\1}", text).translate(_TABLE)).strip()
    if found := _MARKDOWN.fullmatch(text):
        text = found[2]
    text = _BOLD.sub(r"\1", text)
    if delimiters and len(_DOLLAR.findall(text)) % 2 == 0:  # if odd, one is a currency sign
        text = _DOLLAR.sub("", text).strip()
    for begin, end in _WRAPPED:
        if len(text) >= len(begin + end) and text.startswith(begin) and text.endswith(end):
            text = text[len(begin) : len(text) - len(end)].strip()
    text = _DECIMALS.sub(lambda m: re.sub(r"\\[,!]", "", m[0]), _GROUPS.sub(_joined, text))
    text = re.sub(r"(?<=\d)\{\.\}(?=\d)", ".", text.replace("{,}", ",").replace(r"\!", ""))
    text = _STYLE.sub("", _STYLED.sub(lambda m: m[1] or m[2] or "", text))
    text = _SIZES.sub("", _SPACING.sub(" ", text))
    text = _ESCAPED.sub(r"\1", _FRACTIONS.sub(r"\\frac", text))
    text = _NOT_EQUAL.sub(r"\\ne ", _COMMAND.sub(lambda m: _COMMANDS[m.group()], text))
    text = _FONT.sub(lambda m: rf"\text{{{m[1]}}}" if _WORD.search(m[1]) else m[1], text)
    text = _ROMAN.sub(lambda m: rf"\text{{{m[1] or m[2]}}}" if m[1] else "", text)
    text = _WORDS.sub(lambda m: rf"\text{{{' '.join(m[1].split())}}}" if m[1].strip(" .,;:!") else " ", text)
    text = _FUNCTION.sub(r"\1\\\2 ", _SYMBOLS.sub(r"\1", text))
    text = _ORDINAL.sub(r"\\text{th}", _CURRENCY.sub(r"\1", text))
    text = _DEGREES.sub(r"^{\\circ}", text)
    text = _OVER.sub(lambda m: rf"\{'frac' if m[2] == 'over' else 'binom'}{{{m[1]}}}{{{m[3]}}}", text)
    text = _braced(" ".join(text.split()).rstrip(",;: "))
    before = ""
    while (text.startswith("]") or text.endswith("[")) and text != before:
        before = text
        text = _FRENCH.sub(lambda m: ("(" if m[1] == "]" else "[") + m[2] + (")" if m[3] == "[" else "]"), text)
    while text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip(",;: ")
    return text


def _joined(found: re.Match[str]) -> str:
    """A number without thousands separators; if the same number also has plain commas, with commas."""
    before, number, behind = found.string[: found.start()], found[0], found.string[found.end() :]
    plain = (re.search(r"\d,$", before[-2:]) and re.match(r"\d{3}", number)) or re.match(r",\d{3}(?!\d)", behind)
    return re.sub(_MARK, "," if plain else "", number)


def _braced(text: str) -> str:
    r"""Put braces around each argument of `^`, `_`, `\frac`, `\binom` and `\sqrt`; drop them around other symbols.

    Braces around the complete string are dropped, unless it is a list or a condition: then they denote a set."""
    tokens = _TOKENS.findall(text)
    closing: dict[int, int] = {}
    opened: list[int] = []
    for index, token in enumerate(tokens):
        if token == "{":
            opened.append(index)
        elif token == "}" and opened:
            closing[opened.pop()] = index
    text = _arguments(tokens, closing, 0, len(tokens), DEEPEST)
    for _ in range(DEEPEST):
        if not (text.startswith("{") and text.endswith("}") and is_balanced(inside := text[1:-1].strip())):
            break
        if len(split_top(inside)) > 1 or _CONDITION.match(inside):
            return rf"\{{{inside}\}}"
        text = inside
    return text


def _arguments(tokens: list[str], closing: dict[int, int], at: int, end: int, depth: int) -> str:
    """`tokens[at:end]` with braces around arguments. `closing` maps the index of opening braces to closing braces."""
    parts: list[str] = []

    def group() -> str:
        """The content of the braces at `at`."""
        nonlocal at
        begin, at = at + 1, closing[at] + 1
        return _arguments(tokens, closing, begin, at - 1, depth - 1) if depth else "".join(tokens[begin : at - 1])

    def command() -> str:
        """The symbol or command at `at` with its arguments; groups after an unknown command count as its arguments."""
        nonlocal at
        name, found = tokens[at], [tokens[at]]
        at += 1
        if name not in _ARGUMENTS:
            while _is_command(name) and at < end and at in closing:
                found.append("{" + group() + "}")
        for _ in range(_ARGUMENTS.get(name, 0)):
            at += at < end and tokens[at].isspace()
            if name == r"\sqrt" and at < end and tokens[at] == "[" and "]" in tokens[at:end]:
                close = tokens.index("]", at) + 1
                found.append("".join(tokens[at:close]))
                at = close + (close < end and tokens[close].isspace())
            if at < end and at in closing:
                found.append("{" + group().strip() + "}")
            elif at < end and (tokens[at].lstrip("-").isalnum() or _is_command(tokens[at])):
                found.append("{" + command() + "}")
        return "".join(found)

    while at < end:
        if at in closing:
            inside = group()
            parts.append(inside if _ONE.fullmatch(inside) else "{" + inside + "}")
        else:
            parts.append(command())
    return "".join(parts)


def _is_command(token: str) -> bool:
    return len(token) > 1 and token[0] == "\\" and token[1].isalpha()


def compact(text: str) -> str:
    """A tidy string without spaces, for comparison letter by letter; words lose their `\\text` and their capitals."""
    words = re.fullmatch(r"(?:\\text\{([^{}]*)\}|(\([A-Za-z]\)|[A-Za-z](?:[A-Za-z' -]*[A-Za-z'])?))", text)
    if words:
        word = " ".join((words[1] or words[2] or "").split())
        # a single letter is a choice or a symbol: `A` is not `a`
        return word.strip("()") if len(word.strip("()")) == 1 else word.lower().rstrip(".")
    if "\\text" in text:
        text = _TEXT.sub(lambda m: f" {_LONG_WORD.sub(lambda word: word[0].lower(), m[1])} ", text).strip()
    return re.sub(r"(?<=\d) +(?=\d)", "_", text).replace(" ", "")  # `1 2` is not `12`


def _plain(character: str) -> str:
    """Convert digits of any script to ASCII and any whitespace to a space; drop invisible characters."""
    if character.isascii():
        return character if character.isprintable() else ""
    if character.isspace():
        return " "
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    return "" if unicodedata.category(character) in ("Cf", "Cc", "Cs", "Co", "Cn") else character


def is_balanced(text: str) -> bool:
    """Whether LaTeX braces are balanced; `\\{` is a character, not a brace."""
    return _closes({"{": 1, "}": -1}.get(token, 0) for token in re.findall(r"\\.|[{}]", text))


def _closes(steps: Iterable[int]) -> bool:
    """Whether every opening bracket (1) is followed by its closing bracket (-1)."""
    depths = [0, *accumulate(steps)]
    return min(depths) == 0 == depths[-1]


def split_top(text: str, separator: str = ",") -> list[str]:
    """The parts between separators outside brackets of any kind."""
    parts, depth, begin = [], 0, 0
    for index, character in enumerate(text):
        if character in OPENING:
            depth += 1
        elif character in CLOSING:
            depth -= 1
        elif character == separator and depth == 0:
            parts.append(text[begin:index].strip())
            begin = index + 1
    return [*parts, text[begin:].strip()]


def brackets(text: str) -> tuple[str, str, str] | None:
    r"""(opening, content, closing) if one pair of brackets, other than LaTeX braces, encloses the complete string."""
    pairs = ((r"\{", r"\}"), ("(", ")"), ("(", "]"), ("[", ")"), ("[", "]"), ("⟨", "⟩"))
    for begin, end in pairs:
        if len(text) > len(begin + end) - 1 and text.startswith(begin) and text.endswith(end):
            content = text[len(begin) : len(text) - len(end)]
            if _closes((character in OPENING) - (character in CLOSING) for character in content):
                return begin, content.strip(), end
    return None
