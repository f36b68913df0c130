"""One data set from its sources: read, check, tokenise into the cache, apply the limits."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError
from posttrain.base.progress import progress
from posttrain.config.schema.base import Kind
from posttrain.config.schema.data import DataConfig, HeldOutRows
from posttrain.data import cache
from posttrain.data.dataset import Fitted, Limits, Table
from posttrain.data.layouts import Layout, find_layout
from posttrain.data.readers import Record
from posttrain.data.render import rendering
from posttrain.data.report import MALFORMED_SHARE, Malformed, Overlong, Reading, Report, list_malformed
from posttrain.data.reshaping import (
    answer_beside,
    as_prompt,
    last_turn_as_completion,
    refuse_without_reply,
    with_system,
    without_weights,
)
from posttrain.data.rows import Row, RowError, UntrainedError, as_turns, valid, variables_of, without_think
from posttrain.data.sources import Source, layout_of, open_source
from posttrain.data.tasks import Compose
from posttrain.data.templates import Template, choose_template, date_of, require_chat_template
from posttrain.data.tokenise import Compared, Tokeniser, Trained

BATCH = 256  # rows tokenised at a time
MOST_LISTED = 1_000  # rows over the limits that a report names
KWARGS = "chat_template_kwargs"  # a column of variables of the chat template, in every format
METHODS = {"pair": "a method of pairs", "unpaired": "KTO", "prompt": "a method of prompts"}
SAMPLE = 100  # rows from which the format is inferred


@dataclass(frozen=True, slots=True)
class SourcePart:
    """One source of a data set, from the settings."""

    source: str
    split: str
    max_rows: int | None
    weight: float = 1.0
    skip_rows: int = 0

    def open(self, max_rows: int | None, seed: int, compose: Compose) -> tuple[Source, int | None]:
        """The source, and the row number at which reading `max_rows` ends; None: with the last row."""
        end = None if max_rows is None else self.skip_rows + max_rows
        return open_source(self.source, self.split, end, seed, compose), end


def parts_of(data: DataConfig | HeldOutRows) -> list[SourcePart]:
    """The sources of the training data."""
    return (
        [SourcePart(data.source, data.split, data.max_rows, skip_rows=data.skip_rows)]
        if isinstance(data.source, str)
        else [SourcePart(part.source, part.split, part.max_rows, part.weight) for part in data.source]
    )


def most_rows(data: DataConfig | HeldOutRows) -> int | None:
    """The limit of the rows of all sources together; None if there is none, or one source alone."""
    return None if isinstance(data.source, str) else data.max_rows


@dataclass(frozen=True, slots=True)
class Loaded:
    """A data set within its limits, before it is split."""

    table: Table
    fitted: Fitted
    limits: Limits
    ends: list[int]  # table row after each part's last
    contents: list[str]  # SHA-256 of each part's rows
    report: Report


@dataclass(frozen=True, eq=False)
class Reader:
    """Loads data sets that share the settings of one `prepare`."""

    data: DataConfig
    tokenizer: PreTrainedTokenizerBase
    template: Template
    kind: Kind
    completion_only_loss: bool | None
    assistant_only_loss: bool
    folder: Path
    seed: int
    with_completions: bool = False
    behavior_version: int = 2

    @cached_property
    def date(self) -> str | None:
        """The date that the chat template writes; None if it asks for none."""
        return date_of(self.data, self.tokenizer) if self.behavior_version > 1 else self.data.date

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What determines the tokens of a row, for the key of the cache."""
        template = self.template
        settings = {
            "tokenizer": cache.tokenizer_fingerprint(self.tokenizer),
            "template": [template.name, template.turns, template.tags.model_dump()],
            "system_prompt": self.data.system_prompt,
            "strip_think": self.data.strip_think,
            "kind": self.kind,
            "completion_only_loss": self.completion_only_loss,
            "assistant_only_loss": self.assistant_only_loss,
        }
        settings |= {"with_completions": True} if self.with_completions else {}
        settings |= {"behavior_version": self.behavior_version} if self.behavior_version > 1 else {}
        return settings | ({} if self.date is None else {"date": self.date})

    def with_data(self, data: DataConfig) -> Reader:
        """A reader for a further set with its own settings, which omits the completions of prompts; its own template is
        set on a copy of the tokenizer."""
        if data == self.data:
            return replace(self, with_completions=False) if self.with_completions else self
        tokenizer = self.tokenizer if data.template == self.data.template else deepcopy(self.tokenizer)
        template = choose_template(data, tokenizer)
        return replace(self, data=data, tokenizer=tokenizer, template=template, with_completions=False)

    def load(
        self, name: str, parts: Sequence[SourcePart], limits_of: Callable[[Table], Limits], max_rows: int | None
    ) -> Loaded:
        """Tokenise each part or take it from the cache, and apply the limits to all of them together."""
        tables, readings, contents, notes = [], [], [], []
        left = max_rows
        for part in parts:
            rows = part.max_rows if left is None else min(left, part.max_rows or left)
            if left is not None and left == 0:
                break
            table, reading, content, note = self._part(part, rows)
            tables.append(table)
            readings.append(reading)
            contents.append(content)
            notes += [note] if note else []
            left = None if left is None else left - reading.read
        table = Table(tables, self.kind, [reading.read for reading in readings], self.behavior_version)
        limits = limits_of(table)
        notes += [limits.note] if limits.note else []
        if self.date is not None:
            notes.append(f"{name}: the chat template writes the date, {self.date} in this run (data.date)")
        cut = self.kind != "prompt"  # a document used as a prompt stays whole
        documents = np.repeat([cut and r.format == "text" for r in readings], [len(part) for part in tables])
        fitted = table.fit(limits, documents)
        report = _report(name, readings, fitted, limits, notes, self.kind == "prompt")
        if not len(fitted.view):
            raise DataError("no row can be used:\n  " + "\n  ".join(report.lines()))
        ends = [int(end) for end in np.cumsum([len(part) for part in tables])]
        return Loaded(table, fitted, limits, ends, contents, report)

    def _part(self, part: SourcePart, max_rows: int | None) -> tuple[pa.Table, Reading, str, str | None]:
        source, end = part.open(max_rows, self.seed, self.template.compose)
        format, columns = self.layout(part.source)
        facts = {"source": source.digest, "max_rows": max_rows, "format": format, "columns": columns}
        facts |= {"skip_rows": part.skip_rows} if part.skip_rows else {}
        key = cache.key_of({**self.settings, **facts})
        return cache.cached(self.folder, key, self.kind, lambda writer: self._read(part, source, end, writer))

    def layout(self, source: str) -> tuple[str, dict[str, str]]:
        """Format and columns as set, or else those of a known data set."""
        format, columns = self.data.format, self.data.columns
        known = layout_of(source)
        if known is None or format not in ("auto", known.format):
            return format, columns
        return known.format, {**known.columns, **columns}

    @contextmanager
    def tokeniser(self, layout: Layout) -> Iterator[Tokeniser]:
        """The tokeniser of rows of this layout, with the process of their chat template if they have turns."""
        with ExitStack() as stack:
            renderer = None
            if self._has_turns(layout):
                require_chat_template(self.tokenizer)
                renderer = stack.enter_context(rendering(self.tokenizer, self.behavior_version, date=self.date))
            yield Tokeniser(self.tokenizer, renderer, self.assistant_only_loss, self.behavior_version)

    def _has_turns(self, layout: Layout) -> bool:
        return self.template.turns and layout.name != "text"

    def _read(self, part: SourcePart, source: Source, end: int | None, writer: cache.Writer) -> Reading:
        """Read the rows of a source up to row number `end` and write their tokens."""
        records, layout = self._records(part, source, end)
        name = part.source
        read, shifted, malformed, seen, unread = 0, 0, [], _Seen(), Counter[str]()
        untrained, unwritten = 0, dict[str, int]()
        with self.tokeniser(layout) as tokeniser:
            for batch in _batches(progress(records, f"tokenising {name}")):
                read += len(batch)
                rows, records_of = [], []
                for record in batch:
                    unread.update(layout.unread(record.value or {}))
                    try:
                        rows.append(self.row(record, layout))
                        records_of.append(record)
                    except RowError as error:
                        malformed.append(malformed_of(record, error))
                    except DataError as error:
                        raise DataError(f"{record.file} line {record.line}: {error}") from error
                kept = []
                items = self._tokenise(tokeniser, rows, layout)
                unwritten = dict(tokeniser.writer.unwritten)
                for record, row, item in zip(records_of, rows, items, strict=True):
                    if isinstance(item, UntrainedError):
                        untrained += 1
                        continue
                    if isinstance(item, RowError):
                        malformed.append(malformed_of(record, item))
                        continue
                    kept.append(cache.row_of(record, item, self.kind) | self._beside(record, row))
                    shifted += item.shifted
                    seen.add(item)
                writer.write(kept)
        malformed.sort(key=lambda bad: bad.row)
        if len(malformed) > MALFORMED_SHARE * read:
            raise DataError(
                f"{name}: {len(malformed):,} of {read:,} rows are malformed, more than {MALFORMED_SHARE:.0%}. "
                f"The first:\n{list_malformed(malformed)}"
            )
        if self.kind == "prompt":
            unread.pop("answer", None)  # read by rewards in every format
        if self._has_turns(layout):
            unread.pop(KWARGS, None)
        return Reading(
            layout.name, read, tuple(malformed), seen.duplicates, shifted, dict(unread), untrained, unwritten
        )

    def rows(self, part: SourcePart, max_rows: int | None) -> Iterator[tuple[Record, Row | None]]:
        """The rows of a part as they are tokenised, before any template; None for malformed ones."""
        records, layout = self._records(part, *part.open(max_rows, self.seed, self.template.compose))
        for record in records:
            try:
                yield record, self.row(record, layout)
            except RowError:
                yield record, None

    def _records(self, part: SourcePart, source: Source, end: int | None) -> tuple[Iterator[Record], Layout]:
        """The rows of a source up to row number `end`, and their layout, inferred from the first ones."""
        records, name = itertools.islice(source.read(), part.skip_rows, end), part.source
        head = list(itertools.islice(records, SAMPLE))
        if not head and part.skip_rows:
            raise DataError(f"{name} has no row after the first {part.skip_rows:,}: lower data.skip_rows")
        return itertools.chain(head, records), self.layout_of_rows(head, name)

    def layout_of_rows(self, records: Sequence[Record], name: str) -> Layout:
        """The layout of rows like these. Raises DataError if none can be read, or their columns fit no format."""
        good = [record.value for record in records if record.value is not None]
        if not good:
            bad = [malformed_of(record, record.problem or "") for record in records]
            raise DataError(f"{name} has no readable row:\n{list_malformed(bad)}")
        return find_layout(*self.layout(name), good[:SAMPLE], self.kind, name)

    def _beside(self, record: Record, row: Row) -> dict[str, Any]:
        """What is stored with a row's tokens: a label; for a prompt, the facts for rewards."""
        if self.kind == "prompt":
            return {"facts": self.facts(record, row)}
        return {} if row.label is None else {"label": row.label}

    def facts(self, record: Record, row: Row) -> str:
        """The facts of a row for rewards (prompt, answer, columns), as JSON."""
        prompt = row.prompt if not self.template.turns or row.prompt is None else as_turns(row.prompt, "user")
        facts = {"prompt": prompt, "answer": row.answer, "columns": record.value}
        return json.dumps(facts, ensure_ascii=False, default=str)

    def row(self, record: Record, layout: Layout) -> Row:
        """A record in the common form, after system prompt and thinking settings. Raises RowError."""
        if record.value is None:
            raise RowError(record.problem)
        row = layout.read(record.value, self.template, record.is_csv, self.behavior_version)
        if self.kind == "prompt":
            for name, value in record.value.items():  # rewards get all of them
                valid(value, name)
            row = self._with_completion(row) if self.with_completions else as_prompt(row)
            if row.answer is None:  # in formats without an answer, a column of that name
                row = replace(row, answer=answer_beside(record.value))
        else:
            refuse_without_reply(row)
        if self.kind == "sft" and row.rejected is not None:
            row = Row(row.prompt, row.chosen, tools=row.tools)
        own_tags = self.template.has_tags and layout.name == "problem_answer" and self.behavior_version > 1
        if self.data.strip_think and not own_tags:  # whose solutions are stripped before they get the template's tags
            rejected = None if row.rejected is None else without_think(row.rejected)
            row = replace(row, chosen=without_think(row.chosen), rejected=rejected)
        if row.rejected is not None and row.rejected == row.chosen and row.rejected_prompt is None:
            raise RowError("chosen and rejected are the same")
        if not row.prompt and not row.chosen:
            raise RowError("prompt and completion are both empty" if row.prompt is not None else "the text is empty")
        if self.completion_only_loss is not None or self.kind != "sft":
            row = replace(row, train_history=False)  # the last reply alone, or everything
        if self.completion_only_loss and row.prompt is None and layout.name != "text":
            row = last_turn_as_completion(row)
        if self.data.system_prompt is not None and layout.name != "text":
            row = with_system(row, self.data.system_prompt)
        if self.kind != "sft":
            row = without_weights(row, METHODS[self.kind])
        if self._has_turns(layout) and self.behavior_version > 1:
            row = replace(row, variables=variables_of(record.value.get(KWARGS)))
        return row

    @staticmethod
    def _with_completion(row: Row) -> Row:
        """The prompt and the completion of a row. Raises RowError without a completion."""
        refuse_without_reply(row)
        row = last_turn_as_completion(row) if row.prompt is None else replace(row, rejected=None, rejected_prompt=None)
        if not row.chosen:
            raise RowError("has no completion, which method.on_policy_fraction below 1 needs")
        return row

    def _tokenise(
        self, tokeniser: Tokeniser, rows: list[Row], layout: Layout
    ) -> Sequence[Trained | Compared | RowError]:
        if self.kind == "pair":
            return tokeniser.pairs(rows)
        if self.kind == "prompt" and not self.with_completions:
            return tokeniser.without_completions(rows)
        if self.kind in ("prompt", "unpaired"):
            return tokeniser.completions(rows, completion_only_loss=True)
        if layout.name == "text":
            return tokeniser.documents(rows)
        whole = iter(tokeniser.conversations([row for row in rows if row.prompt is None]))
        asked = [row for row in rows if row.prompt is not None]
        replies = iter(tokeniser.completions(asked, self.completion_only_loss is not False))
        return [next(whole if row.prompt is None else replies) for row in rows]


def malformed_of(record: Record, reason: object) -> Malformed:
    return Malformed(record.file, record.line, str(reason), record.row)


class _Seen:
    """Counts examples with the same tokens as an earlier one."""

    def __init__(self) -> None:
        self.hashes: set[int] = set()
        self.duplicates = 0

    def add(self, item: Trained | Compared) -> None:
        tokens = item.tokens if isinstance(item, Trained) else [*item.prompt, -1, *item.chosen, -1, *item.rejected]
        value = hash(tuple(tokens))
        self.duplicates += value in self.hashes
        self.hashes.add(value)


def _batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    while batch := list(itertools.islice(records, BATCH)):
        yield batch


def _report(
    name: str, readings: Sequence[Reading], fitted: Fitted, limits: Limits, notes: Sequence[str], rewarded: bool
) -> Report:
    return Report(
        name=name,
        formats=tuple(reading.format for reading in readings),
        read=sum(reading.read for reading in readings),
        used=len(fitted.view),
        malformed=tuple(row for reading in readings for row in reading.malformed),
        duplicates=sum(reading.duplicates for reading in readings),
        shifted=sum(reading.shifted for reading in readings),
        overlong_dropped=len(fitted.dropped),
        overlong_truncated=fitted.truncated,
        overlong_split=fitted.split,
        tokens=fitted.tokens,
        prompt_tokens=fitted.prompt_tokens,
        max_length=limits.max_length,
        max_prompt_length=limits.max_prompt_length,
        notes=tuple(notes),
        untrained=sum(reading.untrained for reading in readings),
        unwritten=dict(sum((Counter(reading.unwritten) for reading in readings), Counter())),
        dropped=tuple(Overlong(*row) for row in fitted.dropped[:MOST_LISTED].tolist()),
        unread=dict(sum((Counter(reading.unread) for reading in readings), Counter())),
        rewarded=rewarded,
    )
