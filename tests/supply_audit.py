"""`make audit`: known vulnerabilities of every pinned version, looked up by pip-audit.

    python tests/supply_audit.py PIP_AUDIT CONSTRAINTS...

Exit status: 0 if the advisories of every version were read and none applies, 1 if some apply, 2 if not all were read.
pip-audit itself reports "No known vulnerabilities found" for versions that its service did not find, all of them where
only PyPI's package index is reachable. The standard library alone.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

CLEAN, VULNERABLE, UNCHECKED = 0, 1, 2
PIN = re.compile(r"(?P<name>[\w.-]+)==(?P<version>[^\s;+]+)")  # without a local part such as +cpu: advisories know none
NOT_REACHED = "advisories not reached: nothing was checked"


@dataclass
class Looked:
    """What became of the pinned versions, each as `name version`."""

    read: set[str] = field(default_factory=set)
    unread: dict[str, str] = field(default_factory=dict)  # -> why
    known: dict[str, list[str]] = field(default_factory=dict)  # -> its advisories, each with the versions that fix it


def pins(file: Path) -> dict[str, str]:
    """Name in PyPI's spelling -> version, of a file of exact versions."""
    found = map(PIN.match, file.read_text(encoding="utf-8").splitlines())
    return {re.sub(r"[-_.]+", "-", one["name"]).lower(): one["version"] for one in found if one}


def look_up(pip_audit: str, wanted: dict[str, str], looked: Looked) -> None:
    """Add to `looked` what pip-audit finds; resolves, installs and downloads no package."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pins.txt"
        file.write_text("".join(f"{name}=={version}\n" for name, version in wanted.items()), encoding="utf-8")
        command = [pip_audit, "--requirement", str(file), "--no-deps", "--disable-pip", "--format", "json"]
        done = subprocess.run([*command, "--progress-spinner", "off"], capture_output=True, text=True)
    try:
        rows = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):  # it ended with a message instead
        rows, why = [], (done.stderr.strip().splitlines() or [f"pip-audit ended with status {done.returncode}"])[-1]
    else:
        why = "pip-audit does not mention it"
    found = {re.sub(r"[-_.]+", "-", row["name"]).lower(): row for row in rows}
    for name, version in wanted.items():
        row, pin = found.get(name, {"skip_reason": why}), f"{name} {version}"
        if "skip_reason" in row:
            looked.unread[pin] = row["skip_reason"]
            continue
        looked.read.add(pin)
        for one in row["vulns"]:
            fixed = ", ".join(one.get("fix_versions", ())) or "no version yet"
            said = f"{', '.join([one['id'], *one.get('aliases', ())])} (fixed in: {fixed})"
            looked.known.setdefault(pin, []).append(said)


def report(looked: Looked) -> int:
    """Print what is known, and return the exit status."""
    for pin, advisories in sorted(looked.known.items()):
        print(f"{pin}: {'; '.join(advisories)}")
    if not looked.read:
        print(f"{NOT_REACHED} ({next(iter(looked.unread.values()), 'there are no pinned versions')})")
        return UNCHECKED
    if looked.unread:
        print(f"not checked, {len(looked.unread)} of {len(looked.unread) + len(looked.read)} versions:")
        print("\n".join(f"  {pin}: {why}" for pin, why in sorted(looked.unread.items())))
    if looked.known:
        print(f"{len(looked.known)} of {len(looked.read)} checked versions have known vulnerabilities")
        return VULNERABLE
    if looked.unread:
        return UNCHECKED
    print(f"no known vulnerability in {len(looked.read)} pinned versions")
    return CLEAN


def main(pip_audit: str, *files: str) -> int:
    looked = Looked()
    for file in files:
        wanted = {name: version for name, version in pins(Path(file)).items() if f"{name} {version}" not in looked.read}
        if wanted:
            look_up(pip_audit, wanted, looked)
        if not looked.read:  # the service cannot be reached: the other files would say so too
            break
    return report(looked)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
