"""Imports go downwards only: each module may import its own layer's package and the layers below it."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "posttrain"

# Lowest first. Modules on one line may not import one another.
LAYERS = [
    ["bins", "distributions", "latex", "pieces", "plain_yaml", "system", "terminal", "words"],
    ["console"],
    ["caches", "errors", "helpers", "hub", "imports", "memory", "progress", "threads"],
    ["atomic", "extras", "paths", "signals"],
    ["heartbeats", "rendezvous", "shared_sums"],
    ["launch", "ranks"],
    ["output"],
    ["config"],
    ["losses"],
    ["batch"],
    ["data"],
    ["models", "store"],
    ["scoring", "optim", "grading", "reports"],
    ["judging"],
    ["rewards", "engines", "distillation"],
    ["rollout"],
    ["functional"],
    ["evaluation"],
    ["training", "comparing"],
    ["recipes"],
    ["planning", "inspection", "managing", "serving"],
    ["viewing"],
    ["export"],
    ["runner"],
    ["doctor", "quickstart", "sweep", "verify"],
    ["api", "ui"],
    ["cli"],
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def unit_of(path: Path) -> str:
    """The layer unit a file belongs to: its first path part below the package."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_units(path: Path) -> set[str]:
    """The units a file imports, wherever in the file the import stands."""
    units = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            modules = [node.module or ""] if node.module != "posttrain" else [f"posttrain.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        units |= {m.split(".")[1] for m in modules if m.startswith("posttrain.")}
    return units - {"__version__"}


FILES = sorted(p for p in ROOT.rglob("*.py") if p.name != "__init__.py" or p.parent != ROOT)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down(path):
    unit = unit_of(path)
    if unit == "__main__":
        return
    assert unit in LEVEL, f"{unit} has no place in LAYERS: give it one"
    for other in imported_units(path) - {unit}:
        assert LEVEL[other] < LEVEL[unit], f"{path.relative_to(ROOT)} imports {other}, which is not below {unit}"


def test_every_module_is_named_in_the_architecture():
    """docs/architecture.md lists the layers: each unit, and in a package's entry each of its modules."""
    page = (ROOT.parent / "docs/architecture.md").read_text(encoding="utf-8")
    layers = page.partition("## Layers")[2].partition("```text\n")[2].partition("```")[0]
    entries = {name: words for name, words in re.findall(r"^(\w+)/((?:.*\n)(?: .*\n)*)", layers, re.MULTILINE)}
    missing = []
    for path in FILES:
        unit, stem = unit_of(path), path.stem
        if path.parent == ROOT:
            named = stem.startswith("__") or re.search(rf"\b{stem}\.py\b", layers)
        else:
            name = path.parent.name if stem == "__init__" and path.parent.parent != ROOT else stem
            named = unit in entries and (name == "__init__" or re.search(rf"\b{name}\b", entries[unit]))
        if not named:
            missing.append(str(path.relative_to(ROOT)))
    assert missing == [], "name them under Layers in docs/architecture.md"
