"""Stored files of runs with any damage: readers name it, lists and pages show what is left."""

import json
import shutil
import sqlite3
from contextlib import closing
from functools import cached_property
from pathlib import Path

import pytest
from fuzzing import JSON, SCALAR, TEXT, changed, damaged, fuzzed, outcome
from hypothesis import strategies as st

from posttrain.base.errors import DamagedError, RunError
from posttrain.cli import main
from posttrain.cli.runs import COLUMNS, cells_of
from posttrain.reports.report import write_report
from posttrain.runs.checkpoint import MANIFEST, newest_complete, saved_step, verify
from posttrain.runs.files import load_json, load_tensors
from posttrain.runs.folder import read_notes
from posttrain.runs.managing.facts import facts_of
from posttrain.runs.managing.listing import ORDERS, filtered, ordered, table_lines
from posttrain.runs.metrics import first_latest, last_metrics, latest_metrics, read_metrics
from posttrain.runs.rollouts import NAME as ROLLOUTS
from posttrain.runs.stored_rollouts import StoredRun
from posttrain.runs.summary import RunSummary, read_run, summaries_below
from posttrain.ui.data_page import data_page
from posttrain.ui.evaluations_page import evaluations_page
from posttrain.ui.parts import Query
from posttrain.ui.rollouts_page import rollouts_page
from posttrain.ui.run_page import run_page
from posttrain.ui.runs_page import runs_page
from posttrain.ui.viewer import Viewer

SAVED = Path(__file__).parent / "saved_run/run"
CHECKPOINT = SAVED / "checkpoint-2"
NOTES = '{"format": 1, "tags": ["good"], "note": "kept"}'
LOG = "2026-11-24 04:59:41,000 INFO step 2/2 loss 1.2 ETA 3m 02s\n"
TIMES = st.sampled_from(
    [
        "2026-11-24T04:59:41",
        "2026-11-24",
        "0001-01-01T00:00:00+00:00",
        "9999-12-31T23:59:59-12:00",
        "2026-11-24T04:59:41Z",
    ]
)
ODD = JSON | TIMES | st.sampled_from([True, "running", "finished", "failed", 10**400, float("nan"), [], {}])


@st.composite
def files(draw) -> dict[str, bytes]:
    """Files of a run with damage."""
    there = {path.name: path.read_bytes() for path in SAVED.iterdir() if path.is_file()}
    there |= {"notes.json": NOTES.encode(), "training.log": LOG.encode()}
    del there[ROLLOUTS]
    made: dict[str, bytes] = {}
    for name in draw(st.lists(st.sampled_from(sorted(there)), min_size=1, max_size=2, unique=True)):
        whole = there[name]
        if name.endswith(".json") and draw(st.booleans()):
            made[name] = json.dumps(draw(changed(json.loads(whole), ODD))).encode()
        elif name == "metrics.jsonl" and draw(st.booleans()):
            lines = whole.splitlines()
            at = draw(st.integers(0, len(lines) - 1))
            lines[at] = json.dumps(draw(changed(json.loads(lines[at]), ODD))).encode()
            made[name] = b"\n".join([*lines, b""])
        elif draw(st.integers(0, 9)) == 0:
            made[name] = draw(
                st.sampled_from([b"", b"{", b"[" * 3000, b"\0" * 9, b"[]", b"null", b'"', b"{}\n{}\n", b"1\n"])
            )
        else:
            made[name] = draw(damaged(whole))
    return made


def with_files(root: Path, made: dict[str, bytes]) -> Path:
    """The saved run below a folder of runs, with these files in place of its own."""
    run = root / "saved"
    if not run.exists():
        shutil.copytree(SAVED, run)
    for path in SAVED.iterdir():
        if path.is_file():
            (run / path.name).write_bytes(made.get(path.name, path.read_bytes()))
    (run / "notes.json").write_bytes(made.get("notes.json", NOTES.encode()))
    (run / "training.log").write_bytes(made.get("training.log", LOG.encode()))
    return run


@fuzzed(40, 1000, made=files())
def test_readers_name_the_damage(tmp_path, made):
    run = with_files(tmp_path, made)
    names = {"loss": "loss", "reward": "reward", "step": "step"}
    for read in (read_run, read_metrics, last_metrics, latest_metrics, read_notes):
        found = outcome(lambda read=read: read(run))
        assert not isinstance(found, Exception) or (isinstance(found, RunError) and str(run) in str(found)), found
    outcome(lambda: first_latest(run, names))
    summary = RunSummary(run)
    for name in (name for name, made in vars(RunSummary).items() if isinstance(made, property | cached_property)):
        getattr(summary, name)  # never fails
    facts_of(RunSummary(run))
    outcome(lambda: load_json(run / "results.json"))


@fuzzed(25, 800, made=files(), width=st.integers(1, 200), word=TEXT)
def test_lists_show_what_is_left(tmp_path, made, width, word):
    with_files(tmp_path, made)
    rows = summaries_below(tmp_path)
    assert [row.name for row in rows] == ["saved"]
    for order in ORDERS:
        table_lines(COLUMNS, [cells_of(row) for row in ordered(rows * 2, order)], width)
    for term in (word, "step>1", "result<5", "age>1d", "size>1kb", f"note={word}", "tag!=x"):
        outcome(lambda term=term: filtered(rows, [term]))


@fuzzed(5, 200, made=files())
def test_the_command_shows_what_is_left(tmp_path, capsys, made):
    run = with_files(tmp_path, made)
    for words, allowed in ((["list"], {0}), (["list", "--json"], {0}), (["show", str(run)], {0, 1})):
        status = main(["runs", *words, "--output-dir", str(tmp_path)])
        said = capsys.readouterr()
        assert status in allowed and "unexpected" not in said.err, said.err


PAGES = [
    (runs_page, [("pick", "saved"), ("sort", "value")]),
    (run_page, [("run", "saved")]),
    (rollouts_page, [("run", "saved")]),
    (data_page, [("run", "saved")]),
    (evaluations_page, []),
]


def shown(root: Path, cache: Path) -> None:
    viewer = Viewer(root, cache)
    for page, pairs in PAGES:
        outcome(lambda page=page, pairs=pairs: str(page(viewer, Query(pairs))))
    viewer.warm()


@fuzzed(5, 60, made=files())
def test_pages_show_what_is_left(tmp_path, made):
    with_files(tmp_path / "runs", made)
    shown(tmp_path / "runs", tmp_path / "cache")


@fuzzed(4, 120, made=files())
def test_a_report_is_made_of_what_is_left(tmp_path, made):
    run = with_files(tmp_path, made)
    outcome(lambda: write_report(run, "a run", tmp_path / "report.html"))


# --- rollouts ---------------------------------------------------------------------------------------------------------

CELLS = (
    SCALAR.filter(lambda value: not isinstance(value, int) or -(2**63) <= value < 2**63).map(
        lambda value: value.encode(errors="replace").decode() if isinstance(value, str) else value
    )
    | st.binary(max_size=9)
    | JSON.map(json.dumps)
    | JSON.map(lambda value: json.dumps({"math": {"value": value, "verdict": value, "weight": 1.0}, "x": value}))
)
PLACES = [
    ("prompts", name) for name in ("row", "epoch", "prompt", "tokens", "facts")
] + [
    ("rollouts", name)
    for name in ("completion", "reward", "advantage", "finish_reason", "version", "parts", "tokens", "sampler_logprobs",
                 "old_logprobs", "new_logprobs", "advantages", "clipped", "step", "prompt_index")
]  # fmt: skip


def read_rollouts(run: Path) -> None:
    """Everything that there is to read in the rollouts of a run."""

    def read() -> None:
        with StoredRun(run, looking=True) as stored:
            calls = [stored.steps, lambda: [*stored.summary()], stored.evaluations, stored.last_evaluations]
            calls += [lambda: stored.prompts(1), lambda: stored.rollouts(1), lambda: stored.rollouts(1, 0)]
            calls += [lambda: stored.extremes(1, 2), lambda: stored.extremes(1, 2, "a"), lambda: stored.require(1)]
            for call in calls:
                found = outcome(call)
                assert not isinstance(found, Exception) or isinstance(found, RunError), found

    outcome(read)


@fuzzed(12, 500, content=damaged((SAVED / ROLLOUTS).read_bytes()) | st.binary(max_size=200), at=st.integers(0, 32_000))
def test_a_damaged_database_is_named(tmp_path, content, at):
    run = with_files(tmp_path, {})
    (run / ROLLOUTS).write_bytes(content[:at] + b"\xff\xff\xff" + content[at:][3:])
    read_rollouts(run)


@fuzzed(15, 500, place=st.sampled_from(PLACES), value=CELLS)
def test_any_value_in_the_database_is_read_or_named(tmp_path, place, value):
    run = with_files(tmp_path, {})
    change_rollouts(run, place, value)
    read_rollouts(run)


def change_rollouts(run: Path, place: tuple[str, str], value: object) -> None:
    table, column = place
    with closing(sqlite3.connect(run / ROLLOUTS)) as connection:
        where = "WHERE rowid = (SELECT MIN(rowid) FROM rollouts)" if table == "rollouts" else "WHERE prompt_index = 0"
        connection.execute(f"UPDATE OR IGNORE {table} SET {column} = ? {where}", (value,))
        connection.commit()


ROLLOUT_PAGES = [
    [],
    [("step", "1")],
    [("step", "1"), ("prompt", "0")],
    [("step", "1"), ("prompt", "0"), ("rollout", "0")],
]


@fuzzed(3, 80, place=st.sampled_from(PLACES), value=CELLS)
def test_pages_of_rollouts_show_what_is_left(tmp_path, place, value):
    run = with_files(tmp_path / "runs", {})
    change_rollouts(run, place, value)
    viewer = Viewer(tmp_path / "runs", tmp_path / "cache")
    for more in [*ROLLOUT_PAGES, [("words", "a")]]:
        outcome(lambda more=more: str(rollouts_page(viewer, Query([("run", "saved"), *more]))))
    outcome(lambda: write_report(run, "a run", tmp_path / "report.html"))


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.name for path in CHECKPOINT.iterdir()))
@fuzzed(6, 200, draw=st.data())
def test_any_damage_to_a_checkpoint_is_named(tmp_path, name, draw):
    whole = (CHECKPOINT / name).read_bytes()
    content = draw.draw(
        damaged(whole) | changed(json.loads(whole), ODD).map(lambda value: json.dumps(value, indent=1).encode() + b"\n")
        if name.endswith(".json")
        else damaged(whole)
    )
    checkpoint = tmp_path / "run/checkpoint-2"
    if not checkpoint.exists():
        shutil.copytree(CHECKPOINT, checkpoint)
    (checkpoint / name).write_bytes(content)
    problems = verify(checkpoint)
    (checkpoint / name).write_bytes(whole)
    assert (problems == []) == (content == whole) and all(name in problem for problem in problems)
    (checkpoint / name).write_bytes(content)
    found = outcome(lambda: newest_complete(tmp_path / "run"))
    assert isinstance(found, RunError) == (content != whole)
    if name == MANIFEST and content != whole:
        assert isinstance(outcome(lambda: saved_step(checkpoint)), RunError)
    if name.endswith(".safetensors"):
        tensors = outcome(lambda: load_tensors(checkpoint / name))
        assert isinstance(tensors, dict | DamagedError)
    (checkpoint / name).write_bytes(whole)
