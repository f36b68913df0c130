"""The restrictions of a grading worker: memory, files, programs, the network, each if the platform supports it.

A worker calls `isolate` once, after its imports. It never fails: it returns the names of the active restrictions for
the parent to show. Linux: resource limits (setrlimit(2)), Landlock (landlock(7)) for files, programs and TCP, and an
own network namespace if an unprivileged process may create one. macOS: resource limits. Windows: none of these.
"""

import contextlib
import ctypes
import os
import signal
import struct

from posttrain.base.system import IS_LINUX, resource

MEMORY_BYTES = 1_000_000_000  # of address space, which bounds memory too
ROOM_BYTES = 500_000_000  # of address space for answers, where a rule's packages leave less of it
# Landlock's system call numbers are the same on every architecture.
CREATE_RULESET, RESTRICT_SELF = 444, 446
NO_NEW_PRIVS, PARENT_DEATH_SIGNAL = 38, 1
# The rights of each version of Landlock's interface except reading.
EXECUTE, WRITE_FILE, REMOVE_AND_MAKE, REFER, TRUNCATE, DEVICE_CONTROL = 1, 2, 0x1FF0, 1 << 13, 1 << 14, 1 << 15
TCP = 0b11  # bind, connect
NEW_USER, NEW_NET = 0x10000000, 0x40000000


def isolate(memory_bytes: int = MEMORY_BYTES) -> list[str]:
    """Drop rights that grading does not need; returns the names of the active restrictions."""
    in_force = []
    if IS_LINUX:
        if _no_network_namespace():
            in_force.append("no network")
        files, network = _landlock()
        if files:
            in_force.append("no writable files, no programs")
        if network and "no network" not in in_force:
            in_force.append("no TCP")
    return in_force + _limits(memory_bytes, files_open="no writable files, no programs" not in in_force)


def allow_cpu_seconds(seconds: float) -> None:
    """Limit this process's further CPU time: the last resort if its parent has died."""
    if resource is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        soft = int(used.ru_utime + used.ru_stime + seconds) + 2
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def die_with_parent() -> None:
    """Get killed when the thread that forked this process ends: an endless computation cannot check that itself.

    Linux. After `isolate`, whose new user namespace would undo it.
    """
    if IS_LINUX:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def _limits(memory_bytes: int, files_open: bool) -> list[str]:
    if resource is None:
        return []
    in_force = []
    memory_bytes = max(memory_bytes, _address_space() + ROOM_BYTES)
    # macOS accepts the limit and does not enforce it
    kept = f"at most {memory_bytes / 1e9:.2g} GB of memory" if IS_LINUX else ""
    wanted = [(resource.RLIMIT_AS, memory_bytes, kept)]
    wanted += [(resource.RLIMIT_CORE, 0, "")]
    wanted += [(resource.RLIMIT_FSIZE, 0, "no growing files")] if files_open else []
    for limit, value, name in wanted:
        # macOS refuses some of them
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (value, value))
            in_force += [name] if name else []
    return in_force


def _address_space() -> int:
    """Bytes of address space in use; 0 where the system does not say. Large libraries reserve more than they use."""
    try:
        with open("/proc/self/statm", encoding="ascii") as stream:
            return int(stream.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 0


def _no_network_namespace() -> bool:
    """Move into an empty network namespace. Containers often forbid it."""
    try:
        return ctypes.CDLL(None, use_errno=True).unshare(NEW_USER | NEW_NET) == 0
    except (OSError, AttributeError):
        return False


def _landlock() -> tuple[bool, bool]:
    """Deny changes to files, running programs, and TCP. Returns which are in force: (files and programs, TCP)."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        version = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), 1)
        if version < 1:
            return False, False
        rights = EXECUTE | WRITE_FILE | REMOVE_AND_MAKE
        rights |= (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
        rights |= DEVICE_CONTROL if version >= 5 else 0
        attributes = struct.pack("=Q", rights) + (struct.pack("=Q", TCP) if version >= 4 else b"")
        ruleset = libc.syscall(CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
        if ruleset < 0:
            return False, False
        done = libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and libc.syscall(RESTRICT_SELF, ruleset, 0) == 0
        os.close(ruleset)
        return done, done and version >= 4
    except (OSError, AttributeError):
        return False, False
