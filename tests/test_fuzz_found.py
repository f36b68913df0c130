"""Inputs that the properties of tests/test_fuzz_*.py have found, each with the message it has now."""

import json
from datetime import date

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from posttrain.config import load
from posttrain.data.readers import read_files
from posttrain.data.sources import open_source
from posttrain.errors import ConfigError, DataError
from posttrain.paths import path_of

LONG = "x" * 300


# --- settings ---------------------------------------------------------------------------------------------------------


def circle() -> dict:
    """A mapping that contains itself."""
    made: dict = {}
    made["data"] = made
    return made


def nested(depth: int) -> dict:
    made: dict = {}
    for _ in range(depth):
        made = {"columns": made}
    return made


@pytest.mark.parametrize("values", [circle(), {"data": nested(1000)}, {"data": [nested(200)]}])
def test_mappings_of_any_depth(values):
    with pytest.raises(ConfigError, match="contain themselves, or are nested too deeply"):
        load(values)


@pytest.mark.parametrize("value", ["&a [*a]", "[" * 200 + "]" * 200, '{"a":' * 200 + "1" + "}" * 200])
def test_overrides_of_any_depth(value):
    with pytest.raises(ConfigError, match=r"^override data\.columns=.* nested too deeply"):
        load(None, [f"data.columns={value}"])


def test_an_index_of_thousands_of_digits():
    with pytest.raises(ConfigError, match="models has entries 0 to 0"):
        load({"model": "a"}, ["models." + "9" * 5000 + ".path=b"])
    with pytest.raises(ConfigError, match="999"):
        load({"model": "a"}, flags={"9" * 5000: 1})


@pytest.mark.parametrize("name", [LONG, f"{LONG}/a", "/".join([LONG[:100]] * 60)])
def test_names_that_are_too_long_for_a_file(tmp_path, name):
    path = tmp_path / "a.yaml"
    path.write_text(f"extends: {name}\n")
    with pytest.raises(ConfigError, match=r"a\.yaml:1: extends: .*too long for the name of a file"):
        load(path)
    with pytest.raises(ConfigError, match="too long"):
        load(name)
    with pytest.raises(DataError, match="too long"):
        open_source(name, "train", None, 0, lambda working, answer: answer)


def test_the_home_folder_of_nobody():
    assert str(path_of("~nobody-of-this-name/x")) == "~nobody-of-this-name/x"
    with pytest.raises(DataError, match="does not exist"):
        open_source("~nobody-of-this-name/x.jsonl", "train", None, 0, lambda working, answer: answer)


# --- data -------------------------------------------------------------------------------------------------------------


def test_values_of_parquet_that_python_does_not_have(tmp_path):
    """A row of them is malformed; the others are read."""
    path = tmp_path / "rows.parquet"
    day = pa.array([0, 2**31 - 1, 1], pa.date32())
    long = pa.array([1, 1, 2**62], pa.duration("s"))
    pq.write_table(pa.table({"day": day, "text": pa.array([b"a", b"b", b"c"]).view(pa.utf8()), "long": long}), path)
    records = list(read_files((path,)))
    assert [record.line for record in records] == [1, 2, 3]
    assert records[0].value is not None and records[0].value["day"] == date(1970, 1, 1)
    assert [record.problem and record.problem[:22] for record in records] == [None, *["a value cannot be read"] * 2]


def test_text_of_parquet_that_is_not_utf8(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": pa.array([b"a", b"\xff"]).view(pa.utf8())}), path)
    first, second = read_files((path,))
    assert first.value == {"text": "a"} and "utf-8" in (second.problem or "")


def test_two_columns_of_one_name_in_parquet(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"]), path)
    with pytest.raises(DataError, match="names a column twice: text, text"):
        list(read_files((path,)))


def test_a_folder_of_splits_of_different_kinds(tmp_path):
    (tmp_path / "train.txt").write_text("a\n")
    (tmp_path / "test.jsonl").write_text(json.dumps({"text": "a"}))
    with pytest.raises(DataError, match="cannot be told from its files"):
        open_source(str(tmp_path), "train", None, 0, lambda working, answer: answer)
