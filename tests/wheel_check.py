"""`make wheel`: that a wheel holds the whole package, and that README's example runs with what pip installed of it.

    python tests/wheel_check.py holds WHEEL
    python tests/wheel_check.py runs VENV

Both use the standard library alone.
"""

import gzip
import itertools
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
# After the file that README's first run shows, what it does with it; the names of the hub are local ones here.
COMMANDS = (
    ("--version",),
    ("config", "list"),
    ("eval", "--list"),
    ("plan", "hh.yaml", "{local}"),
    ("explore", "hh.yaml", "{local}"),
    ("train", "hh.yaml", "{local}", "--max-steps", "2"),
    ("train", "hh.yaml", "{local}", "--max-steps", "4", "--resume"),
    ("score", "runs/hh", "pairs.jsonl"),
    ("config", "new", "reward", "-o", "reward.yaml"),
)
MADE = ("runs/hh/final/model.safetensors", "runs/hh/report.html", "pairs.jsonl.scored.jsonl", "reward.yaml")


def package_files(root: Path) -> set[str]:
    """Every file of the package in a checkout."""
    found = (path for path in (root / "posttrain").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(root).as_posix() for path in found}


def wheel_files(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if name.startswith("posttrain/")}


def holds(wheel: Path, root: Path = ROOT) -> str:
    """What a wheel holds, in words. Raises SystemExit if that is not exactly the package in the checkout."""
    there, wanted = wheel_files(wheel), package_files(root)
    problems = [f"lacks {name}: add it to package-data in pyproject.toml" for name in sorted(wanted - there)]
    problems += [f"has {name}, which the checkout has not: delete build/lib" for name in sorted(there - wanted)]
    if problems:
        raise SystemExit("\n".join(f"{wheel.name} {problem}" for problem in problems))
    data = sum(not name.endswith(".py") for name in there)
    return f"{wheel.name} holds the package: {len(there) - data} modules, {data} data files"


def first_run() -> str:
    """The settings file that README's first run shows."""
    found = re.search(r"Save this as `hh\.yaml`.*?^```yaml\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    if found is None:
        raise SystemExit("README.md shows no hh.yaml")
    return found[1]


def runs(venv: Path) -> None:
    """Run README's example with the package of `venv`, from an empty folder, and print what was run and checked."""
    model, rows = SHARED / "models/stories260K", SHARED / "data/hh-harmless/train.jsonl.gz"
    if not (model.is_dir() and rows.is_file()):
        raise SystemExit(f"needs a model and pairs to run with: {model} and {rows}")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory(prefix="posttrain-wheel-") as name:
        home = Path(name)
        environment |= {"HF_HUB_OFFLINE": "1", "POSTTRAIN_CACHE": str(home / "cache")}

        def run(*command: str) -> str:
            done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
            return done.stdout.strip()

        code = "import posttrain, torch, transformers as t; print(posttrain.__file__, torch.__version__, t.__version__)"
        place, torch, transformers = run(str(venv / "bin/python"), "-c", code).rsplit(" ", 2)
        if not Path(place).is_relative_to(venv):
            raise SystemExit(f"{place} was imported, and not the wheel's package in {venv}")
        print(f"imported: {place} (torch {torch}, transformers {transformers})")
        (home / "hh.yaml").write_text(first_run())
        with gzip.open(rows, "rt", encoding="utf-8") as lines:
            (home / "pairs.jsonl").write_text("".join(itertools.islice(lines, 400)))
        local = (f"model={model}", "data.source=pairs.jsonl", "--batch-size", "2")
        for command in COMMANDS:
            words = [word for part in command for word in (local if part == "{local}" else (part,))]
            run(str(venv / "bin/posttrain"), *words)
            print("ran: posttrain", " ".join(command).replace(" {local}", ""))
        for file in MADE:
            if not (home / file).stat().st_size:
                raise SystemExit(f"{file} is empty")
        print("made:", ", ".join(MADE))


if __name__ == "__main__":
    verb, place = sys.argv[1], Path(sys.argv[2]).resolve()
    print(holds(place)) if verb == "holds" else runs(place)
