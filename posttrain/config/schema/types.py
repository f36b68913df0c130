"""Types of values: numbers in a range, strings of a form, and the short form of a list."""

import re
from typing import Annotated, Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WrapValidator

from posttrain.base.files import final_model
from posttrain.base.terminal import CONTROLS


def _not_bool(value: Any) -> Any:
    # Python counts True as 1; `max_steps: true` is a mistake, not one step.
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")
    return value


Int = Annotated[int, BeforeValidator(_not_bool)]
Float = Annotated[float, BeforeValidator(_not_bool)]
Positive = Annotated[Int, Field(ge=1)]
Natural = Annotated[Int, Field(ge=0)]
NonNegative = Annotated[Float, Field(ge=0)]
AboveZero = Annotated[Float, Field(gt=0)]
BelowOne = Annotated[Float, Field(ge=0, lt=1)]
ZeroToOne = Annotated[Float, Field(ge=0, le=1)]
Fraction = Annotated[Float, Field(gt=0, le=1)]
Share = Annotated[Float, Field(gt=0.0, lt=1.0)]

OneOrMore = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], OneOrMore]
ModelPath = Annotated[Text, AfterValidator(final_model)]  # a hub id, a folder, or a run, which means its final model


class OnOff:
    """Marks a group of settings that may also be `true` (its defaults) or `false` (none). Layers expand these short
    forms (posttrain/config/reading/layers.py); flags, messages and docs read the mark."""


# Patterns of string settings, and their descriptions in messages. `.` and `..` mean other folders and cannot be names.
NAME_BYTES = 200  # file systems allow 255; the rest is for suffixes such as .tmp-12345
LINE = rf"^[^{CONTROLS}]+$"
FILE_NAME = rf"^[^/\\{CONTROLS}]*[^./\\\s{CONTROLS}][^/\\{CONTROLS}]*$"
WORD = r"^[A-Za-z0-9_.-]*[A-Za-z0-9_-][A-Za-z0-9_.-]*$"
PERCENTILE = r"^p([1-9]\d?|100)$"
FAST_PISSA = r"^pissa_niter_[1-9][0-9]?$"  # PiSSA by a randomised SVD of so many iterations
FUNCTION = r"^([A-Za-z_][\w.]*|[\w./-]+\.py):[A-Za-z_]\w*$"
EVAL_METRIC = rf"^(auto|eval_[^{CONTROLS}]+)$"
PATTERNS = {
    LINE: "without control characters",
    FILE_NAME: f"of at most {NAME_BYTES} bytes that can name a folder",
    WORD: f"of at most {NAME_BYTES} letters, digits, `_`, `-` and `.`",
    PERCENTILE: "such as p90",
    FAST_PISSA: "such as pissa_niter_16",
    FUNCTION: "such as module:function or FILE.py:FUNCTION",
    EVAL_METRIC: "that begins with eval_ or is auto",
}


def is_own(value: object) -> bool:
    """Whether a value names a function or a class of the user's, such as module:function."""
    return isinstance(value, str) and re.fullmatch(FUNCTION, value) is not None


Choice = TypeVar("Choice")
# One of a few words, or a function of the user's. Lists of the words, in messages and help, are those of the words.
OrOwn = Annotated[
    Choice, WrapValidator(lambda value, words: value if is_own(value) else words(value)), PlainSerializer(str)
]


def is_name(text: str, pattern: str = FILE_NAME) -> bool:
    """Whether a string can be a name: it is short enough and matches the pattern."""
    return len(text.encode(errors="replace")) <= NAME_BYTES and re.fullmatch(pattern, text) is not None


def address(url: str) -> SplitResult | None:
    """The parts of an address of a server; None if it is not one, or has a query or a fragment."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError if the port is not a number
    except ValueError:
        return None
    return parts if parts.scheme in ("http", "https") and parts.hostname and not parts.query + parts.fragment else None


def _short_enough(text: str) -> str:
    if len(text.encode()) > NAME_BYTES:
        raise ValueError(f"more than {NAME_BYTES} bytes")
    return text


FastPissa = Annotated[str, Field(pattern=FAST_PISSA)]
Folder = Annotated[str, Field(pattern=LINE)]  # a folder's path
FolderName = Annotated[str, Field(pattern=FILE_NAME), AfterValidator(_short_enough)]
Label = Annotated[str, Field(pattern=LINE), AfterValidator(_short_enough)]  # a name in metrics and logs
Word = Annotated[str, Field(pattern=WORD), AfterValidator(_short_enough)]
