"""Keys and values of prompts and completions, in memory that attention (attention.py) reads without a copy.

Letters: R rows (live completions), G groups (their prompts), K heads of keys and values, d the size of a head.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from posttrain.engines.room import Room, cache_dtype

SMALL_HEAD = 32  # below this size keys are stored transposed, which makes products up to twice as fast on a CPU
WIDTH_STEP = 48  # columns by which a cache grows: fewer cost more copies, more leave larger gaps


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's keys and values: prompts (G, K, columns, d), completions (R, K, width, d)."""

    prompt_key: Tensor
    prompt_value: Tensor
    own_key: Tensor
    own_value: Tensor


class Buffers:
    """Memory for the keys and values of this number of tokens, allocated per layer at its first use.

    In float32 on a CPU, which has no 16-bit products with float32 sums: they would be converted at every step. Caches
    of several sizes can use it in turn. With `finite` it starts as zeros, since one cache may read what another has
    left.
    """

    def __init__(self, tokens: int, finite: bool = False):
        self.tokens, self.finite = tokens, finite
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, index: int, key: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's memory for keys and for values, both flat; `key` (1, K, T, d) are some of its keys."""
        if index not in self.layers:
            size = self.tokens * key.shape[1] * key.shape[3]
            new, dtype = key.new_zeros if self.finite else key.new_empty, cache_dtype(key.dtype, key.device)
            self.layers[index] = new(size, dtype=dtype), new(size, dtype=dtype)
        return self.layers[index]


class Cache:
    """The keys and values of every layer, within `buffers`.

    Masked values are multiplied by about 0 and must be finite. So a prompt's columns start as zeros, and those of a
    completion are zeroed by `widen`, and by `clear` for rows that come into use. A completion has `width` columns:
    while all have the same age a step reads no gaps, and columns beyond the width are memory that is never touched.
    With `still` the memory serves many calls, and steps over it are recorded: all columns exist from the start, and
    computations may depend neither on values nor on leftovers of earlier calls, which are finite.
    """

    def __init__(self, room: Room, still: bool = False, buffers: Buffers | None = None):
        self.room, self.buffers = room, buffers or Buffers(room.tokens)
        self.still, self.width = still, room.own_columns if still else 0
        self.layers: dict[int, Layer] = {}
        self.steep: set[int] = set()  # layers for which m = 0 was not valid
        self._scratch: Tensor | None = None

    def layer(self, module: nn.Module, key: Tensor) -> Layer:
        """The layer of an attention module, for keys (1, K, T, d)."""
        index = index_of(module)
        if index not in self.layers:
            heads, size, room = key.shape[1], key.shape[3], self.room
            own = room.groups * room.prompt_columns * heads * size  # start of the completions' part

            def halves(memory: Tensor, turned: bool) -> tuple[Tensor, Tensor]:
                prompts = _laid(memory, room.groups, heads, room.prompt_columns, size, turned)
                return prompts, _laid(memory[own:], room.rows, heads, self.width, size, turned)

            keys, values = self.buffers.of(index, key)
            prompt_key, own_key = halves(keys, size < SMALL_HEAD)
            prompt_value, own_value = halves(values, False)
            self.layers[index] = Layer(prompt_key, prompt_value, own_key, own_value)
            if not self.still:
                for side in (prompt_key, prompt_value, own_key, own_value):
                    side.zero_()
        return self.layers[index]

    def widen(self, rows: int, columns: int) -> None:
        """Make room for `columns` of completions, in the first `rows`, which are in use."""
        if columns <= self.width:
            return
        self.width = min(self.room.own_columns, -(-columns // WIDTH_STEP) * WIDTH_STEP)
        for index, layer in self.layers.items():
            turned = layer.own_key.shape[3] < SMALL_HEAD
            own_key = _widened(layer.own_key, rows, self.width, turned)
            own_value = _widened(layer.own_value, rows, self.width, False)
            self.layers[index] = replace(layer, own_key=own_key, own_value=own_value)

    def clear(self, rows: slice) -> None:
        """Zero the columns of completions."""
        if self.still:
            return
        for layer in self.layers.values():
            layer.own_key[rows] = 0
            layer.own_value[rows] = 0

    def move_rows(self, source: Tensor, target: Tensor, columns: int) -> None:
        """Copy the first `columns` of the completions at `source` to `target`, both int64."""
        for layer in self.layers.values():
            for side in (layer.own_key, layer.own_value):
                side[target, :, :columns] = side[source, :, :columns]

    def move_group(self, source: int, target: int, columns: int) -> None:
        """Copy a prompt's keys and values to another slot."""
        for layer in self.layers.values():
            for side in (layer.prompt_key, layer.prompt_value):
                side[target, :, :columns] = side[source, :, :columns]

    def scratch(self, *shape: int) -> Tensor:
        """Scratch memory until the next call: fresh pages would cost more time than the arithmetic."""
        size = math.prod(shape)
        if self._scratch is None or self._scratch.numel() < size:
            self._scratch = torch.empty(size * 5 // 4)  # requests grow with every step
        return self._scratch[:size].view(shape)


def index_of(module: nn.Module) -> int:
    """The layer number of an attention module."""
    return module.layer_idx  # pyright: ignore[reportReturnType]


def _laid(memory: Tensor, count: int, heads: int, columns: int, size: int, turned: bool) -> Tensor:
    """The start of the memory as keys or values (count, K, columns, d); turned: stored transposed."""
    inner = (1, columns) if turned else (size, 1)
    return memory.as_strided((count, heads, columns, size), (heads * columns * size, columns * size, *inner))


def _widened(side: Tensor, rows: int, columns: int, turned: bool) -> Tensor:
    """The same memory with more columns: the first `rows` keep their values, with zeros beyond; the rest is
    undefined."""
    count, heads, before, size = side.shape
    wide = _laid(side, count, heads, columns, size, turned)
    while rows:  # last rows first, as many as can move without overwriting rows that have not moved
        start = min(rows - 1, -(-rows * before // columns))
        kept = side[start:rows]
        wide[start:rows, :, :before] = kept.clone() if start * columns < rows * before else kept
        wide[start:rows, :, before:] = 0
        rows = start
    return wide
