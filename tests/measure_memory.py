"""Run by tests/test_memory.py in a process of its own: trains each config named, prints the peak of each in bytes.

    python measure_memory.py CONFIG.json ...

Every run is a fork of one process that has imported everything, and its peak is what it took above that.
"""

import os
import sys

import bitsandbytes  # noqa: F401  (what a run imports later counts as imported)
import datasets  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import torch

from posttrain import recipes
from posttrain.config import load
from posttrain.memory import memory_in_use, peak_memory, release_memory, reset_peak_memory

CPU = torch.device("cpu")


def main() -> None:
    for file in sys.argv[1:]:
        if (child := os.fork()) == 0:
            release_memory()  # of what imports have left
            before = memory_in_use()
            reset_peak_memory(CPU)
            recipes.train(load(file).config)
            print("peak", peak_memory(CPU) - before, flush=True)
            os._exit(0)
        os.waitpid(child, 0)


main()
