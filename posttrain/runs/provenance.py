"""The provenance of a run: versions, platform, command line, commit."""

import functools
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from posttrain.base.files import read_yaml
from posttrain.base.redaction import redact, redact_arguments

PACKAGES = ("posttrain", "torch", "transformers", "peft", "datasets", "safetensors", "numpy")


def redact_yaml(text: str) -> str:
    """YAML settings with secrets replaced as in a mapping: by name, and as whole values."""
    from posttrain.config.reading.files import write_yaml  # imports YAML, which not every reader of a run needs

    try:
        data = read_yaml(text)
    except ValueError:
        return redact(text)
    return text if (clean := redact(data)) == data else write_yaml(clean)


def now() -> str:
    """The current time in UTC, to the second, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def environment() -> dict[str, Any]:
    """Versions, platform and command line of this process. Imports none of the packages."""
    return {
        "command": shlex.join(redact_arguments(sys.argv)),
        "folder": os.getcwd(),
        "host": platform.node(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "versions": {name: _version(name) for name in PACKAGES},
        "git_commit": _commit(Path(__file__).parent),
    }


@functools.cache
def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@functools.cache  # the loaded code stays the same even if the commit changes later
def _commit(folder: Path) -> str | None:
    """The commit of posttrain's source (`-dirty` with uncommitted changes); None for an installed package."""
    command = ["git", "-C", str(folder), "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git, or a very slow file system
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
