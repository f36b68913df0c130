"""The rows of a run's sets in their common form, before templates and tokens, for reports about the data itself."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

from transformers import PreTrainedTokenizerBase

from posttrain.caches import default_folder
from posttrain.config.schema.run import RunConfig
from posttrain.data.prepare import further_parts
from posttrain.data.reading import Reader, SourcePart, most_rows, parts_of
from posttrain.data.rows import Row
from posttrain.data.templates import choose_template

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
