"""The number of live completions: sizes of the cache, from the request and a memory budget.

A prompt's keys and values take `prompt_columns` columns at any length, those of a completion `own_columns`. All sizes
are a function of the call, the settings and the machine, never of the free memory or earlier calls: rounding may
depend on the number of rows of a step, and a resumed run must sample the same completions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

CACHE_BYTES = 4 << 30  # maximum size of keys and values in main memory
GPU_SHARE = 4  # on a GPU a quarter of its memory
FEWEST_COLUMNS = 32  # of completions: with fewer, PyTorch may use its slow path for products of small matrices
COLUMNS = 256  # with static shapes, columns of prompts and of completions are multiples of it


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
        """For `n` completions of at most `own` tokens for each of `prompts` of at most `longest` tokens: as many at a
        time as `max_rows` and `tokens` of cache allow.

        One prompt with one completion always fits. A group with finished completions keeps its prompt's slot while
        other groups enter, so there are twice as many slots as complete groups, unless a group is one completion.
        `static` sizes are rounded up: calls with fewer or shorter prompts have the same ones.
        """
        prompt_columns, own_columns = longest, max(FEWEST_COLUMNS, own)
        if static:
            prompts = max(2, power_of_two(prompts))
            prompt_columns, own_columns = in_columns(longest), in_columns(own)
        members = max(1, min(n, max_rows, (tokens - prompt_columns) // own_columns))
        places = 1 if members == 1 else 2
        fitting = tokens * members // (members * own_columns + places * prompt_columns)
        rows = max(members, min(prompts * n, max_rows, fitting))
        holding = min(places * rows // members, (tokens - rows * own_columns) // prompt_columns)
        groups = min(prompts * -(-n // members), max(1, holding))
        return cls(rows, groups, members, prompt_columns, own_columns)

    @property
    def tokens(self) -> int:
        """The columns of all prompts and completions."""
        return self.groups * self.prompt_columns + self.rows * self.own_columns

    def covers(self, other: Room) -> bool:
        return all(mine >= its for mine, its in zip(self, other, strict=True))

    def joined(self, other: Room) -> Room:
        """The smallest room that covers both."""
        return Room(*map(max, self, other))


def cache_tokens(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, cache_bytes: int | None) -> int:
    """The number of tokens whose keys and values fit in `cache_bytes`; None: the default of the device."""
    if cache_bytes is None:
        on_gpu = device.type == "cuda"
        cache_bytes = torch.cuda.get_device_properties(device).total_memory // GPU_SHARE if on_gpu else CACHE_BYTES
    return cache_bytes // token_bytes(config, dtype, device)


def cache_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the keys and values of a model that computes in `dtype`."""
    return torch.float32 if device.type == "cpu" else dtype


def token_bytes(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> int:
    """The bytes of one token's keys and values in all layers."""
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size * cache_dtype(dtype, device).itemsize


def in_columns(length: int) -> int:
    return -(-length // COLUMNS) * COLUMNS


def power_of_two(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << (number - 1).bit_length()
