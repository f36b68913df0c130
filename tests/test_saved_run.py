"""A run saved by the version before the packages were moved: it resumes, and its rollouts are read."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.runs.files import load_json
from posttrain.runs.receipt import group_receipt
from posttrain.runs.stored_rollouts import StoredRun
from posttrain.ui.rollouts_page import rollouts_page
from posttrain.ui.viewer import Viewer, attempt

SAVED = Path(__file__).parent / "saved_run"


@pytest.fixture
def saved(tmp_path, monkeypatch) -> Path:
    """A copy of the run, in the working directory: a GRPO run of two steps with a checkpoint and rollouts."""
    shutil.copytree(SAVED, tmp_path / "home")
    (tmp_path / "home/benchmarks").mkdir()
    for name in ("__init__.py", "sums.py"):  # a function of settings comes from a file beside them
        shutil.copy(SAVED.parents[1] / "benchmarks" / name, tmp_path / "home/benchmarks")
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path / "home")
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home" / "run"


@pytest.mark.parametrize("words", ["run.yaml training.max_steps=4 --resume run", "--resume run training.max_steps=4"])
def test_a_run_of_an_earlier_version_resumes(saved, words):
    """From the checkpoint's step on, with the metrics of the steps before kept; the settings file is optional."""
    before = (saved / "metrics.jsonl").read_text()
    assert main(["train", *words.split()]) == 0
    after = (saved / "metrics.jsonl").read_text()
    assert after.startswith(before)
    assert [json.loads(line)["step"] for line in after.splitlines()] == [1, 2, 3, 4]
    assert load_json(saved / "run.json")["state"] == "finished"


def test_its_rollouts_are_shown_and_regraded(saved, capsys):
    """Each number of the receipt is printed by `why`, in 80 columns, and stands on the page."""
    assert main(["why", "run", "--step", "2", "--prompt", "0"]) == 0
    shown = capsys.readouterr().out
    assert "0+0=" in shown and "34+521" in shown and "0.8077" in shown
    assert main(["why", "run", "--step", "2", "--prompt", "0", "--rollout", "0"]) == 0
    receipt = capsys.readouterr().out
    with StoredRun(saved) as stored:
        completion = group_receipt(stored, 2, 0).completion(0)
    for values in (completion.numbers.push, *completion.numbers.columns.values()):
        assert all(f"{abs(value):.4f}" in receipt for value in values)
    page = attempt(rollouts_page, Viewer(saved.parent), "?run=run&step=2&prompt=0&rollout=0")
    assert all(f'title="{at}: {value:+.4g}"' in page for at, value in enumerate(completion.numbers.push))
    assert main(["regrade", "run", "--reward", "{type: length, target: 3}"]) == 0
    assert re.search(r"\d+ of 32 advantages change sign", capsys.readouterr().out)


def test_its_receipt_needs_no_torch(saved):
    code = (
        "import sys; from posttrain.cli import main; "
        "status = main(['why', 'run', '--step', '2', '--prompt', '0', '--rollout', '0']); "
        "print(status, [m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout
