"""Command options that the Python API takes too, and their conversion to settings. Does not import torch."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ValidationError

from posttrain.base.errors import UsageError
from posttrain.base.options import Flag, values_of
from posttrain.config.reading.explain import did_you_mean, problems_of_group
from posttrain.config.reading.files import parse_value
from posttrain.config.schema.base import Settings
from posttrain.config.schema.data import variables
from posttrain.config.schema.rollout import EngineName, RolloutConfig

VARIABLES = "--chat-template-kwargs"
Group = TypeVar("Group", bound=Settings)


def from_flags(group: type[Group], options: Any = None, **further: Any) -> Group:
    """Build a group of settings from a command's flags, by field name. Raises UsageError for a wrong value. Fields of
    `options` that are None or do not belong to the group are ignored."""
    fields = {} if options is None else values_of(options)
    values = {name: value for name, value in fields.items() if name in group.model_fields and value is not None}
    values |= further
    try:
        return group(**values)
    except ValidationError as error:
        name, message = next(iter(problems_of_group(error, values, group).items()))
        raise UsageError(f"--{name.replace('_', '-')} {message}") from error


def _variables(text: str) -> dict[str, Any]:
    """Parse the value of `--chat-template-kwargs`. Raises UsageError if it is not a mapping of variables."""
    try:
        return variables(parse_value(text, VARIABLES).values["value"])
    except ValueError as error:
        raise UsageError(f"{VARIABLES}: {error}") from error


def _numbers(name: str, text: str) -> tuple[float, ...]:
    """Parse the comma-separated numbers of a flag. Raises UsageError for a value that the setting `name` refuses."""
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        message = f"--{name.replace('_', '-')} is {text!r}; give numbers separated by commas, such as 0,0.6,1.0"
        raise UsageError(message) from None
    for value in values:
        from_flags(RolloutConfig, **{name: value})
    if len(set(values)) < len(values):
        raise UsageError(f"--{name.replace('_', '-')} repeats a number: {text}")
    return values


TEMPERATURES = Flag(
    "Sampling temperature; several for a sweep.", metavar="T[,T...]", parse=partial(_numbers, "temperature")
)
TOP_PS = Flag(
    "Total probability to sample from; several for a sweep.", metavar="P[,P...]", parse=partial(_numbers, "top_p")
)
# Flags that several commands share.
DATA = Flag("Local rows to use for a suite instead of its source; repeatable.", metavar="[NAME=]FILE")
DEVICE = Flag("auto, cpu, cuda, a GPU by number (cuda:1), or mps.")
DTYPE = Flag("auto, float32, bfloat16 or float16.")
ENGINE = Flag("embedded, transformers (any architecture) or vllm.", parse=str)
FORMAT = Flag("Format of the rows, as in data.format; auto: inferred from the columns.")
LONGEST = Flag("Maximum completion length in tokens.")
MAX_ROWS = Flag("Number of items per suite, evenly spaced; default: all.", min=1)
MIN_P = Flag("Minimum probability of a token, relative to the most likely one.")
NUM_GENERATIONS = Flag("Completions per prompt; above 1, pass@k is reported too.", "-n", min=1)
OVERWRITE = Flag("Replace the output file if it exists.")
SEED = Flag("Random seed; the same seed gives the same completions.", min=0)
STOP = Flag("String that ends a completion; repeatable.")
SUITE_ENGINE = Flag(
    "embedded, transformers (or hf; any architecture) or vllm.",
    parse=lambda text: "transformers" if text == "hf" else text,
)
TOP_K = Flag("Number of most likely tokens to sample from; 0: all.")
TOP_P = Flag("Total probability of the most likely tokens to sample from.")
TEMPLATE = Flag("Template, as in data.template; default: chat if the model has one, otherwise none.")
CHAT_VARIABLES = Flag(
    "Variables of the chat template, such as '{enable_thinking: false}'; default: those saved with the model.",
    metavar="JSON",
    parse=_variables,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """Options of `posttrain eval` and `posttrain.evaluate`, for all suites of a call. None: the suite's own setting."""

    max_rows: Annotated[int | None, MAX_ROWS] = None
    num_generations: Annotated[int | None, NUM_GENERATIONS] = None
    temperature: Annotated[float | Sequence[float] | None, TEMPERATURES] = None
    top_p: Annotated[float | Sequence[float] | None, TOP_PS] = None
    top_k: Annotated[int, Flag("Number of most likely tokens to sample from; 0: all.", min=0)] = 0
    min_p: Annotated[float, MIN_P] = 0.0
    max_completion_length: Annotated[int | None, Flag("Maximum completion length in tokens.", min=1)] = None
    stop: Annotated[Sequence[str], STOP] = ()
    engine: Annotated[EngineName, SUITE_ENGINE] = "embedded"
    seed: Annotated[int, SEED] = 0
    template: Annotated[str | None, Flag("Template of the prompts, as in data.template.")] = None
    chat_template_kwargs: Annotated[Mapping[str, Any] | None, CHAT_VARIABLES] = None
    prompt: Annotated[str | None, Flag("Text of the question, such as '{problem}'.")] = None
    system_prompt: Annotated[str | None, Flag("System prompt.")] = None
    rule: Annotated[str | None, Flag("Rule that grades completions, or module:function.")] = None
    completion_column: Annotated[str, Flag("Column of recorded completions, or a path such as a.solution.")] = (
        "completions"
    )
    reference: Annotated[str | None, Flag("Reference model of the implicit reward, for suites of pairs.")] = None
    num_batches: Annotated[int | None, Flag("Number of batches of 16 pairs, sampled with replacement.", min=1)] = None
    output: Annotated[
        Path | str | None,
        Flag(
            "Folder for the records; default: in the run folder, or evaluations/.", "-o", metavar="<path>", parse=Path
        ),
    ] = None
    overwrite: Annotated[bool, Flag("Evaluate again even if there are records.")] = False
    deadline: Annotated[float, Flag("Time limit for grading each completion, in seconds.")] = 2.0
    workers: Annotated[int | None, Flag("Number of grading processes; default: one per core.", min=1)] = None
    calibrate: Annotated[
        bool, Flag("Also compare string equality, the rule and math_verify, and grade each gold answer against itself.")
    ] = False

    @property
    def of_suites(self) -> dict[str, Any]:
        """The suite settings that are given."""
        names = ("template", "chat_template_kwargs", "prompt", "system_prompt", "rule", "stop")
        settings = {name: getattr(self, name) for name in names}
        return {name: value for name, value in settings.items() if value not in (None, {}, ())}

    @property
    def swept(self) -> list[dict[str, float]]:
        """Every combination of the given values of temperature and top_p; one empty combination if neither is given."""
        sampling = {"temperature": self.temperature, "top_p": self.top_p}
        named = {
            name: values if isinstance(values, Sequence) else (values,)
            for name, values in sampling.items()
            if values is not None and values not in ((), [])
        }
        return [dict(zip(named, values, strict=True)) for values in itertools.product(*named.values())]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExploreOptions:
    """Which rows `posttrain explore` and `posttrain.explore` show, and what is checked."""

    rows: Annotated[int, Flag("Number of examples to show.", min=0)] = 3
    first: Annotated[int, Flag("Index of the first example to show, from 0.", min=0, metavar="N")] = 0
    row: Annotated[int | None, Flag("Show only the examples of this row.", min=0, metavar="N")] = None
    sort: Annotated[
        Literal["row", "longest", "shortest"], Flag("Order of the examples: as in the data, or by length.")
    ] = "row"
    set: Annotated[str, Flag("Set whose examples are shown: train, or a validation set.", metavar="NAME")] = "train"
    json: Annotated[bool, Flag("Print everything as JSON: counts, lengths, rows, findings.")] = False
    no_quality: Annotated[bool, Flag("Show the rows without checking them.")] = False
    against: Annotated[
        Sequence[str],
        Flag(
            "Questions to look for in the training rows; repeatable. Default: the suites in the local hub cache.",
            metavar="SUITE|SUITE=SOURCE|FILE",
        ),
    ] = ()
    ngram: Annotated[int, Flag("Consecutive words that a question and a row must share: 13 or 8.")] = 13
    reward_model: Annotated[str | None, Flag("Model that estimates the share of wrong labels.", metavar="MODEL")] = None
    report: Annotated[Path | None, Flag("File for the findings, with all rows concerned.", metavar="FILE.json")] = None
    good_rows: Annotated[
        Path | None, Flag("File for the training rows that are not malformed, as they are read.", metavar="FILE.jsonl")
    ] = None
    overwrite: Annotated[bool, OVERWRITE] = False

    def __post_init__(self) -> None:
        if self.ngram not in (13, 8):
            raise UsageError(f"--ngram {self.ngram}: it must be 13 or 8")
        if self.no_quality and (self.against or self.reward_model or self.report):
            raise UsageError("--no-quality cannot be combined with --against, --reward-model or --report")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareOptions:
    """How sides are compared. `by_id`: see `posttrain/evaluation/comparing/differences.py`."""

    confidence: Annotated[float, Flag("Coverage of the intervals.", min=0.5, max=0.9999)] = 0.95
    resamples: Annotated[int, Flag("Resamples of the bootstrap.", min=100)] = 10_000
    seed: Annotated[int, Flag("Random seed of the bootstrap.", min=0)] = 0
    all_pairs: Annotated[bool, Flag("Compare every pair of sides, not only each side with the first.")] = False
    by_id: Annotated[bool, Flag("Match items by their id, even if their prompts differ.")] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Options of `posttrain export`."""

    output: Annotated[Path | None, Flag("A new folder; default: exports/NAME.", "-o")] = None
    overwrite: Annotated[bool, Flag("Replace an earlier export, in the folder and on the hub.")] = False
    merge: Annotated[bool, Flag("Merge an adapter into its base, or export it as it is.", "--merge/--no-merge")] = True
    base: Annotated[str | None, Flag("Model to merge an adapter into, such as the original of a 4-bit base.")] = None
    fold: Annotated[
        bool, Flag("Write one adapter of the original base, including the adapters already merged into its base.")
    ] = False
    dtype: Annotated[str, Flag("auto (as stored), float32, bfloat16 or float16.")] = "auto"
    max_shard_size: Annotated[str, Flag("Maximum size of a file of weights.")] = "5GB"
    prompts: Annotated[
        Path | None, Flag("File whose first 8 prompts test the export; default: the run's data, or built-in prompts.")
    ] = None
    engines: Annotated[Sequence[str], Flag("Write what ollama, llama.cpp or vllm needs; repeatable.", "--for")] = ()
    evaluations: Annotated[
        Sequence[Path], Flag("Evaluation folder for the model card; repeatable.", "--evaluation")
    ] = ()
    push_to_hub: Annotated[str | None, Flag("Upload to this hub id, such as me/my-model.", metavar="ID")] = None
    private: Annotated[bool, Flag("Make the hub repository private when it is created.")] = False


Precision = Literal["int8", "int4"]
PRECISIONS: dict[str, Precision] = {"int8": "int8", "int4": "int4", "nf4": "int4"}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """The precision of a quantised model, and its gate: rows of `gate`, and suites evaluated before and after."""

    to: Annotated[str, Flag("int8 (LLM.int8), or int4, also called nf4 (NF4 with double quantisation).")]
    output: Annotated[Path | None, Flag("New folder; default: in the run folder, or quantized_models/.", "-o")] = None
    overwrite: Annotated[bool, Flag("Replace an earlier quantised model.")] = False
    gate: Annotated[
        Sequence[Path],
        Flag(
            "File of prompts or, for a reward model, pairs; repeatable. Default: the run's data, or built-in prompts.",
            metavar="FILE",
        ),
    ] = ()
    suite: Annotated[str | None, Flag("Suites to evaluate before and after.", "-s", metavar="NAME,...")] = None
    data: Annotated[Sequence[str], DATA] = ()
    max_rows: Annotated[
        int | None, Flag("Rows of the gate and of each suite; default: 128 prompts or 1,000 pairs.", min=1)
    ] = None
    temperature: Annotated[float, Flag("Sampling temperature of the compared completions.")] = 1.0
    max_completion_length: Annotated[int, Flag("Maximum length of the compared completions in tokens.")] = 128
    engine: Annotated[EngineName, ENGINE] = "embedded"
    seed: Annotated[int, Flag("Random seed of the completions.", min=0)] = 0
    max_kl: Annotated[float | None, Flag("Maximum KL in nats; default: 0.01 for int8, 0.1 for int4.", min=0)] = None
    max_flips: Annotated[
        float | None, Flag("Maximum share of flips; default: 0.05 for int8, 0.15 for int4 (pairs: 0.1).", min=0)
    ] = None
    max_drop: Annotated[float | None, Flag("Maximum loss of accuracy; default: 0.03.", min=0)] = None
    max_weight_error: Annotated[float | None, Flag("Maximum per layer; default: int8 0.05, int4 0.2.", min=0)] = None
    format: Annotated[str, FORMAT] = "auto"
    template: Annotated[
        str | None, Flag("As in data.template; default: the run's, or chat if the model has one, otherwise none.")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        Flag("Dtype of all other weights: auto (as stored), float32 or bfloat16.", parse=str),
    ] = "auto"
    device: Annotated[str, DEVICE] = "auto"

    def __post_init__(self) -> None:
        if self.to not in PRECISIONS:
            raise UsageError(f"--to {self.to}: {did_you_mean(self.to, PRECISIONS)}")

    @property
    def precision(self) -> Precision:
        return PRECISIONS[self.to]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """How completions are sampled for the prompts of a file."""

    output: Annotated[Path | None, Flag("File to write; default: FILE.generated.jsonl.", "-o")] = None
    overwrite: Annotated[bool, OVERWRITE] = False
    num_generations: Annotated[int, Flag("Completions per prompt.", "-n", min=1)] = 1
    engine: Annotated[str, ENGINE] = "embedded"
    temperature: Annotated[float, Flag("Sampling temperature; 0: greedy.")] = 1.0
    top_p: Annotated[float, TOP_P] = 1.0
    top_k: Annotated[int, TOP_K] = 0
    min_p: Annotated[float, MIN_P] = 0.0
    max_completion_length: Annotated[int, LONGEST] = 512
    stop: Annotated[Sequence[str], STOP] = ()
    seed: Annotated[int, SEED] = 0
    format: Annotated[str, FORMAT] = "auto"
    template: Annotated[str | None, TEMPLATE] = None
    chat_template_kwargs: Annotated[Mapping[str, Any] | None, CHAT_VARIABLES] = None
    dtype: Annotated[str, DTYPE] = "auto"
    device: Annotated[str, DEVICE] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """How completions are sampled. None: the value of the run or of --config."""

    config: Annotated[
        str | None, Flag("Settings to sample with; default: those of the model's run.", metavar="FILE|PRESET")
    ] = None
    stage: Annotated[str | None, Flag("Stage of the settings, or of the run folder.")] = None
    reward: Annotated[
        Sequence[str],
        Flag('A reward: its type, module:function, or settings such as "{type: length, target: 50}"; repeatable.'),
    ] = ()
    prompts: Annotated[int, Flag("Number of prompts to use, from the first usable one.", min=1)] = 4
    num_generations: Annotated[int, Flag("Completions per prompt.", "-n", min=2)] = 8
    show: Annotated[int, Flag("Completions to show per prompt.", min=0)] = 1
    temperature: Annotated[
        str | None, Flag("Sampling temperature; several are compared in a table.", metavar="FLOAT[,FLOAT...]")
    ] = None
    top_p: Annotated[float | None, TOP_P] = None
    top_k: Annotated[int | None, TOP_K] = None
    min_p: Annotated[float | None, MIN_P] = None
    max_completion_length: Annotated[int | None, LONGEST] = None
    stop: Annotated[Sequence[str], STOP] = ()
    engine: Annotated[str | None, ENGINE] = None
    seed: Annotated[int, SEED] = 0
    format: Annotated[str | None, Flag("Format of the rows, as in data.format.")] = None
    template: Annotated[
        str | None, Flag("As in data.template; without settings: chat if the model has one, otherwise none.")
    ] = None
    chat_template_kwargs: Annotated[Mapping[str, Any] | None, CHAT_VARIABLES] = None
    dtype: Annotated[str | None, DTYPE] = None
    device: Annotated[str | None, DEVICE] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The models, the address and the limits of a server."""

    host: Annotated[str, Flag("Address to listen on; one that other machines can reach needs a key.")] = "127.0.0.1"
    port: Annotated[int, Flag("Port; 0: a free one.", min=0, max=65535)] = 8000
    api_key: Annotated[
        str | None,
        Flag("Secret that requests must send. Other users can read it in the process list: prefer $POSTTRAIN_API_KEY."),
    ] = None
    adapter: Annotated[Sequence[str], Flag("LoRA adapter and its name; repeatable.", metavar="NAME=FOLDER")] = ()
    reward_model: Annotated[str | None, Flag("Reward model for POST /reward.")] = None
    template: Annotated[str | None, TEMPLATE] = None
    chat_template_kwargs: Annotated[Mapping[str, Any] | None, CHAT_VARIABLES] = None
    max_rows: Annotated[int, Flag("Maximum number of completions generated together.", min=1, max=512)] = 64
    max_waiting: Annotated[int, Flag("Maximum queued prompts; further requests get status 429.", min=1)] = 256
    context: Annotated[int | None, Flag("Maximum tokens of prompt and completion. [default: 4096]", min=2)] = None
    dtype: Annotated[str, DTYPE] = "auto"
    device: Annotated[str, DEVICE] = "auto"
    record: Annotated[Path | None, Flag("Folder to record chats in, as episodes with tokens.", metavar="FOLDER")] = None
    config: Annotated[Path | None, Flag("Settings file with the rewards of recorded episodes.", metavar="FILE")] = None
    attached: Annotated[bool, Flag("Exit when the parent process ends.", hidden=True)] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TalkOptions:
    """Settings of a conversation in the terminal. None: the default."""

    system_prompt: Annotated[str | None, Flag("System prompt of the conversation.")] = None
    temperature: Annotated[float | None, Flag("Sampling temperature; 0: greedy. [default: 0.7]", min=0)] = None
    top_p: Annotated[float | None, Flag("Total probability of the tokens to sample from.", min=0, max=1)] = None
    max_tokens: Annotated[int | None, Flag("Maximum reply length in tokens. [default: 512]", min=1)] = None
    seed: Annotated[int | None, Flag("Random seed; the same seed gives the same replies.", min=0)] = None
    template: Annotated[str | None, TEMPLATE] = None
    chat_template_kwargs: Annotated[str | None, replace(CHAT_VARIABLES, parse=None)] = None  # the server parses it
    dtype: Annotated[str | None, DTYPE] = None
    device: Annotated[str | None, DEVICE] = None
