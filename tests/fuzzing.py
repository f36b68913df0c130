"""Properties as two tests each, and the random inputs that several files of tests/test_fuzz_*.py share.

`pytest tests/test_fuzz_*.py -m "not slow"` runs the short form of every property, with the same examples each time;
`-m slow` the long one, with new examples each time.
"""

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from posttrain.base.errors import PosttrainError

ANY_CHARACTER = st.characters(exclude_categories=())  # lone surrogates too
TRICKY = st.sampled_from(
    ["", "\0", "\ud800", "\ufeff", "\u2028", "\x85", "\x1b[2J", "\u202e", "0", "-0", "1e999", "9" * 5000, "null", "~",
     "NaN", "true", "..", "/", "~nobody-of-this-name/x", "x" * 300, "${", "${seed}", "\\${x}", "{{ x }}", "é" * 150]
)  # fmt: skip
TEXT = st.text(ANY_CHARACTER, max_size=20) | TRICKY
NUMBER = (
    st.integers(-3, 3)
    | st.sampled_from([10**30, -(10**30), 10**400, 2**63, 1e308, 1e-320, -0.0])
    | st.floats()
)  # fmt: skip
SCALAR = st.none() | st.booleans() | NUMBER | TEXT
JSON = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8
)
DEPTHS = st.sampled_from([2, 60, 150, 200, 250, 300, 330, 400, 500, 700, 950, 3000, 100_000])


def fuzzed(short: int, long: int, **strategies: st.SearchStrategy) -> Callable[[Callable[..., None]], Callable]:
    """Make a test in two forms of a check of random arguments; its other arguments are fixtures."""

    def decorate(check: Callable[..., None]) -> Callable:
        def test(form: str, **fixtures: Any) -> None:
            def holds(**drawn: Any) -> None:
                check(**fixtures, **drawn)

            holds.__name__ = check.__name__
            settings(
                max_examples=short if form == "short" else long,
                derandomize=form == "short",
                database=None,
                deadline=timedelta(seconds=20),  # an example that takes so long hangs
                suppress_health_check=list(HealthCheck),
            )(given(**strategies)(holds))()

        fixtures = [one for name, one in inspect.signature(check).parameters.items() if name not in strategies]
        form = inspect.Parameter("form", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([form, *fixtures])  # pyright: ignore
        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        return pytest.mark.parametrize("form", ["short", pytest.param("long", marks=pytest.mark.slow)])(test)

    return decorate


@st.composite
def damaged(draw: Any, whole: bytes) -> bytes:
    """The bytes with one to three of: a flipped bit, a cut, something inserted, a piece omitted, a piece twice."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        how = draw(st.sampled_from(["flip", "cut", "insert", "omit", "repeat"]))
        if how == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == "cut":
            del data[at:]
        elif how == "insert":
            piece = draw(st.binary(max_size=4) | TEXT.map(lambda text: text.encode(errors="surrogatepass")))
            data[at:at] = piece
        else:
            end = at + draw(st.integers(1, 30))
            data[at:end] = b"" if how == "omit" else bytes(data[at:end]) * 2
    return bytes(data)


@st.composite
def changed(draw: Any, value: Any, other: st.SearchStrategy) -> Any:
    """A JSON value with one of its parts, at any depth, replaced by `other` or removed."""
    if not isinstance(value, dict | list) or not value or draw(st.integers(0, 4)) == 0:
        return draw(other)
    made = dict(value) if isinstance(value, dict) else list(value)
    key = draw(st.sampled_from(sorted(made) if isinstance(made, dict) else range(len(made))))
    if draw(st.integers(0, 4)) == 0:
        del made[key]
    else:
        made[key] = draw(changed(made[key], other))
    return made


def outcome(of: Callable[[], Any]) -> Any:
    """The result, or the package's own error, which must have a message; any other exception fails the test."""
    try:
        return of()
    except PosttrainError as error:
        assert str(error).strip(), f"{type(error).__name__} has no message"
        return error


def deep(opening: str, closing: str, depth: int, inside: str = "") -> str:
    return opening * depth + inside + closing * depth
