"""Examples of a kind, read from the cached rows within the length limits."""

import numpy as np

from posttrain.batch import Example
from posttrain.data.kinds import Kind
from posttrain.data.table import Array, Fitted, Table


class Dataset:
    """A sequence of `posttrain.batch.Example`. `lengths` are physical tokens per example.

    `view` has the position of each example in the table, in the columns of `Fitted`.
    """

    def __init__(self, kind: Kind, table: Table, fitted: Fitted, indices: Array):
        self._kind, self._table = kind, table
        self.view = fitted.view[indices]
        self.lengths: Array = fitted.lengths[indices]

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, index: int) -> Example:
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        row, *columns = map(int, self.view[index])
        return self._kind.example(self._table, row, columns)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence; a pair has two."""
        return self._kind.longest(self._table, self.view, self.lengths)

    @property
    def rows(self) -> Array:
        """The row number of each example, counted through all sources."""
        return self._table.row[self.view[:, 0]]

    @property
    def labels(self) -> Array:
        """For labelled completions: which are desirable."""
        return self._table.numbers["label"][self.view[:, 0]]

    @property
    def ties(self) -> Array:
        """Which pairs are ties; examples of other kinds are none."""
        tie = self._table.numbers.get("tie")
        return np.zeros(len(self), bool) if tie is None else tie[self.view[:, 0]]
