"""What a kind of example defines, and what most kinds share. A kind (posttrain/data/kinds.py) defines what it needs
from a row, how the row is tokenised, stored in the cache and cut to the length limits, and how an example is read from
the stored columns. All other code in `posttrain.data` is the same for every kind."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import pyarrow as pa

from posttrain.base.errors import DataError
from posttrain.batch import Example, Node
from posttrain.config.schema.base import KindName, MethodSettings
from posttrain.config.schema.data import DataConfig
from posttrain.data.readers import Record
from posttrain.data.report import Lengths
from posttrain.data.rows import Fields, Row, RowError, refuse_without_reply, without_weights
from posttrain.data.table import Array, Fitted, Limits, Room, Table, chunks, read, size_of
from posttrain.data.tokenise import Compared, Tokeniser, Trained, first_trained

INTS = pa.list_(pa.int32())
SEQUENCE = [("row", pa.int64()), ("tokens", INTS), ("spans", INTS), ("prompt", pa.int32()), ("heads", INTS)]
Item = Trained | Compared


@dataclass(frozen=True)
class Kind(ABC):
    """A kind of example, and which of its tokens are trained on. The methods of this base class are for one sequence,
    which may begin with a prompt.

    With `completion_only_loss` None, the completion is trained on if a row has a prompt, and every token otherwise;
    `with_completions` keeps the completion that the data has for each prompt, as its only branch; `acts`: the tools are
    those of environments, and a row's own are not read; `context`: of a teacher's prompts, the column that only they
    have, and the template of their last message; `logprobs`: the column with a teacher's log-probabilities.
    """

    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    with_completions: bool = False
    acts: bool = False
    context: tuple[str, str] | None = None
    logprobs: str | None = None

    name: ClassVar[KindName]
    schema: ClassVar[pa.Schema]  # columns of the rows in the cache
    unit: ClassVar[str] = "example"
    trainer: ClassVar[str]  # what trains on this kind, for messages
    compares: ClassVar[bool] = False  # whether rows need chosen and rejected
    samples: ClassVar[bool] = False  # whether completions are sampled: prompts leave room, and rewards receive columns
    format: ClassVar[str | None] = None  # the rows' format if the settings name none; None: inferred from the columns

    @classmethod
    def of(cls, method: MethodSettings) -> Self:
        """The kind as configured by a method's settings."""
        return cls(**method.model_dump(include={"completion_only_loss", "assistant_only_loss"}))

    def trains_users(self, row: Row) -> bool:
        """Whether turns of the user are among what is trained on."""
        replies = [turn for reply in (row.chosen, row.rejected) if isinstance(reply, list) for turn in reply]
        trains_all = not self.assistant_only_loss and not self.samples
        return trains_all and any(turn["role"] == "user" for turn in replies)

    def refuse_columns(self, columns: Set[str], sample: Sequence[Mapping[str, Any]], where: str) -> None:  # noqa: B027 (most kinds refuse none)
        """Raise DataError if the columns belong to a different kind; called when the format is inferred."""

    def shape(self, row: Row, fields: Fields) -> Row:
        """The row with only the parts that this kind reads. Raises RowError if one is missing."""
        refuse_without_reply(row)
        return replace(row, train_history=False)  # train only on the last reply

    def target(self, row: Row, is_document: bool) -> Row:
        """The row, with its completion separated if only that is trained on, and without unsupported loss weights."""
        return without_weights(row, self.trainer)

    def tokenise(self, tokeniser: Tokeniser, rows: Sequence[Row], is_document: bool) -> Sequence[Item | RowError]:
        """The tokens of each row, or the reason why it has none."""
        return tokeniser.completions(rows, completion_only_loss=True)

    def stored(self, record: Record, row: Row, item: Any, turns: bool) -> dict[str, Any]:
        """A tokenised row as it is stored in the cache; `turns`: whether the template writes conversations. Raises
        DataError if none of its tokens is a target."""
        if not self.samples and first_trained(item.spans, len(item.tokens)) >= len(item.tokens):
            raise DataError(
                f"{where(record)} has nothing to train on: none of its {len(item.tokens)} tokens is a target (a token "
                "of an assistant turn or a completion, or any token after the first)"
            )
        return {
            "row": record.row,
            "tokens": np.asarray(item.tokens, np.int32),
            "spans": np.asarray(item.spans, np.int32).reshape(-1),  # start, stop, start, stop …
            "prompt": item.prompt,
            "heads": np.asarray(item.heads, np.int32),
            "weights": np.asarray(item.weights, np.float32),
            "label": row.label,
        }  # only the columns of `schema` are stored

    def limits(self, data: DataConfig, room: Room, positions: int | None) -> Limits:
        """The limits before `max_prompt_length`: prompts leave `room` in `max_length` and in the model's `positions`;
        if the data contains the completions, the whole example has at most `positions` tokens."""
        if positions is None or positions >= data.max_length:
            return Limits(data.max_length, None, data.overlong)
        note = f"the model has {positions:,} positions, so examples have at most as many tokens"
        return Limits(positions, None, data.overlong, note)

    def training_limits(self, data: DataConfig, limits: Limits, behavior_version: int, table: Table) -> Limits:
        """`limits` with the `max_prompt_length` of the settings, for `table`, the training data."""
        most = data.max_prompt_length
        if most == "auto":
            most = "p90" if self.samples and data.overlong == "drop" and behavior_version < 3 else None
        if isinstance(most, str):  # p90: the length that 90 % of the prompts do not exceed
            lengths = self.prompt_lengths(table)
            most = max(1, int(np.percentile(lengths, int(most[1:]), method="higher"))) if len(lengths) else None
        return limits.shortened(most)

    def prompt_lengths(self, table: Table) -> Array:
        """The number of tokens of every prompt; a pair may have two prompts."""
        return table.numbers["prompt"]

    def fit(self, table: Table, limits: Limits, documents: Array, among: Array | bool = True) -> Fitted:
        """Return the examples within the limits: longer rows are dropped or truncated, documents split into chunks.

        `documents` marks rows of plain text; `among` selects rows (pairs ignore it). Raises DataError if `overlong` is
        error and a row exceeds a limit.
        """
        length, prompt = table.lists["tokens"].lengths, table.numbers["prompt"].astype(np.int64)
        among = np.broadcast_to(among, length.shape)
        over = table.over(length, prompt, limits, among)
        start, stop = np.zeros_like(length), length
        heads = np.zeros((len(length), 3), np.int64)
        split = over & documents
        keep = among & (~over | split)
        if limits.overlong == "truncate":
            start, heads, room = table.cut(prompt, length - prompt, limits)
            stop = np.where(split, length, prompt + np.minimum(length - prompt, room))
            for row in map(int, np.flatnonzero(over & ~split)):
                left = read(table.trained(row, stop[row]), start[row], stop[row], heads[row])
                keep[row] = self.samples or left[1:].any()  # nothing predicts the first token
        view = np.column_stack([np.arange(len(length)), start, stop, *([heads] if heads.any() else [])])[keep]
        if split.any():
            view = chunks(view, split[view[:, 0]], limits.max_length)
        return Fitted(
            view,
            view[:, 2] - view[:, 1] + size_of(view[:, 3:]),
            np.stack([table.row, length, prompt], axis=1)[among & ~keep],
            int((over & keep & ~split).sum()),
            int(split.sum()),
            Lengths.of(length),
            Lengths.of(prompt[prompt > 0]),
        )

    def refuse_training(self, table: Table, view: Array, data: DataConfig) -> None:  # noqa: B027 (most kinds refuse none)
        """Raise DataError for examples from which nothing can be learned."""

    def longest(self, table: Table, view: Array, lengths: Array) -> int:
        """The number of tokens of the longest sequence."""
        return int(lengths.max())

    def _tree(self, table: Table, row: int, columns: Sequence[int]) -> Node:
        """The prompt of a table row, with its completion as the only branch, if it has one."""
        start, stop, *head = columns
        tokens, cut = table.lists["tokens"][row], int(table.numbers["prompt"][row])
        trained = table.trained(row, stop)[cut:] if self.assistant_only_loss else True
        completion = (Node(tokens[cut:stop], trained),) if cut < stop else ()
        return Node(read(tokens, start, min(cut, stop), head), False, completion)

    @abstractmethod
    def example(self, table: Table, row: int, columns: Sequence[int]) -> Example:
        """The example of a table row; `columns` are the remaining columns of `Fitted.view`."""


def where(record: Record) -> str:
    return f"{record.file} line {record.line} (row {record.row})"
