"""The size of the package, and how many files a row and an answer pass through: `python -m benchmarks.house`.

Counts lines, files, packages, modules that only one other module imports, and long functions of `posttrain/`. Then
makes one ordinary step of DPO and one evaluation of a tiny random model, and lists the files of `posttrain/` in which a
function was called: from a row of the data to the call of `AdamW.step`, and from an evaluation's item to its stored
verdict. `--sizes` only counts, without PyTorch. Prints the figures with their goals; writes nothing.
"""

import argparse
import ast
import inspect
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KINDS = (".py", ".js", ".css")
LONG = 60  # maximum lines of a function
# Settings and logging, which every path uses; not counted.
APART = ("config/", "base/console.py", "base/terminal.py", "runs/progress.py", "runs/logs.py")
PAIRS = [{"prompt": f"{a} + 1 = ", "chosen": str(a + 1), "rejected": str(a)} for a in range(8)]
# The code that answers a prompt; not counted in the figure of an evaluation.
ENGINE = ("engines/", "models/", "scoring.py", "batch.py")
QUESTIONS = [{"question": f"{a} + 1 = ", "answer": f"#### {a + 1}"} for a in range(2)]


@dataclass(frozen=True, slots=True)
class Size:
    """A figure of the package, and its maximum."""

    name: str
    value: int
    goal: int | None = None


def sizes(package: Path) -> list[Size]:
    """The figures that can be counted from the files."""
    files = [path for path in sorted(package.rglob("*")) if path.suffix in KINDS]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    trees = {path: ast.parse(text) for path, text in texts.items() if path.suffix == ".py"}
    packages = [path.parent for path in trees if path.name == "__init__.py" and path.parent != package]
    top = [path for path in packages if path.parent == package]
    modules = [path for path in trees if path.parent == package and not path.stem.startswith("__")]
    return [
        Size("lines of .py, .js and .css", sum(len(text.splitlines()) for text in texts.values()), 60_000),
        Size("files", len(files), 360),
        Size("modules that only one other imports", len(single_importers(package, trees)), 60),
        Size(f"functions above {LONG} lines", len(long_functions(trees.values())), 0),
        Size("packages at the top", len(top), 27),
        Size("packages with subpackages", len(packages), 34),
        Size("modules at the top", len(modules), 10),
    ]


def single_importers(package: Path, trees: dict[Path, ast.Module]) -> list[str]:
    """The modules that exactly one other module of the package imports, anywhere in its file."""
    names = {module_name(package, path): tree for path, tree in trees.items()}
    importers = Counter(imported for name, tree in names.items() for imported in imports(name, tree, names))
    return sorted(name for name, count in importers.items() if count == 1)


def imports(module: str, tree: ast.Module, known: Iterable[str]) -> set[str]:
    """The modules among `known` that a module imports, except itself."""
    found: set[str] = set()
    known = {*known}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            parts = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {part if part in known else str(node.module) for part in parts}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return (found & known) - {module}


def long_functions(trees: Iterable[ast.Module], limit: int = LONG) -> list[str]:
    """The names of functions with more than `limit` lines, not counting decorators."""
    return [
        node.name
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= limit
    ]


def module_name(package: Path, path: Path) -> str:
    """The name under which a file of the package is imported."""
    return ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")


@dataclass
class Trace:
    """Records the files of a package in which functions are called, from a call of `first` to the next call of `last`.

    The first `skip` calls of `first` do not start it. Bodies of modules and classes do not count as functions.
    """

    package: Path
    first: Callable[..., Any]
    last: Callable[..., Any]
    skip: int = 0
    files: list[str] = field(default_factory=list)  # each once, in the order of the first call
    _is_on: bool = False
    _is_over: bool = False

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        """For `sys.setprofile`."""
        if event != "call" or self._is_over:
            return
        code = frame.f_code
        if code is code_of(self.first) and not self._is_on:
            self._is_on, self.skip = self.skip == 0, self.skip - 1
        if self._is_on and code.co_flags & inspect.CO_NEWLOCALS:
            self._note(code.co_filename)
            self._is_over = code is code_of(self.last)

    def _note(self, filename: str) -> None:
        path = Path(filename)
        if path.is_relative_to(self.package):
            name = path.relative_to(self.package).as_posix()
            if name not in self.files and not name.startswith(APART):
                self.files.append(name)


@cache
def code_of(function: Callable[..., Any]) -> CodeType:
    """The code of a function without its decorators."""
    return inspect.unwrap(function).__code__


@contextmanager
def traced(trace: Trace):
    """Trace the block and the threads that it starts."""
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # pyright: ignore[reportArgumentType]


def write_inputs(folder: Path) -> dict[str, Any]:
    """Write a tiny random model with its tokenizer, pairs and questions. Returns the settings of two DPO steps."""
    from posttrain.quickstart.model import make_model

    make_model(folder / "model", seed=0)
    for name, rows in (("pairs", PAIRS), ("questions", QUESTIONS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "name": "step",
        "output_dir": str(folder),
        "model": {"path": str(folder / "model")},
        "method": {"type": "dpo"},
        "data": {"source": str(folder / "pairs.jsonl"), "template": "none", "max_length": 64},
        "training": {"batch_size": 4, "max_steps": 2},
        "devices": {"type": "cpu"},
    }


def step_of_dpo(folder: Path) -> list[str]:
    """The files used from a row to `AdamW.step`, in the second step, because the first step also checks the model."""
    from posttrain import runner
    from posttrain.config import load
    from posttrain.data import Dataset
    from posttrain.optim.adamw import AdamW

    settings = write_inputs(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(settings))
    rows = settings["training"]["batch_size"]
    with traced(Trace(ROOT / "posttrain", Dataset.__getitem__, AdamW.step, skip=rows)) as trace:
        runner.train(load(file).config)
    return trace.files


def verdict_of_item(folder: Path) -> list[str]:
    """The files used from an evaluation's items, with their prompts, to the stored verdict of the first item.

    The rule itself runs in a separate process, which is not traced.
    """
    from posttrain.config import DevicesConfig, ModelConfig
    from posttrain.config.options import EvalOptions
    from posttrain.evaluation.evaluate import evaluate
    from posttrain.evaluation.items import load_items
    from posttrain.evaluation.records import EvaluationStore
    from posttrain.evaluation.running import run
    from posttrain.evaluation.suite import find_suite, with_settings

    suite = with_settings(find_suite("gsm8k"), {"source": str(folder / "questions.jsonl")})
    options = EvalOptions(max_completion_length=4, workers=1)
    model, devices = ModelConfig(path=str(folder / "model")), DevicesConfig(type="cpu")
    with traced(Trace(ROOT / "posttrain", run, EvaluationStore.add)) as trace:
        evaluate(model, "model", [load_items(suite)], options, devices, folder / "evaluation")
    return trace.files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", action="store_true", help="only count, without PyTorch")
    parser.add_argument("--files", action="store_true", help="name the files that were entered")
    asked = parser.parse_args()
    found, entered = sizes(ROOT / "posttrain"), {}
    if not asked.sizes:
        with TemporaryDirectory() as name:
            folder = Path(name)
            entered["files entered from a row to AdamW.step, DPO"] = step_of_dpo(folder), 18
            files = verdict_of_item(folder)
            outside = [file for file in files if not file.startswith(ENGINE)]
            entered["files entered from an item to its stored verdict, engine and model apart"] = outside, 12
            entered["the same with engine and model"] = files, None
    found += [Size(name, len(files), goal) for name, (files, goal) in entered.items()]
    print("| | now | goal |\n|---|---|---|")
    for size in found:
        print(f"| {size.name} | {size.value:,} | {'' if size.goal is None else f'≤ {size.goal:,}'} |")
    for name, (files, _) in entered.items() if asked.files else ():
        print(f"\n{name}:", *files, sep="\n  ")


if __name__ == "__main__":
    main()
