"""`make licences`: the licence of every package that posttrain and its extras bring, from installed metadata.

python tests/supply_licences.py docs/licences.md
"""

import re
import sys
import tomllib
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from supply_audit import pins

ROOT = Path(__file__).parents[1]
# Permissive licences, and of the others those that cover only a package's own files (MPL).
ALLOWED = {
    "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0",
    "CNRI-Python", "ISC", "MIT", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib",
}  # fmt: skip
# How packages without an SPDX expression spell it, as text or classifier. BSD alone: the metadata names no variant.
SPELT = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "BSD 3-Clause License": "BSD-3-Clause",
    "ISC license": "ISC",
    "ISC License": "ISC",
    "MIT License": "MIT",
    "MIT OR Apache-2.0": "MIT OR Apache-2.0",
    "MPL-2.0 AND MIT": "MPL-2.0 AND MIT",
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "ISC License (ISCL)": "ISC",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
INSTALLED_EXTRAS = ("serve", "ui", "track", "quant", "bench", "dev")
# Of the packages that are not installed with the tests: those that the other extras name, and that of Python 3.13.
OTHERS = {
    "audioop-lts": "PSF-2.0",
    "flash-attn": "BSD-3-Clause",
    "flash-attn-4": "BSD-3-Clause",
    "immutabledict": "MIT",
    "langdetect": "MIT",
    "liger-kernel": "BSD-2-Clause",
    "lm-eval": "MIT",
    "nltk": "Apache-2.0",
    "triton": "MIT",
    "vllm": "Apache-2.0",
}
NVIDIA = ("cuda-", "nvidia-")  # what PyPI's build of PyTorch for Linux brings: named in HEAD
HEAD = """# Licences

What `pip install posttrain` and its extras bring, at the versions of `constraints.txt`, with the licences that their
own metadata names. `make licences` writes this page. A test compares it with what is installed, and fails for a licence
that is neither permissive nor limited to a package's own files (MPL). A wheel may contain libraries of others, with
notices of their own.

PyPI's PyTorch for Linux is the CUDA build. It also brings NVIDIA's libraries (`nvidia-*`, `cuda-*`, under NVIDIA's own
terms, most of them not open source) and `triton`. The CPU build, with which this page was written, brings neither.
"""
OTHER_HEAD = """\
On Python 3.13 `ui` brings `audioop-lts` too. The other extras, which the tests do without or have in an environment of
their own, bring these packages and what they need in turn:
"""


class Row(NamedTuple):
    """One package of the table."""

    name: str
    version: str
    licence: str
    extras: str  # that bring it; "" for posttrain itself


def requirements(extra: str = "") -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [
        Requirement(line) for line in (project["optional-dependencies"][extra] if extra else project["dependencies"])
    ]


@cache
def brought(extra: str = "") -> frozenset[str]:
    """The installed packages that the extra brings, and those it needs in turn, in PyPI's spelling."""
    names: set[str] = set()
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = requirements(extra)
    while waiting:
        one = waiting.pop()
        key = canonicalize_name(one.name), frozenset(one.extras)
        if key in seen or key[0].startswith(NVIDIA):
            continue
        seen.add(key)
        if one.name == "posttrain":
            waiting += [more for part in one.extras for more in requirements(part)]
            continue
        names.add(key[0])
        for more in map(Requirement, metadata.requires(one.name) or ()):
            if more.marker is None or any(more.marker.evaluate({"extra": part}) for part in ("", *one.extras)):
                waiting.append(more)
    return frozenset(names)


def licence(name: str) -> str:
    """The licence in a package's metadata, in SPDX's spelling. Raises SystemExit if that is unknown."""
    facts = metadata.metadata(name)
    if expression := facts.get("License-Expression"):
        return expression
    classifiers = [c.rpartition(" :: ")[2] for c in facts.get_all("Classifier") or () if c.startswith("License ::")]
    for text in ((facts.get("License") or "").strip(), *classifiers):
        if text in SPELT or text in ALLOWED:
            return SPELT.get(text, text)
    raise SystemExit(f"{name}: the licence is unknown: {facts.get('License')!r}, {classifiers}: add it to SPELT")


def unallowed(expression: str) -> list[str]:
    """The licences of an SPDX expression that are not in ALLOWED."""
    parts = re.split(r"\s+(?:AND|OR)\s+", expression.replace("(", "").replace(")", ""))
    return [part for part in parts if part.strip() not in ALLOWED]


@cache
def rows() -> list[Row]:
    """The table of what is installed."""
    core, extras = brought(), {extra: brought(extra) for extra in INSTALLED_EXTRAS}
    pinned = pins(ROOT / "constraints.txt")
    found = []
    for name in sorted(core.union(*extras.values())):
        whose = "" if name in core else ", ".join(extra for extra in INSTALLED_EXTRAS if name in extras[extra])
        found.append(Row(name, pinned.get(name, "not pinned"), licence(name), whose))
    return found


def other_rows() -> list[Row]:
    """The packages that are not installed with the tests, by the range that an extra gives or by their pin."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named: dict[str, list[tuple[str, str]]] = {
        "audioop-lts": [("ui", f"=={pins(ROOT / 'constraints.txt')['audioop-lts']}")]
    }
    for extra in sorted(set(project["optional-dependencies"]) - set(INSTALLED_EXTRAS)):
        for one in requirements(extra):
            named.setdefault(canonicalize_name(one.name), []).append((extra, str(one.specifier)))
    return [
        Row(name, " and ".join(text for _, text in uses), OTHERS[name], ", ".join(extra for extra, _ in uses))
        for name, uses in sorted(named.items())
    ]


def table(of: list[Row], version: str) -> str:
    head = f"| package | {version} | licence | extra |\n|---|---|---|---|\n"
    return head + "".join(f"| {' | '.join(row).rstrip()} |\n" for row in of)


def page() -> str:
    return f"{HEAD}\n{table(rows(), 'version')}\n{OTHER_HEAD}\n{table(other_rows(), 'range')}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
