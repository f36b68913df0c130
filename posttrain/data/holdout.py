"""Selects the validation rows: the first in the order of a hash of the seed and the row as its source stores it.

The hash does not depend on format, columns, template or limits, so all methods and stages that read a source hold out
the same rows, and equal rows are either all held out or all trained on.
"""

import hashlib
import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from posttrain.base.console import progress
from posttrain.base.errors import DataError
from posttrain.config.schema.data import DataConfig, HeldOutRows, ValidationConfig
from posttrain.data import cache
from posttrain.data.readers import Record, json_or_text
from posttrain.data.reading import SourcePart, limited, most_rows, parts_of
from posttrain.data.report import Reading
from posttrain.data.sources import Source
from posttrain.data.table import Array, as_numpy

VERSION = 1  # increase it when the hash of a row changes
BATCH = 4096  # rows written at a time
HASHES = pa.schema([("hash", pa.uint64())])
WHOLE = re.compile(r"-?[0-9]+\.0")


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Row numbers as in `Table.row`: the validation rows, and rows that only other stages hold out."""

    validation: Array = field(default_factory=lambda: np.zeros(0, np.int64))
    elsewhere: Array = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def every(self) -> Array:
        return np.concatenate([self.validation, self.elsewhere])


def held_out_rows(data: DataConfig, seed: int, folder: Path) -> HeldOut:
    """The rows of `data.source` that are not trained on, usable or not; `folder` is the cache. Raises DataError if a
    source cannot be read, or if no row is left to train on."""
    if not data.holds_out and not data.excluded:
        return HeldOut()
    number, hashes = _readable(data, seed, folder)
    own = np.zeros(len(hashes), bool)
    if data.holds_out and data.validation is not None:
        own = _first(hashes, data.validation, seed)
        if own.all():
            raise DataError(
                f"data.validation holds out {int(own.sum()):,} of {len(own):,} rows, which leaves none to train on"
            )
    theirs = own.copy()
    for other in data.excluded:
        its_seed = seed if other.seed is None else other.seed
        its = _readable(other, its_seed, folder)[1]
        theirs |= np.isin(hashes, its[_first(its, other, its_seed)])
    if theirs.all():
        raise DataError("data.source: other stages hold out every row, which leaves none to train on")
    return HeldOut(number[own], number[theirs & ~own])


def trained_too(data: DataConfig, held: HeldOut, part: SourcePart, seed: int, folder: Path) -> int:
    """The number of rows of a validation set with a separate source that are also trained on."""
    number, hashes = _readable(data, seed, folder)
    return int(np.isin(hashes_of(part, part.max_rows, seed, folder), hashes[~np.isin(number, held.every)]).sum())


def _first(hashes: Array, size: ValidationConfig | HeldOutRows, seed: int) -> Array:
    """Which rows are held out: the first rows in the order of the seed, and all rows equal to the last of them."""
    if not len(hashes):
        return np.zeros(0, bool)
    wanted = size.rows if size.rows is not None else max(1, round((size.ratio or 0.0) * len(hashes)))
    order = mixed(hashes + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64))
    last = min(wanted, len(hashes)) - 1
    return order <= np.partition(order, last)[last]


def mixed(value: Array) -> Array:
    """The finaliser of SplitMix64 (Steele et al. 2014): a bijection of 64 bits, each of which depends on all bits."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def _readable(data: DataConfig | HeldOutRows, seed: int, folder: Path) -> tuple[Array, Array]:
    """The number and the hash of every readable row, across all sources."""
    parts, read = [np.zeros((0, 2), np.uint64)], list[int]()
    for part, rows, before in limited(parts_of(data), most_rows(data), read):
        hashes = hashes_of(part, rows, seed, folder)
        number = np.arange(len(hashes), dtype=np.uint64) + np.uint64(before + part.skip_rows)
        parts.append(np.stack([number, hashes], axis=1)[hashes != 0])
        read.append(len(hashes))
    number, hashes = np.concatenate(parts).T
    return number.astype(np.int64), hashes


def hashes_of(part: SourcePart, most: int | None, seed: int, folder: Path) -> Array:
    """The hash of each of the first `most` rows of a source, from the cache; 0 for a row that cannot be read."""
    source, end = part.open(most, seed, lambda working, answer: answer)
    key = cache.key_of({"hash": VERSION, "source": source.digest, "skip_rows": part.skip_rows, "end": end})
    table, *_ = cache.cached(folder, key, HASHES, lambda writer: _write(part, source, end, writer), file="hashes.arrow")
    return as_numpy(table.column("hash"))


def _write(part: SourcePart, source: Source, end: int | None, writer: cache.Writer) -> Reading:
    rows, count = progress(itertools.islice(source.read(), part.skip_rows, end), f"hashing {part.source}"), 0
    while batch := [{"hash": row_hash(row)} for row in itertools.islice(rows, BATCH)]:
        writer.write(batch)
        count += len(batch)
    return Reading("hash", count)


def row_hash(record: Record) -> int:
    """A 64-bit hash of a row's contents, at least 1; 0 for a row that cannot be read.

    It is the sum of the hashes of all values with their paths, so equal rows have equal hashes in every file type. The
    order of keys does not matter, nor do null and empty values, which Parquet and CSV store for keys that a row lacks.
    Numbers, booleans and JSON in CSV cells are hashed as the values that they represent.
    """
    if record.value is None:
        return 0
    total, todo = 0, [(bytes(8), record.value if record.identity is None else record.identity)]
    while todo:
        path, value = todo.pop()
        value = json_or_text(value) if isinstance(value, str) and value[:1] in ("{", "[") else value
        if isinstance(value, dict | list | tuple):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            todo += [(_digest(path, str(key)), item) for key, item in items]
        elif value not in (None, "") and value == value:  # NaN differs from itself
            total += int.from_bytes(_digest(path, _text(value)))
    return total % (2**64 - 1) + 1


def _text(value: Any) -> str:
    """A value as a string that is the same for all file types: `true` for True, `2` for 2.0."""
    text = str(value)
    if WHOLE.fullmatch(text):
        return text.partition(".")[0]
    return text.lower() if len(text) <= len("false") and text.lower() in ("true", "false") else text


def _digest(path: bytes, text: str) -> bytes:
    return hashlib.blake2b(path + text.encode(errors="surrogatepass"), digest_size=8).digest()
