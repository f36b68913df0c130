"""Measures available and used memory, and releases unused memory."""

import contextlib
import ctypes
import functools
import gc
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.base.system import resource

if TYPE_CHECKING:  # grading workers use this module and must not import torch
    import torch

# Files with a container's memory limit and use, in versions 2 and 1 of Linux's control groups.
CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
PROCESS = Path("/proc/self")
M_MMAP_THRESHOLD = -3  # malloc.h


def release_memory() -> None:
    """Release unused memory: reference cycles, torch's cache on a GPU, and the free pages that glibc keeps."""
    import torch

    gc.collect()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return_free_pages()


def return_free_pages() -> None:
    """Release the free pages of main memory that glibc keeps. Call it between two kinds of work, because tensors of the
    second seldom fit the holes that tensors of the first leave."""
    if libc := _glibc():
        libc.malloc_trim(0)


def return_tensors_at_once() -> None:
    """With glibc, return the memory of freed tensors of 256 KiB or more to the system from now on.

    By default glibc keeps blocks of up to 32 MiB in its heap. A new tensor often does not fit the hole that another one
    left, and the process holds a third to a half more memory than it needs at its peak. On a CPU, work takes about a
    fifth more time with this setting, because the system clears new pages.
    """
    if libc := _glibc():
        libc.mallopt(M_MMAP_THRESHOLD, 256 * 1024)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:  # another C library
        return None
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None


def memory_in_use() -> int:
    """Bytes of main memory that this process holds now (on systems other than Linux, its peak)."""
    held = _status("VmRSS")
    return peak_of_process() if held is None else held


def address_space() -> int:
    """Bytes of address space in use; 0 if the system does not report it. Large libraries reserve more than they use."""
    return _status("VmSize") or 0


def peak_memory(device: "torch.device") -> int:
    """Peak memory of this process in bytes since `reset_peak_memory`: GPU memory if `device` is a GPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return peak_of_process()


def peak_of_process() -> int:
    """Peak main memory of this process in bytes; on Linux since `reset_peak_memory`, 0 on Windows.

    On Linux it does not come from getrusage: a process inherits ru_maxrss from its parent, so a worker of a large
    training process would seem large from the start.
    """
    peak = _status("VmHWM")
    if peak is not None or resource is None:
        return peak or 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory(device: "torch.device") -> None:
    """Reset the value of `peak_memory`, so that one model's peak does not count for the next model."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):  # not Linux, or a sandbox that forbids it
            (PROCESS / "clear_refs").write_text("5")


def _status(field: str) -> int | None:
    """A size in /proc/self/status, in bytes; None if the file cannot be read or lacks the field."""
    try:
        return _facts(PROCESS / "status")[field] * 1024
    except (OSError, KeyError):
        return None


def available_memory(device: "torch.device") -> int | None:
    """Free memory of `device` in bytes, within the limit of a container; None if unknown."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    try:
        free = _facts(Path("/proc/meminfo"))["MemAvailable"] * 1024
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
    """The numbers in a file by name, from lines such as `name 12` and `name: 12 kB`."""
    return {name: int(number) for name, number in re.findall(r"^(\w+):?\s+(\d+)\b", path.read_text(), re.MULTILINE)}
