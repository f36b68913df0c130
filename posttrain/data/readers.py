"""Reads rows from local files. Each row records its file and line; a malformed one its problem, instead of an error."""

import csv
import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.base.errors import DataError
from posttrain.data import streams
from posttrain.data.streams import Parsed, read_arrow, read_parquet

HEAD_BYTES = 256 * 1024  # bytes at the start of a CSV file from which its delimiter is inferred
OTHER_DELIMITERS = (";", "\t")
FITTING = 0.9  # a semicolon or tab must give this share of rows as many values as there are column names
DOCUMENT_END = "<|endoftext|>"


@dataclass(frozen=True, slots=True)
class Record:
    """One row: its value, or the problem with it."""

    row: int  # counted from 0 over all files of the source
    file: str
    line: int  # line in the file, from 1; for Parquet and Arrow the row's number
    value: dict[str, Any] | None
    problem: str | None = None
    identity: Any = None  # the part of the value that identifies the row; None: the whole value


def read_files(files: tuple[Path, ...]) -> Iterator[Record]:
    """Yield the rows of all files, in order. Raises DataError if a file is missing, damaged, empty or UTF-16, or if its
    content does not match its suffix."""
    row = 0
    for path in files:
        before = row
        suffix = Path(path.name.lower().removesuffix(".gz")).suffix
        if suffix not in READERS:
            raise DataError(
                f"{path} is not a data file: its name must end in {', '.join(READERS)}, or in one of these and .gz"
            )
        try:
            for line, value, problem in READERS[suffix](path):
                yield Record(row, str(path), line, value, problem)
                row += 1
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{path} is a damaged or truncated gzip file ({error}): download it again") from error
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
        if row == before:
            raise DataError(f"{path} has no rows: the file is empty")


def read_jsonl(path: Path) -> Iterator[Parsed]:
    """Read one JSON object per line; blank lines are skipped."""
    with streams.open_data(path) as stream:
        for number, raw in streams.lines(stream):
            if raw is None:
                yield number, None, f"a line of more than {streams.LINE_BYTES:,} bytes"
                continue
            if not raw.strip():
                continue
            text = ""
            try:
                text = raw.decode()
                value = _decoder.decode(text.strip())
            except UnicodeDecodeError as error:
                yield number, None, f"not UTF-8: byte 0x{raw[error.start]:02x} at column {error.start + 1}"
            except json.JSONDecodeError as error:
                column = error.colno + len(text) - len(text.lstrip())
                yield number, None, f"not JSON: {error.msg} at column {column}"
            except (ValueError, RecursionError) as error:
                yield number, None, f"not JSON: {error}"
            else:
                yield number, *_object(value)


def read_json(path: Path) -> Iterator[Parsed]:
    """Read a list of objects, or an object with exactly one list. A file with one object per line is read as JSONL."""
    with streams.open_data(path) as stream:
        raw = streams.whole(path, stream)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path} line {line} is not UTF-8: byte 0x{raw[error.start]:02x}") from error
    if not text.strip():
        return
    head = text.lstrip()
    if head[0] == "{":
        try:
            whole = _decoder.decode(text)
        except ValueError as error:
            if isinstance(json_or_text(head.split("\n")[0]), dict):
                yield from read_jsonl(path)
                return
            raise _bad_json(path, error) from error
        lists = [key for key, value in whole.items() if isinstance(value, list)]
        if len(lists) != 1:
            raise DataError(
                f"{path} is one JSON object; it must contain one list of rows (found: {', '.join(lists) or 'none'})"
            )
        yield from _items(path, text, _first_list(text))
    elif head[0] == "[":
        yield from _items(path, text, text.index("["))
    else:
        raise DataError(f"{path} is not a JSON list of rows: it begins with {head[:20]!r}")


def _first_list(text: str) -> int:
    """The position of the first list among the values of a JSON object."""
    position = text.index("{") + 1
    while True:
        _, position = _decoder.raw_decode(text, _skip_space(text, position))
        position = _skip_space(text, text.index(":", position) + 1)
        if text[position] == "[":
            return position
        _, position = _decoder.raw_decode(text, position)
        position = text.index(",", position) + 1


def _items(path: Path, text: str, start: int) -> Iterator[Parsed]:
    """The items of the JSON list that starts at `start`, each with the number of its first line."""
    position, line, counted = start + 1, 1, 0
    whole = text[:start].strip() == ""  # whether the list is the whole file
    try:
        while True:
            position = _skip_space(text, position)
            if text[position : position + 1] == "]":
                break
            line += text.count("\n", counted, position)
            counted = position
            item, position = _decoder.raw_decode(text, position)
            yield line, *_object(item)
            position = _skip_space(text, position)
            if text[position : position + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, position)
            position += text[position] == ","
        position = _skip_space(text, position + 1)
        if whole and position < len(text):
            raise json.JSONDecodeError("Extra data after the list", text, position)
    except (ValueError, RecursionError) as error:
        raise _bad_json(path, error, line) from error


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _bad_json(path: Path, error: Exception, line: int | None = None) -> DataError:
    if isinstance(error, json.JSONDecodeError):
        return DataError(f"{path} line {error.lineno} column {error.colno} is not JSON: {error.msg}")
    return DataError(f"{path}{f' line {line}' if line else ''} is not JSON: {error}")


def json_or_text(text: str) -> Any:
    """The value of a JSON string, or the string itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _object(value: object) -> tuple[dict[str, Any] | None, str | None]:
    if isinstance(value, dict):
        return value, None
    return None, f"a row must be an object with named columns, not {type_name(value)}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"the key {next(name for name in counts if counts[name] > 1)!r:.60} appears twice")
    return result


_decoder = json.JSONDecoder(object_pairs_hook=_unique)


def read_csv(path: Path) -> Iterator[Parsed]:
    """Read values separated by commas, semicolons or tabs, below a line of column names. A byte that is not UTF-8
    becomes a lone surrogate, which later checks reject."""
    read = 0  # lines read so far; the csv module's own count omits lines rejected here

    def text(numbered: tuple[int, bytes | None]) -> str:
        nonlocal read
        read, raw = numbered
        if raw is None:
            raise csv.Error(f"a line of more than {streams.LINE_BYTES:,} bytes")
        return raw.decode(errors="surrogateescape")

    delimiter = "\t" if ".tsv" in path.suffixes else delimiter_of(_head(path))
    with streams.open_data(path) as stream:
        lines = map(text, streams.lines(stream))  # a map continues after an error; a generator ends
        limit = csv.field_size_limit(streams.LINE_BYTES)
        header, next_line = None, 1
        try:
            for cells in _cells(lines, delimiter):
                line, next_line = next_line, read + 1
                if not cells:
                    continue
                if isinstance(cells, csv.Error):
                    if header is None:
                        raise DataError(f"{path} line {line}, the column names, is not CSV: {cells}") from cells
                    for lost in range(line, read + 1):  # an open quote spoils every line up to the next quote
                        yield lost, None, f"not CSV: {cells}" if lost == line else f"part of line {line}, not CSV"
                elif header is None:
                    header = cells
                    if len(set(header)) < len(header):
                        raise DataError(f"{path} names a column twice: {', '.join(header)}")
                elif len(cells) != len(header):
                    yield line, None, f"{len(cells)} values for {len(header)} column names"
                else:
                    yield line, dict(zip(header, cells, strict=True)), None
        finally:
            csv.field_size_limit(limit)


def _cells(lines: Iterable[str], delimiter: str) -> Iterator[list[str] | csv.Error]:
    """Yield the cells of each row, none for a blank line, or the error of a row that is not CSV."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        try:
            yield next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield error


def _head(path: Path) -> str:
    """The complete lines among the first HEAD_BYTES bytes of a file."""
    with streams.open_data(path) as stream:
        start = stream.read(HEAD_BYTES)
    whole = start if len(start) < HEAD_BYTES else start[: start.rfind(b"\n") + 1]
    return whole.decode(errors="surrogateescape")


def delimiter_of(head: str) -> str:
    """The delimiter of a file that begins with the lines `head`: a comma, a semicolon or a tab.

    Commas are chosen if they give two or more column names and as many values in every row. Otherwise semicolons or
    tabs are chosen if they give two or more names that FITTING of the rows match, and if commas give a single name or
    match fewer rows. If none of them fits, commas are chosen.
    """
    width, share = _fit(head, ",")
    fits = {delimiter: _fit(head, delimiter) for delimiter in OTHER_DELIMITERS}
    better = {
        delimiter: its_share
        for delimiter, (its_width, its_share) in fits.items()
        if its_width > 1 and its_share >= FITTING and (width < 2 or its_share > share)
    }
    return max(better, key=lambda delimiter: better[delimiter], default=",")


def _fit(head: str, delimiter: str) -> tuple[int, float]:
    """The number of column names, and the share of rows with that many values."""
    rows = _cells(io.StringIO(head, newline=""), delimiter)
    widths = [1 if isinstance(cells, csv.Error) else len(cells) for cells in rows if cells]
    if not widths:
        return 0, 0.0
    width, *others = widths
    return width, others.count(width) / len(others) if others else 1.0


def read_text(path: Path) -> Iterator[Parsed]:
    """Read documents separated by `<|endoftext|>` as rows with one column, `text`; a row's line is its first line."""
    with streams.open_data(path) as stream:
        begin, size = 1, 0
        parts: list[str] = []
        for number, raw in streams.lines(stream):
            if raw is None:
                yield number, None, f"a line of more than {streams.LINE_BYTES:,} bytes"
                continue
            *ended, rest = raw.decode(errors="surrogateescape").split(DOCUMENT_END)
            for piece in ended:
                yield from _document(begin, [*parts, piece], size + len(piece))
                begin, parts, size = number, [], 0
            if not parts and not rest.strip():
                begin = number + 1
            else:
                size += len(rest)
                if size <= streams.LINE_BYTES:
                    parts.append(rest)
        yield from _document(begin, parts, size)


def _document(line: int, parts: list[str], size: int) -> Iterator[Parsed]:
    if size > streams.LINE_BYTES:
        yield line, None, f"a document of more than {streams.LINE_BYTES:,} characters"
    elif text := "".join(parts).strip("\r\n"):
        yield line, {"text": text}, None


def type_name(value: object) -> str:
    """The JSON name of a value's type, with an article."""
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, dict) else f"a {type(value).__name__}")


READERS: dict[str, Callable[[Path], Iterator[Parsed]]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".txt": read_text,
}
