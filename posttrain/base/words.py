"""Counts, names and sizes in readable form, values by key, and the boxed answer in a solution. Imports nothing slow."""

import re
from collections.abc import Iterable, Mapping
from os.path import abspath, exists, expanduser
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

SAVED = re.compile(r"final|best|ema|checkpoint-\d+")  # names of folders with a model in a run folder


def counted(count: int, noun: str, several: str | None = None) -> str:
    """A number with its noun: 1 step, 2 steps, 12,000 steps; `several` is the plural if it is not noun + s."""
    return f"{count:,} {noun if count == 1 else several or noun + 's'}"


def filled(template: str, values: Mapping[str, str]) -> str:
    """The template with `{name}` replaced for every name in `values`. Braces elsewhere and in values are unchanged."""
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), template)


def by_key(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """The values of each key, in the order in which the keys first appear."""
    values: dict[K, list[V]] = {}
    for key, value in pairs:
        values.setdefault(key, []).append(value)
    return values


def model_name(path: str) -> str:
    """The short name of a model: the last part of its hub id or folder; for a model saved by a run, the run's name."""
    parts = path.replace("\\", "/").rstrip("/").split("/")
    if parts[-1] in (".", ".."):
        parts = abspath(path).replace("\\", "/").split("/")
    while len(parts) > 1 and SAVED.fullmatch(parts[-1]) and parts[-2] not in ("", ".", ".."):
        parts.pop()
    return parts[-1]


def hub_id_of(source: str) -> str | None:
    """A model's or data set's id on the hub, owner/name; None for a folder or file."""
    return source if re.fullmatch(r"[\w.-]+/[\w.-]+", source) and not exists(expanduser(source)) else None


def in_units(size: int) -> str:
    """A number of bytes in readable units: 512 B, 14 kB, 1.2 GB."""
    value, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.1f} {unit}" if value < 9.95 and unit != "B" else f"{value:.0f} {unit}"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# The start of a box, a backslash with the character that it escapes, or a brace.
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"\\boxed\s+([^\s{}$\\]+)")


def last_box(text: str) -> str | None:
    r"""The content of the last balanced `\boxed{…}` or `\fbox{…}` (the outermost if nested), otherwise the argument of
    the last `\boxed` without braces, otherwise None."""
    opened: list[tuple[int, bool]] = []  # for each open brace: where its content starts, and whether it is a box
    last: tuple[int, int] | None = None
    for match in _BRACES.finditer(text):
        token = match.group()
        if token.endswith("{") and (token == "{" or token.startswith(("\\boxed", "\\fbox"))):
            opened.append((match.end(), token != "{"))
        elif token == "}" and opened:
            begin, box = opened.pop()
            if box:
                last = begin, match.start()
    if last is not None:
        return text[slice(*last)].strip()
    bare = _BARE_BOX.findall(text)
    return bare[-1] if bare else None
