"""Sums over ranks that share a machine's main memory, without a network between them.

gloo sends every number through the loopback interface. Here each rank writes its numbers where all ranks read them,
sums one part of all, and writes the sums where the others read them.
"""

import mmap
import os
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ROOM = 1 << 25  # bytes of one exchange


class SharedSums:
    """Memory of every rank, by rank, that all have mapped. `meet()` returns once all ranks have called it."""

    def __init__(self, index: int, rooms: Sequence[Tensor], meet: Callable[[], object]):
        self._index, self._meet, self._turn = index, meet, 0
        self._halves = [room.view(2, ROOM) for room in rooms]

    def sum_(self, pieces: Sequence[Tensor]) -> None:
        """Replace flat tensors of one dtype, together at most ROOM bytes, by their sums; the same bits on every rank.

        The halves are used in turn: all ranks meet between the last read of one and the next write to it.
        """
        lengths, dtype, self._turn = [one.numel() for one in pieces], pieces[0].dtype, 1 - self._turn
        each = [halves[self._turn].view(dtype)[: sum(lengths)] for halves in self._halves]
        torch.cat(list(pieces), out=each[self._index])
        self._meet()
        parts = [one.tensor_split(len(each))[self._index] for one in each]  # the one that this rank sums
        own, *others = parts[self._index :] + parts[: self._index]
        for other in others:
            own.add_(other)
        for other in others:
            other.copy_(own)
        self._meet()
        for piece, total in zip(pieces, each[self._index].split(lengths), strict=True):
            piece.copy_(total)


def shared_sums(index: int, meet: Callable[[], object], gather: Callable[[Any], Sequence[Any]]) -> SharedSums | None:
    """SharedSums of ranks that all call this, rank `index` here; None if they do not see one another's memory.

    `gather` returns what every rank gave it. The memory has no name in a file system: nothing is left of it, however
    the processes end.
    """
    name = uuid.uuid4().bytes
    try:
        file = os.memfd_create("posttrain-sums")
    except (AttributeError, OSError):  # another system than Linux, or one that forbids it
        file = None
    if file is not None:
        os.truncate(file, 2 * ROOM)
        os.pwrite(file, name, 0)
    try:
        places = gather((f"/proc/{os.getpid()}/fd/{file}", name))
        rooms = [_mapped(place, name) for place, name in places]
        seen = all(gather(all(room is not None for room in rooms)))
    finally:
        if file is not None:
            os.close(file)
    return SharedSums(index, [room for room in rooms if room is not None], meet) if seen else None


def _mapped(place: str, name: bytes) -> Tensor | None:
    """Another rank's memory, which starts with this name; None if it is not there, as on another machine."""
    try:
        with open(place, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 2 * ROOM)
    except (OSError, ValueError):
        return None
    return torch.frombuffer(memory, dtype=torch.uint8) if memory[: len(name)] == name else None
