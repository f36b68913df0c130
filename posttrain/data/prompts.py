"""Prompts to sample completions for, from rows of any format, tokenised as in training."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.config.schema.data import DataConfig
from posttrain.data.kinds import Prompts, facts_of
from posttrain.data.readers import Record
from posttrain.data.reading import Reader, malformed_of
from posttrain.data.report import Malformed
from posttrain.data.rows import RowError


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row's prompt. `text` is the rendered prompt, `facts` the columns that rewards get."""

    row: int
    text: str
    tokens: list[int]
    facts: dict[str, Any]


def prompts_of(
    records: Sequence[Record],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    behavior_version: int = 2,
) -> list[Prompt | Malformed]:
    """Every record's prompt, or the reason why it has none, in order. The template is set on the tokenizer.

    `name` is the source in messages; `data.source` is not read, but format, columns, template
    and system prompt are. `behavior_version` is that of the run. Raises DataError when no record can be read or the
    columns fit no format.
    """
    reader = Reader(data, tokenizer, Prompts(), behavior_version=behavior_version)
    layout = reader.layout_of_rows(records, name)
    found: dict[int, Prompt | Malformed] = {}
    rows, kept = [], []
    for record in records:
        try:
            rows.append(reader.row(record, layout))
            kept.append(record)
        except RowError as error:
            found[record.row] = malformed_of(record, error)
    with reader.tokeniser(layout) as tokeniser:
        for record, row, item in zip(kept, rows, tokeniser.prompts(rows), strict=True):
            if isinstance(item, RowError):
                found[record.row] = malformed_of(record, item)
            elif not len(item[1]):
                found[record.row] = malformed_of(record, "the prompt has no tokens")
            else:
                facts = json.loads(facts_of(record, row, reader.template.turns))
                found[record.row] = Prompt(record.row, item[0], list(item[1]), facts)
    return [found[record.row] for record in records]
