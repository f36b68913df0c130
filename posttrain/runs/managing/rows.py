"""The runs of a folder as rows, in order and filtered: a list of hundreds is read in a fraction of a second.

Their table is lines of text, in milliseconds: rich measures and styles each cell, which takes longer than reading.
"""

import fnmatch
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import Any

from posttrain.base.atomic import LEFTOVER
from posttrain.base.errors import RunError
from posttrain.base.terminal import visible
from posttrain.runs.finding import measured_runs, state_of
from posttrain.runs.folder import read_facts
from posttrain.runs.headline import headline_metrics
from posttrain.runs.listing import head_of
from posttrain.runs.metrics import first_latest
from posttrain.runs.notes import Notes, read_notes

DAMAGED = "damaged"
LEAST = 8  # characters of a column that gives way


@dataclass(frozen=True, slots=True)
class Row:
    """A run in a list. `name` is its path below the folder of runs."""

    name: str
    folder: Path
    state: str  # as RunInfo's, or `damaged` if run.json cannot be read
    problem: str  # what cannot be read; empty if all can
    method: str
    model: str
    data: str
    step: int
    metric: str  # the headline's name
    result: float | None
    size: int  # bytes
    started: str
    ended: str
    changed: float  # when run.json last changed, in Unix seconds
    tags: tuple[str, ...]
    note: str

    @property
    def headline(self) -> str:
        return "" if self.result is None else f"{self.metric} {self.result:.3g}"


def rows_below(root: Path) -> list[Row]:
    """The runs at a folder and below it, the latest last; damaged ones as such."""
    found = measured_runs(root).items()
    rows = [row_of(Path(folder), root, *facts) for folder, facts in found if not LEFTOVER.fullmatch(Path(folder).name)]
    return sorted(rows, key=lambda row: row.changed)


def row_of(folder: Path, root: Path, size: int, changed: float) -> Row:
    """One run's row. Never fails: what cannot be read is its `problem`."""
    problems: list[str] = []

    def read(what: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return what()
        except (RunError, OSError) as error:
            problems.append(str(error))
            return otherwise

    facts = read(lambda: read_facts(folder), {})
    method, model, data = head_of(folder)
    names = headline_metrics(method)
    step, metric, result = read(lambda: first_latest(folder, names), (0, "", None))
    notes = read(lambda: read_notes(folder), Notes())
    return Row(
        name=os.path.relpath(folder, root) if folder != root else folder.resolve().name,
        folder=folder,
        state=state_of(folder, facts["state"]) if facts else DAMAGED,
        problem="; ".join(problems),
        method=method,
        model=model,
        data=data,
        step=step,
        metric=names.get(metric, ""),
        result=result,
        size=size,
        started=facts.get("started", ""),
        ended=facts.get("ended") or "",
        changed=changed,
        tags=notes.tags,
        note=notes.note,
    )


# Order

ORDERS: dict[str, Callable[[Row], Any]] = {
    "time": lambda row: row.changed,
    "name": lambda row: [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", row.name.lower())],
    "state": lambda row: row.state,
    "method": lambda row: row.method,
    "model": lambda row: row.model.lower(),
    "step": lambda row: row.step,
    "result": lambda row: row.result,
    "size": lambda row: row.size,
}


def ordered(rows: Iterable[Row], order: str, reverse: bool = False) -> list[Row]:
    """The rows by one of ORDERS; those without a value are last either way. Raises RunError for another order."""
    if order not in ORDERS:
        raise RunError(f"cannot sort by {order}: give one of {', '.join(ORDERS)}")
    key = ORDERS[order]
    rows = sorted(rows, key=lambda row: row.name)
    known = sorted((row for row in rows if key(row) is not None), key=key, reverse=reverse)
    return known + [row for row in rows if key(row) is None]


# Filters

TERM = re.compile(r"(?P<field>[a-z]+)(?P<sign>!=|<=|>=|=|<|>)(?P<value>.*)", re.DOTALL)
TEXTS: dict[str, Callable[[Row], Sequence[str]]] = {
    "name": lambda row: (row.name,),
    "state": lambda row: (row.state,),
    "method": lambda row: (row.method,),
    "model": lambda row: (row.model,),
    "data": lambda row: (row.data,),
    "metric": lambda row: (row.metric,),
    "tag": lambda row: row.tags,
    "note": lambda row: (row.note,),
}
NUMBERS: dict[str, Callable[[Row], float | None]] = {
    "step": lambda row: row.step,
    "result": lambda row: row.result,
    "size": lambda row: row.size,
    "age": lambda row: age_of(row),
}
BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


def filtered(rows: Iterable[Row], terms: Iterable[str]) -> list[Row]:
    """The rows that every term fits: a word in any text of the row, or FIELD=VALUE.

    Texts are compared with = and != (and * and ?), the numbers step, result, size (1.5GB) and age (30d) also with <,
    <=, > and >=. Raises RunError for a term that cannot be read.
    """
    tests = [_test(term) for term in terms]
    return [row for row in rows if all(test(row) for test in tests)]


def _test(term: str) -> Callable[[Row], bool]:
    found = TERM.fullmatch(term.strip())
    if found is None or found["field"] not in TEXTS | NUMBERS:
        if found is not None:
            raise RunError(f"cannot filter by {found['field']}: give one of {', '.join(TEXTS | NUMBERS)}, or a word")
        word = term.strip().lower()
        return lambda row: any(word in text.lower() for texts in TEXTS.values() for text in texts(row))
    field, sign, value = found["field"], found["sign"], found["value"]
    if field in NUMBERS:
        return _number_test(field, sign, value)
    if sign not in ("=", "!="):
        raise RunError(f"{term}: {field} is a text, compared with = or !=")
    pattern = re.compile(fnmatch.translate(value.lower()))
    return lambda row: any(pattern.match(text.lower()) for text in TEXTS[field](row)) == (sign == "=")


def _number_test(field: str, sign: str, value: str) -> Callable[[Row], bool]:
    bound = bytes_of(value) if field == "size" else seconds_of(value) if field == "age" else _float(value)
    compare: dict[str, Callable[[float], bool]] = {
        "=": lambda x: x == bound,
        "!=": lambda x: x != bound,
        "<": lambda x: x < bound,
        "<=": lambda x: x <= bound,
        ">": lambda x: x > bound,
        ">=": lambda x: x >= bound,
    }
    return lambda row: (number := NUMBERS[field](row)) is not None and compare[sign](number)


def age_of(row: Row) -> float:
    """Seconds since the run ended; if it has no recorded end, since run.json last changed."""
    ended = datetime.fromisoformat(row.ended).astimezone(UTC) if row.ended else datetime.fromtimestamp(row.changed, UTC)
    return (datetime.now(UTC) - ended).total_seconds()


def seconds_of(text: str) -> float:
    """30d, 12h, 2w as seconds. Raises RunError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip().lower())
    if found is None:
        raise RunError(f"'{text}' is no time: give a number with s, m, h, d or w, such as 30d")
    return float(found[1]) * SECONDS[found[2]]


def bytes_of(text: str) -> float:
    """1.5GB, 300 MB, 1000 as bytes. Raises RunError for anything else."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?b?)", text.strip().lower())
    if found is None or (found[2] and found[2] not in BYTES):
        raise RunError(f"'{text}' is no size: give a number with B, kB, MB, GB or TB, such as 1.5GB")
    return float(found[1]) * BYTES[found[2]]


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise RunError(f"'{text}' is no number") from None


@dataclass(frozen=True, slots=True)
class Column:
    """`folds`: its cells may take several lines. `right`: numbers."""

    title: str
    folds: bool = False
    right: bool = False


def table_lines(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """The lines of a table in `width` characters. The widest columns that fold give way, the first, of names, late."""
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
    """A cell in lines of at most `width` characters, broken at spaces where that is possible."""
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
    """The columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
