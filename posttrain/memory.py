"""How much memory there is and is used, and giving it back."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # grading workers read their memory here, and must not import torch
    import torch

try:
    import resource
except ImportError:  # Windows
    resource = None

# Where a container's limit is told, in Linux's second and first version of control groups.
CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
PROCESS = Path("/proc/self")
M_MMAP_THRESHOLD = -3  # malloc.h


def release_memory() -> None:
    """Give back what no object needs any more: cycles, torch's cache on a GPU, and the free pages that glibc keeps."""
    import torch

    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return_free_pages()


def return_free_pages() -> None:
    """Give back the free pages of main memory that glibc keeps. For between two kinds of work: the tensors of the one
    seldom fit the holes that the other's have left."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def return_tensors_at_once() -> None:
    """From now on, main memory that a tensor of 256 KiB or more leaves goes back to the system, where glibc is in use.

    Else glibc keeps blocks of up to 32 MiB in its heap, where a tensor often does not fit the hole that another has
    left, and a third to a half more is held than any moment needs. The price is about a fifth of the time on a CPU,
    as pages that come anew are cleared.
    """
    libc = _glibc()
    if libc is not None:
        libc.mallopt(M_MMAP_THRESHOLD, 256 * 1024)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:  # another C library
        return None
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None


def memory_in_use() -> int:
    """Bytes of main memory that this process holds now (elsewhere than on Linux, its peak)."""
    held = _status("VmRSS")
    return peak_of_process() if held is None else held


def peak_memory(device: torch.device) -> int:
    """Bytes: the most this process has held since `reset_peak_memory`, on the GPU where it computes on one."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return peak_of_process()


def peak_of_process() -> int:
    """Bytes of main memory: the most this process has held, on Linux since `reset_peak_memory`; 0 on Windows.

    On Linux not by getrusage, whose ru_maxrss a process inherits from the one that started it: a worker of a large
    training process would seem large from its first moment.
    """
    peak = _status("VmHWM")
    if peak is not None:
        return peak
    if resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory(device: torch.device) -> None:
    """Begin `peak_memory` anew, so that one model's peak is not counted as the next one's."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # no Linux, or a sandbox that forbids it
            (PROCESS / "clear_refs").write_text("5")


def _status(field: str) -> int | None:
    """A size in /proc/self/status, in bytes; None where there is no such file."""
    try:
        lines = (PROCESS / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)


def available_memory(device: torch.device) -> int | None:
    """Bytes that could still be taken on `device`, within the limit of a container; None where nobody says."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    try:
        free = _facts(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    except (OSError, KeyError):
        return None
    for folder, limit_of, used_of, droppable in CGROUPS:
        try:
            limit = (folder / limit_of).read_text().strip()
            used = int((folder / used_of).read_text()) - _facts(folder / "memory.stat")[droppable]
        except (OSError, KeyError):
            continue
        if limit != "max":
            free = min(free, int(limit) - used)
    return free


def _facts(path: Path) -> dict[str, int]:
    """The numbers of a file of lines such as `name 12`."""
    return {line.split()[0]: int(line.split()[1]) for line in path.read_text().splitlines()}
