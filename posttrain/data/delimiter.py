"""Which character separates the values of a CSV file."""

from __future__ import annotations

import csv
import io

OTHERS = (";", "\t")
SHARE = 0.9  # of the rows must be as wide as the line of column names, for a delimiter other than the comma


def delimiter_of(head: str) -> str:
    """The delimiter of a file that begins with these lines: a comma, a semicolon or a tab.

    A comma wherever it divides every row into as many values as there are column names, two or more. Another delimiter
    needs two or more column names and rows that fit them better than a comma's.
    """
    width, share = _fit(head, ",")
    if width > 1 and share == 1.0:
        return ","
    fits = {delimiter: _fit(head, delimiter) for delimiter in OTHERS}
    better = {
        delimiter: its_share
        for delimiter, (its_width, its_share) in fits.items()
        if its_width > 1 and its_share >= SHARE and (width < 2 or its_share > share)
    }
    return max(better, key=lambda delimiter: better[delimiter], default=",")


def _fit(head: str, delimiter: str) -> tuple[int, float]:
    """How many column names there are, and the share of the rows below with as many values."""
    reader = csv.reader(io.StringIO(head, newline=""), delimiter=delimiter, strict=True)
    widths: list[int] = []
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error:
            cells = [""]  # not a row of this delimiter
        if cells:
            widths.append(len(cells))
    if not widths:
        return 0, 0.0
    rows = widths[1:]
    return widths[0], sum(width == widths[0] for width in rows) / len(rows) if rows else 1.0
