"""`posttrain runs`: what a list and a page show, and that only run folders are ever deleted."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_cli_config import processor_time

from posttrain.base.errors import RunError
from posttrain.base.words import in_units
from posttrain.cli import main
from posttrain.runs.finding import find_runs, size_of
from posttrain.runs.folder import never_stepped
from posttrain.runs.metrics import read_metrics
from posttrain.runs.rollouts import GIB, RolloutStore, StoredPrompt
from posttrain.runs.run import Run
from posttrain.runs.summary import RunSummary, read_run

CONFIG = """\
name: toy
models: [{path: some/long-folder/qwen3-0.6b-instruct, name: null}]
method: {type: dpo}
data: {source: Anthropic/hh-rlhf}
"""


def make(folder: Path, steps: int = 3, config: str = CONFIG) -> Path:
    with Run.create(folder, config, {"seed": 1}) as run:
        for step in range(1, steps + 1):
            run.log(step, {"loss": 1 / step, "epoch": step / 2})
        if steps:
            run.log(steps, {"eval_loss": 0.5, "epoch": steps / 2})
            run.save_checkpoint(steps, lambda f: (f / "model.bin").write_bytes(b"x" * 2500), limit=None)
            run.save_model(run.final, steps, lambda f: (f / "model.bin").write_bytes(b"x" * 1200))
        run.set_counters({"skipped_steps": 2})
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def test_the_list(here, capsys):
    make(Path("runs/first"))
    make(Path("runs/many/a-very-long-name-of-a-model-0.6b-instruct"), 1200)
    with pytest.raises(ZeroDivisionError), Run.create(Path("runs/broken"), CONFIG, {}):
        raise ZeroDivisionError("oh")
    make(Path("runs/damaged"))
    Path("runs/damaged/run.json").write_text('{"state": ')
    Path("runs/bare").mkdir()
    make(Path("runs/bare"), 0)
    Path("runs/bare/config.yaml").write_text("[unclosed")
    Path("runs/gone.tmp-77").mkdir()
    Path("runs/gone.tmp-77/run.json").write_text("{}")
    assert main(["runs", "list"]) == 0
    shown = capsys.readouterr().out
    print(shown)
    assert all(len(line) <= 80 for line in shown.splitlines())
    rows = {line.split()[0]: line.split() for line in shown.splitlines() if line.strip()}
    assert (
        rows["first"][1:2] == ["dpo"]
        and "finished" in rows["first"]
        and "validation" in rows["first"]
        and "0.5" in shown
    )
    assert "failed" in rows["broken"] and "damaged" in rows["damaged"] and "?" in rows["bare"]
    assert "1200" in shown and "gone" not in shown
    assert main(["runs", "list", "--output-dir", "elsewhere"]) == 0
    assert capsys.readouterr().out.endswith("there are no runs in elsewhere\n")


def test_one_run(here, capsys):
    make(Path("runs/toy"))
    for name in ("toy", "runs/toy", "./runs/toy/"):
        assert main(["runs", "show", name]) == 0
        shown = capsys.readouterr().out
        assert all(len(line) <= 80 for line in shown.splitlines())
        facts = dict(line.strip().split(maxsplit=1) for line in shown.splitlines() if len(line.split(maxsplit=1)) == 2)
        assert facts["state"] == "finished" and facts["step"] == "3, epoch 1.50" and facts["loss"] == "0.333333"
        assert facts["eval_loss"] == "0.5" and facts["data"] == "Anthropic/hh-rlhf"
        assert "qwen3-0.6b-instruct" in facts["model"] and "skipped steps" in shown
        assert "checkpoint-3" in facts and "final" in facts and "torch" in facts["versions"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "there is no run nothing; in runs there are group/a, toy"),
        ("to", "there is no run to; did you mean toy?"),
        ("tyo", "there is no run tyo; did you mean toy?"),
        ("group", "runs/group contains 1 run: name one, such as runs/group/a"),
        ("thesis", "thesis is not a run folder: it has no run.json"),
    ],
)
def test_what_is_no_run_is_refused(here, capsys, name, message):
    make(Path("runs/group/a"))
    time.sleep(0.01)
    make(Path("runs/toy"))
    Path("thesis").mkdir()
    Path("thesis/chapter.txt").write_text("years of work")
    for verb in (["show", name], ["rm", "--yes", "toy", name]):
        assert main(["runs", *verb]) == 1
        assert message in capsys.readouterr().err
    assert Path("runs/toy/run.json").is_file() and Path("thesis/chapter.txt").is_file()


def test_deleting(here, capsys, monkeypatch):
    outside = here / "precious"
    outside.mkdir()
    (outside / "file").write_text("years of work")
    make(Path("runs/toy"))
    Path("runs/toy/link").symlink_to(outside)
    Path("runs/toy/checkpoint-3/link").symlink_to(outside / "file")
    for answer, gone in (("n\n", False), ("y\n", True)):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        assert main(["runs", "rm", "toy"]) == 0
        shown = capsys.readouterr().out
        assert ("deleted runs/toy: dpo of qwen3-0.6b-instruct, finished at step 3" in shown) == gone
        assert Path("runs/toy").exists() != gone
    assert (outside / "file").read_text() == "years of work"
    make(Path("runs/toy"))
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["runs", "rm", "toy"]) == 1
    assert "not confirmed, so runs/toy is kept: give --yes" in capsys.readouterr().err
    assert main(["runs", "rm", "--yes", "toy"]) == 0 and find_runs(Path("runs")) == []


def test_deleting_refuses_links_other_runs_and_runs_at_work(here, capsys):
    make(Path("runs/toy"))
    Path("runs/link").symlink_to(here / "runs/toy")
    make(Path("runs/outer"))
    make(Path("runs/outer/inner"))
    with Run.create(Path("runs/busy"), CONFIG, {}):
        for name, message in (
            ("link", "is a link to"),
            ("outer", "contains other runs (inner)"),
            ("busy", f"in use by process {os.getpid()}"),
        ):
            assert main(["runs", "rm", "--yes", name]) == 1
            assert message in capsys.readouterr().err
            assert Path("runs", name, "run.json").is_file()


def test_sizes_and_units(tmp_path):
    folder = make(tmp_path / "x")
    (folder / "link").symlink_to("/usr")
    assert RunSummary(folder).size == size_of(folder) < 20_000
    assert RunSummary(folder).saved_models.keys() == {"checkpoint-3", "final"}
    sizes = [0, 999, 1000, 9_949, 9_951, 999_499, 999_500, 2_500_000_000, 7 * 10**15]
    assert [in_units(size) for size in sizes] == [
        "0 B", "999 B", "1.0 kB", "9.9 kB", "10 kB", "999 kB", "1.0 MB", "2.5 GB", "7000 TB",
    ]  # fmt: skip
    with pytest.raises(RunError, match="not a run folder"):
        read_run(tmp_path)


def test_runs_answer_in_half_a_second(here):
    for number in range(40):
        make(Path(f"runs/run-{number}"), 20)
    code = "import sys, time; from posttrain.cli import main; main(['runs', 'list']);"
    code += "print([time.process_time(), 'torch' in sys.modules], file=sys.stderr)"
    took = []  # seconds of this process alone, however busy others are
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        seconds, torch = json.loads(done.stderr.replace("False", "false").replace("True", "true"))
        took.append(seconds)
        assert not torch and "run-39" in done.stdout
    imports = processor_time("-c", "import pydantic, rich, typer, yaml")  # tells a slow machine
    print("seconds:", took, imports)
    assert min(took) < max(0.5, 4 * imports)


# Started anew: a run that made no step keeps no one from its name


def test_a_run_that_failed_before_its_first_step_is_begun_anew(tmp_path, caplog):
    folder = tmp_path / "x"
    with pytest.raises(RunError), Run.create(folder, CONFIG, {}) as run:
        run.log(0, {"eval_loss": 1.0})
        run.save_model(run.best, 0, lambda folder: None)
        (folder / "best.tmp-7").write_text("started")
        RolloutStore(folder, GIB, after=0).close()
        raise RunError("no such model")
    assert never_stepped(folder)
    with caplog.at_level("INFO", "posttrain"), Run.create(folder, "name: again\n", {}) as run:
        assert read_metrics(run.folder) == [] and run.config_yaml == "name: again\n"
        run.save_model(run.best, 1, lambda folder: None)
        assert not never_stepped(folder)  # a model that was trained
        run.log(1, {"loss": 1.0})
        run.set_state("failed", "later")
    assert "ended before its first step: it starts again" in caplog.text
    with pytest.raises(RunError, match="has a run already"):
        Run.create(folder, CONFIG, {})


def test_completions_of_a_step_are_kept_though_no_line_of_metrics_tells_of_it(tmp_path):
    """A run that was killed before tracking.logging_steps."""
    folder = tmp_path / "x"
    with pytest.raises(RunError), Run.create(folder, CONFIG, {}):
        store = RolloutStore(folder, GIB, after=0)
        store.add_evaluation(0, "validation", [])
        store.add(1, 0.1, [StoredPrompt(0, "1+1=", [1], {})], [])
        store.close()
        raise RunError("killed")
    assert not never_stepped(folder)
    with pytest.raises(RunError, match="has a run already"):
        Run.create(folder, CONFIG, {})


@pytest.mark.parametrize("what", ["notes.txt", "checkpoint-1", "checkpoint-1.old-5", "final", "best.set-aside"])
def test_nothing_but_a_runs_first_files_is_ever_replaced_unasked(tmp_path, what):
    with pytest.raises(RunError), Run.create(tmp_path / "x", CONFIG, {}):
        raise RunError("oh")
    (tmp_path / "x" / what).mkdir()
    assert not never_stepped(tmp_path / "x")
    with pytest.raises(RunError, match="has a run already"):
        Run.create(tmp_path / "x", CONFIG, {})


def test_a_run_killed_at_birth_is_begun_anew(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "run.json.tmp-99").write_text("{")
    (tmp_path / "x" / ".lock").write_text("process 99")
    Run.create(tmp_path / "x", CONFIG, {}).close()
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == [
        ".lock",
        "config.yaml",
        "run.json",
        "training.log",
    ]
