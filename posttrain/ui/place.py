"""What every page is given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from posttrain.serving.process import ModelServers
from posttrain.viewing.viewer import Viewer


@dataclass(frozen=True, slots=True)
class Place:
    """The folder of runs, what reads it, and the models at work."""

    root: Path
    viewer: Viewer
    servers: ModelServers  # of the models that one talks to
