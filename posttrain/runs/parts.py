"""Tensors in one safetensors file, or in one for each rank of a sharded run, read by any number of ranks.

    optimizer.safetensors                                      of one process, or of ranks with the whole model
    optimizer-00001-of-00002.safetensors, …-00002-of-…         every rank's rows

A tensor is the concatenation of its parts by rows, in the order of the files that have it; a number is in each file
that has it the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from posttrain.base.errors import DamagedError

if TYPE_CHECKING:  # reading a run folder must not import torch
    import torch

RowsOf = Callable[[str, int], slice]  # which rows to read, from a tensor's name and their number


def part_file(folder: Path, name: str, rank: int = 0, ranks: int = 1) -> Path:
    return folder / (f"{name}-{rank + 1:05d}-of-{ranks:05d}.safetensors" if ranks > 1 else f"{name}.safetensors")


def load_parts(folder: Path, name: str, rows_of: RowsOf) -> dict[str, torch.Tensor]:
    """The rows of every tensor. Raises DamagedError when a file is missing or damaged."""
    files = _files(folder, name)
    try:
        with ExitStack() as opened:
            parts = [opened.enter_context(safe_open(file, "pt")) for file in files]
            having: dict[str, list[Any]] = {}
            for part in parts:
                for one in part.keys():  # noqa: SIM118 - not a mapping
                    having.setdefault(one, []).append(part)
            return {one: _rows(one, some, rows_of) for one, some in having.items()}
    except (OSError, SafetensorError) as error:
        raise DamagedError(f"{folder / files[0].name} or a part beside it is damaged: {error}") from None


def _files(folder: Path, name: str) -> list[Path]:
    parts = sorted(folder.glob(f"{name}-*-of-*.safetensors"))
    if not parts:
        if not (only := part_file(folder, name)).is_file():
            raise DamagedError(f"{only} is missing")
        return [only]
    found = re.fullmatch(r".*-of-(\d+)\.safetensors", parts[0].name)
    count = int(found[1]) if found else 0
    expected = [part_file(folder, name, rank, count) for rank in range(count)]
    for file in expected:
        if file not in parts:
            raise DamagedError(f"{file} is missing: {count} ranks have each saved a part")
    if len(parts) != count:
        raise DamagedError(f"{folder} has parts of {name} that {count} ranks did not save: {parts[-1].name}")
    return expected


def _rows(name: str, parts: Sequence[Any], rows_of: RowsOf) -> torch.Tensor:
    """The rows of one tensor, read from the parts that have some."""
    slices = [part.get_slice(name) for part in parts]
    if not slices[0].get_shape():
        return parts[0].get_tensor(name)
    import torch

    lengths = [one.get_shape()[0] for one in slices]
    wanted, start, read = rows_of(name, sum(lengths)), 0, []
    for one, length in zip(slices, lengths, strict=True):
        first, last = max(wanted.start - start, 0), min(wanted.stop - start, length)
        if first < last:
            read.append(one[first:last])
        start += length
    return torch.cat(read) if len(read) != 1 else read[0]
