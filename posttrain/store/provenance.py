"""Where a run came from: versions, platform, command line, commit; with every secret blacked out."""

import functools
import os
import platform
import re
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("posttrain", "torch", "transformers", "peft", "datasets", "safetensors", "numpy")
HIDDEN = "***"
# Environment variables whose values are secrets; values that are secret by their own look; arguments that carry one.
SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|API_?KEY|SECRET|PASSWORD|ACCESS_KEY)$", re.IGNORECASE)
SECRET_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{30,}"  # a Hugging Face token
    r"|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"  # user:password in an address
)
SECRET_ARGUMENT = re.compile(
    r"(?P<name>(?:--)?[\w.-]*(?:token|api[_-]?key|secret|password))(?P<value>=.*)?", re.I | re.S
)


def redact(data: Any) -> Any:
    """A copy of text, or of nested dicts and lists of it, with secrets replaced by `***`.

    Secret are the values (8 characters and more) of environment variables such as HF_TOKEN or WANDB_API_KEY, Hugging
    Face tokens by their look, and the user and password in an address.
    """
    values = {value for name, value in os.environ.items() if SECRET_NAME.search(name) and len(value) >= 8}
    return _redact(data, sorted(values, key=len, reverse=True))


def _redact(data: Any, values: list[str]) -> Any:
    if isinstance(data, str):
        for value in values:
            data = data.replace(value, HIDDEN)
        return SECRET_VALUE.sub(HIDDEN, data)
    if isinstance(data, dict):
        return {_redact(key, values): _redact(value, values) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_redact(value, values) for value in data]
    return data


def redact_command(arguments: list[str]) -> str:
    """A command line as text, with secrets, and the values of arguments named like one (`--hf-token X`), hidden."""
    shown: list[str] = []
    hide_next = False
    for argument in redact(arguments):
        secret = SECRET_ARGUMENT.fullmatch(argument)
        if hide_next:
            argument = HIDDEN
        elif secret and secret["value"]:
            argument = f"{secret['name']}={HIDDEN}"
        hide_next = bool(secret and not secret["value"] and argument.startswith("--"))
        shown.append(argument)
    return shlex.join(shown)


def environment() -> dict[str, Any]:
    """Versions, platform and command line of this process. Imports none of the packages it asks about."""
    return {
        "command": redact_command(sys.argv),
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


@functools.cache  # what this process has loaded, whatever is committed meanwhile
def _commit(folder: Path) -> str | None:
    """The commit posttrain's own source is at (`-dirty` with uncommitted changes), None for an installed package."""
    command = ["git", "-C", str(folder), "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git here, or a file system too slow to ask
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
