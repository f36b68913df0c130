"""Counts and names in readable form. Imports nothing slow."""

import re
from os.path import abspath

SAVED = re.compile(r"final|best|checkpoint-\d+")  # folders of a run that hold a model


def counted(count: int, noun: str, several: str | None = None) -> str:
    """A number with its noun: 1 step, 2 steps, 12,000 steps; `several` is the plural if it is not noun + s."""
    return f"{count:,} {noun if count == 1 else several or noun + 's'}"


def model_name(path: str) -> str:
    """The short name of a model: the last part of its hub id or folder; for a model saved by a run, the run's name."""
    parts = path.replace("\\", "/").rstrip("/").split("/")
    if parts[-1] in (".", ".."):
        parts = abspath(path).replace("\\", "/").split("/")
    while len(parts) > 1 and SAVED.fullmatch(parts[-1]) and parts[-2] not in ("", ".", ".."):
        parts.pop()
    return parts[-1]


def in_units(size: int) -> str:
    """Bytes in readable units: 512 B, 14 kB, 1.2 GB."""
    value, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.1f} {unit}" if value < 9.95 and unit != "B" else f"{value:.0f} {unit}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
