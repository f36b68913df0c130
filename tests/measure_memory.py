"""Run by tests/test_memory.py in a process of its own: trains each config named, prints the peak of each in bytes.

    python measure_memory.py CONFIG.json ...

Every run is a fork of one process that has imported everything, and its peak is what it took above that.
"""

import ctypes
import os
import sys
from pathlib import Path

import bitsandbytes  # noqa: F401  (what a run imports later counts as imported)
import datasets  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import torch

from posttrain import runner
from posttrain.base.memory import memory_in_use, peak_memory, release_memory, reset_peak_memory
from posttrain.config import load

CPU = torch.device("cpu")
MADV_POPULATE_READ = 22  # asm-generic/mman-common.h, since Linux 5.14


def hold_libraries() -> None:
    """Have every page of the imported libraries in memory, and so in the baseline.

    A fork begins without them, and how many come back with each one that it touches, 50 MiB in all or 150, depends on
    what else the system has read. They are no part of what a run takes: the system may drop them at any time.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for line in Path("/proc/self/maps").read_text().splitlines():
        where, rights, *_, name = line.split(maxsplit=5)
        if name.startswith("/") and rights.startswith("r"):
            start, end = (int(address, 16) for address in where.split("-"))
            if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_POPULATE_READ):
                raise OSError(ctypes.get_errno(), f"the pages of {name} cannot be brought into memory")


def main() -> None:
    for file in sys.argv[1:]:
        if (child := os.fork()) == 0:
            hold_libraries()
            release_memory()  # of what imports have left
            before = memory_in_use()
            reset_peak_memory(CPU)
            runner.train(load(file).config)
            print("peak", peak_memory(CPU) - before, flush=True)
            os._exit(0)
        os.waitpid(child, 0)


main()
