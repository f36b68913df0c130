"""Lets waiting OpenMP threads spin while no other process needs their cores, and sleep otherwise.

A step of a small model consists of thousands of short parallel regions, so a thread that spins between two regions is
ready when the next one starts. If another process is busy, a spinning thread occupies the core that a thread with work
needs, and a run takes up to thirty times as long (benchmarks/README.md).

libgomp, the OpenMP of PyTorch's Linux builds, spins for 300,000 iterations, but only for 100 while it manages more
threads than there are cores (its manual, GOMP_SPINCOUNT). `sharing_cores` measures how long this process's threads wait
for a core. While they wait, an additional idle team of threads raises libgomp's thread count above the number of cores.
The number of computing threads does not change, so the results are identical bit for bit.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from posttrain.base.system import usable_cores

INTERVAL_S = 0.1  # seconds between two measurements
CONTENDED = 0.15  # threads sleep if they wait for a core for more than this share of an interval, summed over threads
CALM, CALM_INTERVALS = 0.03, 10  # threads spin again after 10 intervals in a row with a share below 0.03
TASKS = Path("/proc/self/task")
CHOSEN_BY_USER = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@contextmanager
def sharing_cores() -> Iterator[None]:
    """Inside the block, let OpenMP's threads sleep instead of spin while other processes need the cores.

    Does nothing with one thread, with an OpenMP library other than libgomp, without Linux's scheduler statistics, or if
    the user has chosen how threads wait (OMP_WAIT_POLICY, GOMP_SPINCOUNT).
    """
    import torch

    threads, library = torch.get_num_threads(), _libgomp()
    if threads == 1 or library is None or waited() is None or any(map(os.environ.get, CHOSEN_BY_USER)):
        yield
        return
    monitor = CoreMonitor(library, team_beside(threads))
    monitor.start()
    try:
        yield
    finally:
        monitor.end()


class CoreMonitor(threading.Thread):
    """Measures every `INTERVAL_S` whether threads wait for cores, and keeps an idle team while they do."""

    def __init__(self, library: ctypes.CDLL, team_size: int):
        super().__init__(name="posttrain-cores", daemon=True)
        self._library, self._team_size = library, team_size
        self._ended, self._team_ended = threading.Event(), threading.Event()
        self.team: threading.Thread | None = None  # while there is one, OpenMP's threads sleep while they wait
        self._calm_intervals = 0

    def run(self) -> None:
        then, before = time.monotonic(), waited() or 0
        while not self._ended.wait(INTERVAL_S):
            now, total = time.monotonic(), waited() or 0
            self.update((total - before) / 1e9 / (now - then))
            then, before = now, total
        self._release()

    def update(self, share: float) -> None:
        """Start or end the idle team, given the share of the last interval in which threads waited for a core."""
        self._calm_intervals = self._calm_intervals + 1 if share < CALM else 0
        if self.team is None and share > CONTENDED:
            self._team_ended.clear()
            self.team = threading.Thread(target=self._sleep, name="posttrain-team", daemon=True)
            self.team.start()
        elif self._calm_intervals == CALM_INTERVALS:
            self._release()

    def end(self) -> None:
        """Stop measuring; threads spin again."""
        self._ended.set()
        self.join()

    def _release(self) -> None:
        if self.team is not None:
            self._team_ended.set()
            self.team.join()
            self.team = None

    def _sleep(self) -> None:
        """Create the team. libgomp ends the team's threads when the thread that created it ends."""
        nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p)  # each thread of the team calls it once
        self._library.GOMP_parallel(nothing, None, ctypes.c_uint(self._team_size), ctypes.c_uint(0))
        self._team_ended.wait()


def team_beside(threads: int) -> int:
    """Size of a team that raises libgomp's thread count above the cores. The thread that creates it is not counted."""
    return max(usable_cores() - threads, 0) + 2


def waited() -> int | None:
    """Nanoseconds that this process's threads have waited for a core so far; None if the system does not report it."""
    try:
        return sum(_waited_of(task) for task in TASKS.iterdir())
    except (OSError, ValueError, IndexError):
        return None


def _waited_of(task: Path) -> int:
    try:
        return int((task / "schedstat").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):  # normally, the thread has just ended
        if task.exists():  # the thread still runs, so the system has no scheduler statistics
            raise
        return 0


def _libgomp() -> ctypes.CDLL | None:
    """torch's OpenMP library if it is libgomp, otherwise None."""
    if sys.platform != "linux":
        return None
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
    return ctypes.CDLL(paths.pop()) if len(paths) == 1 else None
