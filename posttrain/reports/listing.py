"""The data of run lists, read from the folders without torch and without reading more than is shown."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from posttrain.atomic import LEFTOVER
from posttrain.errors import RunError
from posttrain.reports.headline import headlines
from posttrain.store.checkpoint import MODELS, list_checkpoints, newest_complete
from posttrain.store.metrics import latest_metrics
from posttrain.store.runs import RunInfo, find_runs, read_run
from posttrain.words import counted, model_name


@dataclass(frozen=True, slots=True)
class Summary:
    """A run folder's summary. If its run.json cannot be read, `info` is None and `problem` has the reason."""

    folder: Path
    info: RunInfo | None
    problem: str | None
    method: str
    model: str
    data: str
    metrics: dict[str, Any]  # the latest value of each
    models: dict[str, int]  # checkpoints, best and final: their bytes
    size: int  # bytes, of everything

    @property
    def state(self) -> str:
        return self.info.state if self.info else "damaged"

    @property
    def step(self) -> int:
        return self.metrics.get("step", 0)

    @property
    def headline(self) -> str:
        """The main metric of the run's method with its name; empty before there is one."""
        found = headlines(self.method, self.metrics)
        return next((f"{name} {value:.3g}" for name, value in found.items()), "")


def summarise(folder: Path) -> Summary:
    """The summary of a run folder, also of a damaged one; RunError if it is not a run folder."""
    info = problem = None
    metrics: dict[str, Any] = {}
    try:
        info = read_run(folder)
        metrics = latest_metrics(folder)
    except RunError as error:
        if not (folder / "run.json").is_file():
            raise
        problem = str(error)
    config = _settings(folder)
    models = config.get("models") or [config.get("model") or {}]
    source = (config.get("data") or {}).get("source")
    saved = [*list_checkpoints(folder), *(folder / name for name in MODELS if (folder / name).is_dir())]
    return Summary(
        folder=folder,
        info=info,
        problem=problem,
        method=str((config.get("method") or {}).get("type", "?")),
        model=", ".join(str(m.get("name") or model_name(str(m.get("path", "?")))) for m in models),
        data=source if isinstance(source, str) else json.dumps(source, ensure_ascii=False),
        metrics=metrics,
        models={path.name: size_of(path) for path in saved},
        size=size_of(folder),
    )


def runs_below(output_dir: Path) -> list[Path]:
    """The run folders there, without leftovers of an interrupted deletion, oldest first."""
    found = [path for path in find_runs(output_dir) if not LEFTOVER.fullmatch(path.name)]
    return sorted(found, key=lambda path: (path / "run.json").stat().st_mtime)


def newest_model(folder: Path) -> Path:
    """The folder itself if it has a model; for a run, its final model or else its newest checkpoint.

    Raises RunError if there is neither.
    """
    if any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        return folder
    if (folder / "final").is_dir():
        return folder / "final"
    if not (folder / "run.json").is_file():
        below = runs_below(folder)
        which = (
            f", but {counted(len(below), 'run')}: name one, such as {below[-1]}"
            if below
            else " (config.json), and is not a run"
        )
        raise RunError(f"{folder} contains no model{which}")
    return newest_complete(folder)[0]


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder; links count as links."""
    return sum(os.lstat(Path(root, name)).st_size for root, _, names in os.walk(folder) for name in names)


def in_units(size: int) -> str:
    """Bytes in readable units: 512 B, 14 kB, 1.2 GB."""
    value, unit = float(size), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.1f} {unit}" if value < 9.95 and unit != "B" else f"{value:.0f} {unit}"


def _settings(folder: Path) -> dict[str, Any]:
    """config.yaml as plain data; empty if it is missing or damaged."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C, which keeps long lists fast
    try:
        with open(folder / "config.yaml", encoding="utf-8") as file:
            settings = yaml.load(file, Loader=loader)
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    return settings if isinstance(settings, dict) else {}
