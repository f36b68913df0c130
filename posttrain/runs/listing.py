"""The data of run lists, read from the folders without torch and without reading more than is shown."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.base.atomic import LEFTOVER
from posttrain.base.errors import RunError
from posttrain.base.plain_yaml import read_yaml
from posttrain.base.words import counted, model_name
from posttrain.runs.checkpoint import MODELS, list_checkpoints, newest_complete
from posttrain.runs.files import read_regular
from posttrain.runs.finding import RunInfo, find_runs, read_run
from posttrain.runs.headline import headlines
from posttrain.runs.metrics import latest_metrics

# A block of config.yaml as posttrain writes it, with the lines below it.
BLOCK = re.compile(r"^(models|method|data):\n((?:[ -].*\n)*)", re.MULTILINE)
WORD = re.compile(r"(?:[A-Za-z_/]|\.\.?/)[A-Za-z0-9_./+-]*")
NULL = "null"
NO_WORDS = ("true", "false", "yes", "no", "on", "off", "y", "n")  # in YAML


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
    method, model, data = head_of(folder)
    saved = [*list_checkpoints(folder), *(folder / name for name in MODELS if (folder / name).is_dir())]
    return Summary(
        folder=folder,
        info=info,
        problem=problem,
        method=method,
        model=model,
        data=data,
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


def place_of(model: str) -> tuple[str, str, Path]:
    """The path of a model (of a run: its newest) or of recorded completions, its name, and the default folder of its
    evaluation."""
    folder = Path(model).expanduser()
    if folder.is_file():
        return str(folder), folder.stem, Path("evaluations") / folder.stem
    place = newest_model(folder) if folder.is_dir() else None
    if place is not None and (place.parent / "run.json").is_file():
        return str(place), f"{place.parent.name}/{place.name}", place.parent / "evaluation" / place.name
    name = model_name(model)
    return str(place or model), name, Path("evaluations") / name


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


def settings_of(folder: Path) -> dict[str, Any]:
    """config.yaml as plain data; empty if it is missing or damaged."""
    return _parsed(_text(folder))


def head_of(folder: Path) -> tuple[str, str, str]:
    """Method, model and data of a run, as far as its config.yaml has them.

    Reads the lines that posttrain writes by itself, which takes a twentieth of the time; all other YAML is parsed.
    """
    text = _text(folder)
    quick = _quick_head(text)
    if quick is not None:
        return quick
    config = _parsed(text)
    named, method, data = config.get("models") or [config.get("model")], config.get("method"), config.get("data")
    models = [m if isinstance(m, dict) else {} for m in (named if isinstance(named, list) else [named])]
    source = data.get("source") if isinstance(data, dict) else None
    return (
        str(method.get("type", "?") if isinstance(method, dict) else "?"),
        ", ".join(str(m.get("name") or model_name(str(m.get("path", "?")))) for m in models),
        source if isinstance(source, str) else json.dumps(source, ensure_ascii=False, default=str),
    )


def _quick_head(text: str) -> tuple[str, str, str] | None:
    """As `head_of`, or None where a value is missing or is not a plain word on one line."""
    blocks = dict(BLOCK.findall(text))
    if blocks.keys() != {"models", "method", "data"} or len(BLOCK.findall(text)) != 3:
        return None
    models = []
    for item in re.split(r"^- ", blocks["models"], flags=re.MULTILINE)[1:]:
        path, name = _plain(f"  {item}", "path"), _plain(f"  {item}", "name")
        if path in (None, NULL) or name is None:
            return None
        models.append(model_name(path) if name == NULL else name)
    method, source = _plain(blocks["method"], "type"), _plain(blocks["data"], "source")
    if not models or method in (None, NULL) or source in (None, NULL):
        return None
    return method, ", ".join(models), source


def _plain(block: str, key: str) -> str | None:
    """The value of a key at the block's first level, if it is a word that no YAML reader takes for anything else."""
    found = re.findall(rf"^  {key}: (.+)$", block, re.MULTILINE)
    if len(found) != 1 or not WORD.fullmatch(found[0]) or found[0].lower() in NO_WORDS:
        return None
    return NULL if found[0].lower() == NULL else found[0]


def _text(folder: Path) -> str:
    try:
        path = folder / "config.yaml"
        return read_regular(path).decode() if path.is_file() else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _parsed(text: str) -> dict[str, Any]:
    try:
        settings = read_yaml(text)
    except ValueError:
        return {}
    return settings if isinstance(settings, dict) else {}
