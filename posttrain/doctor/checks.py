"""The checks in the order of the table, what they return, and the checks of installed versions."""

import difflib
import importlib.util
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from posttrain.base.errors import ConfigError
from posttrain.base.files import default_cache, table_beside
from posttrain.base.imports import installing

# Packages that no other check calls.
NOT_CALLED = ("accelerate", "pydantic", "typer", "rich", "psutil")
State = Literal["ok", "limited", "absent", "broken"]


@dataclass(frozen=True, slots=True)
class Found:
    """What a check returns. `fix` is a command or an instruction that improves the state."""

    detail: str
    state: State = "ok"
    fix: str = ""


class Broken(Exception):
    """Raised by a check if something does not work. Any other exception has the same meaning. Another `state` than
    broken: the check found nothing to call."""

    def __init__(self, detail: str, fix: str = "", state: State = "broken"):
        super().__init__(detail)
        self.fix = fix
        self.state: State = state


@dataclass(frozen=True, slots=True)
class Check:
    """One call that shows whether a part works.

    `target` is the `module:function` that a helper process calls with `arguments`, and that returns a Found. Checks in
    the same `lane` run one after another in one process, as long as it lives; lanes run in parallel.
    """

    name: str
    target: str
    lane: str
    required: bool = False
    arguments: tuple[str, ...] = ()
    deadline: float = 30.0  # seconds
    fix: str = ""  # fix to show for an error that names none


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of a check. If a required check is broken, the exit status is 1."""

    name: str
    state: State
    required: bool
    detail: str
    fix: str
    seconds: float

    @property
    def is_fatal(self) -> bool:
        return self.required and self.state == "broken"


def all_checks(output_dir: Path) -> list[Check]:
    """Every check in `checks.yaml`; `output_dir` is where runs are written."""
    folders = {"output_dir": str(output_dir), "data_cache": str(default_cache())}
    rows = table_beside(__file__, "checks.yaml")
    for row in rows:
        row["target"] = f"posttrain.doctor.{row['target']}"
        row["arguments"] = tuple(folders[name] for name in row.get("arguments", ()))
    return [Check(**row) for row in rows]


def chosen(checks: Sequence[Check], names: Iterable[str]) -> list[Check]:
    """The named checks, in the table's order; without names, all checks. Raises ConfigError for an unknown name."""
    known = {check.name.lower(): check for check in checks}
    wanted = [name.lower() for name in names]
    for name in wanted:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, 0.5)
            hint = f"did you mean {known[near[0]].name!r}? " if near else ""
            raise ConfigError(f"there is no check {name!r}: {hint}the checks are {', '.join(c.name for c in checks)}")
    return [check for check in checks if not wanted or check.name.lower() in wanted]


def version_of(package: str, purpose: str = "", extra: str = "") -> str:
    """The version of a package. Raises Broken, with a fix, if it is missing or outside the declared range; with the
    state absent if the package of an `extra`, which is for `purpose`, cannot be imported."""
    if extra and importlib.util.find_spec(package.replace("-", "_")) is None:
        raise Broken(f"not installed; for {purpose}", installing(extra), "absent")
    from packaging.requirements import Requirement  # a package that transformers and datasets also need

    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        version = ""
    ranges = {requirement.name: requirement.specifier for requirement in map(Requirement, reversed(_declared()))}
    if version and (package not in ranges or ranges[package].contains(version, prereleases=True)):
        return version
    needs = f"{package}{ranges.get(package, '')}"
    raise Broken(f"{version}, needs {needs}" if version else "not installed", f"pip install '{needs}'")


def _declared() -> list[str]:
    try:
        return metadata.requires("posttrain") or []
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return []


def python() -> Found:
    """The versions of Python and posttrain."""
    from packaging.specifiers import SpecifierSet

    try:
        facts = metadata.metadata("posttrain")
    except metadata.PackageNotFoundError:
        raise Broken("posttrain is not installed, so versions cannot be checked", "pip install -e .") from None
    version, needed = platform.python_version(), facts["Requires-Python"] or ""
    if not SpecifierSet(needed).contains(version, prereleases=True):
        raise Broken(f"{version}, needs {needed}", f"install Python {needed} and make a new environment")
    return Found(f"{version}, posttrain {facts['Version']}, {platform.platform(terse=True)}")


def packages() -> Found:
    """The required packages that no other check calls."""
    return Found(", ".join(f"{name} {version_of(name)}" for name in NOT_CALLED))
