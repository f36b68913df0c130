"""Which character separates the values of a CSV file."""

from __future__ import annotations

import csv
import io

OTHERS = (";", "\t")
SHARE = 0.9  # share of rows that must have as many values as column names, for a delimiter other than the comma


def delimiter_of(head: str) -> str:
    """The delimiter of a file with these first lines: a comma, a semicolon or a tab.

    A comma if it divides every row into as many values as there are column names, two or more. Another delimiter needs
    two or more column names, and rows that fit them better than with a comma.
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
    """The number of column names, and the share of rows with as many values."""
    reader = csv.reader(io.StringIO(head, newline=""), delimiter=delimiter, strict=True)
    widths: list[int] = []
    while True:
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error:
            cells = [""]  # not a row with this delimiter
        if cells:
            widths.append(len(cells))
    if not widths:
        return 0, 0.0
    rows = widths[1:]
    return widths[0], sum(width == widths[0] for width in rows) / len(rows) if rows else 1.0
