"""What the gate measures on: the user's rows, or else the run's own, or else (policies) built-in prompts."""

import logging
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.base.errors import ConfigError, DataError, PosttrainError
from posttrain.base.words import counted
from posttrain.batch import Example, Node
from posttrain.config import DataConfig, DevicesConfig, RunConfig
from posttrain.config.reading.explain import explain
from posttrain.config.schema.rollout import RolloutConfig
from posttrain.config.schema.run import BEHAVIOR_VERSION
from posttrain.data import Dataset, Options, prepare, prepare_run
from posttrain.data.prompts import Prompt
from posttrain.data.report import Malformed
from posttrain.engines import make_engine, stop_token_ids
from posttrain.evaluation.pairs import LONGEST
from posttrain.export.prompts import built_in
from posttrain.export.source import Source
from posttrain.inspection.rows import generate_all
from posttrain.inspection.sample import Setup, first_prompts
from posttrain.models.families import positions_of
from posttrain.rollout import sampling_of

log = logging.getLogger("posttrain")

T = TypeVar("T")

PROMPTS, PAIRS = 128, 1_000  # rows that are used by default
COMPLETIONS = 64  # of a few prompts, at least


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the gate's rows come from. `format` and `template` None: as in the run if they have it, or inferred."""

    files: tuple[Path, ...] = ()
    format: str | None = None
    template: str | None = None
    max_rows: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """The rows as examples, and their origin in words. None of them: nothing can be measured."""

    examples: list[Example]
    origin: str


def pairs_for(rows: Rows, source: Source, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Found:
    """Preference pairs: of the files, or else of the run's validation sets; evenly spread if there are more than asked.

    Raises DataError for files without usable pairs.
    """
    most = rows.max_rows or PAIRS
    if rows.files:
        longest = min(positions_of(model.config) or LONGEST, LONGEST)
        limits = {"max_length": longest, "max_prompt_length": None, "overlong": "drop", "shuffle": False}
        prepared = _read(
            rows,
            source.config,
            lambda rows: prepare(
                _settings(rows, source.config, tokenizer, limits),
                tokenizer,
                "pair",
                Options(seed=rows.seed, behavior_version=_version(source.config)),
            ),
        )
        lost = prepared.report.read - len(prepared.train)
        dropped = f" ({lost:,} of {prepared.report.read:,} rows malformed or too long)" if lost else ""
        return Found(_spread([prepared.train], most), ", ".join(file.name for file in rows.files) + dropped)
    if source.config is None or source.config.method.kind != "pair":
        return Found([], "no pairs: give --gate FILE")
    try:
        sets = prepare_run(source.config, tokenizer).validation
    except PosttrainError as error:
        log.warning("the run's own data cannot be read: %s", error)
        return Found([], "the run's data cannot be read: give --gate FILE")
    if not sets:
        return Found([], "the run has no validation data: give --gate FILE")
    return Found(_spread(list(sets.values()), most), "the run's validation data")


def _spread(sets: Sequence[Dataset], most: int) -> list[Example]:
    places = [(dataset, index) for dataset in sets for index in range(len(dataset))]
    count = min(most, len(places))
    return [dataset[index] for dataset, index in (places[n * len(places) // count] for n in range(count))]


def completions_for(
    rows: Rows,
    source: Source,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rollout: RolloutConfig,
    devices: DevicesConfig,
) -> Found:
    """Prompts with completions that the original model samples, one of each prompt, or several of a few prompts.

    An example is a prompt with its completions. Raises DataError for files without usable prompts.
    """
    prompts, origin = _prompts(rows, source, model, tokenizer, devices)
    samples = max(1, COMPLETIONS // len(prompts))
    turns = (rows.template or (source.config.data.template if source.config else "chat")) != "none"
    sampling = sampling_of(rollout, samples, stop_token_ids(model, tokenizer, turns), rows.seed)
    with closing(make_engine(rollout.engine, model, tokenizer, vllm=rollout.vllm)) as engine:
        sampled = generate_all(engine, prompts, sampling, "gate: sampling from the original model")
    examples = [
        Example(
            (Node(prompt.tokens, children=tuple(Node(one.tokens, trained=True) for one in sampled[prompt.row])),),
            row=prompt.row,
        )
        for prompt in prompts
    ]
    return Found(examples, origin)


def _prompts(
    rows: Rows, source: Source, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, devices: DevicesConfig
) -> tuple[list[Prompt], str]:
    """The first usable prompts, numbered through, and their origin."""
    most = rows.max_rows or PROMPTS
    config = source.config
    found: list[Prompt] = []
    if not rows.files and config is not None:
        try:
            found, _ = first_prompts(_setup(source, config.data, devices), model, tokenizer, most)
            return found, "the run's own prompts"
        except PosttrainError as error:
            log.warning("the run's own prompts cannot be read (%s): built-in ones are used", error)
    if not rows.files:
        data = _settings(replace(rows, files=(Path("built-in"),)), None, tokenizer, {"format": "auto"})
        half = max(1, (positions_of(model.config) or LONGEST) // 2)  # the rest is for completions
        found = [replace(one, tokens=one.tokens[:half]) for one in built_in(data, tokenizer)]
        return found, "built-in prompts (your own: --gate FILE)"
    unused = 0

    def first(rows: Rows) -> tuple[list[Prompt], Sequence[Malformed]]:
        data = _settings(rows, config, tokenizer, {})
        return first_prompts(_setup(source, data, devices), model, tokenizer, most - len(found))

    for file in rows.files:
        some, bad = _read(replace(rows, files=(file,)), config, first)
        found += [replace(prompt, row=len(found) + place) for place, prompt in enumerate(some)]
        unused += len(bad)
        if len(found) == most:
            break
    names = ", ".join(file.name for file in rows.files)
    return found, names + (f" ({counted(unused, 'row')} without a usable prompt)" if unused else "")


def _read(rows: Rows, config: RunConfig | None, read: Callable[[Rows], T]) -> T:
    """`read(rows)` in the run's format, or in the inferred one if the files have another. Raises DataError."""
    try:
        return read(rows)
    except DataError:
        if rows.format is not None or config is None:
            raise
        with suppress(DataError):
            return read(replace(rows, format="auto"))
        raise


def _setup(source: Source, data: DataConfig, devices: DevicesConfig) -> Setup:
    seed = source.config.seed if source.config else 0
    return Setup(source.model, data, (), RolloutConfig(), devices, None, seed, _version(source.config))


def _version(config: RunConfig | None) -> int:
    return config.behavior_version if config else BEHAVIOR_VERSION


def _settings(
    rows: Rows, config: RunConfig | None, tokenizer: PreTrainedTokenizerBase, limits: dict[str, Any]
) -> DataConfig:
    """The data settings of the run, or the defaults, for the gate's files."""
    values: dict[str, Any] = (
        config.data.model_dump() if config else {"template": "chat" if tokenizer.chat_template else "none"}
    )
    files = [str(file) for file in rows.files]
    parts = [{"source": file} for file in files]
    values |= {"source": files[0] if len(files) == 1 else parts, "split": "train", "validation": None, "excluded": ()}
    values |= {"max_rows": None, "skip_rows": 0, **limits}
    if rows.format is not None:
        values |= {"format": rows.format, "columns": {}}  # columns belong to the format of the run
    if rows.template not in (None, values["template"]):
        values |= {"template": rows.template, "chat_template_kwargs": {}}
    if values["template"] != "tags":
        values["tags"] = {}
    try:
        return DataConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(error, values, {}))) from error
