r"""Normalises the notation of an answer: only spellings of the same answer become the same string.

`tidy` normalises (`10\,000`, fullwidth digits, `\dfrac`), `compact` prepares comparison letter by letter; `brackets`
and `split_top` read tuples, intervals, sets and lists.
"""

from __future__ import annotations

import re
import unicodedata

_CHARACTERS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "﹣": "-", "＋": "+",
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*", "÷": "/", "⁄": "/", "∕": "/",
    "π": r"\pi ", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "±": r"\pm ", "°": r"^{\circ}", "∅": r"\emptyset ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
    "λ": r"\lambda ", "…": "...", "√": r"\sqrt", "’": "'", "“": '"', "”": '"', "％": "%",
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "⅕": r"\frac{1}{5}", "⅖": r"\frac{2}{5}", "⅗": r"\frac{3}{5}", "⅘": r"\frac{4}{5}", "⅙": r"\frac{1}{6}",
    "⅚": r"\frac{5}{6}", "⅛": r"\frac{1}{8}", "⅜": r"\frac{3}{8}", "⅝": r"\frac{5}{8}", "⅞": r"\frac{7}{8}",
    "•": r"\cdot ", "⩽": r"\le ", "⩾": r"\ge ", "∣": r"\mid ", "ℝ": r"\mathbb{R}",
    "≈": r"\approx ", "∶": ":", "′": "'", "Ω": "Ω", "µ": "μ", "φ": r"\phi ", "γ": r"\gamma ", "∖": r"\setminus ",
    "\t": " ", "\n": " ", "\r": " ",
}  # fmt: skip
_SUPER, _SUB = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n"), str.maketrans("₀₁₂₃₄₅₆₇₈₉ₙ", "0123456789n")
_RAISED, _LOWERED = re.compile("[⁰¹²³⁴-⁹⁻⁺ⁿ]+"), re.compile("[₀-₉ₙ]+")
# typographic spaces become spaces; the fullwidth forms of ASCII become ASCII
_TABLE = {ord(c): " " for c in "        　"}
_TABLE |= {0xFF01 + n: chr(0x21 + n) for n in range(94)} | {ord(c): text for c, text in _CHARACTERS.items()}

_SPACING = re.compile(
    r"(?<!\\)\\[,;:!> ]|\\q?quad(?![a-zA-Z])|(?<!\\)~|\\(?:thinspace|displaystyle|textstyle|limits)(?![a-zA-Z])"
)
_SIZES = re.compile(r"\\(?:left|right|[bB]ig{1,2}[lrm]?)(?![a-zA-Z])\s*")
_FRACTIONS = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_SHORT_FRACTION = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|(\d|[a-zA-Z]|\\pi))\s*(?:\{([^{}]*)\}|(\d|[a-zA-Z]|\\pi))")
_SHORT_ROOT = re.compile(r"\\sqrt\s*(\d|[a-zA-Z](?![a-zA-Z]))")
_ROOT_SIGN = re.compile(r"√\s*(\d+|[a-zA-Z])")
_WORDS = re.compile(
    r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|operatorname|mbox|rm)\s*\{([^{}]*)\}"
)
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degrees?(?![a-zA-Z])")
_SCRIPT = re.compile(r"([\^_])\s*(-?\d+|[a-zA-Z])")  # the exponent of 2^10 is read as 10, but as 1 by LaTeX
_COMMANDS = {r"\leq": r"\le", r"\geq": r"\ge", r"\neq": r"\ne", r"\lt": "<", r"\gt": ">", r"\infinity": r"\infty"}
_COMMANDS |= {r"\ldots": "...", r"\dots": "...", r"\cdots": "...", r"\lbrace": r"\{", r"\rbrace": r"\}"}
_COMMANDS |= {r"\varnothing": r"\emptyset", r"\land": r"\text{ and }", r"\lor": r"\text{ or }", r"\vee": r"\text{ or }"}
_COMMANDS |= {r"\leqslant": r"\le", r"\geqslant": r"\ge", r"\pounds": "£", r"\euro": "€", r"\yen": "¥", r"\colon": ":"}
_COMMANDS |= {
    r"\lvert": "|",
    r"\rvert": "|",
    r"\vert": "|",
    r"\wedge": r"\text{ and }",
    r"\langle": "⟨",
    r"\rangle": "⟩",
}
_COMMAND = re.compile(r"\\(?:" + "|".join(sorted((c[1:] for c in _COMMANDS), key=len, reverse=True)) + r")(?![a-zA-Z])")
_NOT_EQUAL = re.compile(r"\\not\s*=")
_OVER = re.compile(r"\{([^{}]*)\\over(?![a-zA-Z])([^{}]*)\}")
_ORDINAL = re.compile(r"(?<=\d)\s*\^\s*(?:\{\s*(?:\\text\{)?(?:st|nd|rd|th)\}?\s*\}|\\text\{(?:st|nd|rd|th)\}|th\b)")
_FRENCH = re.compile(r"([\[\]])([^\[\]]*,[^\[\]]*)([\[\]])")  # ]2,5[ is (2,5)
_CURRENCY = re.compile(r"\\text\{([$€£¥₹%])\}")
_WRAPPED = ((r"\(", r"\)"), (r"\[", r"\]"))
_TEXT, _LONG_WORD = (
    re.compile(r"\\text\{([^{}]*)\}"),
    re.compile(r"[A-Za-z]{3,}"),
)  # shorter ones may be symbols: mW, MW
_DOLLAR = re.compile(r"(?<!\\)\$")
_ESCAPED = re.compile(r"(?<!\\)\\([$%])")  # not after the two backslashes of a new line
OPENING, CLOSING = "([{⟨", ")]}⟩"


def tidy(text: str) -> str:
    """The string without formatting. Words inside `\\text{…}` keep their braces, so that they stay words."""
    text = _RAISED.sub(lambda m: f"^{{{m[0].translate(_SUPER)}}}", text)
    text = _LOWERED.sub(lambda m: f"_{{{m[0].translate(_SUB)}}}", text)
    text = "".join(_plain(c) for c in _ROOT_SIGN.sub(r"\\sqrt{\1}", text).translate(_TABLE)).strip()
    if len(_DOLLAR.findall(text)) % 2 == 0:  # an odd number: one is a currency sign
        text = _DOLLAR.sub("", text).strip()
    for begin, end in _WRAPPED:
        if len(text) >= len(begin + end) and text.startswith(begin) and text.endswith(end):
            text = text[len(begin) : len(text) - len(end)].strip()
    # 10{,}000 and 10,\!000 are commas between digits
    text = text.replace("{,}", ",").replace(r"\!", "")
    text = re.sub(r"(?<=\d)\\[,;: ](?=\d{3}(?!\d))", ",", text)
    text = _SIZES.sub("", _SPACING.sub(" ", text))
    text = _ESCAPED.sub(r"\1", _FRACTIONS.sub(r"\\frac", text))
    text = _NOT_EQUAL.sub(r"\\ne ", _COMMAND.sub(lambda m: _COMMANDS[m.group()], text))
    text = _WORDS.sub(lambda m: rf"\text{{{' '.join(m[1].split())}}}" if m[1].strip(" .,;:!") else " ", text)
    text = _ORDINAL.sub(r"\\text{th}", _CURRENCY.sub(r"\1", text))
    text = _DEGREES.sub(r"^{\\circ}", text)
    text = _OVER.sub(r"\\frac{\1}{\2}", text)
    text = _SHORT_FRACTION.sub(_braced_fraction, text)
    text = _SHORT_ROOT.sub(r"\\sqrt{\1}", text)
    text = _SCRIPT.sub(r"\1{\2}", text)
    text = " ".join(text.split()).rstrip(",;: ")
    before = ""
    while (text.startswith("]") or text.endswith("[")) and text != before:
        before = text
        text = _FRENCH.sub(lambda m: ("(" if m[1] == "]" else "[") + m[2] + (")" if m[3] == "[" else "]"), text)
    while text.endswith(".") and not text.endswith(".."):
        text = text[:-1].rstrip(",;: ")
    return text


def _braced_fraction(found: re.Match[str]) -> str:
    over, under = found[1] or found[2] or "", found[3] or found[4] or ""
    return rf"\frac{{{over.strip()}}}{{{under.strip()}}}"


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
    """Digits of any script as ASCII, spaces of any kind as one; invisible characters are dropped."""
    if character.isascii():
        return character if character.isprintable() else ""
    if character.isspace():
        return " "
    if character.isdecimal():
        return str(unicodedata.decimal(character))
    return "" if unicodedata.category(character) in ("Cf", "Cc", "Cs", "Co", "Cn") else character


def is_balanced(text: str) -> bool:
    """Whether the braces of LaTeX are balanced; `\\{` is a character."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth < 0:
            return False
    return depth == 0


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
            if _closes_itself(content):
                return begin, content.strip(), end
    return None


def _closes_itself(content: str) -> bool:
    depth = 0
    for character in content:
        depth += (character in OPENING) - (character in CLOSING)
        if depth < 0:
            return False
    return depth == 0
