"""Inputs that the properties of tests/test_fuzz_*.py have found, each with the message it has now."""

import asyncio
import json
import shutil
import sqlite3
from contextlib import closing
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from posttrain.base.errors import ConfigError, DataError, RunError
from posttrain.base.files import path_of, read_yaml
from posttrain.cli import main
from posttrain.config import load
from posttrain.data.readers import read_files
from posttrain.data.sources import open_source
from posttrain.grading.notation import tidy
from posttrain.reports.report import ReportedRun
from posttrain.reports.series import Series
from posttrain.runs.managing.listing import filtered
from posttrain.runs.metrics import latest_metrics, read_metrics
from posttrain.runs.rollouts import NAME as ROLLOUTS
from posttrain.runs.stored_rollouts import StoredRun
from posttrain.runs.summary import RunSummary, read_run, summaries_below
from posttrain.serving import listening
from posttrain.ui.guard import Guard

LONG = "x" * 300
SAVED = Path(__file__).parent / "saved_run/run"


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
    assert first.value == {"text": "a"} and "utf8" in (second.problem or "").lower()


def test_two_columns_of_one_name_in_parquet(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"]), path)
    with pytest.raises(DataError, match="names a column twice: text, text"):
        list(read_files((path,)))


def test_a_folder_of_splits_of_different_kinds(tmp_path):
    (tmp_path / "train.txt").write_text("a\n")
    (tmp_path / "test.jsonl").write_text(json.dumps({"text": "a"}))
    with pytest.raises(DataError, match="cannot infer the splits"):
        open_source(str(tmp_path), "train", None, 0, lambda working, answer: answer)


# --- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "tidied"),
    [(r"1\\\%", r"1\\\%"), ("sqrt 2. .", "sqrt 2"), ("\\\xa02", "2"), ("[,[[", "[,))"), ("]2,5[", "(2,5)")],
)
def test_tidying_is_done_once(text, tidied):
    assert tidy(text) == tidied == tidy(tidied)


# --- stored files -----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path) -> Path:
    return shutil.copytree(SAVED, tmp_path / "runs/saved")


BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[" * 100_000, "nested too deeply"),  # the C library overflowed its stack, and ended the process
        (f"{BOMB}data: {{source: *a9}}\nmodels: [{{path: *a9}}]\n", "alias on line 2"),  # took all memory
        ("data: &a {source: *a}\n", "tag or alias"),
        ("models: !!python/name:os.system x\n", "tag or alias"),
        ("models: !!int ''\n", "tag or alias"),  # an IndexError
    ],
)
def test_settings_of_a_run_that_are_hostile(run, capsys, text, problem):
    (run / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_yaml(text)
    assert RunSummary(run).method == "?"
    assert any(problem in line for line in ReportedRun(run).missing)
    assert main(["runs", "list", "--output-dir", str(run.parent)]) == 0
    assert "saved" in capsys.readouterr().out


@pytest.mark.parametrize("time", ["9999-12-31T23:59:59-12:00", "0001-01-01T00:00:00+12:00", "2026-11-24T04:59:41"])
def test_times_that_not_every_zone_has(run, time):
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(facts | {"ended": time}))
    with pytest.raises(RunError, match=r"run\.json is damaged"):
        read_run(run)
    [row] = summaries_below(run.parent)
    assert row.state == "damaged" and filtered([row], ["age>1s"]) in ([], [row])


@pytest.mark.parametrize("value", ["1" + "0" * 400, "NaN", "1e999", "[1]", '"1"', "[" * 3000 + "]" * 3000])
def test_numbers_of_metrics_that_are_none(run, value):
    before = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(f'{before}{{"step": 3, "loss": {value}}}\n')
    for read_them in (read_metrics, latest_metrics):
        with pytest.raises(RunError, match="damaged"):
            read_them(run)
    series = Series(run).refresh()
    assert series.damaged == 1 and list(series.steps) == [1, 2]
    assert "damaged" in summaries_below(run.parent)[0].problem


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("tokens", None),
        ("tokens", "text"),
        ("sampler_logprobs", 5),
        ("reward", "text"),
        ("completion", None),
        ("parts", None),
        ("parts", "[]"),
        ("parts", '{"math": {"value": "text"}}'),
        ("parts", '{"math": {"value": 1' + "0" * 400 + "}}"),
    ],
)
def test_values_of_rollouts_that_no_run_writes(run, column, value):
    with closing(sqlite3.connect(run / ROLLOUTS)) as connection:
        connection.execute(f"UPDATE rollouts SET {column} = ? WHERE step = 1 AND prompt_index = 0", (value,))
        connection.commit()
    with (
        StoredRun(run, looking=True) as stored,
        pytest.raises(RunError, match=r"rollouts\.sqlite is damaged: a row has"),
    ):
        stored.rollouts(1)


def test_a_database_whose_names_are_not_utf8(run):
    content = bytearray((run / ROLLOUTS).read_bytes())
    at = content.index(b"prompts (")
    content[at : at + 3] = b"\xff\xff\xff"
    (run / ROLLOUTS).write_bytes(content)
    with StoredRun(run, looking=True) as stored, pytest.raises(RunError, match="cannot be read"):
        stored.prompts(1)


# --- HTTP -------------------------------------------------------------------------------------------------------------


async def inner(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"inside"})


def test_a_length_of_thousands_of_digits():
    sent = []
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", b"9" * 5000)]
    scope = {"type": "http", "method": "POST", "path": "/v1/score", "headers": headers}

    async def send(message) -> None:
        sent.append(message)

    asyncio.run(listening.Guard(inner)(scope, None, send))
    assert sent[0]["status"] == 413


@pytest.mark.parametrize(("path", "to"), [("//evil.example/", "/evil.example/"), ("/run", "/run"), ("///", "/")])
def test_the_token_leads_to_no_other_site(path, to):
    """A link to //evil.example/ on this server asked for the token, and then led there."""
    client = TestClient(Guard(inner, "token-of-ten", local=False), base_url="http://ui", follow_redirects=False)
    answer = client.get(f"http://ui{path}?a=1&token=token-of-ten")
    assert (answer.status_code, answer.headers["location"]) == (303, f"{to}?a=1")
