"""A list of runs: its order, its filters, and its table. The table is made as lines of text in milliseconds. rich would
measure and style each cell, which takes longer than reading the runs."""

import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from posttrain.base.errors import RunError
from posttrain.base.terminal import visible
from posttrain.runs.summary import RunSummary

LEAST = 8  # minimum width of a folding column, in characters

ORDERS: dict[str, Callable[[RunSummary], Any]] = {
    "time": operator.attrgetter("changed"),
    "name": lambda run: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", run.name.lower())],
    **{name: operator.attrgetter(name) for name in ("state", "method", "model", "step", "result", "size")},
    "model": lambda run: run.model.lower(),
}


def ordered(runs: Iterable[RunSummary], order: str, reverse: bool = False) -> list[RunSummary]:
    """The runs sorted by one of ORDERS; runs without a value come last. Raises RunError for another order."""
    if order not in ORDERS:
        raise RunError(f"cannot sort by {order}: give one of {', '.join(ORDERS)}")
    key = ORDERS[order]
    runs = sorted(runs, key=lambda run: run.name)
    known = sorted((run for run in runs if key(run) is not None), key=key, reverse=reverse)
    return known + [run for run in runs if key(run) is None]


TERM = re.compile(r"(?P<field>[a-z]+)(?P<sign>!=|<=|>=|=|<|>)(?P<value>.*)", re.DOTALL)
TEXTS = ("name", "state", "method", "model", "data", "metric", "tag", "note")
NUMBERS = ("step", "result", "size", "age")  # float or None
COMPARED: dict[str, Callable[[float, float], bool]] = {
    "=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip
BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
UNITS = {
    "size": (BYTES, "is not a size: give a number with B, kB, MB, GB or TB, such as 1.5GB"),
    "age": (SECONDS, "is not a time: give a number with s, m, h, d or w, such as 30d"),
}


def filtered(runs: Iterable[RunSummary], terms: Iterable[str]) -> list[RunSummary]:
    """The runs that match every term: a word in any text of the run, or FIELD=VALUE.

    Texts are compared with = and != (* and ? are wildcards); the numbers step, result, size (1.5GB) and age (30d) also
    with <, <=, > and >=. Raises RunError for an invalid term.
    """
    tests = [_test(term) for term in terms]
    return [run for run in runs if all(test(run) for test in tests)]


def _test(term: str) -> Callable[[RunSummary], bool]:
    match = TERM.fullmatch(term.strip())
    if match is None:
        word = term.strip().lower()
        return lambda run: any(word in text.lower() for name in TEXTS for text in _texts(run, name))
    field, sign, value = match["field"], match["sign"], match["value"]
    if field in NUMBERS:
        compare, limit = COMPARED[sign], bound(field, value)
        return lambda run: (number := getattr(run, field)) is not None and compare(number, limit)
    if field not in TEXTS:
        raise RunError(f"cannot filter by {field}: give one of {', '.join(TEXTS + NUMBERS)}, or a word")
    if sign not in ("=", "!="):
        raise RunError(f"{term}: {field} is a text: compare it with = or !=")
    pattern = re.compile(fnmatch.translate(value.lower()))
    return lambda run: any(pattern.match(text.lower()) for text in _texts(run, field)) == (sign == "=")


def _texts(run: RunSummary, field: str) -> Sequence[str]:
    return run.tags if field == "tag" else (getattr(run, field),)


def bound(field: str, text: str) -> float:
    """The number in a filter of a field: bytes for a `size` such as `1.5GB` or `1000`, seconds for an `age` such as
    `30d` or `12h`, otherwise a plain number. Raises RunError for anything else."""
    if field not in UNITS:
        try:
            return float(text)
        except ValueError:
            raise RunError(f"'{text}' is not a number") from None
    units, problem = UNITS[field]
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in units:
        raise RunError(f"'{text}' {problem}")
    return float(match[1]) * units[match[2]]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. `folds`: its cells may take several lines. `right`: its cells are right-aligned."""

    title: str
    folds: bool = False
    right: bool = False


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """The lines of a table in `width` characters. The widest folding columns shrink, the first (names) least."""
    cells = [[visible(cell).replace("\n", " ").replace("\t", " ") for cell in row] for row in rows]
    table = [[column.title for column in columns], *cells]
    widths = [max(cell_width(row[index]) for row in table) for index in range(len(columns))]
    folding = [index for index, column in enumerate(columns) if column.folds]
    while folding and sum(widths) + len(widths) - 1 > width:
        widest = max(folding, key=lambda index: widths[index] if index else widths[index] / 2)
        if widths[widest] <= LEAST:
            break
        widths[widest] -= 1
    return [line for row in table for line in _lines(row, columns, widths)]


def _lines(row: Sequence[str], columns: Sequence[Column], widths: Sequence[int]) -> Iterator[str]:
    folded = [list(_folded(cell, width)) for cell, width in zip(row, widths, strict=True)]
    for parts in zip_longest(*folded, fillvalue=""):
        padded = [
            " " * (width - cell_width(part)) + part if column.right else part + " " * (width - cell_width(part))
            for part, column, width in zip(parts, columns, widths, strict=True)
        ]
        yield " ".join(padded).rstrip()


def _folded(cell: str, width: int) -> Iterator[str]:
    """A cell in lines of at most `width` characters, broken at spaces if possible."""
    while cell_width(cell) > width:
        end = width
        while end > 1 and cell_width(cell[:end]) > width:
            end -= 1
        space = cell.rfind(" ", 0, end + 1)
        if space > 0:
            yield cell[:space]
            cell = cell[space + 1 :]
        else:
            yield cell[:end]
            cell = cell[end:]
    yield cell


def cell_width(text: str) -> int:
    """The number of terminal columns that a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
