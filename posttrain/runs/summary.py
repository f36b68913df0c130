"""The summary of a run, for lists, pages, reports, comparisons and programs. Does not import torch."""

import json
import os
import re
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from posttrain.base.errors import PosttrainError, RunError
from posttrain.base.files import read_yaml
from posttrain.base.words import model_name
from posttrain.runs.checkpoint import MODELS, list_checkpoints
from posttrain.runs.files import as_mapping, load_json, open_regular, read_regular
from posttrain.runs.finding import measured_runs, size_of
from posttrain.runs.folder import Notes, check_run_folder, is_locked, read_facts, read_notes
from posttrain.runs.metrics import first_latest, headline_metrics, headlines, latest_metrics

if TYPE_CHECKING:  # it imports the schema of settings, which lists do not need
    from posttrain.runs.checks import Check

T = TypeVar("T")
DAMAGED = "damaged"
# What may be unreadable, as the subject of "… not shown".
STATE, LATEST, NOTES = "State and provenance are", "The latest metrics are", "Tags and note are"
SETTINGS, CONFIG, RESULTS = "Settings are", "Method, model and data are", "Results are"
PROGRESS = re.compile(r"step \d+/(\d{1,15}) .*?(?:ETA (\S+(?: \d\d[smhd])?))?\r?\n")  # a line of training.log
# A block of config.yaml as posttrain writes it, with the lines below it.
BLOCK = re.compile(r"^(models|method|data):\n((?:[ -].*\n)*)", re.MULTILINE)
WORD = re.compile(r"(?:[A-Za-z_/]|\.\.?/)[A-Za-z0-9_./+-]*")
NULL = "null"
NO_WORDS = ("true", "false", "yes", "no", "on", "off", "y", "n")  # booleans in YAML


class RunSummary:
    """The facts of a run folder, each read on first use.

    Reading raises nothing: a value that cannot be read is empty, and `problems` has the message. In lists, `name` is
    the run's path below the folder of runs; otherwise it is the name of the run's folder.
    """

    def __init__(self, folder: Path | str, name: str = ""):
        self.folder = Path(folder)
        self.name = name or self.folder.resolve().name
        self.problems: dict[str, str] = {}  # what is not shown -> why

    def _read(self, what: str, read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except (PosttrainError, OSError, ValueError) as error:
            self.problems[what] = str(error)
            return otherwise

    # run.json

    @cached_property
    def facts(self) -> dict[str, Any]:
        """The content of run.json; empty if it is damaged."""
        return self._read(STATE, lambda: read_facts(self.folder), {})

    @property
    def state(self) -> str:
        """The state in run.json; `killed` if it is `running` but no process holds the lock, which is checked each time;
        `damaged` if run.json or the end of metrics.jsonl cannot be read."""
        if not self.facts or self._latest is None:
            return DAMAGED
        recorded = self.facts["state"]
        return "killed" if recorded == "running" and is_locked(self.folder) is False else recorded

    @property
    def reason(self) -> str | None:
        """Why the run ended."""
        return self.facts.get("reason")

    @property
    def explanation(self) -> str:
        """What cannot be read; otherwise why the run ended."""
        return self.problem or self.reason or ""

    @property
    def started(self) -> str:
        return self.facts.get("started", "")

    @property
    def ended(self) -> str:
        """When the run ended; empty if it has not ended, or was killed."""
        return self.facts.get("ended") or ""

    @property
    def started_at(self) -> datetime | None:
        """When the run started, in local time."""
        return datetime.fromisoformat(self.started).astimezone() if self.started else None

    @property
    def ended_at(self) -> datetime | None:
        return datetime.fromisoformat(self.ended).astimezone() if self.ended else None

    @property
    def provenance(self) -> dict[str, Any]:
        return self.facts.get("provenance", {})

    @property
    def counters(self) -> dict[str, Any]:
        return self.facts.get("counters", {})

    @property
    def recorded_checks(self) -> dict[str, Any] | None:
        """The result of each check; None if the run's version of posttrain recorded none."""
        return checks if isinstance(checks := self.facts.get("checks"), dict) else None

    @property
    def checks(self) -> "list[Check]":
        """Every check of the method, with its result; empty if run.json is damaged."""
        from posttrain.runs.checks import checks_of

        return checks_of(self.recorded_checks, self.method, self.step) if self.facts else []

    @cached_property
    def changed(self) -> float:
        """When run.json last changed, in Unix seconds."""
        return self._read(STATE, lambda: (self.folder / "run.json").stat().st_mtime, 0.0)

    @property
    def age(self) -> float:
        """Seconds since the run ended; if it has no recorded end, since run.json last changed."""
        ended = self.ended_at or datetime.fromtimestamp(self.changed, UTC)
        return (datetime.now(UTC) - ended).total_seconds()

    @property
    def seconds(self) -> float | None:
        """Seconds of training, otherwise seconds from the start to the end or to now; None if the run was killed."""
        trained = self.results.get("train_runtime")
        if isinstance(trained, int | float):
            return trained
        if self.started_at is None or not (self.ended_at or self.state == "running"):
            return None
        return ((self.ended_at or datetime.now(UTC)) - self.started_at).total_seconds()

    # notes.json

    @cached_property
    def notes(self) -> Notes:
        return self._read(NOTES, lambda: read_notes(self.folder), Notes())

    @property
    def tags(self) -> tuple[str, ...]:
        return self.notes.tags

    @property
    def hashtags(self) -> str:
        """The tags as text, such as `#keep #paper`."""
        return " ".join(f"#{tag}" for tag in self.tags)

    @property
    def note(self) -> str:
        return self.notes.note

    # config.yaml

    @cached_property
    def settings(self) -> str:
        """The text of config.yaml; empty if it cannot be read."""
        return self._read(SETTINGS, lambda: read_regular(self.folder / "config.yaml").decode(), "")

    @cached_property
    def config(self) -> dict[str, Any]:
        """config.yaml as plain data; empty if it is missing or damaged."""
        return self._read(CONFIG, lambda: _mapping(read_yaml(self.settings), self.folder / "config.yaml"), {})

    @property
    def model_settings(self) -> list[dict[str, Any]]:
        """The settings of each model of the run."""
        models = self.config.get("models") or [self.config.get("model")]
        return [model for model in models if isinstance(model, dict)] if isinstance(models, list) else []

    @cached_property
    def head(self) -> tuple[str, str, str]:
        """Method, model and data, as far as config.yaml has them. They are read from the lines that posttrain writes,
        in a twentieth of the time that parsing takes; any other YAML is parsed."""
        if (quick := _quick_head(self.settings)) is not None:
            return quick
        method, source = as_mapping(self.config.get("method")), as_mapping(self.config.get("data")).get("source")
        names = [str(model.get("name") or model_name(str(model.get("path", "?")))) for model in self.model_settings]
        return (
            str(method.get("type", "?")),
            ", ".join(names) or "?",
            source if isinstance(source, str) else json.dumps(source, ensure_ascii=False, default=str),
        )

    @property
    def method(self) -> str:
        return self.head[0]

    @property
    def model(self) -> str:
        return self.head[1]

    @property
    def data(self) -> str:
        return self.head[2]

    # metrics.jsonl and results.json

    @cached_property
    def _latest(self) -> tuple[int, str, float | None] | None:
        """The last step, the first of the method's main metrics that has a value, and the value; None if damaged."""
        return self._read(LATEST, lambda: first_latest(self.folder, headline_metrics(self.method)), None)

    @property
    def step(self) -> int:
        return self._latest[0] if self._latest else 0

    @property
    def metric(self) -> str:
        """The display name of the main metric; `result` is its value."""
        return headline_metrics(self.method).get(self._latest[1], "") if self._latest else ""

    @property
    def result(self) -> float | None:
        return self._latest[2] if self._latest else None

    @property
    def headline(self) -> str:
        """The main metric with its name; empty before it has a value."""
        return "" if self.result is None else f"{self.metric} {self.result:.3g}"

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The latest value of each metric near the end of metrics.jsonl."""
        return self._read(LATEST, lambda: latest_metrics(self.folder), {})

    @property
    def headlines(self) -> dict[str, float]:
        """All main metrics of the method, by display name."""
        return headlines(self.method, self.metrics)

    @property
    def alarms(self) -> dict[str, int]:
        """The number of steps with each alarm."""
        counts = {name: count for name, count in self.metrics.items() if name.startswith("alarms/")}
        return {name.removeprefix("alarms/"): int(count) for name, count in counts.items()}

    @cached_property
    def results(self) -> dict[str, Any]:
        """The content of results.json; empty before the end of the run."""
        path = self.folder / "results.json"
        return self._read(RESULTS, lambda: _mapping(load_json(path), path), {}) if path.is_file() else {}

    # Files

    @cached_property
    def size(self) -> int:
        """Bytes of all files in the folder."""
        return size_of(self.folder)

    @property
    def saved_models(self) -> dict[str, int]:
        """Bytes of each checkpoint, `best` and `final`, by name."""
        models = (self.folder / name for name in MODELS)
        saved = [*list_checkpoints(self.folder), *(path for path in models if path.is_dir())]
        return {path.name: size_of(path) for path in saved}

    def log_tail(self, size: int) -> str:
        """The whole lines in the last `size` bytes of training.log; empty if it cannot be read."""
        try:
            with open_regular(self.folder / "training.log") as file:
                end = file.seek(0, 2)
                file.seek(max(0, end - size))
                lines = file.read()
        except OSError:
            return ""
        return (lines if end <= size else lines.partition(b"\n")[2]).decode("utf-8", "replace")

    @cached_property
    def _progress(self) -> tuple[int | None, str]:
        lines = PROGRESS.findall(self.log_tail(1 << 14))
        return (int(lines[-1][0]), lines[-1][1]) if lines else (None, "")

    @property
    def total(self) -> int | None:
        """The planned number of steps; None if the run's log does not have it."""
        return self._progress[0]

    @property
    def eta(self) -> str:
        """The remaining time of a run in progress; otherwise empty."""
        return self._progress[1] if self.state == "running" else ""

    @property
    def has_rollouts(self) -> bool:
        return (self.folder / "rollouts.sqlite").is_file()

    @property
    def problem(self) -> str:
        """Why state, metrics or notes cannot be read; empty if all can be read."""
        _ = self.facts, self._latest, self.notes
        return "; ".join(dict.fromkeys(self.problems[what] for what in (STATE, LATEST, NOTES) if what in self.problems))


def read_run(folder: Path | str) -> RunSummary:
    """The summary of a run. Raises RunError if this is not a run folder, or it is damaged."""
    check_run_folder(Path(folder))
    run = RunSummary(folder)
    if run.state == DAMAGED:
        raise RunError(run.problems.get(STATE) or run.problems[LATEST])
    return run


def summaries_below(root: Path) -> list[RunSummary]:
    """The summaries of the runs at and below a folder, the latest last, damaged runs included."""
    runs = []
    for folder, size, changed in measured_runs(root):
        run = RunSummary(folder, os.path.relpath(folder, root) if folder != root else "")
        run.size, run.changed = size, changed
        runs.append(run)
    return runs


def _mapping(data: Any, path: Path) -> dict[str, Any]:
    if not isinstance(data or {}, dict):
        raise ValueError(f"{path} is damaged")
    return data or {}


def _quick_head(text: str) -> tuple[str, str, str] | None:
    """Like `RunSummary.head`; None if a value is missing or is not a plain word on one line."""
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
    """The value of a key at the block's first level; None unless every YAML reader reads it as null or a plain word."""
    values = re.findall(rf"^  {key}: (.+)$", block, re.MULTILINE)
    if len(values) != 1 or not WORD.fullmatch(values[0]) or values[0].lower() in NO_WORDS:
        return None
    return NULL if values[0].lower() == NULL else values[0]
