"""From the data settings to examples ready to pack: reads data sets, holds out validation rows, mixes by weight."""

import hashlib
import logging
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from posttrain.base.caches import default_folder
from posttrain.base.errors import DataError
from posttrain.base.words import counted
from posttrain.config.schema.data import DataConfig
from posttrain.config.schema.evaluation import EvaluationDataset
from posttrain.config.schema.run import RunConfig
from posttrain.data import cache
from posttrain.data.dataset import Dataset, Limits
from posttrain.data.holdout import HeldOut, held_out_rows, trained_too
from posttrain.data.lengths import Room, evaluation_limits, longest_prompt, training_limits
from posttrain.data.reading import Kind, Loaded, Reader, SourcePart, most_rows, parts_of
from posttrain.data.report import Report
from posttrain.data.rows import Row
from posttrain.data.templates import choose_template

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
        method=method.type,
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
    old = data.holds_out and config.behavior_version < 2
    held_out = prepared.validation["validation"].rows if old else None
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
        if name != "validation" or not data.holds_out:
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


def _held_out_set(whole: Loaded, held: HeldOut, limits: Limits | None) -> Dataset:
    """The examples that validate, within other `limits` than those of training if they are given."""
    among = np.isin(whole.table.row, held.validation)
    fitted = whole.fitted if limits is None else whole.table.fit(limits, np.zeros(len(among), bool), among)
    return Dataset(whole.table, fitted, np.flatnonzero(among[fitted.view[:, 0]]))


def _usable(usable: int, readable: int, held_out: int, method: str | None) -> str:
    """How many of the rows held out validate; `readable` are not malformed. Raises DataError if none does."""
    lost = {"malformed": held_out - readable, "over the length limits": readable - usable}
    why = ", ".join(f"{count:,} {what}" for what, count in lost.items() if count)
    by = f" by {method}" if method else ""
    if not usable:
        raise DataError(
            f"validation: none of the {held_out:,} held-out rows can be used{by}: {why}. Hold out more rows, or change "
            "the limits (data.max_length, data.max_prompt_length)"
        )
    return f"validation: {usable:,} of {held_out:,} held-out rows can be used{by}" + (f": {why}" if why else "")


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
    method: str | None = None,
) -> Prepared:
    """Read and tokenise the sources of `data` and the further evaluation `datasets`.

    `kind` is `sft` for single sequences, `pair` for preference pairs, `unpaired` for labelled completions, `prompt` for
    prompts alone, which leave room for `completion_length` tokens in `max_length` and in the model's `positions`; those
    of evaluation for `evaluated`, by default the same. `with_completions` keeps the data's completion of each training
    prompt as the prompt's only child.
    `completion_only_loss` None trains completions if a row has a prompt, and every token otherwise. The template is set
    on the tokenizer. `validation` has the set of `data.validation` as "validation" and the further ones by their names.
    The same seed gives the same split of the source's rows, for every kind, template and limits; `held_out` gives the
    row numbers instead. `method` is named in the report. With `behavior_version` 1 rows are tokenised and truncated as
    by the runs that began before there was such a record, and a random part of those within the limits validates.

    Raises DataError: a missing source or column, more than 1 % malformed rows, a row without trained tokens, rows over
    the limits if `overlong` is error, labelled completions of one kind only, or no usable rows, of those that are held
    out, too.
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
    whole = reader.load("train", parts, partial(training_limits, data, kind, longest), most_rows(data))
    limits = evaluation_limits(data, longest_evaluated, whole.limits)
    by_hash = behavior_version >= 2
    if held_out is not None and data.holds_out:
        held = HeldOut(held_out, held_out[:0])
    else:
        held = held_out_rows(data, seed, cache_dir) if by_hash else _permuted(data, whole, seed)
    number = whole.table.row[whole.fitted.view[:, 0]]
    train = Dataset(whole.table, whole.fitted, _weighted(~np.isin(number, held.every), whole, parts, seed))
    if kind == "unpaired":
        _refuse_one_class(train.labels, data)
    validation, notes = dict[str, Dataset](), []
    if len(held.elsewhere):
        notes.append(f"{counted(len(held.elsewhere), 'row')} that other stages hold out, not trained on")
    if len(held.validation):
        same = limits == whole.limits if by_hash else longest_evaluated.tokens == longest.tokens
        validation["validation"] = found = _held_out_set(whole, held, None if same else limits)
        readable = int(np.isin(held.validation, whole.table.row).sum())
        if longest_evaluated.tokens != longest.tokens and readable:
            _say_left_out("validation", len(found), readable, evaluated or room, data)
        notes.append(_usable(len(np.unique(found.rows)), readable, len(held.validation), method))
    further = _further(data, datasets, reader, limits, taken=validation)
    loaded = {"train": whole, **further}
    validation |= {n: Dataset(one.table, one.fitted, np.arange(len(one.fitted.view))) for n, one in further.items()}
    reports = {name: one.report for name, one in loaded.items()}
    reports["train"] = replace(whole.report, notes=(*whole.report.notes, *notes))
    sources = {"train": parts} | {name: [part] for name, part, _ in further_parts(data, datasets)}
    for name, one in further.items():
        if twice := trained_too(data, held, sources[name][0], seed, cache_dir):
            note = f"{twice:,} of {counted(one.report.read, 'row')} are trained on, too"
            reports[name] = replace(one.report, notes=(*one.report.notes, note))
    contents = {
        f"{name} {part.source}": content
        for name, one in loaded.items()
        for part, content in zip(sources[name], one.contents, strict=False)  # max_rows may leave out the last sources
    }
    return Prepared(kind, train, validation, reports, _fingerprint(loaded, train, validation), contents)


def _permuted(data: DataConfig, whole: Loaded, seed: int) -> HeldOut:
    """The rows that validate by the rule of version 1: a random part of those within the limits."""
    given, rows = data.validation, np.unique(whole.fitted.view[:, 0])
    if given is None or given.source is not None:
        return HeldOut(np.zeros(0, np.int64), np.zeros(0, np.int64))
    wanted = given.rows if given.rows is not None else max(1, round((given.ratio or 0.0) * len(rows)))
    if wanted >= len(rows):
        raise DataError(
            f"data.validation holds out {wanted:,} of {len(rows):,} examples, which leaves none to train on"
        )
    rng = np.random.default_rng([seed, zlib.crc32(b"validation")])
    return HeldOut(whole.table.row[rng.permutation(rows)[:wanted]], np.zeros(0, np.int64))


def further_parts(data: DataConfig, datasets: Sequence[EvaluationDataset]) -> list[tuple[str, SourcePart, DataConfig]]:
    """The names, sources and settings of the validation sets, without rows held out from the training data."""
    sources = [(one.name, SourcePart(one.source, one.split, one.max_rows), settings_of(one, data)) for one in datasets]
    if data.validation is not None and data.validation.source is not None:
        given = data.validation
        sources.insert(0, ("validation", SourcePart(given.source or "", given.split, given.max_rows), data))
    return sources


def _further(
    data: DataConfig, datasets: Sequence[EvaluationDataset], reader: Reader, limits: Limits, taken: Collection[str]
) -> dict[str, Loaded]:
    """The validation sets by name: that of `data.validation`, then the evaluation `datasets`."""
    found: dict[str, Loaded] = {}
    for name, part, settings in further_parts(data, datasets):
        if name in taken or name in found or name == "train":
            raise DataError(f"evaluation.datasets has the reserved name {name!r}: give it another")
        found[name] = reader.with_data(settings).load(name, [part], lambda _: limits, None)
    return found


def _fingerprint(loaded: Mapping[str, Loaded], train: Dataset, validation: Mapping[str, Dataset]) -> str:
    """SHA-256 of all data of a run in order: the rows' contents, the effect of limits, and the split."""
    sets = {"train": train, **validation}
    views = {name: hashlib.sha256(one.view.tobytes()).hexdigest() for name, one in sets.items()}
    return cache.digest_of({"rows": {name: one.contents for name, one in loaded.items()}, "views": views})


def settings_of(entry: EvaluationDataset, data: DataConfig) -> DataConfig:
    """The data settings of an evaluation set: those of the training data, overridden by its own."""
    update: dict[str, Any] = {"template": entry.template or data.template}
    if update["template"] != data.template:
        update["chat_template_kwargs"] = {}  # of another template
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


def _weighted(trained: np.ndarray, whole: Loaded, parts: Sequence[SourcePart], seed: int) -> np.ndarray:
    """The examples `trained`, those of each part repeated or thinned by its weight: 2 has each twice, 0.5 a random
    half, 2.5 both."""
    indices = np.flatnonzero(trained)
    if not len(indices):
        raise DataError("every row that can be used is held out, which leaves none to train on: lower data.validation")
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


Numbered = Iterator[tuple[int, Row]]


def rows_of_run(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, Numbered]]:
    """The rows that are not malformed, with their numbers as in `Dataset.rows`: of `train`, which includes those that
    are held out, then of each validation set with a source of its own."""
    data, tokenizer = config.data, deepcopy(tokenizer)
    template, kind = choose_template(data, tokenizer), config.method.kind
    version, folder = config.behavior_version, default_folder()
    reader = Reader(data, tokenizer, template, kind, None, False, folder, config.seed, behavior_version=version)
    yield "train", _numbered(reader, parts_of(data), most_rows(data))
    for name, part, settings in further_parts(data, config.evaluation.datasets):
        yield name, _numbered(reader.with_data(settings), [part], None)


def _numbered(reader: Reader, parts: list[SourcePart], max_rows: int | None) -> Numbered:
    """Rows are numbered through the parts, of which `max_rows` limits the sum."""
    before, left = 0, max_rows
    for part in parts:
        if left == 0:
            return
        read = 0
        for record, row in reader.rows(part, part.max_rows if left is None else min(left, part.max_rows or left)):
            read += 1
            if row is not None:
                yield before + record.row, row
        before += read
        left = None if left is None else left - read
