"""From the data settings to examples ready to pack: reads data sets, holds out validation rows, mixes by weight."""

from __future__ import annotations

import hashlib
import logging
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from posttrain.caches import default_folder
from posttrain.config.schema.data import DataConfig
from posttrain.config.schema.evaluation import EvaluationDataset
from posttrain.config.schema.run import RunConfig
from posttrain.data import cache
from posttrain.data.dataset import Dataset, Limits
from posttrain.data.lengths import Room, evaluation_limits, longest_prompt, training_limits
from posttrain.data.reading import Kind, Loaded, Reader, SourcePart
from posttrain.data.report import Report
from posttrain.data.templates import choose_template
from posttrain.errors import DataError

log = logging.getLogger("posttrain")

__all__ = ["Kind", "Prepared", "prepare"]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Data ready for a recipe. `reports` has `train`, and each validation set with a source of its own.

    `prompts` has the prompts of the validation sets with rewards, for methods that train on completions.
    """

    kind: Kind
    train: Dataset
    validation: dict[str, Dataset]
    reports: dict[str, Report]
    fingerprint: str
    contents: dict[str, str]  # SHA-256 of the rows of each source, by set and source
    prompts: dict[str, Dataset] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """Maximum tokens of a sequence; of a prompt without its sampled completion."""
        return max(dataset.longest for dataset in (self.train, *self.validation.values()))

    @property
    def report(self) -> Report:
        """The report of the training source, before validation rows are held out."""
        return self.reports["train"]


def prepare_run(config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, positions: int | None = None) -> Prepared:
    """The data of a run: the training set and every validation set.

    `positions` is the model's number of positions: prompts leave room for a completion within them.
    """
    method = config.method
    kind = method.kind
    targets = method.model_dump(include={"completion_only_loss", "assistant_only_loss"}) if kind == "sft" else {}
    sets, seed = config.evaluation.datasets, config.seed
    prepared = prepare(
        config.data,
        tokenizer,
        kind,
        datasets=sets,
        seed=seed,
        completion_length=config.completion_length,
        evaluated=_evaluated(config),
        positions=positions,
        with_completions=method.reads_completions,
        behavior_version=config.behavior_version,
        **targets,
    )
    if kind == "pair" and not method.learns_ties:
        for name, dataset in {"train": prepared.train, **prepared.validation}.items():
            if ties := int(dataset.ties.sum()):
                raise DataError(
                    f"{name} has {ties:,} ties among {len(dataset):,} pairs: only reward models learn from ties, "
                    f"{method.type} needs one reply to be better. Remove these rows"
                )
    if config.samples and kind != "prompt":
        return replace(prepared, prompts=_validation_prompts(config, tokenizer, prepared, positions))
    return prepared


def prompts_with_system(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, system_prompt: str
) -> dict[int, np.ndarray]:
    """The tokens of the training prompts with another system prompt, by row. Raises DataError if one does not fit a
    pack with a completion."""
    most = config.training.tokens_per_pack
    update = {"system_prompt": system_prompt, "max_prompt_length": None, "max_length": most}
    data = config.data.model_copy(update=update | {"overlong": "error", "validation": None})
    room, version = config.completion_length, config.behavior_version
    made = prepare(data, tokenizer, "prompt", completion_length=room, seed=config.seed, behavior_version=version)
    found = made.train
    return {int(row): np.asarray(found[index].trees[0].tokens) for index, row in enumerate(found.rows)}


def _validation_prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, prepared: Prepared, positions: int | None
) -> dict[str, Dataset]:
    """The prompts of the validation sets with rewards, by row, without the replies.

    A row whose prompt leaves no room for a completion is dropped with a warning. Raises DataError as `prepare` does.
    """
    room, data = _evaluated(config), config.data
    if data.max_prompt_length == "auto":  # methods that do not train on prompts evaluate all
        data = data.model_copy(update={"max_prompt_length": None})
    if not config.rewards:
        data = data.model_copy(update={"validation": None})
    held_out = prepared.validation["validation"].rows if data.validation is not None else None
    sets = config.evaluation.datasets
    found = prepare(
        data,
        tokenizer,
        "prompt",
        datasets=[one for one in sets if (config.rewards if one.rewards is None else one.rewards)],
        seed=config.seed,
        evaluated=room,
        positions=positions,
        held_out=held_out,
        behavior_version=config.behavior_version,
    ).validation
    for name, dataset in found.items():  # reported already for held-out rows
        if name != "validation" or (data.validation is not None and data.validation.source is not None):
            _say_left_out(name, len(dataset), len(np.unique(prepared.validation[name].rows)), room, data)
    return found


def longest_sequence(config: RunConfig, prepared: Prepared) -> int:
    """Maximum tokens of the model's input: of a prompt with its sampled completion, without the last token."""
    if config.method.kind != "prompt":
        return prepared.longest
    sampled = [(prepared.train, config.completion_length)]
    sampled += [(dataset, _evaluated(config).tokens) for dataset in prepared.validation.values()]
    return max(dataset.longest + length - 1 for dataset, length in sampled)


def _evaluated(config: RunConfig) -> Room:
    """The room that evaluation prompts leave for their completions."""
    own = config.evaluation.max_completion_length
    return Room(config.rollout.max_completion_length) if own is None else Room(own, "evaluation.max_completion_length")


def _say_left_out(name: str, asked: int, rows: int, room: Room, data: DataConfig) -> None:
    """Log how many prompts leave room for a completion, unless all do. Raises DataError if none does."""
    if not asked:
        raise DataError(
            f"{name}: no prompt leaves room for a completion of {room.tokens:,} tokens ({room.setting}) "
            f"in {data.max_length:,} (data.max_length)"
        )
    if asked < rows:
        log.warning("%s: %d of %d prompts leave room for a completion and are evaluated", name, asked, rows)


def prepare(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    kind: Kind,
    *,
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
    datasets: Sequence[EvaluationDataset] = (),
    completion_length: int = 0,
    evaluated: Room | None = None,
    positions: int | None = None,
    held_out: np.ndarray | None = None,
    with_completions: bool = False,
    cache_dir: Path | None = None,
    seed: int = 0,
    behavior_version: int = 2,
) -> Prepared:
    """Read and tokenise the sources of `data` and the further evaluation `datasets`.

    `kind` is `sft` for single sequences, `pair` for preference pairs, `unpaired` for labelled completions, `prompt` for
    prompts alone, which leave room for `completion_length` tokens in `max_length` and in the model's `positions`; those
    of evaluation for `evaluated`, by default the same. `with_completions` keeps the data's completion of each training
    prompt as the prompt's only child.
    `completion_only_loss` None trains completions if a row has a prompt, and every token otherwise. The template is set
    on the tokenizer. `validation` has the set of `data.validation` as "validation" and the further ones by their names.
    The same seed gives the same split; `held_out` gives the row numbers instead. With `behavior_version` 1 rows are
    tokenised and truncated as by the runs that began before there was such a record.

    Raises DataError: a missing source or column, more than 1 % malformed rows, a row without trained tokens, rows over
    the limits if `overlong` is error, labelled completions of one kind only, or no usable rows.
    """
    room = Room(completion_length)
    longest, longest_evaluated = (longest_prompt(data, kind, one, positions) for one in (room, evaluated or room))
    template = choose_template(data, tokenizer)
    cache_dir = cache_dir or default_folder()
    reader = Reader(
        data, tokenizer, template, kind, completion_only_loss, assistant_only_loss, cache_dir, seed, with_completions,
        behavior_version,
    )  # fmt: skip
    parts = parts_of(data)
    max_rows = None if isinstance(data.source, str) else data.max_rows
    whole = reader.load("train", parts, partial(training_limits, data, kind, longest), max_rows)
    limits = evaluation_limits(data, longest_evaluated, whole.limits)
    rows = whole.fitted.view[:, 0]
    is_held_out = _is_held_out(data, whole, held_out, seed)
    validating, indices = np.flatnonzero(is_held_out), np.flatnonzero(~is_held_out)
    train = Dataset(whole.table, whole.fitted, _weighted(indices, whole, parts, seed))
    if kind == "unpaired":
        _refuse_one_class(train.labels, data)
    validation = {"validation": Dataset(whole.table, whole.fitted, validating)} if len(validating) else {}
    if validation and longest_evaluated.tokens != longest.tokens:
        held_rows = np.isin(np.arange(len(whole.table.row)), rows[is_held_out])
        fitted = whole.table.fit(limits, np.zeros(len(held_rows), bool), held_rows)
        _say_left_out("validation", len(fitted.view), int(held_rows.sum()), evaluated or room, data)
        validation = {"validation": Dataset(whole.table, fitted, np.arange(len(fitted.view)))}
    further = _further(data, datasets, reader, limits, taken=validation)
    loaded = {"train": whole, **further}
    validation |= {n: Dataset(one.table, one.fitted, np.arange(len(one.fitted.view))) for n, one in further.items()}
    reports = {name: one.report for name, one in loaded.items()}
    sources = {"train": parts} | {name: [part] for name, part in further_parts(data, datasets)}
    contents = {
        f"{name} {part.source}": content
        for name, one in loaded.items()
        for part, content in zip(sources[name], one.contents, strict=False)  # max_rows may leave out the last sources
    }
    return Prepared(kind, train, validation, reports, _fingerprint(loaded, train, validation), contents)


def _is_held_out(data: DataConfig, whole: Loaded, held_out: np.ndarray | None, seed: int) -> np.ndarray:
    """Which examples validate: those of the row numbers, or else of a random part of the rows."""
    rows = whole.fitted.view[:, 0]
    if held_out is None or (data.validation is not None and data.validation.source is not None):
        rng = np.random.default_rng([seed, zlib.crc32(b"validation")])
        return np.isin(rows, _held_out(data, np.unique(rows), rng))  # the chunks of a document stay together
    return np.isin(whole.table.row[rows], held_out)


def parts_of(data: DataConfig) -> list[SourcePart]:
    """The sources of the training data."""
    return (
        [SourcePart(data.source, data.split, data.max_rows, skip_rows=data.skip_rows)]
        if isinstance(data.source, str)
        else [SourcePart(part.source, part.split, part.max_rows, part.weight) for part in data.source]
    )


def further_parts(data: DataConfig, datasets: Sequence[EvaluationDataset]) -> list[tuple[str, SourcePart]]:
    """The sources of the validation sets by name, without rows held out from the training data."""
    sources = [(entry.name, SourcePart(entry.source, entry.split, entry.max_rows)) for entry in datasets]
    if data.validation is not None and data.validation.source is not None:
        given = data.validation
        sources.insert(0, ("validation", SourcePart(given.source or "", given.split, given.max_rows)))
    return sources


def _further(
    data: DataConfig, datasets: Sequence[EvaluationDataset], reader: Reader, limits: Limits, taken: Collection[str]
) -> dict[str, Loaded]:
    """The validation sets by name: that of `data.validation`, then the evaluation `datasets`."""
    own = {entry.name: entry for entry in datasets}
    found: dict[str, Loaded] = {}
    for name, part in further_parts(data, datasets):
        if name in taken or name in found or name == "train":
            raise DataError(f"evaluation.datasets has the reserved name {name!r}: give it another")
        its = reader.of_prompts_alone().with_data(settings_of(own[name], data) if name in own else data)
        found[name] = its.load(name, [part], lambda _: limits, None)
    return found


def _fingerprint(loaded: Mapping[str, Loaded], train: Dataset, validation: Mapping[str, Dataset]) -> str:
    """SHA-256 of all data of a run in order: the rows' contents, the effect of limits, and the split."""
    sets = {"train": train, **validation}
    views = {name: hashlib.sha256(one.view.tobytes()).hexdigest() for name, one in sets.items()}
    return cache.digest_of({"rows": {name: one.contents for name, one in loaded.items()}, "views": views})


def settings_of(entry: EvaluationDataset, data: DataConfig) -> DataConfig:
    """The data settings of an evaluation set: those of the training data, overridden by its own."""
    update: dict[str, Any] = {"template": entry.template or data.template}
    if entry.format is not None:
        update |= {"format": entry.format, "columns": {}}
    if entry.columns is not None:
        update["columns"] = entry.columns
    return data.model_copy(update=update)


def _refuse_one_class(labels: np.ndarray, data: DataConfig) -> None:
    if labels.any() and not labels.all():
        return
    given = "true" if labels.any() else "false"
    few = "" if data.max_rows is None else f" (data.max_rows is {data.max_rows:,}: raise it if others come later)"
    raise DataError(
        f"all {len(labels):,} training examples are labelled {given}{few}: KTO compares desirable and undesirable "
        "completions, and needs both. Add rows of the other label, or train on desirable ones alone with "
        "method.type: sft"
    )


def _held_out(data: DataConfig, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The rows held out for validation: sampled from all rows without replacement."""
    given, count = data.validation, len(rows)
    if given is None or given.source is not None:
        return np.zeros(0, np.int64)
    wanted = given.rows if given.rows is not None else max(1, round((given.ratio or 0.0) * count))
    if wanted >= count:
        raise DataError(f"data.validation holds out {wanted:,} of {count:,} examples, which leaves none to train on")
    return rng.permutation(rows)[:wanted]


def _weighted(indices: np.ndarray, whole: Loaded, parts: Sequence[SourcePart], seed: int) -> np.ndarray:
    """Repeat or thin each part's examples by its weight: 2 has each twice, 0.5 a random half, 2.5 both."""
    table_row = whole.fitted.view[indices, 0]
    out, begin = [], 0
    for number, (part, end) in enumerate(zip(parts, whole.ends, strict=False)):
        mine = indices[(table_row >= begin) & (table_row < end)]
        times, share = int(part.weight), part.weight % 1
        rng = np.random.default_rng([seed, zlib.crc32(b"weight"), number])
        extra = np.sort(rng.permutation(mine)[: round(share * len(mine))])
        out += [*[mine] * times, extra]
        begin = end
    sampled = np.concatenate(out)
    if not len(sampled):
        raise DataError("data.source: the weights leave no example to train on: raise one")
    return sampled
