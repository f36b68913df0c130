"""Tokenised rows as columns of memory-mapped Arrow tables, and the length limits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from posttrain.base.errors import DataError
from posttrain.data.report import Lengths

Array = np.ndarray


def as_numpy(column: pa.Array | pa.ChunkedArray) -> Array:
    """A column of numbers or booleans as an array; null becomes NaN. pyarrow's own conversion imports pandas, which
    takes a quarter of a second."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_boolean(column.type):
        return as_numpy(column.cast(pa.int8())).astype(bool)
    return np.from_dlpack(column.fill_null(float("nan")) if column.null_count else column)


class Lists:
    """A column of lists of numbers, as numpy views of the mapped file."""

    def __init__(self, column: pa.ChunkedArray):
        self._column = column
        self.lengths: Array = as_numpy(pc.call_function("list_value_length", [column])).astype(np.int64)

    def __getitem__(self, index: int) -> Array:
        return as_numpy(self._column[index].values)


class Room(NamedTuple):
    """The number of tokens that prompts leave for a completion, and the setting that determines it."""

    tokens: int
    setting: str = "rollout.max_completion_length"


@dataclass(frozen=True, slots=True)
class Limits:
    """The length settings; without `max_prompt_length`, prompts have no limit. `note`: why it is below the setting."""

    max_length: int
    max_prompt_length: int | None
    overlong: str
    note: str = ""

    def shortened(self, max_prompt_length: int | None) -> "Limits":
        """The limits with prompts of at most `max_prompt_length` tokens."""
        known = [limit for limit in (max_prompt_length, self.max_prompt_length) if limit is not None]
        return replace(self, max_prompt_length=min(known, default=None))

    @property
    def longest_prompt(self) -> int:
        return self.max_prompt_length or np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Fitted:
    """Examples within the limits as columns of numbers, and counts of the other rows.

    `view` has one row per example. Sequences: table row, start, stop. Pairs: table row, start of the prompt, start of
    the rejected prompt, tokens of chosen, tokens of rejected. If truncated prompts keep their begin token or a turn's
    header, each prompt has three more columns: number of begin tokens, start and stop of the header. `lengths` are
    physical tokens; shared prompts are counted once.
    `dropped` has the rows above the limits that are not used: row number, tokens, prompt tokens.
    """

    view: Array
    lengths: Array
    dropped: Array
    truncated: int
    split: int
    tokens: Lengths
    prompt_tokens: Lengths


class Table:
    """The cached rows of one or more sources, numbered across all sources. `makes_room`: prompts that fill `max_length`
    are truncated so that their replies fit; False with behavior_version 1, and if prompts have no replies."""

    def __init__(self, tables: Sequence[pa.Table], reads: Sequence[int], makes_room: bool = True):
        self.makes_room = makes_room
        table = pa.concat_tables(tables)
        self.ends: Array = np.cumsum([len(part) for part in tables])  # by source: the first table row after it
        offsets = np.repeat(np.cumsum([0, *reads])[:-1], [len(part) for part in tables])
        self.row: Array = as_numpy(table.column("row")) + offsets
        self.lists: dict[str, Lists] = {}
        self.numbers: dict[str, Array] = {}  # a margin is NaN if the pair has none
        self.texts: dict[str, pa.ChunkedArray] = {}
        for name, column in zip(table.schema.names, table.columns, strict=True):
            if pa.types.is_list(column.type):
                self.lists[name] = Lists(column)
            elif pa.types.is_string(column.type):
                self.texts[name] = column
            elif name != "row":
                self.numbers[name] = as_numpy(column)

    def trained(self, row: int, stop: int, spans: str = "spans") -> Array:
        """Whether each of the first `stop` tokens of a sequence is trained on."""
        mask = np.zeros(stop, bool)
        for begin, end in self.lists[spans][row].reshape(-1, 2):
            mask[begin:end] = True
        return mask

    def cut(self, prompt: Array, reply: Array, limits: Limits, heads_name: str = "heads") -> tuple[Array, Array, Array]:
        """Truncate prompts of `prompt` tokens on the left. Returns the position from which each is read, the heads that
        it keeps, and the number of tokens of `max_length` left for the reply.

        A prompt keeps up to `max_prompt_length` tokens. If they leave no room for the reply, it keeps as many as do,
        but at least half of `max_length`. The kept tokens include the begin token and the header of the turn that is
        cut (its head): the columns are the number of begin tokens, start and stop of the header.
        """
        most = np.full_like(prompt, limits.longest_prompt)
        if self.makes_room:
            full = np.minimum(prompt, most) >= limits.max_length
            most = np.where(full, np.maximum(limits.max_length - reply, limits.max_length // 2), most)
        start, heads = np.maximum(prompt - most, 0), np.zeros((len(prompt), 3), np.int64)
        for row in map(int, np.flatnonzero(start)):
            start[row], *heads[row] = _cut_turn(self.lists[heads_name][row].tolist(), int(prompt[row]), int(most[row]))
        return start, heads, limits.max_length - (prompt - start + size_of(heads))

    def over(self, length: Array, prompt: Array, limits: Limits, among: Array | bool = True) -> Array:
        """Which of the rows `among` exceed a limit. Raises DataError if any does and `overlong` is error."""
        over = among & ((length > limits.max_length) | (prompt > limits.longest_prompt))
        if limits.overlong != "error" or not over.any():
            return over
        rows = [
            f"row {self.row[i]} has {length[i]:,} tokens, {prompt[i]:,} of them in the prompt"
            for i in np.flatnonzero(over)[:10]
        ]
        limit = f"max_length {limits.max_length:,}"
        if limits.max_prompt_length is not None:
            limit += f", max_prompt_length {limits.max_prompt_length:,}{limits.note and ': '}{limits.note}"
        raise DataError(
            f"{int(over.sum()):,} rows are over the length limits ({limit}), and data.overlong is error:\n  "
            + "\n  ".join(rows)
        )


def _cut_turn(heads: list[int], prompt: int, most: int) -> tuple[int, int, int, int]:
    """For `Table.cut`: the start of the kept tokens, the number of begin tokens, start and stop of the header."""
    begin, whole = (heads or [0])[0], None
    for header, body in reversed([*zip(heads[1::2], heads[2::2], strict=True)]):
        if begin + prompt - header <= most:
            whole = header  # the turn fits with its header
            continue
        start = prompt - (most - begin - (body - header))
        if start < (prompt if whole is None else whole):
            return start, begin, header, body
        break
    if whole is not None:
        return whole, begin, 0, 0
    if begin < most and len(heads) == 1:
        return prompt - (most - begin), begin, 0, 0
    return prompt - most, 0, 0, 0  # there is no room for a header


def size_of(heads: Array) -> Array:
    """The number of begin and header tokens; 0 if there are no such columns."""
    return heads[:, 0] + heads[:, 2] - heads[:, 1] if heads.shape[1] else np.zeros(len(heads), np.int64)


def read(values: Array, start: int, stop: int, head: Sequence[int] = ()) -> Array:
    """The values from `start` to `stop`, preceded by those of the begin token and the header."""
    if not any(head):
        return values[start:stop]
    begin, header, body = head
    return np.concatenate([values[:begin], values[header:body], values[start:stop]])


def chunks(view: Array, split: Array, size: int) -> Array:
    """Split documents into chunks that overlap by one token: every token except a document's first is a target once."""
    out = []
    for (index, start, stop, *heads), cut in zip(view, split, strict=True):
        begins = range(start, stop - 1, size - 1) if cut else (start,)
        out += [(index, begin, min(begin + size, stop) if cut else stop, *heads) for begin in begins]
    return np.asarray(out, np.int64).reshape(-1, view.shape[1])
