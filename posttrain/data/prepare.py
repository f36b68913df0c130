"""Prepares examples from the data settings: reads data sets, holds out validation rows, mixes sources by weight."""

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError
from posttrain.base.files import default_cache
from posttrain.base.log import log
from posttrain.base.words import counted
from posttrain.config.schema.base import KindName
from posttrain.config.schema.data import DataConfig
from posttrain.config.schema.evaluation import EvaluationDataset
from posttrain.config.schema.run import BEHAVIOR_VERSION, RunConfig
from posttrain.data import cache
from posttrain.data.holdout import HeldOut, held_out_rows, trained_too
from posttrain.data.kind import Kind
from posttrain.data.kinds import KINDS, Dataset
from posttrain.data.reading import Loaded, Reader, SourcePart, limited, most_rows, parts_of
from posttrain.data.report import Report
from posttrain.data.rows import Row, RowError
from posttrain.data.table import Limits, Room


@dataclass(frozen=True, slots=True)
class Prepared:
    """Data ready for a recipe. `reports` are for `train` and each validation set with a separate source. `prompts`
    are the prompts of the validation sets with rewards, for methods that train on completions."""

    kind: KindName
    train: Dataset
    validation: dict[str, Dataset]
    reports: dict[str, Report]
    fingerprint: str
    contents: dict[str, str]  # SHA-256 of the rows of each source, by set and source
    prompts: dict[str, Dataset] = field(default_factory=dict)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence; a prompt counts without its sampled completion."""
        return max(dataset.longest for dataset in (self.train, *self.validation.values()))

    @property
    def report(self) -> Report:
        """The report of the training source, before validation rows are held out."""
        return self.reports["train"]


@dataclass(frozen=True, slots=True)
class Options:
    """Optional arguments of `prepare`.

    Prompts leave room for `completion_length` tokens in `max_length` and in the model's `positions`; evaluation prompts
    leave room for `evaluated`, by default the same. With `learned_positions`, which end, no example has more tokens
    than `positions`. `datasets` are evaluation sets in addition to `data.validation`.
    The same `seed` holds out the same rows for all kinds, templates and limits; `held_out` gives the row numbers
    instead. The report names `method`. With `behavior_version` 1, rows are tokenised and truncated as in runs started
    before the version was recorded, and the validation rows are a random part of the rows within the limits. Without
    `refuse_malformed`, more than 1 % of malformed rows are reported, not refused.
    """

    datasets: Sequence[EvaluationDataset] = ()
    completion_length: int = 0
    evaluated: Room | None = None
    positions: int | None = None
    learned_positions: bool = False
    held_out: np.ndarray | None = None
    cache_dir: Path | None = None
    seed: int = 0
    behavior_version: int = BEHAVIOR_VERSION
    method: str | None = None
    refuse_malformed: bool = True


def prepare_run(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    positions: int | None = None,
    learned_positions: bool = False,
    refuse_malformed: bool = True,
) -> Prepared:
    """Prepare the data of a run: the training set and every validation set. `positions` is the number of positions of
    the model, in which prompts leave room for a completion; the arguments are as in `Options`."""
    method = config.method
    kind = replace(KINDS[method.kind].of(method), acts=config.acts and config.behavior_version > 2)
    options = Options(
        datasets=config.evaluation.datasets,
        completion_length=config.completion_length,
        evaluated=_evaluated(config),
        positions=positions,
        learned_positions=learned_positions,
        seed=config.seed,
        behavior_version=config.behavior_version,
        method=method.type,
        refuse_malformed=refuse_malformed,
    )
    prepared = prepare(config.data, tokenizer, kind, options)
    for setting in ("privileged_context", "teacher_logprobs"):  # columns that only a teacher reads
        prepared.report.unread.pop(getattr(method, setting, None) or "", None)
    if not method.learns_ties:
        prepared = _without_ties(prepared, method.type)
    if config.samples and not kind.samples:
        return replace(prepared, prompts=_validation_prompts(config, tokenizer, prepared, options))
    return prepared


def _without_ties(prepared: Prepared, method: str) -> Prepared:
    """The data without ties, which are counted in the reports. Raises DataError if a set has nothing else."""
    sets, reports = {"train": prepared.train, **prepared.validation}, dict(prepared.reports)
    for name, dataset in sets.items():
        if ties := int(dataset.ties.sum()):
            what = f"{name}: {counted(ties, 'tie')} among {counted(len(dataset), 'pair')} dropped: only reward models "
            what += f"learn from ties; {method} needs one reply to be better"
            if ties == len(dataset):
                raise DataError(f"no row can be used: {what}")
            own = name if name in reports else "train"
            used = reports[own].used - ties
            reports[own] = replace(reports[own], used=used, notes=(*reports[own].notes, what))
            sets[name] = dataset.without_ties()
    return replace(prepared, train=sets.pop("train"), validation=sets, reports=reports)


def _validation_prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, prepared: Prepared, options: Options
) -> dict[str, Dataset]:
    """The prompts, without replies, of the validation sets with rewards, by name. A row whose prompt leaves no room for
    a completion is dropped with a warning. Raises DataError like `prepare`."""
    room, data = _evaluated(config), config.data
    if data.max_prompt_length == "auto":  # methods that do not train on prompts evaluate all prompts
        data = data.model_copy(update={"max_prompt_length": None})
    if not config.rewards:
        data = data.model_copy(update={"validation": None})
    old = data.holds_out and config.behavior_version < 2
    held_out = prepared.validation["validation"].rows if old else None
    datasets = [d for d in options.datasets if (config.rewards if d.rewards is None else d.rewards)]
    options = replace(options, datasets=datasets, held_out=held_out, method=None)
    prompts = prepare(data, tokenizer, "prompt", options).validation
    for name, dataset in prompts.items():
        if name != "validation" or not data.holds_out:  # held-out rows are already reported
            _report_room(name, len(dataset), len(np.unique(prepared.validation[name].rows)), room, data)
    return prompts


def longest_sequence(config: RunConfig, prepared: Prepared) -> int:
    """The maximum number of input tokens; a prompt counts with its sampled completion, except for the last token."""
    if not KINDS[prepared.kind].samples:
        return prepared.longest
    sampled = [(prepared.train, config.completion_length)]
    sampled += [(dataset, _evaluated(config).tokens) for dataset in prepared.validation.values()]
    return max(dataset.longest + length - 1 for dataset, length in sampled)


def _evaluated(config: RunConfig) -> Room:
    """The room that evaluation prompts leave for completions."""
    own = config.evaluation.max_completion_length
    return Room(config.rollout.max_completion_length) if own is None else Room(own, "evaluation.max_completion_length")


def _report_room(name: str, fitting: int, rows: int, room: Room, data: DataConfig) -> None:
    """Log the number of prompts that leave room for a completion, unless all do. Raises DataError if none does."""
    if not fitting:
        raise DataError(
            f"{name}: no prompt leaves room for a completion of {room.tokens:,} tokens ({room.setting}) "
            f"within {data.max_length:,} (data.max_length)"
        )
    if fitting < rows:
        log.warning("%s: %d of %d prompts leave room for a completion and are evaluated", name, fitting, rows)


def prepare(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, kind: Kind | KindName, options: Options | None = None
) -> Prepared:
    """Read and tokenise the sources of `data` and the additional evaluation sets of `options`.

    `kind` is `sft` for single sequences, `pair` for preference pairs, `unpaired` for labelled completions, `prompt` for
    prompts, or a `Kind` with its settings. Sets the template on the tokenizer. The resulting `validation` contains the
    set of `data.validation` as "validation" and the evaluation sets under their names.

    Raises DataError for a missing source or column, more than 1 % malformed rows, a row without trained tokens, rows
    above the limits if `overlong` is error, labelled completions with only one label, and if no usable row is left for
    training or validation.
    """
    kind, options = KINDS[kind]() if isinstance(kind, str) else kind, options or Options()
    room, seed = Room(options.completion_length), options.seed
    evaluated = options.evaluated or room
    positions = options.positions if kind.samples or options.learned_positions else None
    trained_limits, limits = (kind.limits(data, each, positions) for each in (room, evaluated))
    cache_dir = options.cache_dir or default_cache()
    reader = Reader(data, tokenizer, kind, cache_dir, seed, options.behavior_version, options.refuse_malformed)
    limits_of = partial(kind.training_limits, data, trained_limits, options.behavior_version)
    whole = reader.load("train", parts_of(data), limits_of, most_rows(data))
    # `auto` does not limit evaluation prompts
    percentile = whole.limits.max_prompt_length if data.max_prompt_length != "auto" else None
    most = percentile if isinstance(data.max_prompt_length, str) else data.max_prompt_length
    shorter = evaluated if limits.max_prompt_length != trained_limits.max_prompt_length else None
    limits = limits.shortened(most)
    if options.held_out is not None and data.holds_out:
        held = HeldOut(options.held_out)
    elif options.behavior_version >= 2:
        held = held_out_rows(data, seed, reader.folder)
    else:
        held = _permuted(data, whole, seed)
    numbers = whole.table.row[whole.fitted.view[:, 0]]
    train = whole.examples(_mixed(~np.isin(numbers, held.every), whole, data.mixing, seed))
    kind.refuse_training(whole.table, train.view, data)
    validation, notes = dict[str, Dataset](), []
    if len(held.elsewhere):
        notes.append(f"{counted(len(held.elsewhere), 'row')} held out by other stages, not trained on")
    if len(held.validation):
        validation["validation"], note = _validating(data, whole, held, limits, shorter, options)
        notes.append(note)
    reports = {"train": replace(whole.report, notes=(*whole.report.notes, *notes))}
    loaded = {"train": whole}
    for name, part, settings in further_parts(data, options.datasets):
        if name in validation or name == "train":
            raise DataError(f"evaluation.datasets uses the reserved name {name!r}: choose another name")
        loaded[name] = reader.with_data(settings).load(name, [part], lambda _: limits, None)
        validation[name], reports[name] = loaded[name].examples(), loaded[name].report
        if twice := trained_too(data, held, part, seed, reader.folder):
            note = f"{twice:,} of {counted(reports[name].read, 'row')} are also trained on"
            reports[name] = replace(reports[name], notes=(*reports[name].notes, note))
    contents = {
        f"{name} {part.source}": content
        for name, each in loaded.items()
        for part, content in zip(each.parts, each.contents, strict=True)
    }
    return Prepared(kind.name, train, validation, reports, _fingerprint(loaded, train, validation), contents)


def _validating(
    data: DataConfig, whole: Loaded, held: HeldOut, limits: Limits, shorter: Room | None, options: Options
) -> tuple[Dataset, str]:
    """The held-out examples within the evaluation limits, and a note on how many rows can be used. `shorter` is the
    room for their completions if it differs from the room in training. Raises DataError if no row can be used."""
    among, rows = np.isin(whole.table.row, held.validation), len(held.validation)
    fitted = whole.fitted
    if limits != whole.limits if options.behavior_version >= 2 else shorter is not None:
        fitted = whole.kind.fit(whole.table, limits, np.zeros(len(among), bool), among)
    dataset = Dataset(whole.kind, whole.table, fitted, np.flatnonzero(among[fitted.view[:, 0]]))
    readable, usable = int(np.isin(held.validation, whole.table.row).sum()), len(np.unique(dataset.rows))
    if shorter and readable:
        _report_room("validation", len(dataset), readable, shorter, data)
    lost = {"malformed": rows - readable, "over the length limits": readable - usable}
    why = ", ".join(f"{count:,} {reason}" for reason, count in lost.items() if count)
    by = f" by {options.method}" if options.method else ""
    if not usable:
        raise DataError(
            f"validation: none of the {rows:,} held-out rows can be used{by}: {why}. Hold out more rows, or change "
            "the limits (data.max_length, data.max_prompt_length)"
        )
    return dataset, f"validation: {usable:,} of {rows:,} held-out rows can be used{by}" + (f": {why}" if why else "")


def _permuted(data: DataConfig, whole: Loaded, seed: int) -> HeldOut:
    """The validation rows by the rule of behavior_version 1: a random part of the rows within the limits."""
    size, rows = data.validation, np.unique(whole.fitted.view[:, 0])
    if size is None or size.source is not None:
        return HeldOut()
    wanted = size.rows if size.rows is not None else max(1, round((size.ratio or 0.0) * len(rows)))
    if wanted >= len(rows):
        raise DataError(
            f"data.validation holds out {wanted:,} of {len(rows):,} examples, which leaves none to train on"
        )
    rng = np.random.default_rng([seed, zlib.crc32(b"validation")])
    return HeldOut(whole.table.row[rng.permutation(rows)[:wanted]])


def further_parts(data: DataConfig, datasets: Sequence[EvaluationDataset]) -> list[tuple[str, SourcePart, DataConfig]]:
    """The name, source and settings of each validation set with a separate source."""
    parts = [(d.name, SourcePart(d.source, d.split, d.max_rows), settings_of(d, data)) for d in datasets]
    if (own := data.validation) is not None and own.source is not None:
        parts.insert(0, ("validation", SourcePart(own.source, own.split, own.max_rows), data))
    return parts


def _fingerprint(loaded: Mapping[str, Loaded], train: Dataset, validation: Mapping[str, Dataset]) -> str:
    """SHA-256 of all data of a run, in order: the rows' contents, the effect of the limits, and the split."""
    sets = {"train": train, **validation}
    views = {name: hashlib.sha256(dataset.view.tobytes()).hexdigest() for name, dataset in sets.items()}
    return cache.digest_of({"rows": {name: whole.contents for name, whole in loaded.items()}, "views": views})


def settings_of(entry: EvaluationDataset, data: DataConfig) -> DataConfig:
    """The data settings of an evaluation set: the training data's settings, overridden by those of the set."""
    update: dict[str, Any] = {"template": entry.template or data.template}
    if update["template"] != data.template:
        update["chat_template_kwargs"] = {}  # the variables belong to the other template
    if entry.format is not None:
        update |= {"format": entry.format, "columns": {}}
    if entry.columns is not None:
        update["columns"] = entry.columns
    return data.model_copy(update=update)


def _mixed(trained: np.ndarray, whole: Loaded, mixing: str, seed: int) -> np.ndarray:
    """The indices of the `trained` examples. Unless they are interleaved, the weight of a part repeats or samples its
    examples: 2 includes each example twice, 0.5 a random half, and 2.5 each twice plus a random half."""
    indices = np.flatnonzero(trained)
    if not len(indices):
        raise DataError("every row that can be used is held out, which leaves none to train on: lower data.validation")
    sources, out = whole.examples(indices).sources, []
    for number, part in enumerate(whole.parts):
        own = indices[sources == number]
        if mixing == "interleave" and not len(own):
            raise DataError(f"data.source: {part.source} has no row to train on, so it cannot be interleaved")
        weight = 1.0 if mixing == "interleave" else part.weight
        times, share = int(weight), weight % 1
        rng = np.random.default_rng([seed, zlib.crc32(b"weight"), number])
        extra = np.sort(rng.permutation(own)[: round(share * len(own))])
        out += [*[own] * times, extra]
    sampled = np.concatenate(out)
    if not len(sampled):
        raise DataError("data.source: the weights leave no example to train on: raise a weight")
    return sampled


Numbered = Iterator[tuple[int, Row]]


def rows_of_run(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, Numbered]]:
    """Yield the sets with their well-formed rows, numbered as in `Dataset.rows`: first `train`, which includes the
    held-out rows, then each validation set with a separate source."""
    data, kind, version = config.data, KINDS[config.method.kind](), config.behavior_version
    reader = Reader(data, deepcopy(tokenizer), kind, seed=config.seed, behavior_version=version)
    yield "train", _numbered(reader, parts_of(data), most_rows(data))
    for name, part, settings in further_parts(data, config.evaluation.datasets):
        yield name, _numbered(reader.with_data(settings), [part], None)


def _numbered(reader: Reader, parts: list[SourcePart], max_rows: int | None) -> Numbered:
    """Yield the rows of all parts, numbered consecutively; `max_rows` limits their total."""
    read = list[int]()
    for part, rows, before in limited(parts, max_rows, read):
        records, layout = reader.records(part, *part.open(rows, reader.seed, reader.template.compose))
        read.append(0)
        for record in records:
            read[-1] += 1
            with suppress(RowError):
                yield before + record.row, reader.row(record, layout)
