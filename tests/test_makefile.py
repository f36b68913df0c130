"""What `make` would install: the quickstart the packages of posttrain alone, everything else those of its tests too."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def clone(tmp_path):
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-vllm.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def installed(clone, target):
    """What a dry run of the target would give to pip, torch's exact version and pip itself left out."""
    done = subprocess.run(["make", "-n", target], cwd=clone, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if " -e " in line and "build/vllm" not in line]
    assert all(" -c constraints.txt " in line for line in lines)
    return [line.partition(" -e ")[2].strip("'") for line in lines]


def test_each_command_installs_what_it_needs_and_once(clone):
    assert installed(clone, "quickstart") == ["."]
    for target in ("test", "lint", "slow", "faults", "bench", "learn"):
        assert installed(clone, target) == [".", ".[bench,dev,gpu-dev]"], target
    (clone / ".venv").mkdir()
    (clone / ".venv" / ".installed").touch()
    assert installed(clone, "quickstart") == [] and installed(clone, "test") == [".[bench,dev,gpu-dev]"]
    (clone / ".venv" / ".installed-dev").touch()
    assert installed(clone, "quickstart") == [] == installed(clone, "test")
