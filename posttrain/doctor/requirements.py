"""Installed versions against the ranges that posttrain declares."""

import importlib.util
import platform
from importlib import metadata

from posttrain.doctor.checks import Broken, Found

# What the other checks do not call: the command line, the settings, and what PEFT needs.
NOT_CALLED = ("accelerate", "pydantic", "typer", "rich", "psutil")


def version_of(package: str) -> str:
    """The version of an installed package, which is within the declared range.

    Raises Broken with the command that mends it otherwise.
    """
    from packaging.requirements import Requirement  # transformers and datasets need it, too

    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        version = ""
    wanted = [Requirement(line) for line in _declared()]
    found = next((one for one in wanted if one.name == package), None)
    if version and (found is None or found.specifier.contains(version, prereleases=True)):
        return version
    needs = f"{package}{found.specifier if found else ''}"
    raise Broken(f"{version}, needs {needs}" if version else "not installed", f"pip install '{needs}'")


def _declared() -> list[str]:
    try:
        return metadata.requires("posttrain") or []
    except metadata.PackageNotFoundError:  # run from a source tree that is not installed
        return []


def absent(package: str, module: str, purpose: str, extra: str) -> Found | None:
    """The finding that an optional package is not installed, or None if it is."""
    if importlib.util.find_spec(module) is not None:
        return None
    return Found(f"not installed; for {purpose}", "absent", f"pip install 'posttrain[{extra}]'")


def python() -> Found:
    """Python's version, and that of posttrain."""
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
