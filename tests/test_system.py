"""Without what POSIX has, as on Windows: everything imports, and a run trains, grades, saves and resumes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.runs.checkpoint import list_checkpoints, verify
from posttrain.runs.metrics import read_metrics

PLACE = Path(__file__).with_name("as_on_windows")


@pytest.mark.slow
def test_a_run_without_posix(sums_home, tmp_path):
    settings = {
        "name": "run",
        "output_dir": str(tmp_path),
        "model": str(sums_home / "model"),
        "method": {"type": "grpo", "num_generations": 4},
        "rewards": [{"type": "math", "weight": 0.5}, {"type": "python", "function": "benchmarks.sums:exact"}],
        "data": {"source": str(sums_home / "train.jsonl"), "template": "none", "max_length": 24},
        "rollout": {"max_completion_length": 6},
        "training": {"batch_size": 4, "lr_scheduler_type": "constant", "warmup_steps": 0},
        "checkpoint": {"save_steps": 1},
        "tracking": {"logging_steps": 1},
        "devices": {"type": "cpu"},
    }
    (tmp_path / "run.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [sys.executable, str(PLACE / "trains.py"), str(tmp_path / "run.json")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(PLACE), str(PLACE.parents[1])])},
        capture_output=True, text=True, timeout=300, cwd=PLACE.parents[1],  # where the reward is
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["status"] == [0, 0] and said["has"] == [False, False, False]
    assert said["imported"] > 250 and len(said["left"]) <= 2, said["left"]
    run = tmp_path / "run"
    assert [line["step"] for line in read_metrics(run)] == [1, 2, 3, 4]
    assert all(not verify(checkpoint) for checkpoint in list_checkpoints(run))
    assert b"\r\n" not in (run / "metrics.jsonl").read_bytes()
    assert all(line.get("rewards/left_out", 0) == 0 for line in read_metrics(run)), "every completion was graded"
