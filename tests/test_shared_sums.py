"""Sums in shared memory, by threads in the place of ranks; two processes: tests/test_ranks.py."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from posttrain.parallel import ranks

LENGTHS = (1000, 1, 0, 517, 90)


class Gather:
    """What every thread gives, by its number."""

    def __init__(self, size: int):
        self.barrier, self.found = Barrier(size, timeout=20), [None] * size

    def of(self, index: int):
        def gather(value):
            self.found[index] = value
            self.barrier.wait()
            found = list(self.found)
            self.barrier.wait()
            return found

        return gather


def on_ranks(size: int, work):
    """What `work(index, gather)` returns on every rank."""
    gather = Gather(size)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda index: work(index, gather.of(index)), range(size)))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_sums_are_those_of_all_ranks_with_the_same_bits(monkeypatch, size, dtype):
    """In several exchanges, one after the other in the two halves; a part may be longer than the room."""
    monkeypatch.setattr(ranks, "ROOM", 4096)
    generator = torch.Generator().manual_seed(size)
    given = [[torch.randn(length, generator=generator).to(dtype) for length in LENGTHS] for _ in range(size)]

    def work(index, gather):
        memory = ranks.shared_sums(index, lambda: gather(None), gather)
        assert memory is not None
        mine = [one.clone() for one in given[index]]
        groups = list(ranks._exchanges(mine))
        for pieces in groups * 3:
            memory.sum_(pieces)
        return len(groups), mine

    made = on_ranks(size, work)
    assert made[0][0] == -(-sum(LENGTHS) * dtype.itemsize // 4096)
    for number in range(len(LENGTHS)):
        once = torch.stack([rank[number].double() for rank in given]).sum(0)
        exact = once * size**2  # summed three times
        for _, mine in made:
            assert torch.equal(mine[number], made[0][1][number])
            assert torch.allclose(mine[number].double(), exact, rtol=0, atol=32 * size**3 * torch.finfo(dtype).eps)


def test_without_a_look_at_the_memory_of_the_others_there_are_none(monkeypatch):
    """Where a number of a process is that of another one, as in two containers; where the system has no such memory."""

    def blind(index, gather):
        return ranks.shared_sums(index, lambda: gather(None), gather)

    mapped = ranks._mapped
    monkeypatch.setattr(ranks, "_mapped", lambda place, name: mapped(place, name[::-1]))
    assert on_ranks(2, blind) == [None, None]
    monkeypatch.setattr(ranks, "_mapped", mapped)
    monkeypatch.delattr("os.memfd_create")
    assert on_ranks(2, blind) == [None, None]
