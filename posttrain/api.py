"""The Python API: explore, train, evaluate, and read the results of a run.

    import posttrain

    run = posttrain.train({"model": "openai-community/gpt2", "method": "sft", "data": {"source": "rows.jsonl"}})
    run.metric("loss")                      # steps and values
    posttrain.evaluate(run, ["gsm8k"]).summary["gsm8k"]["value"]

The settings are the same as in a settings file (docs/config.md). The error classes are in posttrain/base/errors.py.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from inspect import Signature, signature
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain import runner
from posttrain.base.errors import ConfigError, RunError
from posttrain.base.functions import give
from posttrain.base.log import log
from posttrain.config import DevicesConfig, ModelConfig, RolloutConfig, RunConfig, Stage, load
from posttrain.config.options import EvalOptions, ExploreOptions
from posttrain.config.reading.explain import checked
from posttrain.config.schema.model import ModelDtype
from posttrain.config.schema.suite import LM_EVAL, SuiteConfig
from posttrain.data.given import give_rows
from posttrain.evaluation.evaluate import evaluate as evaluate_suites
from posttrain.evaluation.evaluate import evaluate_recorded
from posttrain.evaluation.items import Items, load_items
from posttrain.evaluation.records import Answer, read_answers
from posttrain.evaluation.suite import ALIASES, find_suite, with_settings
from posttrain.evaluation.tasks import Tasks, evaluate_tasks
from posttrain.inspection.quality import explore_stages
from posttrain.models.devices import compute_dtype, take_device
from posttrain.models.load import load_model, load_tokenizer
from posttrain.runs.checkpoint import list_checkpoints
from posttrain.runs.files import load_json
from posttrain.runs.finding import locate_model, newest_model
from posttrain.runs.folder import check_run_folder
from posttrain.runs.metrics import read_metrics
from posttrain.runs.summary import RunSummary, read_run

Settings = RunConfig | Sequence[Stage] | Mapping[str, Any] | Path | str
Rows = Iterable[Any]  # mappings of columns to values
Suites = Sequence[str | SuiteConfig | Items]
Options = TypeVar("Options", bound=EvalOptions)
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class TrainedRun:
    """A run folder. Each access to a property reads the folder again, so a run in progress can be followed."""

    folder: Path

    @property
    def summary(self) -> RunSummary:
        """State, headline, tags, note, alarms, checks …, as in the UI. The returned object reads each value once."""
        return RunSummary(self.folder)

    @property
    def state(self) -> str:
        """`running`, `finished`, `interrupted`, `failed` or `killed`."""
        return read_run(self.folder).state

    @property
    def config(self) -> RunConfig:
        return load(self.folder / "config.yaml").config

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`: `step` and the logged metrics. Validation metrics start with `eval_`."""
        return read_metrics(self.folder)

    @property
    def results(self) -> dict[str, Any]:
        """The final numbers of a finished run. Raises RunError if the run has not finished."""
        file = self.folder / "results.json"
        if not file.is_file():
            raise RunError(f"{self.folder} has no results yet: it is {self.state}")
        return load_json(file)

    @property
    def model_path(self) -> Path:
        """The folder of the final model, or otherwise of the newest checkpoint. Raises RunError if there is neither."""
        return newest_model(self.folder)

    @property
    def checkpoints(self) -> list[Path]:
        return list_checkpoints(self.folder)

    def metric(self, name: str) -> tuple[list[int], list[float]]:
        """The steps at which a metric was logged, and its values; both lists are empty if it was never logged. Raises
        RunError for a name like that of a metric that was."""
        lines = [line for line in self.metrics if line.get(name) is not None]
        names = {key for line in self.metrics for key in line} if not lines else ()
        if near := get_close_matches(name, names, n=1):
            raise RunError(f"{self.folder} has logged no {name}; did you mean {near[0]}?")
        return [line["step"] for line in lines], [line[name] for line in lines]

    def load(self) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """The trained model as a plain transformers model in evaluation mode, adapters merged, and its tokenizer."""
        config = self.config
        model, device = ModelConfig(path=str(self.model_path)), take_device(config.devices)
        head = "reward" if config.method.head == "reward" else "lm"
        loaded = load_model(model, head, compute_dtype(model, device), device).eval()
        # not posttrain's attention, which needs packed batches
        loaded.set_attn_implementation("sdpa" if loaded._supports_sdpa else "eager")
        return loaded, load_tokenizer(model)


Model = TrainedRun | Path | str


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The records of an evaluation."""

    folder: Path
    summary: Mapping[str, Any]  # for each requested suite: value, low, high, items … (docs/eval.md)

    @property
    def answers(self) -> list[Answer]:
        """All answers to the suites in `summary`, with their verdicts."""
        suites = {entry["suite"] for entry in self.summary.values()}
        return [answer for answer in read_answers(self.folder) if answer.suite in suites]


def train(
    settings: Settings,
    *,
    overrides: Sequence[str] = (),
    data: Rows | Mapping[str, Rows] | None = None,
    rewards: Sequence[Callable[..., Any]] = (),
    resume: bool | Path | str = False,
    overwrite: bool = False,
) -> TrainedRun:
    """Train one model in one stage.

    `settings`: a file, a preset, a mapping, or a RunConfig; `overrides` are strings such as "training.max_steps=10".
    `resume`: True continues the run with the name in the settings, a path the run in that folder or from that
    checkpoint. `data`: rows in memory (mappings, or a Dataset of the library `datasets`) in place of `data.source`, or
    the sets `train` and `validation`; `rewards`: functions, closures too, in place of the settings' rewards. Neither is
    stored: a resumed run needs them again. Raises ConfigError for several models or stages (use `train_all`), and the
    error of a failed run.
    """
    stages = _stages(settings, overrides, _given(data, rewards))
    models = stages[0].config.models
    if len(stages) > 1 or len(models) > 1:
        raise ConfigError(f"the settings have {len(stages)} stages and {len(models)} models: use train_all")
    return train_all(stages, resume=resume, overwrite=overwrite)[0]


def train_all(
    settings: Settings,
    *,
    overrides: Sequence[str] = (),
    resume: bool | Path | str = False,
    overwrite: bool = False,
    model_index: int | None = None,
    skip: Collection[str] = (),
    compared: bool = False,
) -> list[TrainedRun]:
    """Train every model at every stage, as `posttrain train` does. Returns the runs in the order of training.

    `model_index`: train only this model of the list. `skip`: stages that are not trained, because their final models
    exist. `compared`: the stages are methods, whose completions are compared at the end. With several ranks, a rank
    other than the first exits the process if its run fails.
    """
    stages = _stages(settings, overrides)
    resume = Path(resume) if isinstance(resume, str) else resume
    root = runner.root_of(stages, resume, skip, model_index, compared)
    if not isinstance(resume, Path):
        stages = tuple(Stage(s.name, s.init_from, s.config.model_copy(update={"name": root.name})) for s in stages)
    if status := runner.train(
        stages, resume=resume, overwrite=overwrite, model_index=model_index, skip=skip, compared=compared
    ):
        sys.exit(status)
    return [TrainedRun(folder) for folder in runner.folders_of(stages, root, resume, skip, model_index)]


def explore(
    settings: Settings,
    *,
    overrides: Sequence[str] = (),
    data: Rows | Mapping[str, Rows] | None = None,
    rewards: Sequence[Callable[..., Any]] = (),
    **options: Any,
) -> dict[str, Any]:
    """Show the data as a run with these settings would see it, and check it, as `posttrain explore` does.

    The arguments are those of `train`, and as `options` those of the command, such as `rows=5`, `set="validation"` or
    `json=True` (print nothing). Returns counts, lengths, the rows shown and the findings (docs/data.md), for several
    stages by stage.
    """
    return explore_stages(_stages(settings, overrides, _given(data, rewards)), ExploreOptions(**options))


def _given(data: Rows | Mapping[str, Rows] | None, rewards: Sequence[Callable[..., Any]]) -> dict[str, Any]:
    """The settings that name rows and functions in memory."""
    given: dict[str, Any] = {}
    if data is not None:
        sets = data if isinstance(data, Mapping) else {"train": data}
        if "train" not in sets or sets.keys() - {"train", "validation"}:
            raise ConfigError(f"data has the sets {', '.join(sets) or 'none'}: give train, and perhaps validation")
        given["data.source"] = give_rows("train", sets["train"])
        if "validation" in sets:
            given["data.validation"] = {"source": give_rows("validation", sets["validation"])}
    if rewards:
        given["rewards"] = [{"type": "python", "function": name} for name in give(rewards)]
    return given


def load_run(folder: Path | str) -> TrainedRun:
    """The run in a folder, in any state. Raises RunError if it is not a run folder."""
    check_run_folder(Path(folder))
    return TrainedRun(Path(folder))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateOptions(EvalOptions):
    """Options of `evaluate`: those of `posttrain eval`, and four that only the Python API accepts."""

    settings: Mapping[str, Any] | None = None
    data: Mapping[str, Path | str | Rows] | None = None
    dtype: ModelDtype = "auto"
    device: DevicesConfig | None = None


def _taking(
    group: Callable[P, Options],
) -> Callable[[Callable[[Model, Suites, Options], Evaluated]], Callable[Concatenate[Model, Suites, P], Evaluated]]:
    """Decorator: the function takes the fields of `group` as keyword arguments, in place of a `group` object."""

    def decorate(function: Callable[[Model, Suites, Options], Evaluated]) -> Callable[..., Evaluated]:
        @wraps(function)
        def called(model: Model, suites: Suites, *args: P.args, **kwargs: P.kwargs) -> Evaluated:
            return function(model, suites, group(*args, **kwargs))

        model, suites, _ = signature(function).parameters.values()
        called.__signature__ = Signature([model, suites, *signature(group).parameters.values()])  # pyright: ignore
        return called

    return decorate


@_taking(EvaluateOptions)
def evaluate(model: Model, suites: Suites, options: EvaluateOptions) -> Evaluated:
    """Answer suites with a model and grade the answers. An interrupted evaluation is resumed.

    `model`: a run, a folder, a hub id, or a file with recorded completions in `completion_column`. `suites`: names,
    files, `lm-eval:TASK`, settings, or loaded items. `template`, `prompt`, `rule` and the values in `settings` apply to
    every suite and replace the suite's own; a rule may be a function. `data`: a file or rows in memory by suite.
    Several values of `temperature` or `top_p` are a sweep. `reference` and `num_batches` are for suites of pairs.
    Records are written to `output`; by default to evaluation/NAME in the run folder, or to evaluations/NAME for models
    and files outside a run. Raises RunError if the folder has records of a different model or other settings.
    """
    path, name, default = locate_model(str(model.folder if isinstance(model, TrainedRun) else model))
    folder, devices, file = Path(options.output or default), options.device or DevicesConfig(), Path(path)
    sampling = {"engine": options.engine, "top_k": options.top_k, "min_p": options.min_p}
    for setting in options.swept:
        checked(RolloutConfig, sampling | setting, "sampling")
    rollout = checked(RolloutConfig, sampling, "sampling")
    settings = {**options.of_suites, **(options.settings or {})}
    config = checked(ModelConfig, {"path": path, "dtype": options.dtype}, "a model")
    chosen = _chosen(suites, settings, options.data or {}, options.max_rows)
    tasks = _tasks(suites, settings, rollout, options)
    requested, summary = {items.suite.name for items in chosen}, dict[str, Any]()
    if not requested and not tasks.names:
        raise ConfigError("no suite is named: give at least one, such as gsm8k")
    if file.is_file() and tasks.names:
        raise ConfigError(f"{file} has recorded completions, which lm-eval's tasks cannot grade: give a model")
    if chosen and tasks.names:  # an unknown task is an error before the suites start
        from posttrain.evaluation.lm_eval_model import manager_of  # needs lm-eval

        manager_of(config, tasks.names, tasks.chat)
    if file.is_file():
        summary = evaluate_recorded(file, chosen, options, folder)
    elif chosen:
        summary = evaluate_suites(config, name, chosen, options, devices, folder)
    if tasks.names:
        summary, ran = evaluate_tasks(config, name, tasks, devices, folder, options.overwrite)
        requested |= ran
    return Evaluated(folder, {key: entry for key, entry in summary["suites"].items() if entry["suite"] in requested})


def _is_task(suite: object) -> bool:
    return isinstance(suite, str) and suite.startswith(LM_EVAL)


def _tasks(suites: Suites, settings: Mapping[str, Any], rollout: RolloutConfig, options: EvalOptions) -> Tasks:
    """The lm-eval tasks among the suites. The only settings that they read are the template and the system prompt."""
    names = tuple(str(suite).removeprefix(LM_EVAL) for suite in suites if _is_task(suite))
    chat, system_prompt = settings.get("template") == "chat", settings.get("system_prompt")
    return Tasks(names, rollout, options.max_rows, chat, system_prompt, options.seed)


def _chosen(
    suites: Suites, settings: Mapping[str, Any], data: Mapping[str, Path | str | Rows], max_rows: int | None
) -> list[Items]:
    """The items of each suite except lm-eval tasks. Raises ConfigError for a repeated suite, and for unused data."""
    sources = {
        ALIASES.get(name, name): str(source) if isinstance(source, Path | str) else give_rows(name, source)
        for name, source in data.items()
    }
    if callable(settings.get("rule")):
        settings = {**settings, "rule": give([settings["rule"]])[0]}
    chosen: dict[str, Items] = {}
    for entry in suites:
        if _is_task(entry):
            continue
        suite = entry.suite if isinstance(entry, Items) else find_suite(entry) if isinstance(entry, str) else entry
        if suite.name in chosen:
            raise ConfigError(f"the suite {suite.name} is named twice")
        if isinstance(entry, Items):
            chosen[suite.name] = entry
            continue
        own = {"source": sources.pop(suite.name)} if suite.name in sources else {}
        chosen[suite.name] = load_items(with_settings(suite, {**settings, **own}), max_rows)
    if sources:
        raise ConfigError(
            f"`data` has rows for {', '.join(sources)}, but none of these suites uses them: {', '.join(chosen)}"
        )
    return list(chosen.values())


def _stages(settings: Settings, overrides: Sequence[str], given: Mapping[str, Any] | None = None) -> tuple[Stage, ...]:
    if isinstance(settings, Mapping | str | Path):
        loaded = load(settings, overrides, given, imports=True)
        for note in loaded.notes:
            log.warning("%s", note)
        return loaded.stages
    if overrides or given:
        raise ConfigError(
            "overrides apply only to a file or a mapping, as do data and rewards: change the RunConfig with model_copy"
        )
    return (Stage("", None, settings),) if isinstance(settings, RunConfig) else tuple(settings)
