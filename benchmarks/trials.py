"""What the two halves of `make learn` do with their trained models at the end."""

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from posttrain.store.files import save_json


def save_trials(path: Path, settings: object, trials: Sequence[Any]) -> None:
    """The trained models as JSON, with the machine and the settings."""
    facts = {"machine": platform.platform(), "cores": os.cpu_count(), "torch": torch.__version__}
    save_json(path, facts | {"settings": settings, "trials": [asdict(trial) for trial in trials]})


def verdict(failed: Sequence[str]) -> int:
    """Say which thresholds do not hold; the exit status."""
    print("\n".join(failed) or "every threshold holds")
    return int(bool(failed))
