"""The kinds of examples that methods train on: sequences, preference pairs, labelled completions and prompts."""

import json
import math
from collections.abc import Mapping, Sequence, Set
from copy import copy
from dataclasses import replace
from typing import Any, Self

import numpy as np
import pyarrow as pa

from posttrain.base.errors import DataError
from posttrain.base.words import filled
from posttrain.batch import Example, Node
from posttrain.config.schema.base import KindName, MethodSettings
from posttrain.config.schema.data import DataConfig
from posttrain.data.kind import INTS, SEQUENCE, Item, Kind, where
from posttrain.data.readers import Record
from posttrain.data.report import Lengths
from posttrain.data.rows import (
    Fields,
    Row,
    RowError,
    Turns,
    as_prompt,
    as_turns,
    last_turn_as_completion,
    messages_of,
    number_or_text,
    refuse_without_reply,
    valid,
)
from posttrain.data.table import Array, Fitted, Limits, Room, Table, read, size_of
from posttrain.data.tokenise import Compared, Tokeniser, Trained

PAIR = [
    ("row", pa.int64()),
    *((name, INTS) for name in ("prompt", "chosen", "rejected", "rejected_prompt")),
    *(("two_prompts", pa.bool_()), ("margin", pa.float64()), ("tie", pa.bool_())),
    *((name, INTS) for name in ("heads", "rejected_heads", "chosen_spans", "rejected_spans")),
]


class Sequences(Kind):
    """Conversations, prompts with completions, and documents, for SFT."""

    name, trainer = "sft", "SFT"
    schema = pa.schema([*SEQUENCE, ("weights", pa.list_(pa.float32()))])

    def refuse_columns(self, columns: Set[str], sample: Sequence[Mapping[str, Any]], where: str) -> None:
        if "label" in columns and any(isinstance(value.get("label"), bool) for value in sample):
            raise DataError(
                f"{where} has a boolean column `label`, like KTO's data: SFT would also imitate undesirable rows. "
                "Set data.format to train on all rows"
            )

    def shape(self, row: Row, fields: Fields) -> Row:
        refuse_without_reply(row)
        if row.rejected is not None:
            row = Row(row.prompt, row.chosen, tools=row.tools)
        return row if self.completion_only_loss is None else replace(row, train_history=False)

    def target(self, row: Row, is_document: bool) -> Row:
        alone = self.completion_only_loss and row.prompt is None and not is_document
        return last_turn_as_completion(row) if alone else row

    def tokenise(self, tokeniser: Tokeniser, rows: Sequence[Row], is_document: bool) -> Sequence[Item | RowError]:
        if is_document:
            return tokeniser.documents(rows)
        whole = iter(tokeniser.conversations([row for row in rows if row.prompt is None]))
        prompted = [row for row in rows if row.prompt is not None]
        replies = iter(tokeniser.completions(prompted, self.completion_only_loss is not False))
        return [next(whole if row.prompt is None else replies) for row in rows]

    def example(self, table: Table, row: int, columns: Sequence[int]) -> Example:
        start, stop, *head = columns
        stored, weights = table.lists["weights"][row], np.ones(stop, np.float32)
        for (begin, end), weight in zip(table.lists["spans"][row].reshape(-1, 2), stored, strict=False):
            weights[begin:end] = weight  # no weights are stored if all are 1
        whole = (table.lists["tokens"][row], table.trained(row, stop), weights)
        tokens, trained, weights = (read(values, start, stop, head) for values in whole)
        return Example((Node(tokens, trained, weights=weights if len(stored) else None),), int(table.row[row]))


class Labelled(Kind):
    """Completions labelled as desirable or undesirable, for KTO."""

    name, trainer, format = "unpaired", "KTO", "kto"
    schema = pa.schema([*SEQUENCE, ("label", pa.bool_())])

    def refuse_columns(self, columns: Set[str], sample: Sequence[Mapping[str, Any]], where: str) -> None:
        if {"chosen", "rejected"} <= columns and not {"label", "kto_tag"} & columns:
            names = ", ".join({name: None for value in sample for name in value})
            raise DataError(
                f"{where} has preference pairs (its columns: {names}), but KTO needs single completions with a "
                "label: write each pair as two rows, {prompt, completion, label: true} and {…, label: false}, "
                "or train on the pairs with method.type: dpo (its loss kto_pair is KTO for pairs)"
            )

    def refuse_training(self, table: Table, view: Array, data: DataConfig) -> None:
        labels = table.numbers["label"][view[:, 0]]
        if labels.any() and not labels.all():
            return
        label = "true" if labels.any() else "false"
        most = data.max_rows
        few = f" (data.max_rows is {most:,}: raise it if the other label occurs later)" if most else ""
        raise DataError(
            f"all {len(labels):,} training examples are labelled {label}{few}: KTO compares desirable and undesirable "
            "completions, and needs both. Add rows with the other label, or train only on desirable rows with "
            "method.type: sft"
        )

    def example(self, table: Table, row: int, columns: Sequence[int]) -> Example:
        """Return a tree of the prompt and one completion, so that a recipe can tell the two apart."""
        label = bool(table.numbers["label"][row])
        return Example((self._tree(table, row, columns),), int(table.row[row]), label=label)


class Prompts(Kind):
    """Prompts for which completions are sampled, with the facts for rewards."""

    name, trainer, unit, samples = "prompt", "a method that trains on prompts", "prompt", True
    schema = pa.schema([*SEQUENCE, ("facts", pa.string())])

    @classmethod
    def of(cls, method: MethodSettings) -> Self:
        return cls(with_completions=method.reads_completions, logprobs=getattr(method, "teacher_logprobs", None))

    def shape(self, row: Row, fields: Fields) -> Row:
        for name, value in fields.items():  # rewards receive all fields
            valid(value, name)
        if self.context is not None:
            column, template = self.context
            context, row = context_of(row, fields, column), as_prompt(row)
            row = replace(row, prompt=with_context(row.prompt or "", context, template))
        elif not self.with_completions:
            row = as_prompt(row)
        else:
            refuse_without_reply(row)
            whole = row.prompt is None
            row = last_turn_as_completion(row) if whole else replace(row, rejected=None, rejected_prompt=None)
            if not row.chosen:
                raise RowError("has no completion, whose tokens a teacher scores (method.on_policy_fraction)")
        row = replace(row, train_history=False)
        answer = fields.get("answer")
        if row.answer is None and isinstance(answer, str | int | float):  # formats without an answer
            row = replace(row, answer=number_or_text(answer, "answer") or None)
        return row

    def tokenise(self, tokeniser: Tokeniser, rows: Sequence[Row], is_document: bool) -> Sequence[Item | RowError]:
        if self.with_completions:
            return super().tokenise(tokeniser, rows, is_document)
        return tokeniser.without_completions(rows)

    def stored(self, record: Record, row: Row, item: Trained, turns: bool) -> dict[str, Any]:
        if self.logprobs is not None:
            problem = logprobs_problem((record.value or {}).get(self.logprobs), list(item.tokens[item.prompt :]))
            if problem:
                raise DataError(f"{where(record)}: {self.logprobs} (method.teacher_logprobs) {problem}")
        return super().stored(record, row, item, turns) | {"facts": facts_of(record, row, turns)}

    def limits(self, data: DataConfig, room: Room, positions: int | None) -> Limits:
        if positions is None or positions + 1 >= data.max_length:
            return Limits(data.max_length, data.max_length - room.tokens, data.overlong)
        if positions < room.tokens:
            raise DataError(
                f"the model has {positions:,} positions, but {room.setting} is {room.tokens:,}, which leaves no room "
                "for a prompt: lower this setting"
            )
        most = positions + 1 - room.tokens  # a completion's last token needs no position: nothing is predicted from it
        note = (
            f"the model has {positions:,} positions: prompts have at most {most:,} tokens, so that {room.setting} fits "
            "after them"
        )
        return Limits(data.max_length, most, data.overlong, note)

    def example(self, table: Table, row: int, columns: Sequence[int]) -> Example:
        facts = json.loads(table.texts["facts"][row].as_py())
        return Example((self._tree(table, row, columns),), int(table.row[row]), facts=facts)


class Pairs(Kind):
    """Two completions, chosen and rejected, of one shared prompt or of two prompts."""

    name, trainer, unit, compares = "pair", "a method that trains on pairs", "pair", True
    schema = pa.schema(PAIR)

    def tokenise(self, tokeniser: Tokeniser, rows: Sequence[Row], is_document: bool) -> Sequence[Item | RowError]:
        return tokeniser.pairs(rows)

    def stored(self, record: Record, row: Row, item: Compared, turns: bool) -> dict[str, Any]:
        other = item.prompt if item.rejected_prompt is None else item.rejected_prompt
        for name, prompt, reply in (("chosen", item.prompt, item.chosen), ("rejected", other, item.rejected)):
            if not len(reply) or len(prompt) + len(reply) < 2:
                raise DataError(f"{where(record)} has nothing to train on: {name} has {len(reply)} tokens")
        lists = {name: np.asarray(getattr(item, name) or (), np.int32) for name, type in PAIR if type == INTS}
        facts = {"row": record.row, "two_prompts": item.rejected_prompt is not None}
        return lists | facts | {"margin": row.margin, "tie": row.tie}

    def prompt_lengths(self, table: Table) -> Array:
        second = table.lists["rejected_prompt"].lengths[table.numbers["two_prompts"]]
        return np.concatenate([table.lists["prompt"].lengths, second])

    def fit(self, table: Table, limits: Limits, documents: Array, among: Array | bool = True) -> Fitted:
        prompt, chosen, rejected = (table.lists[name].lengths for name in ("prompt", "chosen", "rejected"))
        two, other = table.numbers["two_prompts"], _rejected_prompts(table)
        longest, longest_prompt = np.maximum(prompt + chosen, other + rejected), np.maximum(prompt, other)
        over = table.over(longest, longest_prompt, limits)
        start, other_start, keep = np.zeros_like(prompt), np.zeros_like(prompt), ~over
        heads = other_heads = np.zeros((len(prompt), 3), np.int64)
        new_chosen, new_rejected = chosen, rejected
        if limits.overlong == "truncate":
            reply = np.maximum(chosen, rejected)  # a shared prompt is cut once, for the longer reply
            start, heads, room = table.cut(prompt, np.where(two, chosen, reply), limits)
            other_start, other_heads, other_room = start, heads, room
            if two.any():
                apart = table.cut(other, np.where(two, rejected, reply), limits, "rejected_heads")
                other_start, other_room = np.where(two, apart[0], start), np.where(two, apart[2], room)
                other_heads = np.where(two[:, None], apart[1], heads)
            new_chosen, new_rejected = np.minimum(chosen, room), np.minimum(rejected, other_room)
            keep = (new_chosen > 0) & (new_rejected > 0)
            for row in map(int, np.flatnonzero(over & keep)) if self.assistant_only_loss else ():
                left = (("chosen", new_chosen[row]), ("rejected", new_rejected[row]))
                keep[row] = all(np.any(self._trained(table, row, *side)) for side in left)
            for row in map(int, np.flatnonzero(over & keep & ~two & (new_chosen == new_rejected))):
                left, right = (table.lists[name][row][: new_chosen[row]] for name in ("chosen", "rejected"))
                keep[row] = not np.array_equal(left, right)  # the difference between them was cut off
        columns = [np.arange(len(prompt)), start, other_start, new_chosen, new_rejected]
        kept_heads = [heads, other_heads] if heads.any() or other_heads.any() else []
        lengths = prompt - start + size_of(heads) + new_chosen + new_rejected
        lengths += np.where(two, other - other_start + size_of(other_heads), 0)
        return Fitted(
            np.column_stack([*columns, *kept_heads])[keep],
            lengths[keep],
            np.stack([table.row, longest, longest_prompt], axis=1)[~keep],
            int((over & keep).sum()),
            0,
            Lengths.of(np.concatenate([prompt + chosen, other + rejected])),
            Lengths.of(self.prompt_lengths(table)),
        )

    def _trained(self, table: Table, row: int, side: str, stop: int) -> Array | bool:
        """Which of the first `stop` tokens of a completion are trained on."""
        return table.trained(row, stop, f"{side}_spans") if self.assistant_only_loss else True

    def longest(self, table: Table, view: Array, lengths: Array) -> int:
        row, start, other_start, chosen, rejected = view.T[:5]
        first = table.lists["prompt"].lengths[row] - start + size_of(view[:, 5:8]) + chosen
        second = _rejected_prompts(table)[row] - other_start + size_of(view[:, 8:]) + rejected
        return int(np.maximum(first, second).max())

    def example(self, table: Table, row: int, columns: Sequence[int]) -> Example:
        start, other_start, chosen, rejected, *heads = columns
        prompt = table.lists["prompt"][row]
        prompt = read(prompt, start, len(prompt), heads[:3])
        lists, numbers = table.lists, table.numbers
        leaves = tuple(
            Node(lists[side][row][:size], self._trained(table, row, side, size))
            for side, size in (("chosen", chosen), ("rejected", rejected))
        )
        trees: tuple[Node, ...] = (Node(prompt, False, leaves),)
        if numbers["two_prompts"][row]:
            other = lists["rejected_prompt"][row]
            other = read(other, other_start, len(other), heads[3:])
            trees = (Node(prompt, False, leaves[:1]), Node(other, False, leaves[1:]))
        margin = float(numbers["margin"][row])
        margin = None if np.isnan(margin) else margin
        return Example(trees, int(table.row[row]), margin, tie=bool(numbers["tie"][row]))


KINDS: dict[KindName, type[Kind]] = {kind.name: kind for kind in (Sequences, Pairs, Labelled, Prompts)}


def facts_of(record: Record, row: Row, turns: bool) -> str:
    """A row's facts for rewards (prompt, answer, columns) as JSON; `turns` as in `Kind.stored`."""
    prompt = as_turns(row.prompt, "user") if turns and row.prompt is not None else row.prompt
    facts = {"prompt": prompt, "answer": row.answer, "columns": record.value}
    return json.dumps(facts, ensure_ascii=False, default=str)


def with_context(prompt: str | Turns, context: str, template: str) -> str | Turns:
    """A prompt whose last message, the user's, is the template with this message and a context that it lacks. Raises
    RowError if it ends with another message."""
    if isinstance(prompt, str):
        return filled(template, {"prompt": prompt, "privileged_context": context})
    *before, last = prompt
    if last["role"] != "user":
        raise RowError(
            f"the teacher's prompt replaces the last message of the user, but the prompt ends with one of the "
            f"{last['role']}: remove such rows, or method.privileged_context and use_successful_as_teacher"
        )
    content = filled(template, {"prompt": last["content"], "privileged_context": context})
    kept = {name: value for name, value in last.items() if name not in ("instruction", "input")}  # an Alpaca row's
    return [*before, kept | {"content": content}]


def context_of(row: Row, fields: Fields, column: str) -> str:
    """The text of a column that only the teacher's prompt has; `completion` is the row's completion in every format.
    Raises RowError if the row lacks it."""
    value = fields.get(column)
    if value is None and column == "completion" and not (row.prompt is None and isinstance(row.chosen, str)):
        turns = as_turns(row.chosen if row.prompt is not None else row.chosen[-1:], "assistant")
        value = [turn for turn in turns if turn["role"] == "assistant"]
    if isinstance(value, list) and value:
        value = "\n".join(turn["content"] for turn in messages_of(value, column))
    if value in (None, "", []) or not (text := number_or_text(value, column)).strip():
        others = f"the row has {', '.join(fields)}"
        raise RowError(f"the column {column} (method.privileged_context) is missing or empty; {others}")
    return text


def logprobs_problem(given: Any, tokens: list[int]) -> str | None:
    """Why these are not a teacher's log-probabilities of a completion with these tokens; None if they are."""
    if given is None:
        return "is missing"
    given = given if isinstance(given, Mapping) else {}
    ids, logprobs, own = (given.get(name) for name in ("logprob_token_ids", "logprobs", "token_ids"))
    if not isinstance(ids, list) or not isinstance(logprobs, list):
        return "must be an object with the lists logprob_token_ids and logprobs, which have a list for each token"
    if own is not None and own != tokens:
        return f"has the token_ids {own}, but the completion has {tokens}: tokenizer, template or text differ"
    if not len(ids) == len(logprobs) == len(tokens):
        return f"has lists of {len(ids)} and {len(logprobs)} tokens, but the completion has {len(tokens)}, with its end"
    for number, (some, values) in enumerate(zip(ids, logprobs, strict=True)):
        at, is_list = f"at token {number + 1}", isinstance(some, list) and isinstance(values, list)
        if not is_list or len(some) != len(values) or not some:
            return f"{at} must have two lists of the same length, which are not empty"
        if any(isinstance(id, bool) or not isinstance(id, int) or id < 0 for id in some) or len({*some}) < len(some):
            return f"{at} must have different token ids of 0 or more, not {some}"
        if not all(isinstance(value, int | float) and -math.inf < value <= 1e-4 for value in values):
            return f"{at} must have finite log-probabilities of at most 0, not {values}"
        if (total := sum(map(math.exp, values))) > 1.01:
            return f"{at} has probabilities whose sum is {total:.3f}: log-probabilities are in nats"
    return None


def _rejected_prompts(table: Table) -> Array:
    """The number of prompt tokens before each pair's rejected reply."""
    lists = table.lists
    return np.where(table.numbers["two_prompts"], lists["rejected_prompt"].lengths, lists["prompt"].lengths)


class Dataset:
    """A sequence of `posttrain.batch.Example` within the length limits, read from the cached rows. `lengths` are
    physical tokens per example; `view` locates the examples in the table, with the columns of `Fitted.view`."""

    def __init__(self, kind: Kind, table: Table, fitted: Fitted, indices: Array):
        self._kind, self._table = kind, table
        self.view = fitted.view[indices]
        self.lengths: Array = fitted.lengths[indices]

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, index: int) -> Example:
        if not -len(self) <= index < len(self):
            raise IndexError(f"there is no example {index}: the data set has {len(self)}")
        row, *columns = map(int, self.view[index])
        source = int(np.searchsorted(self._table.ends, row, side="right")) if len(self._table.ends) > 1 else None
        return replace(self._kind.example(self._table, row, columns), source=source)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence; a pair has two sequences."""
        return self._kind.longest(self._table, self.view, self.lengths)

    @property
    def rows(self) -> Array:
        """The row number of each example, counted across all sources."""
        return self._table.row[self.view[:, 0]]

    @property
    def sources(self) -> Array:
        """The index of each example's source in the settings."""
        return np.searchsorted(self._table.ends, self.view[:, 0], side="right")

    @property
    def labels(self) -> Array:
        """Whether each labelled completion is desirable."""
        return self._table.numbers["label"][self.view[:, 0]]

    @property
    def ties(self) -> Array:
        """Whether each example is a tie; only pairs can be."""
        tie = self._table.numbers.get("tie")
        return np.zeros(len(self), bool) if tie is None else tie[self.view[:, 0]]

    def without_ties(self) -> "Dataset":
        less = copy(self)
        less.view, less.lengths = self.view[~self.ties], self.lengths[~self.ties]
        return less
