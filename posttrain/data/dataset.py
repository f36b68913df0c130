"""Tokenised rows as examples: memory-mapped Arrow tables, with the length limits as a view on them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from posttrain.base.errors import DataError
from posttrain.batch import Example, Node
from posttrain.data.report import Lengths

Array = np.ndarray


def as_numpy(column: pa.Array | pa.ChunkedArray) -> Array:
    """A column of numbers or booleans; null is NaN. pyarrow's own way imports pandas, a quarter of a second."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_boolean(column.type):
        return as_numpy(column.cast(pa.int8())).astype(bool)
    return np.from_dlpack(column.fill_null(float("nan")) if column.null_count else column)


class Lists:
    """A column of lists of numbers as numpy views on the mapped file."""

    def __init__(self, column: pa.ChunkedArray):
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        self.offsets: list[Array] = [as_numpy(chunk.offsets) for chunk in chunks]
        self.values: list[Array] = [as_numpy(chunk.values) for chunk in chunks]
        self.starts = np.cumsum([0, *(len(chunk) for chunk in chunks)])
        self.lengths: Array = np.concatenate([np.zeros(0, np.int64), *(np.diff(offsets) for offsets in self.offsets)])

    def __getitem__(self, index: int) -> Array:
        chunk = int(np.searchsorted(self.starts, index, side="right")) - 1
        row = index - self.starts[chunk]
        start, stop = self.offsets[chunk][row : row + 2]
        return self.values[chunk][start:stop]


@dataclass(frozen=True, slots=True)
class Limits:
    """The length settings, with `max_prompt_length` as a number. `note` is the reason if it is below the setting."""

    max_length: int
    max_prompt_length: int | None
    overlong: str
    note: str = field(default="", repr=False)  # the fingerprint of the data includes the effect of limits

    @property
    def longest_prompt(self) -> int:
        return self.max_prompt_length or np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Fitted:
    """Examples within the limits as columns of numbers, and counts of the others.

    `view` has a row per example. Sequences: table row, start, stop. Pairs: table row, start of the prompt, start of the
    rejected prompt, tokens of chosen, tokens of rejected. Where prompts are cut and keep their begin token or a turn's
    header, each prompt has three more columns: begin tokens, start and stop of the header. `lengths` are physical
    tokens, shared prompts counted once.
    `dropped` has the rows over the limits that are not used: row number, tokens, prompt tokens.
    """

    view: Array
    lengths: Array
    dropped: Array
    truncated: int
    split: int
    tokens: Lengths
    prompt_tokens: Lengths


class Table:
    """The cached rows of one or more sources, numbered through all sources."""

    def __init__(self, tables: Sequence[pa.Table], kind: str, reads: Sequence[int], behavior_version: int = 2):
        self.kind = kind
        self.makes_room = kind != "prompt" and behavior_version > 1  # by truncating prompts over max_length
        table = pa.concat_tables(tables)
        offsets = np.repeat(np.cumsum([0, *reads])[:-1], [len(part) for part in tables])
        self.row: Array = as_numpy(table.column("row")) + offsets
        self.lists = {one.name: Lists(table.column(one.name)) for one in table.schema if pa.types.is_list(one.type)}
        if kind == "pair":
            self.two: Array = as_numpy(table.column("two_prompts"))
            self.margin: Array = as_numpy(table.column("margin"))  # NaN where there is none
            self.tie: Array = as_numpy(table.column("tie"))
        else:
            self.prompt: Array = as_numpy(table.column("prompt"))
        if kind == "prompt":
            self.facts = table.column("facts")
        if kind == "unpaired":
            self.label: Array = as_numpy(table.column("label"))

    def fit(self, limits: Limits, documents: Array, among: Array | None = None) -> Fitted:
        """The examples within the limits, by dropping or truncating; documents are split into chunks.

        `documents` marks the rows of plain text; `among` selects rows (not for pairs). Raises DataError for rows over a
        limit if `overlong` is error.
        """
        if self.kind == "pair":
            return self._fit_pairs(limits)
        return self._fit_single(limits, documents, np.ones(len(self.row), bool) if among is None else among)

    def trained(self, row: int, stop: int) -> Array:
        """Which of the first `stop` tokens of a sequence are trained."""
        found = np.zeros(stop, bool)
        for begin, end in self.lists["spans"][row].reshape(-1, 2):
            found[begin:end] = True
        return found

    def prompt_lengths(self) -> Array:
        """Tokens of every prompt; a pair with two prompts has two."""
        if self.kind == "pair":
            return np.concatenate([self.lists["prompt"].lengths, self.lists["rejected_prompt"].lengths[self.two]])
        return self.prompt

    def _fit_single(self, limits: Limits, documents: Array, among: Array) -> Fitted:
        length, prompt = self.lists["tokens"].lengths.astype(np.int64), self.prompt.astype(np.int64)
        over = among & ((length > limits.max_length) | (prompt > limits.longest_prompt))
        self._refuse(over, length, prompt, limits)
        start, stop = np.zeros_like(length), length
        heads = np.zeros((len(length), 3), np.int64)
        split = over & documents
        keep = among & (~over | split)
        if limits.overlong == "truncate":
            start, heads = self._cut("heads", prompt, self._most(prompt, length - prompt, limits))
            stop = np.where(split, length, np.minimum(length, start + limits.max_length - _size(heads)))
            for row in map(int, np.flatnonzero(over & ~split)):
                left = _read(self.trained(row, stop[row]), start[row], stop[row], heads[row])
                keep[row] = self.kind == "prompt" or left[1:].any()  # nothing predicts the first token
        view = np.column_stack([np.arange(len(length)), start, stop, *([heads] if heads.any() else [])])[keep]
        if split.any():
            view = _pieces(view, split[view[:, 0]], limits.max_length)
        truncated = int((over & keep & ~split).sum())
        return Fitted(
            view,
            view[:, 2] - view[:, 1] + _size(view[:, 3:]),
            np.stack([self.row, length, prompt], axis=1)[among & ~keep],
            truncated,
            int(split.sum()),
            Lengths.of(length),
            Lengths.of(prompt[prompt > 0]),
        )

    def _fit_pairs(self, limits: Limits) -> Fitted:
        prompt, chosen, rejected = (
            self.lists[name].lengths.astype(np.int64) for name in ("prompt", "chosen", "rejected")
        )
        other = np.where(self.two, self.lists["rejected_prompt"].lengths, prompt)
        longest = np.maximum(prompt + chosen, other + rejected)
        longest_prompt = np.maximum(prompt, other)
        over = (longest > limits.max_length) | (longest_prompt > limits.longest_prompt)
        self._refuse(over, longest, longest_prompt, limits)
        start, other_start, keep = np.zeros_like(prompt), np.zeros_like(prompt), ~over
        heads = other_heads = np.zeros((len(prompt), 3), np.int64)
        new_chosen, new_rejected = chosen, rejected
        if limits.overlong == "truncate":
            reply = np.maximum(chosen, rejected)  # both leave the same of a prompt that they share
            start, heads = self._cut("heads", prompt, self._most(prompt, np.where(self.two, chosen, reply), limits))
            other_start, other_heads = start, heads
            if self.two.any():
                most_other = self._most(other, np.where(self.two, rejected, reply), limits)
                found = self._cut("rejected_heads", other, most_other)
                other_start = np.where(self.two, found[0], start)
                other_heads = np.where(self.two[:, None], found[1], heads)
            room = limits.max_length - (prompt - start + _size(heads))
            other_room = limits.max_length - (other - other_start + _size(other_heads))
            new_chosen, new_rejected = np.minimum(chosen, room), np.minimum(rejected, other_room)
            keep = (new_chosen > 0) & (new_rejected > 0)
            for row in map(int, np.flatnonzero(over & keep & ~self.two & (new_chosen == new_rejected))):
                chosen_row, rejected_row = (self.lists[name][row][: new_chosen[row]] for name in ("chosen", "rejected"))
                keep[row] = not np.array_equal(chosen_row, rejected_row)  # their difference was cut off
        columns = [np.arange(len(prompt)), start, other_start, new_chosen, new_rejected]
        kept_heads = [heads, other_heads] if heads.any() or other_heads.any() else []
        view = np.column_stack([*columns, *kept_heads])[keep]
        lengths = prompt - start + _size(heads) + new_chosen + new_rejected
        lengths += np.where(self.two, other - other_start + _size(other_heads), 0)
        return Fitted(
            view,
            lengths[keep],
            np.stack([self.row, longest, longest_prompt], axis=1)[~keep],
            int((over & keep).sum()),
            0,
            Lengths.of(np.concatenate([prompt + chosen, other + rejected])),
            Lengths.of(self.prompt_lengths()),
        )

    def _most(self, prompt: Array, reply: Array, limits: Limits) -> Array:
        """Tokens that truncation leaves of each prompt: up to `max_prompt_length`; where that leaves no room in
        `max_length`, as many as leave it to the reply, but at least half of it."""
        most = np.full_like(prompt, limits.longest_prompt)
        full = np.minimum(prompt, most) >= limits.max_length
        left = np.maximum(limits.max_length - reply, limits.max_length // 2)
        return np.where(full, left, most) if self.makes_room else most

    def _cut(self, name: str, prompt: Array, most: Array) -> tuple[Array, Array]:
        """Where each prompt of more than `most` tokens is read from, so that with its begin token and the header of the
        turn that is cut it has at most as many; and these (begin tokens, start and stop of the header)."""
        start, heads = np.maximum(prompt - most, 0), np.zeros((len(prompt), 3), np.int64)
        for row in map(int, np.flatnonzero(start)):
            start[row], *heads[row] = _cut_turn(self.lists[name][row].tolist(), int(prompt[row]), int(most[row]))
        return start, heads

    def _refuse(self, over: Array, length: Array, prompt: Array, limits: Limits) -> None:
        if limits.overlong != "error" or not over.any():
            return
        rows = [
            f"row {self.row[i]} has {length[i]:,} tokens, {prompt[i]:,} of them prompt"
            for i in np.flatnonzero(over)[:10]
        ]
        limit = f"max_length {limits.max_length:,}"
        if limits.max_prompt_length is not None:
            limit += f", max_prompt_length {limits.max_prompt_length:,}{limits.note and ': '}{limits.note}"
        raise DataError(
            f"{int(over.sum()):,} rows are over the length limits ({limit}) and data.overlong is error:\n  "
            + "\n  ".join(rows)
        )


def _cut_turn(heads: list[int], prompt: int, most: int) -> tuple[int, int, int, int]:
    """For `Table._cut`: the start, begin tokens, start and stop of the header."""
    begin, whole = (heads or [0])[0], None
    for header, said in reversed([*zip(heads[1::2], heads[2::2], strict=True)]):
        if begin + prompt - header <= most:
            whole = header  # the turn fits with its header
            continue
        start = prompt - (most - begin - (said - header))
        if start < (prompt if whole is None else whole):
            return start, begin, header, said
        break
    if whole is not None:
        return whole, begin, 0, 0
    if begin < most and len(heads) == 1:
        return prompt - (most - begin), begin, 0, 0
    return prompt - most, 0, 0, 0  # there is no room for a header


def _size(heads: Array) -> Array:
    """Tokens of begin tokens and headers; 0 without such columns."""
    return heads[:, 0] + heads[:, 2] - heads[:, 1] if heads.shape[1] else np.zeros(len(heads), np.int64)


def _read(values: Array, start: int, stop: int, head: Sequence[int] = ()) -> Array:
    """The values from `start` to `stop`, after those of the begin token and of the header."""
    if not any(head):
        return values[start:stop]
    begin, header, said = head
    return np.concatenate([values[:begin], values[header:said], values[start:stop]])


def _pieces(view: Array, split: Array, size: int) -> Array:
    """Split documents into chunks that overlap by one token: every token but a document's first is a target once."""
    out = []
    for (index, start, stop, *heads), cut in zip(view, split, strict=True):
        begins = range(start, stop - 1, size - 1) if cut else (start,)
        out += [(index, begin, min(begin + size, stop) if cut else stop, *heads) for begin in begins]
    return np.asarray(out, np.int64).reshape(-1, view.shape[1])


class Dataset:
    """A sequence of `posttrain.batch.Example`. `lengths` are physical tokens per example.

    `view` has the position of each example in the table, in the columns of `Fitted`.
    """

    def __init__(self, table: Table, fitted: Fitted, indices: Array):
        self._table = table
        self.view = fitted.view[indices]
        self.lengths: Array = fitted.lengths[indices]

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, index: int) -> Example:
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        read = {"pair": self._pair, "unpaired": self._labelled, "prompt": self._prompt, "sft": self._one}
        return read[self._table.kind](index)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence; a pair has two."""
        if self._table.kind != "pair":
            return int(self.lengths.max())
        row, start, other_start, chosen, rejected = self.view.T[:5]
        head, other_head = _size(self.view[:, 5:8]), _size(self.view[:, 8:])
        prompt = self._table.lists["prompt"].lengths[row]
        other = np.where(self._table.two[row], self._table.lists["rejected_prompt"].lengths[row], prompt)
        return int(np.maximum(prompt - start + head + chosen, other - other_start + other_head + rejected).max())

    @property
    def rows(self) -> Array:
        """The row number of each example, counted through all sources."""
        return self._table.row[self.view[:, 0]]

    @property
    def labels(self) -> Array:
        """For labelled completions: which are desirable."""
        return self._table.label[self.view[:, 0]]

    @property
    def ties(self) -> Array:
        """Which pairs are ties."""
        return self._table.tie[self.view[:, 0]]

    def _labelled(self, index: int) -> Example:
        """A tree of the prompt and one completion, so that a recipe can distinguish the two."""
        table = self._table
        at, start, stop, *head = (int(value) for value in self.view[index])
        tokens, cut = table.lists["tokens"][at], int(table.prompt[at])
        tree = Node(_read(tokens, start, cut, head), False, (Node(tokens[cut:stop], True),))
        return Example((tree,), int(table.row[at]), label=bool(table.label[at]))

    def _prompt(self, index: int) -> Example:
        table = self._table
        at, start, stop, *head = (int(value) for value in self.view[index])
        facts, tokens, cut = json.loads(table.facts[at].as_py()), table.lists["tokens"][at], int(table.prompt[at])
        given = (Node(tokens[cut:stop], True),) if cut < stop else ()  # where the completion is read too
        asked = _read(tokens, start, min(cut, stop), head)
        return Example((Node(asked, False, given),), int(table.row[at]), facts=facts)

    def _one(self, index: int) -> Example:
        table = self._table
        at, start, stop, *head = (int(value) for value in self.view[index])
        given, weights = table.lists["weights"][at], np.ones(stop, np.float32)
        for (begin, end), weight in zip(table.lists["spans"][at].reshape(-1, 2), given, strict=False):
            weights[begin:end] = weight  # none are given where all are 1
        whole = (table.lists["tokens"][at], table.trained(at, stop), weights)
        tokens, trained, weights = (_read(values, start, stop, head) for values in whole)
        return Example((Node(tokens, trained, weights=weights if len(given) else None),), int(table.row[at]))

    def _pair(self, index: int) -> Example:
        lists = self._table.lists
        at, start, other_start, chosen, rejected, *heads = (int(value) for value in self.view[index])
        prompt = lists["prompt"][at]
        prompt = _read(prompt, start, len(prompt), heads[:3])
        leaves = (Node(lists["chosen"][at][:chosen], True), Node(lists["rejected"][at][:rejected], True))
        trees: tuple[Node, ...] = (Node(prompt, False, leaves),)
        if self._table.two[at]:
            other = lists["rejected_prompt"][at]
            other = _read(other, other_start, len(other), heads[3:])
            trees = (Node(prompt, False, leaves[:1]), Node(other, False, leaves[1:]))
        margin = float(self._table.margin[at])
        margin = None if np.isnan(margin) else margin
        return Example(trees, int(self._table.row[at]), margin, tie=bool(self._table.tie[at]))
