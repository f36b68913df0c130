"""Data files of any content: every row is read or counted with its line; only the package's own errors leave."""

import csv
import gzip
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_tokenizer import CHATML, byte_tokenizer, find_layout, prepare
from fuzzing import JSON, TEXT, damaged, fuzzed, outcome
from hypothesis import strategies as st

from posttrain.base.errors import DataError
from posttrain.config.schema.data import DataConfig, TagsConfig
from posttrain.data import reading
from posttrain.data.formats import FORMATS
from posttrain.data.readers import Record, read_files
from posttrain.data.rows import Row, RowError
from posttrain.data.sources import open_source
from posttrain.data.templates import Template

ROWS = [{"prompt": f"Name {n}.", "completion": f"{n} é\n", "tools": None} for n in range(5)]
COLUMNS = sorted({name for known in FORMATS.values() for name in (*known.required, *known.optional)})
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "gpt", 3, None]) | TEXT, "content": JSON},
        optional={"tool_calls": JSON, "name": JSON, "reasoning_content": JSON, "from": JSON, "value": JSON},
    ),
    max_size=3,
)
GOOD = st.lists(st.builds(lambda text, role: {"role": role, "content": text}, st.text(max_size=9),
                          st.sampled_from(["user", "assistant"])), min_size=2, max_size=2)  # fmt: skip
FIELDS = (
    JSON | MESSAGES | GOOD | st.booleans() | st.sampled_from(["\n\nHuman: a\n\nAssistant: b", "a #### 7", '[{"a":1}]'])
)
LINES = (
    st.dictionaries(TEXT, JSON, max_size=3).map(lambda row: json.dumps(row).encode())
    | JSON.map(lambda value: json.dumps(value, ensure_ascii=False).encode(errors="surrogatepass"))
    | st.binary(max_size=12)
    | st.sampled_from([b"", b"  ", b"\r", b"\x0b", b'{"a": 1, "a": 2}', b"[" * 5000, b'{"a":' * 2000, b'{"a": 1}\xff'])
    | st.builds(lambda depth: b'{"a":' + b"[" * depth + b"]" * depth + b"}", st.integers(1, 3000))
).map(lambda line: line.replace(b"\n", b" "))


def records_of(path: Path) -> list[Record] | DataError:
    """The rows of a file: numbered, each with a value or a problem, and with lines in order."""
    found = outcome(lambda: list(read_files((path,))))
    if isinstance(found, DataError):
        return found
    assert [one.row for one in found] == list(range(len(found)))
    assert all((one.value is None) == (one.problem is not None) for one in found)
    assert [one.line for one in found] == sorted(one.line for one in found) and found[0].line >= 1
    return found


@fuzzed(60, 1500, lines=st.lists(LINES, max_size=6), mark=st.booleans())
def test_every_line_of_jsonl_is_a_row_or_a_problem(tmp_path, lines, mark):
    content = b"\n".join(lines)
    path = tmp_path / "rows.jsonl"
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + content)
    found = records_of(path)
    if content.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff", b"\x1f\x8b")):
        return  # another mark at the beginning of the file, which is not of its first line
    expected = [number for number, line in enumerate(lines, start=1) if line.strip()]
    if isinstance(found, DataError):
        assert not expected
    else:
        assert [record.line for record in found] == expected
        for record in found:
            if record.value is not None:
                assert repr(record.value) == repr(json.loads(lines[record.line - 1]))


@fuzzed(40, 1500, rows=st.lists(st.dictionaries(TEXT, JSON, max_size=2), min_size=1, max_size=4),
        spaces=st.lists(st.text(" \n\t\r", max_size=3), min_size=5, max_size=5), inside=st.booleans())  # fmt: skip
def test_a_list_of_json_has_all_its_rows_at_their_lines(tmp_path, rows, spaces, inside):
    text, lines = '{"of": [1], "rows": ['.replace("[1]", "1") if inside else "[", []
    for index, row in enumerate(rows):
        text += ("," if index else "") + spaces[index]
        lines.append(text.count("\n") + 1)
        text += json.dumps(row)
    path = tmp_path / "rows.json"
    path.write_text(f"{text}{spaces[-1]}]{'}' if inside else ''}", newline="")
    found = records_of(path)
    if any(len(number) > 4300 for number in text.replace(",", " ").replace("]", " ").replace("}", " ").split()):
        return  # numbers of thousands of digits are refused
    assert not isinstance(found, DataError), found
    assert [record.line for record in found] == lines
    assert repr([record.value for record in found]) == repr(json.loads(json.dumps(rows)))


CELL = st.text(st.characters(codec="utf-8", exclude_characters=",;\t"), max_size=8) | st.sampled_from(
    ['"', "\r", "a\nb", "\r\n", "\0"]
)


@fuzzed(
    50,
    2000,
    table=st.integers(1, 3).flatmap(lambda n: st.lists(st.lists(CELL, min_size=n, max_size=n), max_size=5)),
    separator=st.sampled_from(",;\t"),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_a_table_of_csv_has_all_its_rows_at_their_lines(tmp_path, table, separator, end):
    width = len(table[0]) if table else 1
    stream, lines = io.StringIO(newline=""), []
    writer = csv.writer(stream, delimiter=separator, lineterminator=end, quoting=csv.QUOTE_ALL)
    writer.writerow([f"column {n}" for n in range(width)])
    for row in table:
        lines.append(stream.getvalue().count("\n") + 1)
        writer.writerow(row)
    path = tmp_path / "rows.csv"
    path.write_bytes(stream.getvalue().encode())
    found = records_of(path)
    if isinstance(found, DataError):
        assert not table
        return
    assert [[*(record.value or {}).values()] for record in found] == table
    assert [record.line for record in found] == lines


def in_bytes(suffix: str) -> bytes:
    stream = io.BytesIO()
    if suffix == ".parquet":
        pq.write_table(pa.table({"prompt": ["a", "b"] * 5, "list": [[1], []] * 5}), stream)
        return stream.getvalue()
    if suffix == ".arrow":
        words = pa.DictionaryArray.from_arrays(pa.array([0, 1] * 5, pa.int32()), ["aa", "b"])
        table = pa.table({"prompt": words, "list": [[1], []] * 5, "text": ["é", None] * 5})
        with pa.ipc.new_stream(stream, table.schema) as writer:
            writer.write_table(table)
        return stream.getvalue()
    if suffix == ".json":
        return json.dumps(ROWS, indent=1).encode()
    if suffix in (".csv", ".tsv"):
        return b'prompt,completion\n"a ""b""",c\n"d\ne",f\r\n\ng,h\n'.replace(b",", b"\t" if suffix == ".tsv" else b",")
    if suffix == ".txt":
        return "one\nmore<|endoftext|>two é\n\n<|endoftext|><|endoftext|>three".encode()
    return "\n".join(map(json.dumps, ROWS)).encode()


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet", ".arrow"])
@fuzzed(25, 600, draw=st.data(), packed=st.booleans())
def test_a_damaged_file_of_any_kind(tmp_path, suffix, draw, packed):
    whole = in_bytes(suffix)
    content = draw.draw(st.binary(max_size=40) | damaged(gzip.compress(whole, mtime=0) if packed else whole))
    path = tmp_path / f"rows{suffix}{'.gz' if packed else ''}"
    path.write_bytes(content)
    found = records_of(path)
    if not isinstance(found, DataError) and not packed and suffix not in (".parquet", ".arrow"):
        assert found[-1].line <= content.count(b"\n") + 1


def test_a_column_whose_name_is_damaged(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(in_bytes(".parquet").replace(b"prompt", b"pro\xc0pt"))
    assert isinstance(records_of(path), DataError)


def test_no_damage_of_a_parquet_file_ends_the_process(tmp_path):
    """Any byte: Arrow ends it for sizes of a column that do not fit its type, where they are asked for first."""
    whole, path = in_bytes(".parquet"), tmp_path / "rows.parquet"
    for mask in (2, 4):
        for place in range(len(whole)):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ mask]) + whole[place + 1 :])
            records_of(path)


ARROW = {
    "text": pa.array([b"\xff", b"a"]).view(pa.utf8()),
    "second": pa.array([2**50, -1], pa.timestamp("ms")),
    "nano": pa.array([2**62, 1], pa.timestamp("ns")),
    "zone": pa.array([1, 2], pa.timestamp("us", tz="Nowhere/Land")),
    "day": pa.array([2**31 - 1, 0], pa.date32()),
    "duration": pa.array([2**62, 1], pa.duration("s")),
    "nested": pa.array([[{"a": 2**50}], None], pa.list_(pa.struct([("a", pa.timestamp("ms"))]))),
    "map": pa.array([[(1, "a")], []], pa.map_(pa.int64(), pa.string())),
    "bytes": pa.array([b"\xff", None]),
    "decimal": pa.array([1, 2]).cast(pa.decimal128(38)),
}


@fuzzed(12, 60, names=st.lists(st.sampled_from(sorted(ARROW)), min_size=1, max_size=3))
def test_every_row_of_parquet_is_read_or_the_file_is_refused(tmp_path, names):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_arrays([ARROW[name] for name in names], names), path)
    found = records_of(path)
    if not isinstance(found, DataError):
        assert len(found) == 2 and all(record.value is None or set(record.value) == set(names) for record in found)


TEMPLATES = [Template(name, name != "none", TagsConfig()) for name in ("chat", "none", "tags", "question_only")]


@pytest.mark.parametrize("name", FORMATS)
@fuzzed(25, 500, draw=st.data(), template=st.sampled_from(TEMPLATES))
def test_any_fields_are_a_row_or_the_reason_why_not(name, draw, template):
    known = FORMATS[name]
    fields = draw.draw(
        st.fixed_dictionaries(
            {column: FIELDS for column in known.required},
            optional={column: FIELDS for column in {*known.optional, "prompt"} - {*known.required}},
        )
    )
    try:
        found = known.read(fields, template)
    except RowError as error:
        assert str(error)
    except DataError as error:
        assert str(error)
    else:
        assert isinstance(found, Row)
        json.dumps([found.prompt, found.chosen, found.rejected, found.tools, found.answer])


@fuzzed(40, 1000, sample=st.lists(st.dictionaries(st.sampled_from(COLUMNS) | TEXT, FIELDS), min_size=1, max_size=2),
        columns=st.dictionaries(st.sampled_from(COLUMNS) | TEXT, st.sampled_from(COLUMNS) | TEXT, max_size=2),
        format=st.sampled_from(["auto", *FORMATS]), kind=st.sampled_from(["sft", "pair", "unpaired", "prompt"]),
)  # fmt: skip
def test_any_columns_have_a_layout_or_a_message(sample, columns, format, kind):
    found = outcome(lambda: find_layout(format, columns, sample, kind, "rows"))
    for value in sample if not isinstance(found, DataError) else []:
        try:
            outcome(lambda value=value: found.read(value, TEMPLATES[0]))
        except RowError as error:
            assert str(error)


@pytest.fixture
def all_malformed(monkeypatch):
    """No run is refused for its malformed rows: their report is looked at."""
    monkeypatch.setattr(reading, "MALFORMED_SHARE", 1.0)


@fuzzed(
    12,
    150,
    rows=st.lists(st.dictionaries(st.sampled_from(["prompt", "completion", "answer", "tools"]), FIELDS), max_size=4),
    extra=st.lists(LINES, max_size=2),
    kind=st.sampled_from(["sft", "prompt"]),
    template=st.sampled_from(["chat", "none"]),
    most=st.integers(8, 60),
)
def test_kept_and_dropped_are_what_was_read(tmp_path, all_malformed, rows, extra, kind, template, most):
    lines = [*(json.dumps(row).encode() for row in [ROWS[0], *rows]), *extra]
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    data = DataConfig(source=str(path), template=template, max_length=most, format="prompt_completion")
    if kind == "prompt":
        data = data.model_copy(update={"format": "prompt"})
    found = outcome(
        lambda: prepare(data, byte_tokenizer(CHATML), kind, cache_dir=tmp_path / "cache", completion_length=2)
    )
    if isinstance(found, DataError):
        return
    report, numbers = found.report, [number for number, line in enumerate(lines, start=1) if line.strip()]
    assert report.read == len(numbers)
    assert report.used + len(report.malformed) + report.overlong_dropped == report.read
    assert all(numbers[bad.row] == bad.line and bad.reason for bad in report.malformed)


ELSEWHERE = TEXT.filter(lambda text: text.strip("./~"))  # whole disks are not looked through


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@fuzzed(30, 200, source=ELSEWHERE, split=TEXT | st.just("train"))
def test_any_source_is_found_or_a_message(elsewhere, source, split):
    outcome(lambda: open_source(source, split, None, 0, TEMPLATES[0].compose))
