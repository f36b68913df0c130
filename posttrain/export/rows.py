"""The rows on which a written model is compared with the original: rows of the user or the run, or built-in prompts."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.base.errors import DataError, PosttrainError
from posttrain.base.files import table_beside
from posttrain.base.log import log
from posttrain.base.words import counted
from posttrain.batch import Example, Node
from posttrain.config import DataConfig, RunConfig
from posttrain.config.options import QuantizeOptions, from_flags
from posttrain.config.reading.explain import checked
from posttrain.config.schema.rollout import RolloutConfig
from posttrain.config.schema.run import BEHAVIOR_VERSION
from posttrain.data import Dataset, Options, prepare, prepare_run
from posttrain.data.prompts import Prompt, prompts_of
from posttrain.data.readers import Record, read_files
from posttrain.engines import make_engine, stop_token_ids
from posttrain.evaluation.pairs import LONGEST
from posttrain.export.source import Source
from posttrain.inspection.rows import generate_all
from posttrain.inspection.sample import first_prompts
from posttrain.models.families import positions_of
from posttrain.sampler import sampling_of

T = TypeVar("T")
Settings = dict[str, Any]  # data settings by name

EXPORT_PROMPTS, EXPORT_TOKENS = 8, 512  # an export is compared on the first 512 tokens of each of 8 prompts
GATE_PROMPTS, GATE_PAIRS = 128, 1_000  # default number of rows for the gate
GATE_COMPLETIONS = 64  # each prompt has 64 // (number of prompts) completions, but at least one
BUILT_IN = table_beside(__file__, "prompts.yaml")


# --- for an export ----------------------------------------------------------------------------------------------------


def prompts_for(
    file: Path | None, config: RunConfig | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[list[int]], str]:
    """The token ids of the first prompts of `file`, or else of the run's data, or else of built-in prompts, and a
    description of them. Raises DataError if `file` has no usable prompt."""
    plain = DataConfig(source="builtin", template="chat" if tokenizer.chat_template else "none")
    prompts: list[Prompt] | None = None
    origin = "built-in prompts"
    if file is not None:
        records = list(itertools.islice(read_files((file,)), 4 * EXPORT_PROMPTS))
        data = config.data.model_copy(update={"format": "auto", "columns": {}}) if config else plain
        results = prompts_of(records, data, tokenizer, str(file), _version(config))
        prompts, origin = [row for row in results if isinstance(row, Prompt)][:EXPORT_PROMPTS], file.name
        if not prompts:
            raise DataError(f"{file} has no usable prompt among its first {len(records)} rows: {results[0]}")
    elif config is not None:
        try:
            prompts, _ = first_prompts(config.data, model, tokenizer, EXPORT_PROMPTS, config.seed, _version(config))
            origin = "the run's data"
        except PosttrainError as error:
            log.info("the run's own prompts cannot be read (%s): comparing on built-in prompts", error)
    if prompts is None:
        prompts = built_in(plain, tokenizer)
    longest = min(EXPORT_TOKENS, positions_of(model.config) or EXPORT_TOKENS)
    tokens = [prompt.tokens[:longest] for prompt in prompts]
    return tokens, f"{counted(len(tokens), 'prompt')} of {counted(sum(map(len, tokens)), 'token')}, {origin}"


def built_in(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The built-in prompts that are usable with the settings `data`."""
    records = [Record(row, "built-in", row + 1, {"prompt": text}) for row, text in enumerate(BUILT_IN)]
    return [row for row in prompts_of(records, data, tokenizer, "built-in prompts") if isinstance(row, Prompt)]


# --- for the gate of a quantised model --------------------------------------------------------------------------------


GateRows = tuple[list[Example], str]  # the rows, and their origin in words, or the reason why there are no rows


def pairs_for(
    options: QuantizeOptions, source: Source, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> GateRows:
    """At most `max_rows` (default: 1,000) pairs, evenly spread, from the files or else the run's validation sets.
    Raises DataError if the files have no usable pair."""
    most, config = options.max_rows or GATE_PAIRS, source.config
    if options.gate:
        longest = min(positions_of(model.config) or LONGEST, LONGEST)
        limits = {"max_length": longest, "max_prompt_length": None, "overlong": "drop", "shuffle": False}
        how = Options(seed=options.seed, behavior_version=_version(config))
        read = partial(prepare, tokenizer=tokenizer, kind="pair", options=how)
        prepared = _read(options, options.gate, _defaults(config, tokenizer) | limits, read)
        lost = prepared.report.read - len(prepared.train)
        dropped = f" ({lost:,} of {prepared.report.read:,} rows malformed or too long)" if lost else ""
        return _spread([prepared.train], most), ", ".join(file.name for file in options.gate) + dropped
    if config is None or config.method.kind != "pair":
        return [], "no pairs: give --gate FILE"
    try:
        sets = prepare_run(config, tokenizer).validation
    except PosttrainError as error:
        log.warning("the run's own data cannot be read: %s", error)
        return [], "the run's data cannot be read: give --gate FILE"
    if not sets:
        return [], "the run has no validation data: give --gate FILE"
    return _spread(list(sets.values()), most), "the run's validation data"


def _spread(sets: Sequence[Dataset], most: int) -> list[Example]:
    """At most `most` examples, evenly spread over the sets."""
    positions = [(dataset, index) for dataset in sets for index in range(len(dataset))]
    count = min(most, len(positions))
    return [dataset[index] for dataset, index in (positions[n * len(positions) // count] for n in range(count))]


def completions_for(
    options: QuantizeOptions, source: Source, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> GateRows:
    """Prompts, each with a completion that is sampled from the original model, or several if there are few prompts.
    Raises DataError if the files have no usable prompt."""
    prompts, origin = _prompts(options, source.config, model, tokenizer)
    rollout = from_flags(RolloutConfig, options)
    samples = max(1, GATE_COMPLETIONS // len(prompts))
    turns = (options.template or (source.config.data.template if source.config else "chat")) != "none"
    sampling = sampling_of(rollout, samples, stop_token_ids(model, tokenizer, turns), options.seed)
    with closing(make_engine(rollout.engine, model, tokenizer, vllm=rollout.vllm)) as engine:
        sampled = generate_all(engine, prompts, sampling, "gate: sampling from the original model")
    trees = {
        prompt.row: Node(prompt.tokens, children=tuple(Node(done.tokens, trained=True) for done in sampled[prompt.row]))
        for prompt in prompts
    }
    return [Example((tree,), row=row) for row, tree in trees.items()], origin


def _prompts(
    options: QuantizeOptions, config: RunConfig | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Prompt], str]:
    """The first usable prompts, with consecutive row numbers, and their origin in words."""
    most, seed, version = options.max_rows or GATE_PROMPTS, config.seed if config else 0, _version(config)
    if not options.gate and config is not None:
        try:
            prompts, _ = first_prompts(config.data, model, tokenizer, most, seed, version)
            return prompts, "the run's own prompts"
        except PosttrainError as error:
            log.warning("the run's own prompts cannot be read (%s): using built-in prompts", error)
    if not options.gate:
        data = _settings(options, (Path("built-in"),), _defaults(None, tokenizer))
        half = max(1, (positions_of(model.config) or LONGEST) // 2)  # the other half is for completions
        prompts = [replace(prompt, tokens=prompt.tokens[:half]) for prompt in built_in(data, tokenizer)]
        return prompts, "built-in prompts (your own: --gate FILE)"
    prompts, unused = list[Prompt](), 0
    for file in options.gate:
        left = most - len(prompts)
        first = partial(
            first_prompts, policy=model, tokenizer=tokenizer, count=left, seed=seed, behavior_version=version
        )
        usable, malformed = _read(options, (file,), _defaults(config, tokenizer), first)
        prompts += [replace(prompt, row=len(prompts) + index) for index, prompt in enumerate(usable)]
        unused += len(malformed)
        if len(prompts) == most:
            break
    names = ", ".join(file.name for file in options.gate)
    return prompts, names + (f" ({counted(unused, 'row')} without a usable prompt)" if unused else "")


def _read(options: QuantizeOptions, files: Sequence[Path], defaults: Settings, read: Callable[[DataConfig], T]) -> T:
    """Call `read` with these files' settings: in the given format, or else in the run's, or if that fails, inferred."""
    try:
        return read(_settings(options, files, defaults))
    except DataError:
        if options.format != "auto" or "format" not in defaults:
            raise
        with suppress(DataError):
            return read(_settings(options, files, defaults | {"format": "auto", "columns": {}}))
        raise


def _version(config: RunConfig | None) -> int:
    return config.behavior_version if config else BEHAVIOR_VERSION


def _defaults(config: RunConfig | None, tokenizer: PreTrainedTokenizerBase) -> Settings:
    return config.data.model_dump() if config else {"template": "chat" if tokenizer.chat_template else "none"}


def _settings(options: QuantizeOptions, files: Sequence[Path], defaults: Settings) -> DataConfig:
    """The data settings for the gate's files, based on the settings of the run or on the defaults."""
    source = str(files[0]) if len(files) == 1 else [{"source": str(file)} for file in files]
    values = defaults | {"source": source, "split": "train", "validation": None, "excluded": ()}
    values |= {"max_rows": None, "skip_rows": 0}
    if options.format != "auto":
        values |= {"format": options.format, "columns": {}}  # the run's columns belong to the run's format
    if options.template not in (None, values["template"]):
        values |= {"template": options.template, "chat_template_kwargs": {}}
    if values["template"] != "tags":
        values["tags"] = {}
    return checked(DataConfig, values, "the data")
