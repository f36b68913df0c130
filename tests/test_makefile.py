"""What `make` would install: the quickstart the packages of posttrain alone, everything else those of its tests too."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def clone(tmp_path):
    for name in (
        "Makefile",
        "pyproject.toml",
        "constraints.txt",
        "constraints-vllm.txt",
        "constraints-eval.txt",
        "constraints-old.txt",
    ):
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


def test_old_versions_have_an_environment_and_constraints_of_their_own(clone):
    done = subprocess.run(["make", "-n", "test-old"], cwd=clone, capture_output=True, text=True, check=True)
    [line] = [line for line in done.stdout.splitlines() if " -e " in line]
    assert line.startswith("build/old/bin/pip install") and " -c constraints-old.txt -e '.[bench,dev]'" in line
    old = dict(line.split("==") for line in (clone / "constraints-old.txt").read_text().splitlines())
    allowed = tomllib.loads((clone / "pyproject.toml").read_text())["project"]["dependencies"]
    for name in ("torch", "transformers"):
        [oldest] = [text.removeprefix(f"{name}>=").split(",")[0] for text in allowed if text.startswith(f"{name}>=")]
        assert old[name].startswith(oldest)


def test_evaluation_packages_have_an_environment_of_their_own_with_our_versions(clone):
    done = subprocess.run(["make", "-n", "test-eval"], cwd=clone, capture_output=True, text=True, check=True)
    commands = [line for line in done.stdout.splitlines() if line.startswith("build/eval/bin/")]
    assert [line.partition("pip install --quiet ")[2] for line in commands[1:-1]] == [
        "\"$(grep '^torch==' constraints-eval.txt)\"", "--no-deps -r constraints-eval.txt", "--no-deps -e .",
    ]  # fmt: skip
    assert commands[-1].startswith("build/eval/bin/python -m pytest tests/test_interoperability.py")
    ours, theirs = (
        dict(line.split("==") for line in (clone / name).read_text().splitlines() if not line.startswith("#"))
        for name in ("constraints.txt", "constraints-eval.txt")
    )
    assert {"inspect_ai", "lm_eval", "torch", "transformers"} <= set(theirs)
    assert {name for name in set(ours) & set(theirs) if ours[name] != theirs[name]} == {"fsspec", "python-dateutil"}


def test_the_kit_takes_the_wheels_that_were_brought_along(clone):
    def commands() -> str:
        return subprocess.run(["make", "-n", "gpu"], cwd=clone, capture_output=True, text=True, check=True).stdout

    assert "PYTHONPATH=build/gpu-site python3 -m benchmarks.gpu" in commands()
    (clone / ".venv/bin").mkdir(parents=True)
    (clone / ".venv/bin/python").touch()
    assert "PYTHONPATH=build/gpu-site .venv/bin/python -m benchmarks.gpu" in commands()
    wheels = subprocess.run(["make", "-n", "wheels"], cwd=clone, capture_output=True, text=True, check=True).stdout
    assert "--python-version 3.12" in wheels and "-r benchmarks/gpu/wheels.txt" in wheels
    assert "--platform manylinux_2_28_x86_64" in wheels and "--platform manylinux2014_x86_64" in wheels
