"""Imports go downwards: the floors and rooms are those of the picture in docs/architecture.md."""

import ast
import re
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
MOST_PACKAGES, MOST_WITH_SUBPACKAGES, MOST_MODULES = 27, 34, 10


def _floors() -> dict[str, tuple[int, int]]:
    """The place of each room: its floor, counted from the ground, and how far to the right it is."""
    picture = PAGE.partition("```text\n")[2].partition("```")[0]
    floors = [re.split(r"\s{2,}", line.strip()) for line in reversed(picture.splitlines())]
    return {room: (floor, -i) for floor, (_, *rooms) in enumerate(floors) for i, room in enumerate(rooms)}


PLACES = _floors()
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for top in ("posttrain", "benchmarks")
    for path in sorted((ROOT / top).rglob("*.py"))
}


def imports_of(module: str) -> set[str]:
    """The modules of FILES that one imports, wherever in the file the import stands; but for the package itself."""
    found = set()
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: write absolute imports"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in FILES else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name in FILES} - {module, "posttrain"}


IMPORTS = {module: imports_of(module) for module in FILES}


def room_of(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("module", [m for m in FILES if m.startswith("posttrain.") and not m.endswith("__main__")])
def test_imports_go_down(module):
    """To floors below, and on its own floor to rooms further right."""
    room = room_of(module)
    assert room in PLACES, f"{room} is no room of the picture in docs/architecture.md: give it a place"
    for other in IMPORTS[module]:
        if other.startswith("posttrain.") and room_of(other) != room:
            assert PLACES[room_of(other)] < PLACES[room], f"{module} imports {other}, which is not below it"


def test_no_modules_import_one_another():
    try:
        TopologicalSorter(IMPORTS).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def _used(tree: ast.Module) -> set[tuple[str, str]]:
    """The names that a module takes from others of FILES: (module, name), imported or as `module.name`."""
    named, modules = set(), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in FILES:
                    modules[alias.asname or alias.name] = whole
                elif node.module in FILES:
                    named.add((node.module, alias.name))
        elif isinstance(node, ast.Import):
            modules |= {alias.asname: alias.name for alias in node.names if alias.asname and alias.name in FILES}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            named.add((modules[node.value.id], node.attr))
    return named


def test_benchmarks_use_what_there_is():
    """They run for hours and seldom, and types are checked in posttrain/ only: a name that is gone shows up here."""
    gone = []
    for file in sorted((ROOT / "benchmarks").rglob("*.py")):
        for module, name in sorted(_used(ast.parse(file.read_text(encoding="utf-8")))):
            if module.startswith("posttrain"):
                known = hasattr(import_module(module), name)
            else:
                known = re.search(rf"\b{name}\b", FILES[module].read_text(encoding="utf-8"))
            if not known:
                gone.append(f"{file.relative_to(ROOT)}: {module}.{name}")
    assert not gone


def test_the_house_stays_small_enough_to_know():
    packages = [path.parent for path in (ROOT / "posttrain").rglob("__init__.py")]
    top = {path.name for path in packages if path.parent == ROOT / "posttrain"}
    modules = {path.stem for path in (ROOT / "posttrain").glob("*.py")}
    assert len(top) <= MOST_PACKAGES and len(packages) - 1 <= MOST_WITH_SUBPACKAGES and len(modules) <= MOST_MODULES
    assert PLACES.keys() == top | modules - {"__init__", "__main__"}
    assert len(PAGE.split()) < 900, "docs/architecture.md is to be kept in the head"
