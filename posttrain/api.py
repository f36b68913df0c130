"""For programs: train, evaluate, and what a run has.

    import posttrain

    run = posttrain.train({"model": "openai-community/gpt2", "method": "sft", "data": {"source": "rows.jsonl"}})
    run.metric("loss")                      # steps and values
    posttrain.evaluate(run, ["gsm8k"]).summary["gsm8k"]["value"]

Settings are those of a file (docs/config.md). Errors are of the classes in posttrain/errors.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain import runner
from posttrain.config import DevicesConfig, ModelConfig, RunConfig, Stage, load
from posttrain.config.schema.suite import SuiteConfig
from posttrain.errors import ConfigError, RunError
from posttrain.evaluation.items import load_items
from posttrain.evaluation.records import Answer, read_answers
from posttrain.evaluation.suite import find_suite, with_settings
from posttrain.inspection.evaluate import Options
from posttrain.inspection.evaluate import evaluate as evaluate_suites
from posttrain.models.devices import compute_dtype, take_device
from posttrain.models.load import load_model, load_tokenizer
from posttrain.reports.listing import newest_model, place_of
from posttrain.runner.pipeline import Pipeline
from posttrain.store.checkpoint import list_checkpoints
from posttrain.store.files import load_json
from posttrain.store.folder import check_run_folder
from posttrain.store.metrics import read_metrics
from posttrain.store.runs import read_run

Settings = RunConfig | Mapping[str, Any] | Path | str


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """A run folder. What it has is read when it is asked for, so a run in progress is followed."""

    folder: Path

    @property
    def state(self) -> str:
        """running, finished, interrupted, failed, or killed."""
        return read_run(self.folder).state

    @property
    def config(self) -> RunConfig:
        return load(self.folder / "config.yaml").config

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`: `step`, and what was logged; validation has the prefix `eval_`."""
        return read_metrics(self.folder)

    @property
    def results(self) -> dict[str, Any]:
        """The final numbers of a finished run. Raises RunError before."""
        file = self.folder / "results.json"
        if not file.is_file():
            raise RunError(f"{self.folder} has no results yet: it is {self.state}")
        return load_json(file)

    @property
    def model_path(self) -> Path:
        """The final model, or else the newest checkpoint. Raises RunError without either."""
        return newest_model(self.folder)

    @property
    def checkpoints(self) -> list[Path]:
        return list_checkpoints(self.folder)

    def metric(self, name: str) -> tuple[list[int], list[float]]:
        """The steps at which a metric was logged, and its values; empty if it never was."""
        lines = [line for line in self.metrics if line.get(name) is not None]
        return [line["step"] for line in lines], [line[name] for line in lines]

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The trained model as transformers uses it, adapters merged, in evaluation mode; and its tokenizer."""
        config = self.config
        model, device = ModelConfig(path=str(self.model_path)), take_device(config.devices)
        head = "reward" if config.method.head == "reward" else "lm"
        loaded = load_model(model, head, compute_dtype(model, device), device).eval()
        loaded.set_attn_implementation("sdpa" if loaded._supports_sdpa else "eager")  # not of packs
        return loaded, load_tokenizer(model)


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The records of an evaluation."""

    folder: Path
    summary: Mapping[str, Any]  # by suite: value, low, high, items … (docs/eval.md)

    @property
    def answers(self) -> list[Answer]:
        """Every answer with its verdict."""
        return read_answers(self.folder)


def train(
    settings: Settings, *, overrides: Sequence[str] = (), resume: bool = False, overwrite: bool = False
) -> TrainedRun:
    """Train one model in one stage.

    `settings`: a file, a preset, a mapping, or checked settings; `overrides` such as "training.max_steps=10". `resume`
    continues the run of that name. Raises ConfigError for several models or stages (`train_all` takes them), and what
    a failed run raised.
    """
    runs = train_all(settings, overrides=overrides, resume=resume, overwrite=overwrite, single=True)
    return runs[0]


def train_all(
    settings: Settings,
    *,
    overrides: Sequence[str] = (),
    resume: bool = False,
    overwrite: bool = False,
    single: bool = False,
) -> list[TrainedRun]:
    """Train every model at every stage. Returns their runs in the order of training."""
    stages = _stages(settings, overrides)
    config = stages[0].config
    if single and (len(stages) > 1 or len(config.models) > 1):
        raise ConfigError(f"the settings have {len(stages)} stages and {len(config.models)} models: use train_all")
    name = config.name or runner.default_name(stages)
    stages = tuple(Stage(one.name, one.init_from, one.config.model_copy(update={"name": name})) for one in stages)
    runner.train(stages, resume=resume, overwrite=overwrite)
    pipeline = Pipeline.of(stages, Path(config.output_dir).expanduser() / name)
    return [TrainedRun(task.folder) for task in pipeline.tasks]


def load_run(folder: Path | str) -> TrainedRun:
    """The run in a folder, in any state. Raises RunError if it is not a run folder."""
    check_run_folder(Path(folder))
    return TrainedRun(Path(folder))


def evaluate(
    model: TrainedRun | Path | str,
    suites: Sequence[str | SuiteConfig],
    *,
    max_rows: int | None = None,
    num_generations: int | None = None,
    temperature: float | None = None,
    max_completion_length: int | None = None,
    data: Mapping[str, Path | str] | None = None,
    output: Path | str | None = None,
    overwrite: bool = False,
    device: DevicesConfig | None = None,
    seed: int = 0,
) -> Evaluated:
    """Answer suites with a model, and grade the answers; an evaluation that was stopped is resumed.

    `suites` are names, files, or settings; `data` has local rows by suite. The records go to `output`, by default to
    evaluation/ in the run, or evaluations/NAME. Raises RunError for records of another model or settings.
    """
    path, name, place = place_of(str(model.folder if isinstance(model, TrainedRun) else model))
    sources = {name: {"source": str(source)} for name, source in (data or {}).items()}
    found = [one if isinstance(one, SuiteConfig) else find_suite(one) for one in suites]
    chosen = [load_items(with_settings(one, sources.get(one.name, {})), max_rows) for one in found]
    folder = place if output is None else Path(output)
    options = Options(
        num_generations=num_generations,
        temperatures=() if temperature is None else (temperature,),
        max_completion_length=max_completion_length,
        seed=seed,
    )
    summary = evaluate_suites(
        ModelConfig(path=path), name, chosen, options, device or DevicesConfig(), folder, overwrite
    )
    return Evaluated(folder, summary["suites"])


def _stages(settings: Settings, overrides: Sequence[str]) -> tuple[Stage, ...]:
    if isinstance(settings, RunConfig):
        if overrides:
            raise ConfigError("overrides go with a file or a mapping: change the RunConfig with model_copy")
        return (Stage("", None, settings),)
    return load(settings, overrides).stages
