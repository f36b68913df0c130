"""A run folder as far as it can be read: what is missing or damaged is said, everything else is there."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from posttrain.base.errors import PosttrainError
from posttrain.base.plain_yaml import read_yaml
from posttrain.base.words import counted, model_name
from posttrain.reports.markup import number
from posttrain.reports.series import Series
from posttrain.runs.files import load_json, open_regular, read_regular
from posttrain.runs.finding import RunInfo, read_run
from posttrain.runs.headline import headlines
from posttrain.runs.metrics import NAME


@dataclass(frozen=True, slots=True)
class Run:
    """A run's files. `missing` has a sentence for each that cannot be read; more may be added."""

    name: str
    folder: Path
    info: RunInfo | None
    series: Series
    settings: str  # config.yaml as it is
    config: dict[str, Any]
    results: dict[str, Any]
    missing: list[str]

    @property
    def method(self) -> str:
        method = self.config.get("method")
        return str(method.get("type", "")) if isinstance(method, dict) else ""

    @property
    def models(self) -> list[dict[str, Any]]:
        models = self.config.get("models") or [self.config.get("model")]
        return [model for model in models if isinstance(model, dict)] if isinstance(models, list) else []

    @property
    def model(self) -> str:
        return ", ".join(str(one.get("name") or model_name(str(one.get("path", "?")))) for one in self.models)

    @property
    def step(self) -> int:
        return int(max(self.series.steps, default=0))

    @property
    def state(self) -> str:
        return self.info.state if self.info else "damaged"

    @property
    def seconds(self) -> float | None:
        """Of training; else since the start, if the end is known or not yet reached."""
        trained = self.results.get("train_runtime")
        if isinstance(trained, int | float):
            return trained
        if self.info is None or not (self.info.ended or self.info.state == "running"):
            return None
        ended = datetime.fromisoformat(self.info.ended) if self.info.ended else datetime.now(UTC)
        return (ended - datetime.fromisoformat(self.info.started)).total_seconds()

    @property
    def headlines(self) -> dict[str, str]:
        return {name: number(value) for name, value in headlines(self.method, self.series.last()).items()}


def read(folder: Path, name: str = "") -> Run:
    """Read a run folder in any state."""
    missing: list[str] = []

    def tried(what: str, of: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return of()
        except (PosttrainError, OSError, ValueError) as error:
            missing.append(f"{what} not shown: {' '.join(str(error).split())}.")
            return otherwise

    config = folder / "config.yaml"
    settings = tried("Settings are", lambda: read_regular(config).decode(), "")
    return Run(
        name=name or folder.resolve().name,
        folder=folder,
        info=tried("State and provenance are", lambda: read_run(folder), None),
        series=_series(folder, missing),
        settings=settings,
        config=tried("Method, model and data are", lambda: _mapping(settings, config), {}),
        results=tried("Results are", lambda: _results(folder / "results.json"), {}),
        missing=missing,
    )


def _series(folder: Path, missing: list[str]) -> Series:
    series = Series(folder).refresh()
    if series.damaged:
        missing.append(f"{counted(series.damaged, 'line')} of {folder / NAME} cannot be read: not in the curves.")
    if _ends_within_a_line(folder / NAME):
        missing.append(f"The last line of {folder / NAME} is incomplete: not in the curves.")
    return series


def _mapping(settings: str, path: Path) -> dict[str, Any]:
    found = read_yaml(settings) or {}
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged")
    return found


def _results(path: Path) -> dict[str, Any]:
    found = load_json(path) if path.is_file() else {}
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged")
    return found


def _ends_within_a_line(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - 1))
            return size > 0 and file.read(1) != b"\n"
    except OSError:
        return False
