"""The benchmarks' own code at a size for tests: what they patch and measure in posttrain is still there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.house import APART, ROOT, Trace, sizes, traced
from posttrain.base.files import path_of
from posttrain.base.words import counted

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


def test_the_figures_of_a_small_house(tmp_path):
    """Lines, files, modules with one importer, a function of 61 lines; other files count nothing."""
    package = tmp_path / "toy"
    long = "def long():\n" + "    x = 1\n" * 60
    files = {
        "__init__.py": "", "a.py": "import toy.b\nfrom toy.room import c\n", "b.py": "from toy.room.c import long\n",
        "room/__init__.py": "", "room/c.py": f"{long}\n\nasync def short():\n    from toy.a import x\n",
        "room/style.css": "a {}\nb {}\n", "room/page.html": "<p>\n",
    }  # fmt: skip
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    found = {size.name: size.value for size in sizes(package)}
    assert list(found.values()) == [2 + 1 + 65 + 2, 6, 2, 1, 1, 1, 2], found
    assert all(size.goal is not None for size in sizes(package))


def test_a_trace_goes_from_one_call_to_another():
    """Files of the package alone, each once, and nothing before the first call or after the last."""

    def begin(work):
        return work()

    def end():
        return None

    def path():
        counted(1, "row")
        counted(2, "row")
        end()
        path_of("after")

    with traced(Trace(ROOT / "posttrain", begin, end, skip=1)) as trace:
        begin(lambda: path_of("skipped"))
        begin(path)
        begin(path)
    assert trace.files == ["base/words.py"]
    with traced(Trace(ROOT, begin, end)) as trace:
        begin(path)
    assert trace.files == ["tests/test_benchmarks.py", "posttrain/base/words.py"]
    assert all((ROOT / "posttrain" / name).exists() for name in APART), "what is left out is still there"


@pytest.mark.slow
def test_a_row_and_an_answer_are_followed():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.house"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    figures = {cells[0]: cells[1:] for cells in lines if len(cells) == 3}
    for name in ("a row to AdamW.step", "an item to its stored verdict"):
        [(count, goal)] = [cells for key, cells in figures.items() if name in key and cells[1]]
        assert 5 < int(count) <= int(goal.removeprefix("≤ ")), done.stdout


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
