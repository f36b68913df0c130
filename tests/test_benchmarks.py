"""The benchmarks' own code at a size for tests: what they patch and measure in posttrain is still there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ONE_STEP = """
import json, sys
from pathlib import Path

import pytest
from benchmarks import online_work as work
work.STEPS, work.WORK, work.LIMIT = {"grpo": 1}, {"grpo": (2, 3)}, 8
from benchmarks import online
found = online.run_posttrain("grpo", {"policy": Path(sys.argv[1])}, [[[5, 8, 2], [1, 4, 8]]], Path(sys.argv[2]))
print(json.dumps(found))
"""


@pytest.mark.slow
def test_the_online_benchmark_measures_a_step(scratch_model, tmp_path):
    """In a process of its own, for its timers stay in place of what they measure."""
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", ONE_STEP, str(scratch_model), str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=root, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["mean_length"] == pytest.approx(28 / 6)
    assert 0 < found["storing_seconds"] < found["seconds"] and 0 < found["sampling_seconds"] < found["seconds"]
