"""What `make` would install: the quickstart the packages of posttrain alone, everything else those of its tests too."""

import re
import shutil
import subprocess
import tomllib
import zipfile
from pathlib import Path

import pytest
import wheel_check

ROOT = Path(__file__).parents[1]


@pytest.fixture
def clone(tmp_path):
    for name in (
        "Makefile",
        "pyproject.toml",
        "constraints.txt",
        "constraints-vllm.txt",
        "constraints-env.txt",
        "constraints-eval.txt",
        "constraints-old.txt",
    ):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def installed(clone, target):
    """What a dry run of the target would give to pip, without torch's exact version and pip itself."""
    done = subprocess.run(["make", "-n", target], cwd=clone, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if " -e " in line and "build/vllm" not in line]
    assert all(" -c constraints.txt " in line for line in lines)
    return [line.partition(" -e ")[2].strip("'") for line in lines]


def test_each_command_installs_what_it_needs_and_once(clone):
    assert installed(clone, "quickstart") == ["."]
    for target in ("test", "lint", "slow", "faults", "prove", "bench", "learn"):
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


def test_new_versions_are_what_pip_takes_but_for_torch(clone):
    done = subprocess.run(["make", "-n", "test-new"], cwd=clone, capture_output=True, text=True, check=True)
    torch, ours = [line for line in done.stdout.splitlines() if "^torch==" in line or " -e " in line]
    assert torch.startswith("build/new/bin/pip install") and "constraints.txt" in torch
    assert ours == "build/new/bin/pip install --quiet -e '.[bench,dev,gpu-dev]'"


def test_the_suite_runs_with_the_kernels_of_other_processors_and_on_other_weights(clone):
    done = subprocess.run(["make", "-n", "test-processors"], cwd=clone, capture_output=True, text=True, check=True)
    runs = [line.split() for line in done.stdout.splitlines() if "POSTTRAIN_TEST_SEED" in line]
    assert [run[0] for run in runs] == [
        "ATEN_CPU_CAPABILITY=default",
        "ATEN_CPU_CAPABILITY=avx2",
        "ONEDNN_MAX_CPU_ISA=AVX2",
    ]
    assert len({run[1] for run in runs}) == 3 and all("not slow and not ui" in " ".join(run) for run in runs)


@pytest.mark.parametrize(
    ("name", "tests", "packages", "others"),
    [
        ("eval", "test_interoperability.py", {"inspect_ai", "lm_eval"}, {"fsspec", "python-dateutil"}),
        ("env", "test_environment_packages.py", {"mcp", "openenv-core", "skyrl-gym", "verifiers"}, set()),
    ],
)
def test_other_packages_have_an_environment_of_their_own_with_our_versions(clone, name, tests, packages, others):
    done = subprocess.run(["make", "-n", f"test-{name}"], cwd=clone, capture_output=True, text=True, check=True)
    commands = [line for line in done.stdout.splitlines() if line.startswith(f"build/{name}/bin/")]
    file = f"constraints-{name}.txt"
    assert [line.partition("pip install --quiet ")[2] for line in commands[1:-1]] == [
        f"\"$(grep '^torch==' {file})\"", f"--no-deps -r {file}", "--no-deps -e .",
    ]  # fmt: skip
    assert commands[-1].startswith(f"build/{name}/bin/python -m pytest tests/{tests}")
    ours, theirs = (
        dict(line.split("==") for line in (clone / each).read_text().splitlines() if not line.startswith("#"))
        for each in ("constraints.txt", file)
    )
    assert {*packages, "torch", "transformers"} <= set(theirs)
    assert {each for each in set(ours) & set(theirs) if ours[each] != theirs[each]} == others


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


# --- the wheel: `make wheel` builds it, installs it by itself and runs README's example -----------------------------


def test_the_wheel_is_checked_before_it_is_installed_and_run(clone):
    done = subprocess.run(
        ["make", "--no-print-directory", "-n", "wheel"], cwd=clone, capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stdout.splitlines() if "wheel" in line]
    [built, holds, torch, installed, runs] = [
        line for line in lines if re.search("pip wheel|check|pip install .*[=c]", line)
    ]
    assert "--no-deps" in built and "holds" in holds and "^torch==" in torch and "build/wheel/venv" in runs
    assert "-c constraints.txt build/wheel/posttrain-*.whl" in installed and " -e " not in installed
    assert "rm -rf build/lib build/wheel" in lines[0]  # else a wheel could hold modules that are gone


def test_the_wheel_would_hold_every_file_of_the_package():
    """What setuptools takes: the modules of folders with an `__init__.py`, and the files of package-data."""
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["posttrain"]
    taken = {path for pattern in patterns for path in (ROOT / "posttrain").glob(pattern)}
    assert all(any((ROOT / "posttrain").glob(pattern)) for pattern in patterns)
    for path in (ROOT / "posttrain").rglob("*.py"):
        above = path.relative_to(ROOT).parents
        if all((ROOT / folder / "__init__.py").is_file() for folder in list(above)[:-1]):
            taken.add(path)
    assert {path.relative_to(ROOT).as_posix() for path in taken} == wheel_check.package_files(ROOT)


def test_a_wheel_that_is_not_the_package_is_refused(tmp_path):
    for name in ("posttrain/__init__.py", "posttrain/page.css", "posttrain/__pycache__/a.pyc", "tests/test_a.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def made(*names: str) -> Path:
        with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
            for name in (*names, "posttrain-0.1.0.dist-info/METADATA"):
                archive.writestr(name, "")
        return tmp_path / "a.whl"

    said = wheel_check.holds(made("posttrain/__init__.py", "posttrain/page.css"), tmp_path)
    assert said == "a.whl holds the package: 1 modules, 1 data files"
    with pytest.raises(SystemExit, match=r"lacks posttrain/page.css: add it to package-data"):
        wheel_check.holds(made("posttrain/__init__.py"), tmp_path)
    with pytest.raises(SystemExit, match=r"has posttrain/gone.py, which the checkout has not"):
        wheel_check.holds(made("posttrain/__init__.py", "posttrain/page.css", "posttrain/gone.py"), tmp_path)


def test_what_runs_with_the_wheel_is_readmes_first_run():
    page = (ROOT / "README.md").read_text(encoding="utf-8").partition("## A first run")[2].partition("\n## ")[0]
    block = re.search(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    shown = [re.sub(r"(\d)00\b", r"\1", line.partition("#")[0]).split()[1:] for line in block[1].splitlines()]
    run = [[word for word in command if word != "{local}"] for command in wheel_check.COMMANDS]
    assert len(shown) >= 6 and [command for command in shown if command not in run] == []
    assert "method: {type: dpo" in wheel_check.first_run()
