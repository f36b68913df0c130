"""What every page is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from posttrain.viewing.viewer import Viewer


@dataclass(frozen=True, slots=True)
class Place:
    """The folder of runs, and what reads it."""

    root: Path
    viewer: Viewer
