"""Runs that started before `behavior_version` was recorded, as that version left them: they resume as they began.

`make_earlier_runs.py` has how they were made. New runs hold out other rows, drop nulls of tool calls, continue the
adapter of a stage, add a loss of routers, and read `use_ref_model: false` as the policy at its start.
"""

import json
import tarfile
from pathlib import Path

import pytest
from make_earlier_runs import RUNS, metrics

from posttrain.cli import main
from posttrain.config import load

TIMES = ("seconds", "per_second", "time", "memory", "num_workers")


def compared(lines: list[dict]) -> list[dict]:
    """What a run computes, without how long it took."""
    return [{name: value for name, value in line.items() if not any(part in name for part in TIMES)} for line in lines]


@pytest.mark.parametrize(
    "name, by", [(name, "folder") for name in RUNS] + [("sft", "settings"), ("stages", "settings")]
)
def test_an_earlier_run_resumes_as_it_began(name, by, monkeypatch, tmp_path):
    """Its metrics are those of that version's own uninterrupted run, on the same data, to rounding."""
    home = tmp_path / "home"
    with tarfile.open(Path(__file__).parent / "earlier_runs.tar.xz") as archive:
        archive.extractall(home, filter="data")
    monkeypatch.chdir(home)
    command = ["--resume", f"runs/{name}"] if by == "folder" else [f"{name}.yaml", "--resume"]
    assert main(["train", *command]) == 0
    expected = json.loads(Path("expected.json").read_text())[name]
    found = metrics(Path("runs") / name)
    assert found.keys() == expected.keys()
    for run, lines in expected.items():
        assert [line["step"] for line in found[run]] == [line["step"] for line in lines]
        for line, new in zip(compared(lines), compared(found[run]), strict=True):
            for metric, value in line.items():
                assert new[metric] == pytest.approx(value, rel=2e-3, abs=2e-4), (run, line["step"], metric)
    saved = load(Path("runs") / name / "config.yaml").stages
    assert {stage.config.behavior_version for stage in saved} == {1}
