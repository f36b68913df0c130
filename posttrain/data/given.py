"""Rows in memory: those that a program gives to the Python API (`given:NAME` in settings), and those of a function."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.base.errors import DataError, RewardError, reason_of
from posttrain.base.functions import GIVEN, find_function
from posttrain.data.readers import Record


@dataclass(frozen=True)
class Given:
    """Rows in memory, under the name that the settings have for them."""

    name: str
    rows: Sequence[Any]

    @property
    def digest(self) -> str:
        """SHA-256 over the rows."""
        whole = hashlib.sha256()
        for row in self.rows:
            whole.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
        return whole.hexdigest()

    def read(self) -> Iterator[Record]:
        for row, value in enumerate(self.rows):
            fault = None if isinstance(value, dict) else f"a {type(value).__name__}, not a mapping"
            yield Record(row, self.name, row + 1, value if fault is None else None, fault)


_given: dict[str, Given] = {}


def give_rows(name: str, rows: Iterable[Any]) -> str:
    """Make rows known as the source `given:NAME`, which is returned. Raises DataError if there are none."""
    source = Given(GIVEN + name, list(rows))
    if not source.rows:
        raise DataError(f"the rows given as {name} are empty")
    _given[source.name] = source
    return source.name


def given_rows(source: str) -> Given:
    """The rows that `source` names. Raises DataError if this process was not given them."""
    if source not in _given:
        raise DataError(f"{source}: these rows were given to the Python API in memory: give them again, as data=…")
    return _given[source]


def own_rows(source: str, split: str) -> Given:
    """The rows of a user's function `module:function` for a split. Raises DataError if it fails or yields none."""
    try:
        rows = list(find_function(source)(split))
    except RewardError as error:
        raise DataError(f"data.source: {error}") from error
    except Exception as error:  # the user's code may raise any
        raise DataError(f"data.source: {source}({split!r}) failed: {reason_of(error)}") from error
    if not rows:
        raise DataError(f"data.source: {source}({split!r}) yields no rows")
    return Given(source, rows)
