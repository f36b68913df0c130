"""`posttrain sample`, `generate`, `score` and `grade`: completions and scores for the rows of a file or a run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from posttrain.base.errors import UsageError
from posttrain.base.imports import quick_imports
from posttrain.base.options import Flag
from posttrain.base.terminal import say
from posttrain.cli.settings import devices_from_flag, rewards_from_flags, saved_settings
from posttrain.config import DataConfig, ModelConfig, RunConfig, load
from posttrain.config.options import (
    DEVICE,
    DTYPE,
    FORMAT,
    OVERWRITE,
    TEMPLATE,
    GenerateOptions,
    SampleOptions,
    from_flags,
)
from posttrain.config.reading.explain import did_you_mean
from posttrain.config.schema.rollout import RolloutConfig
from posttrain.config.schema.run import BEHAVIOR_VERSION
from posttrain.runs.finding import locate_model


def sample(
    model: Annotated[
        str,
        typer.Argument(help="Hub id or folder: a causal model, a LoRA adapter, a checkpoint, or a run's newest model."),
    ],
    file: Annotated[
        Path | None, typer.Argument(help="Prompts, as rows of any format; default: those of the run, or of --config.")
    ] = None,
    *,
    options: SampleOptions,
) -> None:
    """Sample completions from a model as in training, and report findings.

    Options override the settings (prompts, template, rewards, model, sampling) of the model's run or of --config;
    without either, settings have their defaults. For every prompt, the report shows lengths, the shares of truncated,
    distinct and well-formatted completions, and the mean and spread of their rewards. It then lists suggestions, and
    problems with stop tokens, begin tokens and tags.
    """
    folder = Path(model).expanduser()  # of a hub id, it does not exist
    if options.stage and (folder / options.stage / "run.json").is_file():
        folder /= options.stage
    path = locate_model(str(folder))[0]
    settings = _settings(model, folder, options.config, options.stage)
    if settings is None and file is None:
        what = "is not part of a run" if folder.is_dir() else "is not a folder, and a hub model has no run"
        raise UsageError(f"{model} {what}, so there are no prompts: give a FILE of prompts, or settings with --config")
    rollouts, data = _rollouts(settings, options), _data(settings, file, options)
    rewards = rewards_from_flags(options.reward) if options.reward else settings.rewards if settings else ()
    with quick_imports():
        from posttrain.base.console import PlainConsole
        from posttrain.inspection.sample import sample as sample_from
        from posttrain.models.load import load_tokenizer  # these import torch, which takes seconds

    model_settings = _model(settings, path, options.dtype)
    if settings is None and options.template is None and load_tokenizer(model_settings).chat_template:
        data = data.model_copy(update={"template": "chat"})
    base = settings or load(None, (), {"model.path": "model", "method.type": "sft", "data.source": "file"}).config
    devices = base.devices if options.device is None else devices_from_flag(options.device)
    changed = {"models": (model_settings,), "data": data, "rewards": rewards, "rollout": rollouts[0]}
    config = base.model_copy(update=changed | {"devices": devices})
    temperatures = list(dict.fromkeys(rollout.temperature for rollout in rollouts))
    sample_from(config, _longest_prompt(settings), temperatures, options, PlainConsole())


def _settings(model: str, folder: Path, config: str | None, stage: str | None) -> RunConfig | None:
    """The settings of --config, or of the run that the folder is or belongs to; None without either."""
    if config is not None:
        stages = {part.name: part.config for part in load(config, (), {"model.path": model}).stages}
        if stage is None and len(stages) > 1:
            raise UsageError(f"{config} has stages ({', '.join(stages)}): name one with --stage")
        if stage is not None and stage not in stages:
            names = [name for name in stages if name]
            hint = did_you_mean(stage, names) if names else f"{config} has no stages"
            raise UsageError(f"--stage {stage}: unknown stage; {hint}")
        return stages[stage] if stage is not None else next(iter(stages.values()))
    if stage is not None and folder.name != stage:
        raise UsageError(f"--stage {stage}: {folder} has no stage of that name, and --config is not given")
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
        values |= {"template": template, "chat_template_kwargs": {}}  # the settings' variables are for their template
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
    return [from_flags(RolloutConfig, **values | {"temperature": text}) for text in texts]


def _model(settings: RunConfig | None, path: str, dtype: str | None) -> ModelConfig:
    """The model at `path`, with the options of the settings. A folder contains full weights or an adapter to merge."""
    model = settings.models[0] if settings else ModelConfig(path=path)
    values = model.model_dump() | {"path": path, "lora": None, "load_in_4bit": False}
    if path != model.path:
        values["revision"] = None
    return from_flags(ModelConfig, **values | ({"dtype": dtype} if dtype is not None else {}))


def _longest_prompt(settings: RunConfig | None) -> int | None:
    """The maximum prompt length of an online method, in tokens; None without a limit."""
    if settings is None or not settings.method.samples_completions:
        return None
    room, limit = settings.data.max_length - settings.completion_length, settings.data.max_prompt_length
    return min(room, limit) if isinstance(limit, int) else room


def score(
    model: Annotated[
        str, typer.Argument(help="Hub id or folder: a causal model, a reward model, a LoRA adapter, a run.")
    ],
    file: Annotated[Path, typer.Argument(help="JSONL, JSON, CSV or Parquet; also .gz.")],
    output: Annotated[Path | None, Flag("File to write; default: FILE.scored.jsonl.", "-o")] = None,
    overwrite: Annotated[bool, OVERWRITE] = False,
    format: Annotated[str, FORMAT] = "auto",
    template: Annotated[str | None, TEMPLATE] = None,
    max_length: Annotated[int, Flag("Maximum length of a row in tokens; a longer one is an error.", min=2)] = 4096,
    tokens_per_pack: Annotated[
        int, Flag("Maximum tokens per pack, which limits memory, as in training.", min=2)
    ] = 8192,
    top_logprobs: Annotated[
        int, Flag("Number of most likely tokens at each token, for distillation from a file; 0: none.", min=0)
    ] = 0,
    dtype: Annotated[str, DTYPE] = "auto",
    device: Annotated[str, DEVICE] = "auto",
) -> None:
    """Score a file's completions: log-probabilities from a causal model, rewards from a reward model.

    Rows keep their order and fields; `logprob` and `logprobs`, or `reward`, are added. Rows with a chosen and a
    rejected completion receive these for both (`chosen_reward`, `rejected_reward`). With --top-logprobs,
    `teacher_logprobs` is added, a column for method.teacher_logprobs.
    """
    devices = devices_from_flag(device)
    overrides = [f"data.max_length={max_length}", f"data.format={format}", "data.overlong=error", "data.shuffle=false"]
    flags = {"model.path": locate_model(model)[0], "model.dtype": dtype, "method.type": "sft", "data.source": str(file)}
    flags |= {"training.tokens_per_pack": max(tokens_per_pack, 2 * max_length)}
    config = load(None, overrides, flags).config
    with quick_imports():
        from posttrain.inspection.rows import score as score_file
        from posttrain.models.load import load_tokenizer  # these import torch, which takes seconds

    if template is None:
        template = "chat" if load_tokenizer(config.models[0]).chat_template else "none"
    data = config.data.model_copy(update={"template": template})
    target = output or file.with_name(f"{file.name}.scored.jsonl")
    tokens = config.training.tokens_per_pack
    means = score_file(config.models[0], file, target, data, devices, tokens, overwrite, top_logprobs)
    for name, value in means.items():
        say(f"mean {name}: {value:.4f}" if name != "accuracy" else f"chosen above rejected: {value:.1%}")
    say(f"written: {target}")


def grade(
    file: Annotated[Path, typer.Argument(help="JSONL, JSON, CSV or Parquet; also .gz.")],
    reward: Annotated[
        str,
        Flag(
            "math, gsm8k, r1_zero, question_only, check_answer, check_numbers, match_format_exactly, "
            "match_format_approximately; or module:function."
        ),
    ],
    answer_column: Annotated[str, Flag("The column with the right answer.")] = "answer",
    completion_column: Annotated[str, Flag("The column with the completion.")] = "completion",
    output: Annotated[Path | None, Flag("File to write; default: FILE.graded.jsonl.", "-o")] = None,
    overwrite: Annotated[bool, OVERWRITE] = False,
    deadline: Annotated[float, Flag("Time limit for grading each completion, in seconds.")] = 2.0,
    workers: Annotated[int | None, Flag("Number of processes; default: one per core, at most 8.", min=1)] = None,
) -> None:
    """Grade a file's completions in supervised worker processes, as in training.

    Rows keep their order and fields; `verdict` (correct, wrong, timeout, crashed, bad_gold), `score`, `extracted` and
    `seconds` are added, and `parts` if a reward has parts.
    """
    from posttrain.rewards.file import grade_file

    target = output or file.with_name(f"{file.name}.graded.jsonl")
    grade_file(file, target, reward, completion_column, answer_column, deadline, workers, overwrite)
    say(f"written: {target}")


def generate(
    model: Annotated[str, typer.Argument(help="Hub id or folder: a causal model, a LoRA adapter, a run.")],
    file: Annotated[
        Path, typer.Argument(help="Prompts, as rows of any format: JSONL, JSON, CSV or Parquet; also .gz.")
    ],
    options: GenerateOptions,
) -> None:
    """Sample completions for the prompts of a file.

    Rows keep their order and fields; `completions` is added, each with `text`, `token_ids`, `logprobs` (under the
    sampling distribution) and `finish_reason` (stop or length).
    """
    model_settings = from_flags(ModelConfig, options, path=locate_model(model)[0])
    rollout = from_flags(RolloutConfig, options)
    devices = devices_from_flag(options.device)
    default = "chat" if options.chat_template_kwargs else "none"
    data = from_flags(DataConfig, options, source=str(file), template=options.template or default)
    with quick_imports():
        from posttrain.inspection.rows import generate as generate_for
        from posttrain.models.load import load_tokenizer  # these import torch, which takes seconds

    if options.template is None and load_tokenizer(model_settings).chat_template:
        data = data.model_copy(update={"template": "chat"})
    target = options.output or file.with_name(f"{file.name}.generated.jsonl")
    saved = saved_settings(Path(model).expanduser())
    version = load(saved).stages[0].config.behavior_version if saved else BEHAVIOR_VERSION
    say(generate_for(model_settings, file, target, data, rollout, devices, options, version))
    say(f"written: {target}")
