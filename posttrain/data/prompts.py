"""Prompts to sample completions for, from rows of any format, tokenised as in training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.caches import default_folder
from posttrain.config.schema.data import DataConfig
from posttrain.data.layouts import find_layout
from posttrain.data.readers import Record
from posttrain.data.reading import SAMPLE, Reader
from posttrain.data.render import rendering
from posttrain.data.report import Malformed, list_malformed
from posttrain.data.rows import RowError
from posttrain.data.templates import choose_template, date_of, require_chat_template
from posttrain.data.tokenise import Tokeniser
from posttrain.errors import DataError


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row's prompt. `text` is the rendered prompt, `facts` the columns that rewards get."""

    row: int
    text: str
    tokens: list[int]
    facts: dict[str, Any]


def prompts_of(
    records: Sequence[Record], data: DataConfig, tokenizer: PreTrainedTokenizerBase, name: str
) -> list[Prompt | Malformed]:
    """Every record's prompt, or the reason why it has none, in order. The template is set on the tokenizer.

    `name` is the source in messages; `data.source` is not read, but format, columns, template
    and system prompt are. Raises DataError when no record can be read or the columns fit no format.
    """
    template = choose_template(data, tokenizer)
    good = [record.value for record in records if record.value is not None][:SAMPLE]
    if not good:
        bad = [Malformed(record.file, record.line, record.problem or "", record.row) for record in records]
        raise DataError(f"{name} has no readable row:\n{list_malformed(bad)}")
    reader = Reader(data, tokenizer, template, "prompt", None, False, default_folder(), 0)
    layout = find_layout(*reader.layout(name), good, "prompt", name)
    found: dict[int, Prompt | Malformed] = {}

    def refuse(record: Record, error: RowError) -> None:
        found[record.row] = Malformed(record.file, record.line, str(error), record.row)

    rows, kept = [], []
    for record in records:
        try:
            rows.append(reader.row(record, layout))
            kept.append(record)
        except RowError as error:
            refuse(record, error)
    with ExitStack() as stack:
        renderer = None
        if template.turns and layout.name != "text":
            require_chat_template(tokenizer)
            renderer = stack.enter_context(rendering(tokenizer, date=date_of(data, tokenizer)))
        asked = Tokeniser(tokenizer, renderer, False).prompts(rows)
        for record, row, item in zip(kept, rows, asked, strict=True):
            if isinstance(item, RowError):
                refuse(record, item)
            elif not len(item[1]):
                refuse(record, RowError("the prompt has no tokens"))
            else:
                found[record.row] = Prompt(record.row, item[0], list(item[1]), json.loads(reader.facts(record, row)))
    return [found[record.row] for record in records]
