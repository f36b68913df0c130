"""Keys and values of prompts and completions, in memory that attention (attention.py) reads without a copy.

The number of live completions follows from the request and a memory budget (`Room`). A prompt's keys and values take
`prompt_columns` columns whatever its length, and a completion's take `own_columns`. All sizes depend only on the call,
the settings and the machine, never on free memory or earlier calls. Otherwise a resumed run might sample different
completions, because rounding may depend on the number of rows in a step.

Letters: R rows (live completions), G groups (their prompts), M members of a group, L tokens of a completion, K heads of
keys and values, d the size of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from posttrain.models.families import head_size

CACHE_BYTES = 4 << 30  # maximum size of keys and values in main memory
GPU_SHARE = 4  # on a GPU, keys and values take at most a quarter of its memory
FEWEST_COLUMNS = 32  # minimum columns of completions; with fewer, PyTorch may multiply small matrices by a slow path
COLUMNS = 256  # with static shapes, columns of prompts and of completions are multiples of this number

SMALL_HEAD = 32  # below this size keys are stored transposed, which makes products up to twice as fast on a CPU
WIDTH_STEP = 48  # columns by which a cache grows; fewer would cost more copies, more would leave larger gaps


class Room(NamedTuple):
    """The capacity of the cache: maximum number of completions (rows) and of prompts (groups)."""

    rows: int
    groups: int
    members: int  # maximum completions of a group; a prompt with more has several groups
    prompt_columns: int
    own_columns: int

    @classmethod
    def of(
        cls, prompts: int, n: int, longest: int, own: int, *, max_rows: int, tokens: int, static: bool = False
    ) -> Room:
        """Room for `prompts` prompts of at most `longest` tokens, each with `n` completions of at most `own` tokens. As
        many completions are live at a time as `max_rows` and a cache of `tokens` tokens allow.

        One prompt with one completion always fits. A group with finished completions keeps its prompt's slot while
        other groups enter, so there are twice as many slots as complete groups, unless a group is one completion.
        With `static`, sizes are rounded up, so that calls with fewer or shorter prompts have the same sizes.
        """
        prompt_columns, own_columns = longest, max(FEWEST_COLUMNS, own)
        if static:
            prompts = max(2, power_of_two(prompts))
            prompt_columns, own_columns = in_columns(longest), in_columns(own)
        members = max(1, min(n, max_rows, (tokens - prompt_columns) // own_columns))
        slots = 1 if members == 1 else 2  # prompt slots per complete group
        fitting = tokens * members // (members * own_columns + slots * prompt_columns)
        rows = max(members, min(prompts * n, max_rows, fitting))
        holding = min(slots * rows // members, (tokens - rows * own_columns) // prompt_columns)
        groups = min(prompts * -(-n // members), max(1, holding))
        return cls(rows, groups, members, prompt_columns, own_columns)

    @property
    def tokens(self) -> int:
        """The number of columns of all prompts and completions."""
        return self.groups * self.prompt_columns + self.rows * self.own_columns

    def covers(self, other: Room) -> bool:
        return all(mine >= its for mine, its in zip(self, other, strict=True))

    def joined(self, other: Room) -> Room:
        """The smallest room that covers both."""
        return Room(*map(max, self, other))


def cache_tokens(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, cache_bytes: int | None) -> int:
    """Return the number of tokens whose keys and values fit in `cache_bytes` (None: the default of the device)."""
    if cache_bytes is None:
        on_gpu = device.type == "cuda"
        cache_bytes = torch.cuda.get_device_properties(device).total_memory // GPU_SHARE if on_gpu else CACHE_BYTES
    return cache_bytes // token_bytes(config, dtype, device)


def cache_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the keys and values of a model that computes in `dtype`."""
    return torch.float32 if device.type == "cpu" else dtype


def token_bytes(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> int:
    """The bytes of one token's keys and values in all layers."""
    return numbers_per_token(config.get_text_config()) * cache_dtype(dtype, device).itemsize


def numbers_per_token(config: PreTrainedConfig) -> int:
    """The number of values in one token's keys and values in all layers."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_size(config)


def in_columns(length: int) -> int:
    return -(-length // COLUMNS) * COLUMNS


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's keys and values: prompts (G, K, columns, d), completions (R, K, width, d)."""

    prompt_key: Tensor
    prompt_value: Tensor
    own_key: Tensor
    own_value: Tensor


class Buffers:
    """Memory for the keys and values of `tokens` tokens, allocated for each layer at its first use.

    On a CPU it is float32, so that no step needs to convert it: a CPU has no 16-bit products with float32 sums. Caches
    of several sizes can use the memory in turn. With `finite` it starts as zeros, because a cache may read leftovers
    of another cache.
    """

    def __init__(self, tokens: int, finite: bool = False):
        self.tokens, self.finite = tokens, finite
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, index: int, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's memory for keys and for values, both flat. `key` (1, K, T, d): some of its keys."""
        if index not in self.layers:
            size = self.tokens * key.shape[1] * key.shape[3]
            new, dtype = key.new_zeros if self.finite else key.new_empty, cache_dtype(key.dtype, key.device)
            self.layers[index] = new(size, dtype=dtype), new(size, dtype=dtype)
        return self.layers[index]


class Cache:
    """The keys and values of every layer, within `buffers`.

    Masked values are multiplied by about 0, so they must be finite. A prompt's columns start as zeros; a completion's
    columns are zeroed by `widen`, or by `clear` when its row comes into use. A completion has `width` columns. While
    all completions have the same age, a step reads no gaps, and memory beyond the width is never touched.
    With `still` the memory serves many calls, and steps over it are captured as CUDA graphs. All columns then exist
    from the start, and computations must not depend on values or on leftovers of earlier calls, which are finite.
    """

    def __init__(self, room: Room, still: bool = False, buffers: Buffers | None = None):
        self.room, self.buffers = room, buffers or Buffers(room.tokens)
        self.still, self.width = still, room.own_columns if still else 0
        self.layers: dict[int, Layer] = {}
        self.steep: set[int] = set()  # layers for which m = 0 was not valid
        self._scratch: Tensor | None = None

    def layer(self, module: nn.Module, key: Tensor) -> Layer:
        """Return the layer of an attention module, for keys (1, K, T, d)."""
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
        """Make room for `columns` columns of completions. The first `rows` rows are in use."""
        if columns <= self.width:
            return
        self.width = min(self.room.own_columns, -(-columns // WIDTH_STEP) * WIDTH_STEP)
        for index, layer in self.layers.items():
            turned = layer.own_key.shape[3] < SMALL_HEAD
            own_key = _widened(layer.own_key, rows, self.width, turned)
            own_value = _widened(layer.own_value, rows, self.width, False)
            self.layers[index] = replace(layer, own_key=own_key, own_value=own_value)

    def clear(self, rows: slice) -> None:
        """Zero the columns of the completions in `rows`; with `still`, do nothing."""
        if self.still:
            return
        for layer in self.layers.values():
            layer.own_key[rows] = 0
            layer.own_value[rows] = 0

    def move_rows(self, source: Tensor, target: Tensor, columns: int) -> None:
        """Copy the first `columns` columns of completions from the rows `source` to the rows `target`, both int64."""
        for layer in self.layers.values():
            for side in (layer.own_key, layer.own_value):
                side[target, :, :columns] = side[source, :, :columns]

    def move_group(self, source: int, target: int, columns: int) -> None:
        """Copy a prompt's keys and values to another slot."""
        for layer in self.layers.values():
            for side in (layer.prompt_key, layer.prompt_value):
                side[target, :, :columns] = side[source, :, :columns]

    def scratch(self, *shape: int) -> Tensor:
        """Return scratch memory, valid until the next call. Fresh pages would cost more time than the arithmetic."""
        size = math.prod(shape)
        if self._scratch is None or self._scratch.numel() < size:
            self._scratch = torch.empty(size * 5 // 4)  # requests grow with every step
        return self._scratch[:size].view(shape)


def index_of(module: nn.Module) -> int:
    """The layer number of an attention module."""
    return module.layer_idx  # pyright: ignore[reportReturnType]


def _laid(memory: Tensor, count: int, heads: int, columns: int, size: int, turned: bool) -> Tensor:
    """View the start of the memory as keys or values (count, K, columns, d); `turned`: stored transposed."""
    inner = (1, columns) if turned else (size, 1)
    return memory.as_strided((count, heads, columns, size), (heads * columns * size, columns * size, *inner))


def _widened(side: Tensor, rows: int, columns: int, turned: bool) -> Tensor:
    """Widen `side` in place to `columns` columns. The first `rows` rows keep their values and are padded with zeros;
    the remaining rows are undefined."""
    count, heads, before, size = side.shape
    wide = _laid(side, count, heads, columns, size, turned)
    while rows:  # last rows first, as many as can move without overwriting rows that have not moved
        start = min(rows - 1, -(-rows * before // columns))
        kept = side[start:rows]
        wide[start:rows, :, :before] = kept.clone() if start * columns < rows * before else kept
        wide[start:rows, :, before:] = 0
        rows = start
    return wide
