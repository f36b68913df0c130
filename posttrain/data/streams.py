"""The unpacked bytes of a data file, by line or whole, and the rows of Parquet and Arrow files in batches; with limits
against decompression bombs."""

import gzip
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from posttrain.base.errors import DataError

LINE_BYTES = 64_000_000  # a longer line or document is not parsed
# Largest size of a file that is read whole (JSON, Parquet in gzip), and bytes that are read at a time.
DOCUMENT_BYTES, CHUNK_BYTES = 2_000_000_000, 16_000_000
# A gzip file that unpacks to more than FREE_BYTES may expand at most MOST_EXPANSION times: text expands 3 to 20 times,
# a bomb 1,000 times.
MOST_EXPANSION, FREE_BYTES = 200, 64_000_000
TOO_MUCH = f"unpacks to more than {MOST_EXPANSION} times its size, the limit for {{}}"
TABLE_ROWS = 1000  # rows read at a time, or fewer
BATCH_BYTES = 256_000_000  # bytes of repeated strings in the rows that are read at a time

Parsed = tuple[int, dict[str, Any] | None, str | None]  # line, value, problem


def most_unpacked(size: int) -> int:
    """The maximum number of bytes that a file of `size` bytes may unpack to."""
    return max(FREE_BYTES, MOST_EXPANSION * size)


class Unpacked(io.RawIOBase):
    """The content of a gzip file, unpacked while reading. Raises DataError if it expands beyond the limit."""

    def __init__(self, path: Path):
        self.path = path
        self.packed = path.open("rb")
        self.content = gzip.GzipFile(fileobj=self.packed)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self.content.readinto(buffer)
        if self.content.tell() > most_unpacked(self.packed.tell()):
            self.close()
            raise DataError(f"{self.path} {TOO_MUCH.format('gzip')}: unpack it yourself if you trust it")
        return count

    def close(self) -> None:
        self.content.close()
        self.packed.close()
        super().close()


def unpacked(path: Path) -> io.BufferedReader:
    """Open a file for reading its bytes; a `.gz` file is unpacked."""
    return io.BufferedReader(Unpacked(path), 2**17) if path.suffix.lower() == ".gz" else path.open("rb")


def whole(path: Path, stream: BinaryIO) -> bytearray:
    """Read the rest of a file that can only be read whole. Raises DataError if it exceeds DOCUMENT_BYTES."""
    content = bytearray()
    too_large = path.stat().st_size > DOCUMENT_BYTES
    while not too_large and (chunk := stream.read(CHUNK_BYTES)):
        content += chunk
        too_large = len(content) > DOCUMENT_BYTES
    if too_large:
        raise DataError(
            f"{path} has more than {DOCUMENT_BYTES:,} bytes and must be read whole: convert it to JSONL, or to Parquet "
            "without gzip, which are read row by row"
        )
    return content


def open_data(path: Path) -> BinaryIO:
    """Open a file as bytes, without UTF-8's byte order mark. Raises DataError for UTF-16, or gzip not named `.gz`."""
    stream = unpacked(path)
    start = stream.peek(4)[:4]
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        stream.close()
        raise DataError(f"{path} is UTF-16, not UTF-8: convert it, e.g. with `iconv -f UTF-16 -t UTF-8`")
    if start[:2] == b"\x1f\x8b":
        stream.close()
        raise DataError(f"{path} is compressed: give it a name that ends in .gz")
    if start[:3] == b"\xef\xbb\xbf":
        stream.read(3)
    return stream


def lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines with their numbers; None for a line that is too long."""
    number = 0
    while line := stream.readline(LINE_BYTES):
        number += 1
        if len(line) == LINE_BYTES and not line.endswith(b"\n"):
            while (rest := stream.readline(LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        else:
            yield number, line


def read_parquet(path: Path) -> Iterator[Parsed]:
    """Read Apache Parquet; the line is the row's number, from 1."""
    compressed = path.suffix.lower() == ".gz"
    if path.stat().st_size == 0:
        return
    try:
        with unpacked(path) as stream:
            source = pa.BufferReader(whole(path, stream)) if compressed else path
            file = pq.ParquetFile(source, memory_map=not compressed)
            yield from _table(path, file.schema_arrow, _batches(path, file, source))
    except (pa.ArrowException, UnicodeDecodeError) as error:  # UnicodeDecodeError: a name is not UTF-8
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error


def _batches(path: Path, file: pq.ParquetFile, source: Path | pa.BufferReader) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a Parquet file in batches, smaller ones if a string that is stored once is repeated in many
    rows. Raises DataError if the file unpacks to more than the limit for gzip files."""
    limit, unpacked, values = most_unpacked(path.stat().st_size), 0, Counter[str]()
    for index in range(file.num_row_groups):
        group, repeated = file.metadata.row_group(index), set[str]()
        # This reads no row, but raises for a column's damaged metadata, for which `column` would crash the process.
        next(file.reader.iter_batches(0, [index]), None)
        for column in (group.column(number) for number in range(group.num_columns)):
            name, size = column.path_in_schema, column.total_uncompressed_size
            unpacked, values[name] = unpacked + size, values[name] + column.num_values
            _check_unpacked(path, name, max(unpacked, values[name]), limit)
            strings = column.has_dictionary_page and column.physical_type == "BYTE_ARRAY"
            if strings and size * column.num_values > BATCH_BYTES:
                repeated.add(name)
        largest = BATCH_BYTES
        if repeated:
            encoded = pq.ParquetFile(source, memory_map=isinstance(source, Path), read_dictionary=sorted(repeated))
            for batch in encoded.iter_batches(TABLE_ROWS, [index], columns=sorted(repeated)):
                grown = _grown(path, batch, unpacked, limit)
                unpacked, largest = unpacked + grown, max(largest, grown)
        yield from file.iter_batches(max(1, TABLE_ROWS * BATCH_BYTES // largest), [index])


def _check_unpacked(path: Path, column: str, size: int, limit: int) -> None:
    if size > limit:
        raise DataError(f"{path}, column {column}: {TOO_MUCH.format('a table')}")


def _grown(path: Path, batch: pa.RecordBatch, before: int, limit: int) -> int:
    """The bytes of a batch's repeated strings. Raises DataError if they and the bytes `before` exceed the limit."""
    grown = {name: _expanded(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    size = sum(grown.values())
    _check_unpacked(path, max(grown, key=lambda name: grown[name], default=""), before + size, limit)
    return size


def _expanded(array: pa.Array) -> int:
    """The bytes of a column's repeated strings: dictionary-encoded, so stored once each."""
    if pa.types.is_dictionary(array.type):
        if not (pa.types.is_binary(array.type.value_type) or pa.types.is_string(array.type.value_type)):
            return 0
        lengths = pc.call_function("binary_length", [array.dictionary])
        return pc.call_function("sum", [lengths.take(array.indices)]).as_py() or 0
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_struct(array.type):
        parts = array.flatten() if pa.types.is_struct(array.type) else [array.flatten()]
        return sum(map(_expanded, parts))
    return 0


def read_arrow(path: Path) -> Iterator[Parsed]:
    """Read Apache Arrow, a stream (as of datasets' `save_to_disk`) or a file; the line is the row's number, from 1."""
    if path.stat().st_size == 0:
        return
    try:
        with unpacked(path) as stream:
            gz = path.suffix.lower() == ".gz"
            source = pa.BufferReader(whole(path, stream)) if gz else pa.memory_map(str(path))
            try:
                opened = pa.ipc.open_stream(source)
                batches = iter(opened)
            except pa.ArrowInvalid:
                opened = file = pa.ipc.open_file(source)
                batches = (file.get_batch(index) for index in range(file.num_record_batches))
            yield from _table(path, opened.schema, batches)
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: a name is not UTF-8
        raise DataError(f"{path} is not a readable Arrow file: {error}") from error


def _table(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[Parsed]:
    names = schema.names
    if len(set(names)) < len(names):
        raise DataError(f"{path} names a column twice: {', '.join(names)}")
    number, expanded, limit = 0, 0, most_unpacked(path.stat().st_size)
    for batch in batches:
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid:  # with a damaged offset, a computation would crash the process
            rows = 1
        else:
            grown = _grown(path, batch, expanded, limit)
            expanded += grown
            rows = max(1, TABLE_ROWS * BATCH_BYTES // max(grown, BATCH_BYTES))
        for start in range(0, batch.num_rows, rows):
            for value, problem in _values(batch.slice(start, rows)):
                number += 1
                yield number, value, problem


def _values(batch: pa.RecordBatch) -> Iterator[tuple[dict[str, Any] | None, str | None]]:
    """Yield each row, or why Python cannot represent it: a date beyond the year 9999, bytes that are not UTF-8."""
    try:
        batch.validate(full=True)
        kinds = {field.name: field.type for field in batch.schema if "arrow.json" in str(field.type)}
        rows = batch.to_pylist()
        yield from [(row | {name: _of_json(row[name], kind) for name, kind in kinds.items()}, None) for row in rows]
    except (ArithmeticError, LookupError, ValueError) as error:  # LookupError: a time zone that does not exist
        if batch.num_rows == 1:
            yield None, f"a value cannot be read: {error}"
            return
        for index in range(batch.num_rows):
            yield from _values(batch.slice(index, 1))


def _of_json(value: Any, kind: pa.DataType) -> Any:
    """Parse the strings of Arrow's JSON type in a value; datasets writes columns of mixed types in this type."""
    if value is None:
        return None
    if isinstance(kind, pa.JsonType):
        return json.loads(value)
    if pa.types.is_struct(kind):
        return {field.name: _of_json(value[field.name], field.type) for field in kind}
    if isinstance(value, list) and not pa.types.is_map(kind):
        return [_of_json(item, kind.value_type) for item in value]
    return value
