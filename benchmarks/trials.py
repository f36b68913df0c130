"""What both halves of `make learn` do with their trained models at the end."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import machine
from posttrain.runs.files import save_json


def save_trials(path: Path, settings: object, trials: Sequence[Any]) -> None:
    """Save the trained models as JSON, with the machine and the settings."""
    save_json(path, {"machine": machine(), "settings": settings, "trials": [asdict(trial) for trial in trials]})


def verdict(failed: Sequence[str]) -> int:
    """Print which thresholds do not hold, and return the exit status."""
    print("\n".join(failed) or "every threshold holds")
    return int(bool(failed))
