"""What is installed with posttrain: no known vulnerabilities, an audit that is never clean by mistake, licences."""

import re
import stat
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import supply_audit
import supply_licences
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
CONSTRAINTS = sorted(ROOT.glob("constraints*.txt"))
ADVISORY = re.compile(r"\b(CVE-\d{4}-\d{4,}|GHSA(-\w{4}){3}|PYSEC-\d{4}-\d+)\b")


# --- versions ---------------------------------------------------------------------------------------------------------


def declared() -> dict[str, list[Requirement]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    del extras["gpu-dev"]  # for the tests of kernels alone: vLLM's environment has its own triton
    lines = [*project["dependencies"], *(line for extra in extras.values() for line in extra)]
    found: dict[str, list[Requirement]] = {}
    for one in map(Requirement, lines):
        found.setdefault(canonicalize_name(one.name), []).append(one)
    return found


@pytest.mark.parametrize("file", CONSTRAINTS, ids=lambda file: file.stem)
def test_every_pin_is_within_the_declared_ranges(file):
    pins, wanted = supply_audit.pins(file), declared()
    assert len(pins) > 100
    wrong = [
        f"{name}=={version}: {one}"
        for name, version in pins.items()
        for one in wanted.get(name, ())
        if not one.specifier.contains(version, prereleases=True)
    ]
    assert wrong == []


def test_a_package_that_nothing_imports_is_named_for_an_advisory():
    """What pyproject.toml names for its version alone says which advisory that is for."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    bounds = re.finditer(r'"(?P<name>[\w.-]+)>=[\d.]+[^"]*"\]?,?  # (?P<comment>.*)', text)
    named = {found["name"] for found in bounds if ADVISORY.search(found["comment"])}
    assert {"torch", "jinja2", "starlette", "setuptools", "nltk"} <= named
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "posttrain").rglob("*.py")]
    imported = {name for text in sources for name in re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE)}
    dependencies = {Requirement(line).name for line in tomllib.loads(text)["project"]["dependencies"]}
    assert dependencies - named - {name for name in dependencies if name.replace("-", "_") in imported} <= {
        "accelerate"
    }


# --- the audit --------------------------------------------------------------------------------------------------------

HOLE = {"id": "PYSEC-2026-1", "fix_versions": ["2.0"], "aliases": ["CVE-2026-1111"], "description": "a hole"}
SKIPPED = {"skip_reason": "Dependency not found on PyPI and could not be audited"}


@pytest.fixture
def audit(tmp_path, capsys):
    """`audit(replies)` runs it over two files; pip-audit answers so: package -> its row, or what it says on stderr."""

    def run(replies: dict[str, dict] | str) -> tuple[int, str]:
        program, first, second = tmp_path / "pip-audit", tmp_path / "a.txt", tmp_path / "b.txt"
        first.write_text("# pins\nTorch_Vision==1.0+cpu\nbeta==2.1\n")
        second.write_text("beta==2.1\ngamma==3\n")
        program.write_text(f"""#!{sys.executable}
import json, re, sys
replies = {replies!r}
if isinstance(replies, str):
    sys.exit(replies)
assert "--no-deps" in sys.argv and "--disable-pip" in sys.argv  # else it would resolve and install
pins = [line.strip().split("==") for line in open(sys.argv[sys.argv.index("--requirement") + 1])]
rows = [{{"name": name, **replies.get(name, {{"version": version, "vulns": []}})}} for name, version in pins]
print(json.dumps({{"dependencies": rows, "fixes": []}}))
sys.exit(any(row.get("vulns") for row in rows))
""")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return supply_audit.main(str(program), str(first), str(second)), capsys.readouterr().out

    return run


def test_an_audit_is_clean_only_if_every_version_was_looked_up(audit):
    assert audit({}) == (0, "no known vulnerability in 3 pinned versions\n")


def test_an_audit_lists_what_is_known(audit):
    status, said = audit({"beta": {"version": "2.1", "vulns": [HOLE]}})
    assert status == 1
    assert said.splitlines() == [
        "beta 2.1: PYSEC-2026-1, CVE-2026-1111 (fixed in: 2.0)",
        "1 of 3 checked versions have known vulnerabilities",
    ]


@pytest.mark.parametrize("replies", [dict.fromkeys(("torch-vision", "beta", "gamma"), SKIPPED), "no route to the host"])
def test_an_audit_without_advisories_says_so(audit, replies):
    """pip-audit ends with 0 and "No known vulnerabilities found" if its service knows none of the packages."""
    status, said = audit(replies)
    assert status == 2 and said.startswith("advisories not reached: nothing was checked (")
    assert "no known" not in said and "clean" not in said


def test_an_audit_of_some_versions_is_not_clean(audit):
    status, said = audit({"gamma": SKIPPED})
    assert status == 2 and said.splitlines()[0] == "not checked, 1 of 3 versions:" and "gamma 3: " in said
    status, said = audit({"gamma": SKIPPED, "beta": {"version": "2.1", "vulns": [HOLE]}})
    assert status == 1 and "gamma 3: " in said and "beta 2.1: PYSEC-2026-1" in said


# --- licences ---------------------------------------------------------------------------------------------------------


def listed() -> dict[str, tuple[str, str]]:
    """Package -> (version or range, licence) of docs/licences.md."""
    lines = (ROOT / "docs/licences.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    return {name: (version, licence) for name, version, licence, _ in cells if name != "package"}


def test_licences_are_those_of_the_installed_packages_and_allowed():
    page, found = listed(), supply_licences.rows()
    assert len(found) > 100
    for row in found:
        assert row.name in page, f"{row.name} is not in docs/licences.md: make licences"
        assert page[row.name][1] == row.licence, f"{row.name}: make licences"
    for name, (_, licence) in page.items():
        assert supply_licences.unallowed(licence) == [], name


def test_the_page_of_licences_is_what_the_command_writes():
    pins = supply_audit.pins(ROOT / "constraints.txt")
    other = [
        name for name in supply_licences.brought("dev") if metadata.version(name).partition("+")[0] != pins.get(name)
    ]
    if other or "+cpu" not in metadata.version("torch"):
        pytest.skip("needs the versions of constraints.txt and PyTorch's CPU build")
    assert (ROOT / "docs/licences.md").read_text(encoding="utf-8") == supply_licences.page()


def test_a_licence_that_is_not_allowed_is_named():
    assert supply_licences.unallowed("MPL-2.0 AND (Apache-2.0 OR MIT)") == []
    assert supply_licences.unallowed("MIT AND GPL-3.0-only") == ["GPL-3.0-only"]
    assert supply_licences.unallowed("Apache-2.0 WITH LLVM-exception") == []
