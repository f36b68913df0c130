"""A table of hundreds of rows as lines of text, in milliseconds: rich measures and styles each cell, which takes longer
than reading the runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from posttrain.terminal import visible

LEAST = 8  # characters of a column that gives way


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
