"""Loads a data set from its sources: reads and checks rows, tokenises them into the cache and applies the limits."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from posttrain.base.console import progress
from posttrain.base.errors import DataError
from posttrain.base.files import default_cache
from posttrain.config.schema.data import DataConfig, HeldOutRows
from posttrain.data import cache
from posttrain.data.kind import Kind
from posttrain.data.kinds import Dataset
from posttrain.data.layouts import Layout, find_layout
from posttrain.data.readers import Record
from posttrain.data.render import rendering
from posttrain.data.report import MALFORMED_SHARE, OVERLONG, Malformed, MalformedError, Reading, Report, list_malformed
from posttrain.data.rows import (
    VARIABLES,
    IdenticalError,
    Row,
    RowError,
    UntrainedError,
    is_undesirable,
    variables_of,
    with_system,
    without_think,
)
from posttrain.data.sources import Source, layout_of, open_source
from posttrain.data.table import Array, Fitted, Limits, Table
from posttrain.data.tasks import Compose
from posttrain.data.templates import choose_template, require_chat_template
from posttrain.data.tokenise import Compared, Tokeniser, Trained

BATCH = 256  # rows tokenised at a time
MOST_LISTED = 1_000  # rows above the limits that a report lists
SAMPLE = 100  # rows from which the format is inferred
# counts of a reading and of a report
SUMMED = ("read", "duplicates", "shifted", "identical", "untrained", "users", "extracted", "undesirable")


@dataclass(frozen=True, slots=True)
class SourcePart:
    """One source of a data set, from the settings."""

    source: str
    split: str
    max_rows: int | None
    weight: float = 1.0
    skip_rows: int = 0

    def open(self, max_rows: int | None, seed: int, compose: Compose) -> tuple[Source, int | None]:
        """The source, and the row number at which reading stops after `max_rows` rows; None: after the last row."""
        end = None if max_rows is None else self.skip_rows + max_rows
        return open_source(self.source, self.split, end, seed, compose), end


def parts_of(data: DataConfig | HeldOutRows) -> list[SourcePart]:
    """The sources of the training data."""
    if isinstance(data.source, str):
        return [SourcePart(data.source, data.split, data.max_rows, skip_rows=data.skip_rows)]
    return [SourcePart(part.source, part.split, part.max_rows, part.weight) for part in data.source]


def most_rows(data: DataConfig | HeldOutRows) -> int | None:
    """The limit on the rows of all sources together; None if there is no limit or only one source."""
    return None if isinstance(data.source, str) else data.max_rows


def limited(
    parts: Sequence[SourcePart], most: int | None, read: list[int]
) -> Iterator[tuple[SourcePart, int | None, int]]:
    """Yield each part, its row limit, and the number of rows before it; `most` limits the rows of all parts together.
    The caller appends the number of rows that it has read from a part to `read`."""
    for part in parts:
        before = sum(read)
        if most is None:
            yield part, part.max_rows, before
        elif left := most - before:
            yield part, min(left, part.max_rows or left), before


@dataclass(frozen=True, slots=True)
class Loaded:
    """A data set within its limits, before validation rows are split off."""

    kind: Kind
    table: Table
    fitted: Fitted
    limits: Limits
    parts: list[SourcePart]  # those that were read: `max_rows` may exclude the last ones
    contents: list[str]  # SHA-256 of each part's rows
    report: Report

    def examples(self, indices: Array | None = None) -> Dataset:
        """The examples at these positions in `fitted`; all of them by default."""
        indices = np.arange(len(self.fitted.view)) if indices is None else indices
        return Dataset(self.kind, self.table, self.fitted, indices)


@dataclass
class Reader:
    """Loads data sets of one kind with the settings of one run. Sets the template on the tokenizer."""

    data: DataConfig
    tokenizer: PreTrainedTokenizerBase
    kind: Kind
    folder: Path = field(default_factory=default_cache)  # the cache
    seed: int = 0
    behavior_version: int = 2
    refuse_malformed: bool = True  # False: more than MALFORMED_SHARE of malformed rows is a note of the report

    def __post_init__(self) -> None:
        self.template = choose_template(self.data, self.tokenizer)

    @cached_property
    def date(self) -> str | None:
        """The date that the chat template writes; None if it writes no date."""
        if self.behavior_version == 1:
            return self.data.date
        if self.data.template == "none" or "strftime_now" not in str(self.tokenizer.chat_template):
            return None
        return self.data.date or date.today().isoformat()

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings that determine the tokens of a row, for the cache key."""
        template, kind = self.template, self.kind
        settings = {
            "tokenizer": cache.tokenizer_fingerprint(self.tokenizer),
            "template": [template.name, template.turns, template.tags.model_dump()],
            "system_prompt": self.data.system_prompt,
            "strip_think": self.data.strip_think,
            "kind": kind.name,
            "completion_only_loss": kind.completion_only_loss,
            "assistant_only_loss": kind.assistant_only_loss,
        }
        settings |= {"with_completions": True} if kind.with_completions else {}
        settings |= {"acts": True} if kind.acts else {}
        settings |= {name: value for name in ("context", "logprobs") if (value := getattr(kind, name)) is not None}
        settings |= {"behavior_version": 2} if self.behavior_version > 1 else {}  # since 2, the tokens are the same
        return settings | ({} if self.date is None else {"date": self.date})

    def with_data(self, data: DataConfig) -> Self:
        """A reader for a set with different settings, which omits the completions of prompts. If the template differs,
        it is set on a copy of the tokenizer."""
        kind = replace(self.kind, with_completions=False, logprobs=None)
        if (data, kind) == (self.data, self.kind):
            return self
        tokenizer = self.tokenizer if data.template == self.data.template else deepcopy(self.tokenizer)
        return replace(self, data=data, tokenizer=tokenizer, kind=kind)

    def load(
        self, name: str, parts: Sequence[SourcePart], limits_of: Callable[[Table], Limits], max_rows: int | None
    ) -> Loaded:
        """Tokenise each part or load it from the cache, and apply the limits to all parts together."""
        tables, readings, contents, notes, read = [], [], [], [], list[int]()
        for part, rows, _ in limited(parts, max_rows, read):
            table, reading, content, note = self._part(part, rows)
            tables.append(table)
            readings.append(reading)
            contents.append(content)
            notes += [note] if note else []
            if len(reading.malformed) > MALFORMED_SHARE * reading.read:
                notes.append(self._malformed_note(part.source, reading))
            read.append(reading.read)
        kind = self.kind
        table = Table(tables, read, makes_room=not kind.samples and self.behavior_version > 1)
        limits = limits_of(table)
        notes += [limits.note] if limits.note else []
        if self.date is not None:
            notes.append(f"{name}: the chat template writes the date, {self.date} in this run (data.date)")
        # a document that is used as a prompt is not split
        splits = [not kind.samples and reading.format == "text" for reading in readings]
        sizes = [len(rows) for rows in tables]
        fitted = kind.fit(table, limits, np.repeat(splits, sizes))
        report = Report(
            name=name,
            formats=tuple(reading.format for reading in readings),
            used=len(fitted.view),
            malformed=tuple(row for reading in readings for row in reading.malformed),
            overlong_dropped=len(fitted.dropped),
            overlong_truncated=fitted.truncated,
            overlong_split=fitted.split,
            tokens=fitted.tokens,
            prompt_tokens=fitted.prompt_tokens,
            max_length=limits.max_length,
            max_prompt_length=limits.max_prompt_length,
            notes=tuple(notes),
            unwritten=dict(sum((Counter(reading.unwritten) for reading in readings), Counter())),
            dropped=tuple(dict(zip(OVERLONG, row, strict=True)) for row in fitted.dropped[:MOST_LISTED].tolist()),
            unread=dict(sum((Counter(reading.unread) for reading in readings), Counter())),
            rewarded=kind.samples,
            **{key: sum(getattr(reading, key) for reading in readings) for key in SUMMED},
        )
        if not len(fitted.view):
            raise DataError("no row can be used:\n  " + "\n  ".join(report.lines()))
        used = list(parts[: len(read)])
        return Loaded(kind, table, fitted, limits, used, contents, report)

    def _malformed_note(self, source: str, reading: Reading) -> str:
        bad = f"{len(reading.malformed):,} of {reading.read:,} rows are malformed, more than {MALFORMED_SHARE:.0%}"
        if self.refuse_malformed:
            raise MalformedError(
                f"{source}: {bad}. Correct them, or write the others to a file, which data.source may name: "
                f"posttrain explore SETTINGS data.source={source} --good-rows FILE.jsonl. "
                f"The first:\n{list_malformed(reading.malformed)}"
            )
        return f"{source}: {bad}, so plan and train refuse it; --good-rows FILE.jsonl writes the others"

    def _part(self, part: SourcePart, max_rows: int | None) -> tuple[pa.Table, Reading, str, str | None]:
        source, end = part.open(max_rows, self.seed, self.template.compose)
        format, columns = self.layout(part.source)
        facts = {"source": source.digest, "max_rows": max_rows, "format": format, "columns": columns}
        facts |= {"skip_rows": part.skip_rows} if part.skip_rows else {}
        key = cache.key_of({**self.settings, **facts})
        return cache.cached(self.folder, key, self.kind.schema, lambda writer: self._read(part, source, end, writer))

    def layout(self, source: str) -> tuple[str, dict[str, str]]:
        """The format and columns of the settings, completed with those of `source` if it is a known data set."""
        format, columns = self.data.format, self.data.columns
        known = layout_of(source)
        if known is None or format not in ("auto", known.format):
            return format, columns
        return known.format, {**known.columns, **columns}

    @contextmanager
    def tokeniser(self, layout: Layout) -> Iterator[Tokeniser]:
        """A tokeniser for rows of this layout, with a chat template process if they have turns."""
        if has_turns := self._has_turns(layout):
            require_chat_template(self.tokenizer)
        own_process = rendering(self.tokenizer, self.behavior_version, date=self.date) if has_turns else nullcontext()
        with own_process as renderer:
            yield Tokeniser(self.tokenizer, renderer, self.kind.assistant_only_loss, self.behavior_version)

    def _has_turns(self, layout: Layout) -> bool:
        return self.template.turns and layout.name != "text"

    def _read(self, part: SourcePart, source: Source, end: int | None, writer: cache.Writer) -> Reading:
        """Read the rows of a source up to row number `end` and write their tokens."""
        records, layout = self.records(part, source, end)
        name = part.source
        reading, unread, seen = Reading(layout.name), Counter[str](), set[int]()
        imitates = layout.name != "text" and (self.kind.name == "sft" or self.kind.with_completions)
        with self.tokeniser(layout) as tokeniser:
            records = progress(records, f"tokenising {name}")
            while batch := list(itertools.islice(records, BATCH)):
                reading.read += len(batch)
                rows, records_of = [], []
                for record in batch:
                    unread.update(layout.unread(record.value or {}))
                    unread.update(["tools"] if self.kind.acts and (record.value or {}).get("tools") else [])
                    try:
                        rows.append(self.row(record, layout))
                        records_of.append(record)
                    except IdenticalError:
                        reading.identical += 1
                    except RowError as error:
                        reading.malformed.append(malformed_of(record, error))
                    except DataError as error:
                        raise DataError(f"{record.file} line {record.line}: {error}") from error
                kept = []
                items = self.kind.tokenise(tokeniser, rows, layout.name == "text")
                for record, row, item in zip(records_of, rows, items, strict=True):
                    if isinstance(item, UntrainedError):
                        reading.untrained += 1
                    elif isinstance(item, RowError):
                        reading.malformed.append(malformed_of(record, item))
                    else:
                        kept.append(self.kind.stored(record, row, item, self.template.turns))
                        reading.users += self.kind.trains_users(row)
                        reading.extracted += self.kind.samples and layout.takes_part(record.value or {}, row.answer)
                        reading.undesirable += imitates and is_undesirable(record.value or {})
                        reading.shifted += item.shifted
                        reading.duplicates += (tokens := _hash(item)) in seen
                        seen.add(tokens)
                writer.write(kept)
        reading.malformed.sort(key=lambda bad: bad.row)
        if self.kind.samples:
            unread.pop("answer", None)  # read by rewards in every format
        if self._has_turns(layout):
            unread.pop(VARIABLES, None)
        reading.unread, reading.unwritten = dict(unread), dict(tokeniser.writer.unwritten)
        return reading

    def records(self, part: SourcePart, source: Source, end: int | None) -> tuple[Iterator[Record], Layout]:
        """The rows of a source up to row number `end`, and their layout, inferred from the first rows."""
        records, name = itertools.islice(source.read(), part.skip_rows, end), part.source
        head = list(itertools.islice(records, SAMPLE))
        if not head and part.skip_rows:
            raise DataError(f"{name} has no row after the first {part.skip_rows:,}: lower data.skip_rows")
        return itertools.chain(head, records), self.layout_of_rows(head, name)

    def layout_of_rows(self, records: Sequence[Record], name: str) -> Layout:
        """The layout of rows like these. Raises DataError if no row can be read or their columns fit no format."""
        good = [record.value for record in records if record.value is not None]
        if not good:
            bad = [malformed_of(record, record.problem or "") for record in records]
            raise DataError(f"{name} has no readable row:\n{list_malformed(bad)}")
        return find_layout(*self.layout(name), good[:SAMPLE], self.kind, name)

    def row(self, record: Record, layout: Layout) -> Row:
        """A record in the common form, with the settings for system prompt and thinking applied. Raises RowError if the
        record is malformed."""
        if record.value is None:
            raise RowError(record.problem)
        is_csv = Path(record.file.removesuffix(".gz")).suffix.lower() in (".csv", ".tsv")  # every value is a string
        row = layout.read(record.value, self.template, is_csv, self.behavior_version)
        row = self.kind.shape(row, record.value)
        own_tags = self.template.has_tags and layout.name == "problem_answer" and self.behavior_version > 1
        if self.data.strip_think and not own_tags:  # own tags: solutions are stripped before tags are added
            rejected = None if row.rejected is None else without_think(row.rejected)
            row = replace(row, chosen=without_think(row.chosen), rejected=rejected)
        if row.rejected is not None and row.rejected == row.chosen and row.rejected_prompt is None:
            raise IdenticalError("chosen and rejected are the same")
        if not row.prompt and not row.chosen:
            raise RowError("prompt and completion are both empty" if row.prompt is not None else "the text is empty")
        row = self.kind.target(row, layout.name == "text")
        if self.kind.acts:
            row = replace(row, tools=None)
        if self.data.system_prompt is not None and layout.name != "text":
            row = with_system(row, self.data.system_prompt)
        if self._has_turns(layout) and self.behavior_version > 1:
            row = replace(row, variables=variables_of(record.value.get(VARIABLES)))
        return row


def malformed_of(record: Record, reason: object) -> Malformed:
    return Malformed(record.file, record.line, str(reason), record.row)


def _hash(item: Trained | Compared) -> int:
    alone = isinstance(item, Trained)
    return hash(tuple(item.tokens if alone else [*item.prompt, -1, *item.chosen, -1, *item.rejected]))
