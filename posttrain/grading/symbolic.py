"""Decides by computer algebra whether two expressions are equal. Only grading workers import this module.

LaTeX is parsed by math-verify's grammar (latex2sympy2_extended), never by code that evaluates Python: sympy's own
conversion from strings to expressions is disabled here. Equality is decided by the value of the difference at several
points, to a hundred digits, or otherwise by simplification. Decimals are exact fractions: nothing is rounded.
"""

import re
from itertools import accumulate, count, islice
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from sympy.parsing import sympy_parser

from posttrain.grading.notation import CLOSING, OPENING, is_balanced
from posttrain.grading.numbers import LARGEST_EXPONENT

DIGITS, MOST_DIGITS = 30, 300
CLOSE = sympy.Float("1e-100", 30)  # relative; if the difference is zero, its rounding error is far smaller
POINTS, TRIES = 3, 8  # number of points at which both must have a value, and maximum number of points tried
LONGEST = 2000  # characters
DEEPEST = 25  # maximum nesting of brackets
LESS = r"<|\\le(?![a-zA-Z])"
_AS_WRITTEN = ConversionConfig(lowercase_symbols=False)
# Functions and constants that may be written without a backslash.
_PLAIN_NAME = re.compile(
    r"(?<![a-zA-Z\\])(arc(?:sin|cos|tan)|(?:sin|cos|tan)h?|cot|sec|csc|log|ln|exp|sqrt|pi|infinity|inf|(?:gcd|lcm|max|min)(?=\())(?![a-zA-Z])"
)
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")
# The grammar drops primes, and reads the power T of a number as a transpose.
_PRIMED = re.compile(r"(?P<name>\\[a-zA-Z]+|[a-zA-Z])(?:_\{(?P<index>\w+)\})?(?P<primes>'*)")
_TRANSPOSED = re.compile(r"\^\{(T)\}")
_SCIENTIFIC = re.compile(r"(?<![\w.}])(\d+\.?\d*|\.\d+)[eE]([+-]?\d+)(?![\d.])")
# Not expressions: relations, ratios, words, and numbers in another base, whose index the grammar would drop.
_FOREIGN = re.compile(
    r"[<>=:;?@#~\"`&$€£¥]|\\(?:le|ge|ne|in|approx|sim|equiv|to|mid|text|pm|mp|math[a-z]+|[bp]?mod|cup|cap|setminus|emptyset)(?![a-zA-Z])|[\d)}]\s*_|[)\]}|]\s*'"
)
_ODD_ROOT = re.compile(r"\\sqrt\[\s*\d*[13579]\s*\]\{")
_DIVISORS = re.compile(r"\\?(?:gcd|lcm)(?![a-zA-Z])")
_OPERATOR = re.compile(r"\\(?:sum|prod|i{1,3}nt|oint|lim|limsup|liminf)(?![a-zA-Z])")


class Unreadable(Exception):
    """The string is not an expression that can be compared."""


def _refuse(*_: object, **__: object) -> Any:
    raise Unreadable("Python is not evaluated here")


def _digits_only(text: str, *_: object, **__: object) -> sympy.Expr:
    """Replaces sympy's conversion of strings: accepts only numbers, which the grammar passes as strings."""
    if not re.fullmatch(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)", text) or len(text) > LONGEST:
        raise Unreadable("Python is not evaluated here")
    return sympy.Rational(text)


# sympify(text) and S(text) call the first function, which calls the second, which calls Python's eval.
sympy_parser.parse_expr = _digits_only
sympy_parser.eval_expr = _refuse


def warm_up() -> None:
    """Fill the grammar's tables and sympy's caches, so that the first expression is not slow."""
    same_expression(r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}")
    same_expression("x^{2}+2x+1", "(x+1)^{2}")
    same_expression(r"\sin^{2} x", "x!")
    same_relation("y=2x+3", "2x-y+3=0")


def same_expression(gold: str, answer: str) -> bool:
    """Whether two tidy strings are equal as expressions; False, without an exception, if one cannot be read."""
    if _OPERATOR.search(gold):
        return False  # only the same string is equal: the value may take forever to compute, or not exist
    try:
        if _equal(parse(gold), parse(answer)):
            return True
        return r"\sqrt[" in gold + answer and _equal(parse(gold, odd=True), parse(answer, odd=True))
    except Unreadable:
        return False


def same_relation(gold: str, answer: str, sign: str = "=") -> bool:
    """Whether two equations are equivalent: left - right of one is a nonzero constant times that of the other.

    With the sign LESS, whether two inequalities `low < high` are: the constant is positive."""
    try:
        first, second = (_difference(text, sign) for text in (gold, answer))
    except Unreadable:
        return False
    if not first.free_symbols or first.free_symbols != second.free_symbols:
        return False
    point: Any = dict(zip(_ordered(first, second), _values(TRIES), strict=False))
    try:
        factor: Any = first.subs(point) / second.subs(point)
        value = factor.evalf(DIGITS, maxn=MOST_DIGITS)
        if not value.is_finite or abs(value) < CLOSE or (sign == LESS and not value > 0):
            return False
    except (ArithmeticError, ValueError, TypeError, AttributeError):
        return False
    return _equal(first, second * factor)


def parse(text: str, odd: bool = False) -> sympy.Expr:
    r"""The expression of a tidy string. Raises Unreadable. The root `\sqrt[3]{a}` of a negative number is the real one;
    if `odd`, so is the root of a negated expression. `a^{1/3}` is the principal value."""
    text = _PRIMED.sub(_with_primes, text)
    depth = max(accumulate((c in OPENING) - (c in CLOSING) for c in text), default=0)
    if not text or len(text) > LONGEST or not is_balanced(text) or _FOREIGN.search(text) or depth > DEEPEST:
        raise Unreadable(text[:50])
    if _DIVISORS.search(text) and re.search(r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])", text):
        raise Unreadable(text[:50])  # the grammar takes gcd(m, n) of symbols for 1
    text = _real_roots(text, odd)
    try:
        result: Any = latex2sympy(as_latex(text), normalization_config=None, conversion_config=_AS_WRITTEN)
        result = result.subs(sympy.Symbol("i"), sympy.I).doit()
    except MemoryError:
        raise
    except Exception as error:  # ANTLR, sympy and the grammar's actions each have their own errors
        raise Unreadable(text[:50]) from error
    if not isinstance(result, sympy.Expr) or result.is_Matrix:
        raise Unreadable(text[:50])
    return result


def _real_roots(text: str, expressions: bool) -> str:
    r"""Rewrite `\sqrt[3]{-a}` as `-\sqrt[3]{a}`, the innermost root first."""
    for found in reversed(list(_ODD_ROOT.finditer(text))):
        close = _closing(text, found.end() - 1, "{}")
        argument, rest = text[found.end() : close], "" if close < 0 else text[close + 1 :]
        inside: Any = parse(argument, expressions)
        if inside.is_negative or (expressions and inside.free_symbols and inside.could_extract_minus_sign()):
            text = f"{text[: found.start()]}(-{found[0]}-({argument})}}){rest}"
    return text


def _closing(text: str, at: int, pair: str) -> int:
    """The index of the bracket that closes the one at `at`; -1 if it stays open."""
    depths = accumulate((c == pair[0]) - (c == pair[1]) for c in text[at:])
    return next((index for index, depth in enumerate(depths, at) if depth == 0), -1)


def as_latex(text: str) -> str:
    """Convert notation such as `2*sqrt(3)/3`, `x**2` or `sin(pi/4)` to LaTeX, and decimals to fractions; keep LaTeX."""
    text = _SCIENTIFIC.sub(_power_of_ten, text)
    text = text.replace("**", "^").replace("^{\\circ}", r"\cdot\frac{\pi}{180}")
    text = _TRANSPOSED.sub(r"^{(\1)}", text.replace("*", r"\cdot "))
    text = _PLAIN_NAME.sub(lambda m: "\\" + {"inf": "infty", "infinity": "infty"}.get(m[1], m[1]) + " ", text)
    text = _grouped(text, r"\sqrt")
    text = _grouped(text, "^")
    return _DECIMAL.sub(lambda m: rf"\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}}", text)


def _with_primes(found: re.Match[str]) -> str:
    """Rewrite primes as indices, so that `y'` and `y''` are separate symbols."""
    primes = "prime" * len(found["primes"])
    return f"{found['name']}_{{{found['index'] or ''}{primes}}}" if primes else found[0]


def _power_of_ten(found: re.Match[str]) -> str:
    """`2e3` is 2000: an e within a number is not Euler's number."""
    if len(found[2]) > 5 or abs(int(found[2])) > LARGEST_EXPONENT:
        raise Unreadable(found[0][:50])
    return rf"({found[1]}\cdot 10^{{{int(found[2])}}})"


def _grouped(text: str, command: str) -> str:
    """Rewrite `command(…)` as `command{…}`, because in LaTeX a parenthesis does not group."""
    for _ in range(text.count(command)):
        found = re.search(re.escape(command) + r"\s*\(", text)
        close = _closing(text, found.end() - 1, "()") if found else -1
        if found is None or close < 0:
            break
        text = f"{text[: found.start()]}{command}{{{text[found.end() : close]}}}{text[close + 1 :]}"
    return text


def _difference(text: str, sign: str) -> sympy.Expr:
    sides = re.split(sign, text)
    if len(sides) != 2:
        raise Unreadable(text[:50])
    return parse(sides[0].strip()) - parse(sides[1].strip())


def _equal(left: sympy.Expr, right: sympy.Expr) -> bool:
    if _same_value(left, right):
        return True
    has_root = any(_root_of_quotient(power) for side in (left, right) for power in side.atoms(sympy.Pow))
    return has_root and _same_value(_split_roots(left), _split_roots(right))


def _root_of_quotient(power: Any) -> bool:
    return power.exp.is_Rational and not power.exp.is_Integer and bool(sympy.denom(power.base).free_symbols)


def _split_roots(expression: Any) -> Any:
    r"""Rewrite `\sqrt{a/b}` as `\sqrt{a}/\sqrt{b}`, which is equal where b is positive."""
    return expression.replace(
        lambda e: e.is_Pow and _root_of_quotient(e),
        lambda e: sympy.numer(e.base) ** e.exp / sympy.denom(e.base) ** e.exp,
    )


def _same_value(left: sympy.Expr, right: sympy.Expr) -> bool:
    if left == right:
        return True
    if left.has(sympy.oo, sympy.zoo, sympy.nan) or right.has(sympy.oo, sympy.zoo, sympy.nan):
        return False
    difference = left - right
    if difference.is_Rational:
        return bool(difference.is_zero)
    symbols = _ordered(left, right)
    seen = 0
    for shift in range(TRIES if symbols else 1):
        point = dict(zip(symbols, _values(shift), strict=False))
        verdict = _vanishes(difference, left, right, point)
        if verdict is False:
            return False
        seen += verdict is True
        if seen == (POINTS if symbols else 1):
            return True
    try:
        return sympy.simplify(difference) == 0
    except MemoryError:
        raise
    except Exception:  # simplify may raise anything; undecided counts as not equal
        return False


def _vanishes(difference: sympy.Expr, left: sympy.Expr, right: sympy.Expr, point: dict) -> bool | None:
    """Whether two expressions agree at a point; None if they have no value there or it cannot be decided."""
    try:
        value, *sides = (e.evalf(DIGITS, subs=point, maxn=MOST_DIGITS) for e in (difference, left, right))
        if not all(e.is_number and e.is_finite for e in (value, *sides)):
            return None
        scale = max(abs(side) for side in sides)
        return None if scale < CLOSE else bool(abs(value) <= CLOSE * scale)
    except MemoryError:
        raise
    except Exception:  # no value at this point: a pole, an undefined function, an order of magnitude beyond mpmath
        return None


def _ordered(*expressions: Any) -> list[Any]:
    return sorted(set().union(*(e.free_symbols for e in expressions)), key=lambda symbol: symbol.name)


def _values(shift: int = 0) -> Any:
    """Generic fractions of both signs, small enough for powers and roots: never 0, 1 or the negative of one another."""
    primes = (sympy.Rational(sympy.prime(n + 11), sympy.prime(n + 17)) for n in islice(count(), 7 * shift, None))
    return (-value if (n + shift) % 3 == 1 else value * (1 + n % 2) for n, value in enumerate(primes))
