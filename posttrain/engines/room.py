"""How many completions are alive at a time: sizes of the cache, from what is asked for and a budget of memory.

A prompt's keys and values take `prompt_columns` places whatever its length, those of a completion `own_columns`. All
sizes are a function of the call, of settings and of the machine, never of what is free now or of earlier calls:
rounding may depend on how many rows a step has, and a resumed run must draw what the first one drew.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import PreTrainedConfig

CACHE_BYTES = 4 << 30  # what keys and values may take in main memory
GPU_SHARE = 4  # on a GPU a quarter of it all
FEWEST_COLUMNS = 32  # of completions: with fewer, PyTorch may take its slow way to products of small matrices
COLUMNS = 256  # where shapes are static, of prompts and of completions, a multiple of it


class Room(NamedTuple):
    """What the cache has room for: at most so many completions (rows) of at most so many prompts (groups)."""

    rows: int
    groups: int
    members: int  # most completions of a group; more of one prompt are several groups
    prompt_columns: int
    own_columns: int

    @classmethod
    def of(
        cls, prompts: int, n: int, longest: int, own: int, *, max_rows: int, tokens: int, static: bool = False
    ) -> Room:
        """For `n` completions, `own` tokens at most, of each of `prompts`, which have `longest` at most: as many at a
        time as `max_rows` and `tokens` of cache allow.

        One prompt with one completion always fits. Groups of which some completions are done hold their prompt's place
        while others enter, so there are twice as many places as whole groups, except where a group is one completion.
        `static` sizes are rounded up: calls of fewer or shorter prompts have the same ones.
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
        """The places of all prompts and completions."""
        return self.groups * self.prompt_columns + self.rows * self.own_columns

    def covers(self, other: Room) -> bool:
        return all(mine >= its for mine, its in zip(self, other, strict=True))

    def joined(self, other: Room) -> Room:
        """The least that covers both."""
        return Room(*map(max, self, other))


def cache_tokens(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, cache_bytes: int | None) -> int:
    """How many tokens' keys and values `cache_bytes` hold; None: the default of the device."""
    if cache_bytes is None:
        on_gpu = device.type == "cuda"
        cache_bytes = torch.cuda.get_device_properties(device).total_memory // GPU_SHARE if on_gpu else CACHE_BYTES
    return cache_bytes // token_bytes(config, dtype, device)


def cache_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Of the keys and values of a model that computes in `dtype`."""
    return torch.float32 if device.type == "cpu" else dtype


def token_bytes(config: PreTrainedConfig, dtype: torch.dtype, device: torch.device) -> int:
    """What the keys and values of one token take in all layers."""
    config = config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size * cache_dtype(dtype, device).itemsize


def in_columns(length: int) -> int:
    return -(-length // COLUMNS) * COLUMNS


def power_of_two(number: int) -> int:
    """The least power of two that is no less."""
    return 1 << (number - 1).bit_length()
