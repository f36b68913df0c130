"""`posttrain sample`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.base.imports import quick_imports
from posttrain.cli.errors import UsageError
from posttrain.cli.generate import Seed, Stop
from posttrain.cli.score import Variables
from posttrain.cli.settings import (
    devices_from_flag,
    from_flags,
    rewards_from_flags,
    saved_settings,
    variables_from_flag,
)
from posttrain.config import DataConfig, ModelConfig, RunConfig, load
from posttrain.config.reading.explain import did_you_mean
from posttrain.config.schema.rollout import RolloutConfig
from posttrain.config.schema.run import BEHAVIOR_VERSION
from posttrain.runs.finding import newest_model

Model = Annotated[
    str, typer.Argument(help="Hub id or folder: a causal model, a LoRA adapter, a checkpoint, or a run (its newest).")
]
File = Annotated[
    Path | None,
    typer.Argument(help="Prompts, as rows of any format; default: those of the run, or of --config."),
]
Config = Annotated[
    str | None,
    typer.Option("--config", metavar="FILE|PRESET", help="Settings to sample with; default: those of the model's run."),
]
StageName = Annotated[str | None, typer.Option("--stage", help="Stage of the settings, or of the run folder.")]
Reward = Annotated[
    list[str] | None,
    typer.Option(
        "--reward",
        help='A reward: its type, module:function, or settings such as "{type: length, target: 50}"; repeatable.',
    ),
]
Prompts = Annotated[int, typer.Option("--prompts", min=1, help="Number of prompts: the first usable ones.")]
NumGenerations = Annotated[int, typer.Option("--num-generations", "-n", min=2, help="Completions of each prompt.")]
Show = Annotated[int, typer.Option("--show", min=0, help="Completions shown of each prompt.")]
Temperature = Annotated[
    str | None,
    typer.Option(
        "--temperature", metavar="FLOAT[,FLOAT...]", help="Sampling temperature; several: a table by temperature."
    ),
]
TopP = Annotated[
    float | None, typer.Option("--top-p", help="Total probability of the most likely tokens to sample from.")
]
TopK = Annotated[int | None, typer.Option("--top-k", help="Number of most likely tokens; 0: all.")]
MinP = Annotated[
    float | None, typer.Option("--min-p", help="Minimum probability, as a share of the most likely token's.")
]
MaxLength = Annotated[int | None, typer.Option("--max-completion-length", help="Longest completion in tokens.")]
Engine = Annotated[str | None, typer.Option("--engine", help="embedded; transformers: any architecture; vllm.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="auto, float32 or bfloat16.")]
Format = Annotated[str | None, typer.Option("--format", help="Format of the rows, as data.format.")]
Template = Annotated[
    str | None, typer.Option("--template", help="As data.template; without settings: chat if there is one, else none.")
]


DeviceOption = Annotated[
    str | None, typer.Option("--device", help="auto, cpu, cuda, a GPU by number (cuda:1), or mps.")
]


def sample(
    model: Model,
    file: File = None,
    config: Config = None,
    stage: StageName = None,
    reward: Reward = None,
    prompts: Prompts = 4,
    num_generations: NumGenerations = 8,
    show: Show = 1,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    max_completion_length: MaxLength = None,
    stop: Stop = None,
    engine: Engine = None,
    seed: Seed = 0,
    format: Format = None,
    template: Template = None,
    chat_template_kwargs: Variables = None,
    dtype: Dtype = None,
    device: DeviceOption = None,
) -> None:
    """Sample completions from a model as in training, and report findings.

    Prompts, template, rewards, model and sampling settings are those of the model's run or of --config, unless given
    here; without either they have their defaults. For every prompt: lengths, the shares of truncated, of distinct and
    of well-formatted completions, and the mean and spread of their rewards; then suggestions, and problems of stop
    tokens, begin tokens and tags.
    """
    folder = _folder(model, stage)
    path = str(newest_model(folder)) if folder.is_dir() else model
    settings = _settings(model, folder, config, stage)
    if settings is None and file is None:
        what = "is not part of a run" if folder.is_dir() else "is not a folder, and a hub model has no run"
        raise UsageError(f"{model} {what}, so there are no prompts: give a FILE of prompts, or settings with --config")
    limits = {"top_p": top_p, "top_k": top_k, "min_p": min_p, "max_completion_length": max_completion_length}
    given = limits | {"engine": engine, "stop": tuple(stop) if stop else None}
    rollouts = _rollouts(settings, temperature, {name: value for name, value in given.items() if value is not None})
    variables = variables_from_flag(chat_template_kwargs)
    if variables and settings is None and template is None:
        template = "chat"
    data = _data(settings, file, {"format": format, "template": template}, variables)
    rewards = rewards_from_flags(reward) if reward else settings.rewards if settings else ()
    with quick_imports():
        from posttrain.base.console import PlainConsole
        from posttrain.inspection.sample import Setup
        from posttrain.inspection.sample import sample as sample_from
        from posttrain.models.load import load_tokenizer  # these import torch, which takes seconds

    model_settings = _model(settings, path, dtype)
    if settings is None and template is None and load_tokenizer(model_settings).chat_template:
        data = data.model_copy(update={"template": "chat"})
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
    temperatures = list(dict.fromkeys(one.temperature for one in rollouts))
    sample_from(setup, temperatures, prompts, num_generations, show, seed, PlainConsole())


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


def _data(
    settings: RunConfig | None, file: Path | None, given: dict[str, str | None], variables: dict[str, Any]
) -> DataConfig:
    values: dict[str, Any] = settings.data.model_dump() if settings else {"template": "none"}
    if file is not None:
        values |= {"source": str(file), "split": "train", "validation": None}
    if given["format"] is not None:
        values["columns"] = {}  # they belong to the format of the settings
    if given["template"] not in (None, "tags"):
        values["tags"] = {}
    if given["template"] not in (None, values["template"]):
        values["chat_template_kwargs"] = {}  # of the template of the settings
    values["chat_template_kwargs"] = values.get("chat_template_kwargs", {}) | variables
    return from_flags(DataConfig, values | {name: value for name, value in given.items() if value is not None})


def _rollouts(settings: RunConfig | None, temperature: str | None, given: dict[str, Any]) -> list[RolloutConfig]:
    """The sampling settings at each temperature."""
    rollout = settings.rollout if settings else RolloutConfig()
    if given.get("engine", "vllm") != "vllm":
        given["vllm"] = {}  # training's vLLM settings do not apply to another engine
    values = rollout.model_dump() | given
    at = [rollout.temperature] if temperature is None else [_number(text) for text in temperature.split(",")]
    return [from_flags(RolloutConfig, values | {"temperature": value}) for value in at]


def _model(settings: RunConfig | None, path: str, dtype: str | None) -> ModelConfig:
    """The model at `path` with the settings' options. A folder has full weights, or an adapter that is merged."""
    model = settings.models[0] if settings else ModelConfig(path=path)
    values = model.model_dump() | {"path": path, "lora": None, "load_in_4bit": False}
    if path != model.path:
        values["revision"] = None
    return from_flags(ModelConfig, values | ({"dtype": dtype} if dtype is not None else {}))


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
