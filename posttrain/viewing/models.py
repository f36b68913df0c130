"""The models that one can talk to below a folder of runs."""

from __future__ import annotations

from pathlib import Path

from posttrain.viewing.viewer import Viewer

MODEL_FILES = ("config.json", "adapter_config.json")
MOST = 200  # in a list to choose from
MOST_CHECKPOINTS = 3  # of a run, the newest


def models_below(viewer: Viewer) -> dict[str, str]:
    """Name -> folder of every saved model: of each run, the latest first, its final, best and newest checkpoints, and
    the quantised ones."""
    found: dict[str, str] = {}
    for row in viewer.runs.rows():
        for folder in _models_of(row.folder):
            found[f"{row.name}/{folder.relative_to(row.folder)}"] = str(folder)
            if len(found) >= MOST:
                return found
    for folder in sorted((viewer.root / "quantized_models").glob("*")):
        if _is_model(folder):
            found[str(folder.relative_to(viewer.root))] = str(folder)
    return found


def _models_of(run: Path) -> list[Path]:
    checkpoints = sorted(run.glob("checkpoint-*"), key=_step, reverse=True)[:MOST_CHECKPOINTS]
    return [
        path
        for path in [run / "final", run / "best", *checkpoints, *sorted(run.glob("quantized_*/*"))]
        if _is_model(path)
    ]


def _is_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MODEL_FILES)


def _step(folder: Path) -> int:
    step = folder.name.rpartition("-")[2]
    return int(step) if step.isdecimal() else -1
