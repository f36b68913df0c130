"""`posttrain score`, `grade` and `generate`: the rows of a file with scores, verdicts or completions."""

from pathlib import Path
from typing import Annotated

import typer

from posttrain.base.imports import quick_imports
from posttrain.base.options import Flag
from posttrain.base.terminal import say
from posttrain.base.words import counted
from posttrain.cli.settings import devices_from_flag, saved_settings
from posttrain.config import DataConfig, ModelConfig, load
from posttrain.config.options import DEVICE, DTYPE, FORMAT, OVERWRITE, TEMPLATE, GenerateOptions, from_flags
from posttrain.config.schema.rollout import RolloutConfig
from posttrain.config.schema.run import BEHAVIOR_VERSION


def score(
    model: Annotated[
        str, typer.Argument(help="Hub id or folder: a causal model, a reward model, or a LoRA adapter of one.")
    ],
    file: Annotated[Path, typer.Argument(help="JSONL, JSON, CSV or Parquet; also .gz.")],
    output: Annotated[Path | None, Flag("Where to write; default: FILE.scored.jsonl.", "-o")] = None,
    overwrite: Annotated[bool, OVERWRITE] = False,
    format: Annotated[str, FORMAT] = "auto",
    template: Annotated[str | None, TEMPLATE] = None,
    max_length: Annotated[int, Flag("Maximum length of a row in tokens; a longer one is an error.", min=2)] = 4096,
    tokens_per_pack: Annotated[
        int, Flag("Maximum tokens per pack, which limits memory, as in training.", min=2)
    ] = 8192,
    dtype: Annotated[str, DTYPE] = "auto",
    device: Annotated[str, DEVICE] = "auto",
) -> None:
    """Score a file's completions: log-probabilities by a causal model, rewards by a reward model.

    Rows keep their order and fields, with `logprob` and `logprobs`, or `reward`; rows with chosen and rejected get both
    (`chosen_reward`, `rejected_reward`).
    """
    devices = devices_from_flag(device)
    overrides = [f"data.max_length={max_length}", f"data.format={format}", "data.overlong=error", "data.shuffle=false"]
    flags = {"model.path": model, "model.dtype": dtype, "method.type": "sft", "data.source": str(file)}
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
    means = score_file(config.models[0], file, target, data, devices, tokens, overwrite)
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
    output: Annotated[Path | None, Flag("Where to write; default: FILE.graded.jsonl.", "-o")] = None,
    overwrite: Annotated[bool, OVERWRITE] = False,
    deadline: Annotated[float, Flag("Time limit of one completion, in seconds.")] = 2.0,
    workers: Annotated[int | None, Flag("Processes; default: one per core, at most 8.", min=1)] = None,
) -> None:
    """Grade a file's completions in supervised worker processes, as in training.

    Rows keep their order and fields, with `verdict` (correct, wrong, timeout, crashed, bad_gold), `score`, `extracted`,
    `seconds`, and `parts` if a reward has some.
    """
    from posttrain.rewards.file import Columns, grade_file

    target = output or file.with_name(f"{file.name}.graded.jsonl")
    grade_file(file, target, reward, Columns(completion_column, answer_column), deadline, workers, overwrite)
    say(f"written: {target}")


def generate(
    model: Annotated[str, typer.Argument(help="Hub id or folder: a causal model, or a LoRA adapter of one.")],
    file: Annotated[
        Path, typer.Argument(help="Prompts, as rows of any format: JSONL, JSON, CSV or Parquet; also .gz.")
    ],
    options: GenerateOptions,
) -> None:
    """Sample completions for the prompts of a file.

    Rows keep their order and fields, with `completions`, each with `text`, `token_ids`, `logprobs` (of the sampling
    distribution) and `finish_reason` (stop or length).
    """
    model_settings = from_flags(ModelConfig, options, path=model)
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
    how = options.num_generations, options.seed, options.overwrite, version
    done = generate_for(model_settings, file, target, data, rollout, devices, *how)
    say(
        f"{counted(done.completions, 'completion')} of {counted(done.prompts, 'prompt')}: "
        f"{counted(done.tokens, 'token')} in {done.seconds:.1f} s "
        f"({done.tokens / max(done.seconds, 1e-9):,.0f} per second), {done.truncated:,} reached the length limit"
    )
    say(f"written: {target}")
