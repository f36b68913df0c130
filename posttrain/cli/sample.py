"""`posttrain sample`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.base.errors import UsageError
from posttrain.base.imports import quick_imports
from posttrain.cli.settings import devices_from_flag, rewards_from_flags, saved_settings
from posttrain.config import DataConfig, ModelConfig, RunConfig, load
from posttrain.config.options import SampleOptions, from_flags
from posttrain.config.reading.explain import did_you_mean
from posttrain.config.schema.rollout import RolloutConfig
from posttrain.config.schema.run import BEHAVIOR_VERSION
from posttrain.runs.finding import newest_model


def sample(
    model: Annotated[
        str,
        typer.Argument(help="Hub id or folder: a causal model, a LoRA adapter, a checkpoint, or a run (its newest)."),
    ],
    file: Annotated[
        Path | None, typer.Argument(help="Prompts, as rows of any format; default: those of the run, or of --config.")
    ] = None,
    *,
    options: SampleOptions,
) -> None:
    """Sample completions from a model as in training, and report findings.

    Prompts, template, rewards, model and sampling settings are those of the model's run or of --config, unless given
    here; without either they have their defaults. For every prompt: lengths, the shares of truncated, of distinct and
    of well-formatted completions, and the mean and spread of their rewards; then suggestions, and problems of stop
    tokens, begin tokens and tags.
    """
    folder = _folder(model, options.stage)
    path = str(newest_model(folder)) if folder.is_dir() else model
    settings = _settings(model, folder, options.config, options.stage)
    if settings is None and file is None:
        what = "is not part of a run" if folder.is_dir() else "is not a folder, and a hub model has no run"
        raise UsageError(f"{model} {what}, so there are no prompts: give a FILE of prompts, or settings with --config")
    rollouts, data = _rollouts(settings, options), _data(settings, file, options)
    rewards = rewards_from_flags(options.reward) if options.reward else settings.rewards if settings else ()
    with quick_imports():
        from posttrain.base.console import PlainConsole
        from posttrain.inspection.sample import Setup
        from posttrain.inspection.sample import sample as sample_from
        from posttrain.models.load import load_tokenizer  # these import torch, which takes seconds

    model_settings = _model(settings, path, options.dtype)
    if settings is None and options.template is None and load_tokenizer(model_settings).chat_template:
        data = data.model_copy(update={"template": "chat"})
    device = options.device
    setup = Setup(
        model=model_settings,
        data=data,
        rewards=rewards,
        rollout=rollouts[0],
        devices=settings.devices if settings and device is None else devices_from_flag(device or "auto"),
        longest_prompt=_longest_prompt(settings),
        seed=settings.seed if settings else 0,
        behavior_version=settings.behavior_version if settings else BEHAVIOR_VERSION,
    )
    temperatures = list(dict.fromkeys(rollout.temperature for rollout in rollouts))
    how = options.prompts, options.num_generations, options.show, options.seed
    sample_from(setup, temperatures, *how, PlainConsole())


def _folder(model: str, stage: str | None) -> Path:
    """The model's folder, or the stage's folder in a run with stages; it does not exist for a hub id."""
    folder = Path(model).expanduser()
    return folder / stage if stage and (folder / stage / "run.json").is_file() else folder


def _settings(model: str, folder: Path, config: str | None, stage: str | None) -> RunConfig | None:
    """The settings of --config, or else of the run that the folder is or belongs to; None without either."""
    if config is not None:
        stages = {one.name: one.config for one in load(config, (), {"model.path": model}).stages}
        if stage is None and len(stages) > 1:
            raise UsageError(f"{config} has stages ({', '.join(stages)}): name one with --stage")
        if stage is not None and stage not in stages:
            named = [name for name in stages if name]
            there = did_you_mean(stage, named) if named else f"{config} has none"
            raise UsageError(f"--stage {stage}: unknown stage; {there}")
        return stages[stage] if stage is not None else next(iter(stages.values()))
    if stage is not None and folder.name != stage:
        raise UsageError(f"--stage {stage}: {folder} has no run of a stage of that name, and there is no --config")
    saved = saved_settings(folder)
    if saved is None:
        return None
    from posttrain.runs.inputs import run_settings  # imports torch, which takes seconds

    run = saved.parent if (saved.parent / "run.json").is_file() else saved.parents[1]
    return run_settings(run, saved)


def _data(settings: RunConfig | None, file: Path | None, options: SampleOptions) -> DataConfig:
    variables, template = options.chat_template_kwargs or {}, options.template
    if variables and settings is None and template is None:
        template = "chat"
    values: dict[str, Any] = settings.data.model_dump() if settings else {"template": "none"}
    if file is not None:
        values |= {"source": str(file), "split": "train", "validation": None}
    if options.format is not None:
        values |= {"format": options.format, "columns": {}}  # columns belong to the format of the settings
    if template not in (None, "tags"):
        values["tags"] = {}
    if template not in (None, values["template"]):
        values |= {"template": template, "chat_template_kwargs": {}}  # variables of the template of the settings
    values["chat_template_kwargs"] = {**values.get("chat_template_kwargs", {}), **variables}
    return from_flags(DataConfig, **values)


def _rollouts(settings: RunConfig | None, options: SampleOptions) -> list[RolloutConfig]:
    """The sampling settings at each temperature."""
    values = (settings.rollout if settings else RolloutConfig()).model_dump()
    names = ("engine", "top_p", "top_k", "min_p", "max_completion_length", "stop")
    values |= {name: value for name in names if (value := getattr(options, name)) not in (None, ())}
    if options.engine not in (None, "vllm"):
        values["vllm"] = {}  # training's vLLM settings do not apply to another engine
    texts = [values["temperature"]] if options.temperature is None else options.temperature.split(",")
    return [from_flags(RolloutConfig, **values | {"temperature": _number(text)}) for text in texts]


def _model(settings: RunConfig | None, path: str, dtype: str | None) -> ModelConfig:
    """The model at `path` with the settings' options. A folder has full weights, or an adapter that is merged."""
    model = settings.models[0] if settings else ModelConfig(path=path)
    values = model.model_dump() | {"path": path, "lora": None, "load_in_4bit": False}
    if path != model.path:
        values["revision"] = None
    return from_flags(ModelConfig, **values | ({"dtype": dtype} if dtype is not None else {}))


def _longest_prompt(settings: RunConfig | None) -> int | None:
    """The maximum prompt length of an online method, in tokens; None without a limit."""
    if settings is None or not settings.method.samples_completions:
        return None
    room, most = settings.data.max_length - settings.completion_length, settings.data.max_prompt_length
    return min(room, most) if isinstance(most, int) else room


def _number(text: str | float) -> str | float:
    """A number from its string; any other string unchanged, for the schema to refuse."""
    try:
        return float(text)
    except ValueError:
        return text
