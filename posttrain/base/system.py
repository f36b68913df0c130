"""The operating system: what it has and where systems differ. Windows lacks the POSIX parts."""

import ipaddress
import os
import signal
import socket
import sys

try:
    import fcntl
except ImportError:  # Windows has no flock: users must not run two processes in one folder
    fcntl = None
try:
    import resource
except ImportError:  # Windows
    resource = None

IS_LINUX = sys.platform == "linux"  # with /proc, prctl, Landlock and namespaces
CAN_FORK = hasattr(os, "fork") and hasattr(socket, "send_fds")
BINARY = getattr(os, "O_BINARY", 0)  # without it `os.write` to a file makes each newline two characters on Windows
NOFOLLOW, NONBLOCK = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_NONBLOCK", 0)  # 0 on Windows
HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)  # a closed terminal


def usable_cores() -> int:
    """Cores that this process may use, or all cores where the system does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def leave_signals_to_parent() -> None:
    """Ignore Ctrl-C and a closed terminal: the parent handles both, and ends this process."""
    for number in (signal.SIGINT, HANGUP):
        if number is not None:
            signal.signal(number, signal.SIG_IGN)


def is_loopback(host: str) -> bool:
    """Whether a host name or address reaches only this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def sync_file(path: str | os.PathLike[str]) -> None:
    """Force a written file to the disk."""
    access = os.O_RDWR if os.name == "nt" else os.O_RDONLY  # Windows syncs what it may write
    descriptor = os.open(path, access | BINARY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Force a folder's list of files to the disk (not on Windows, which cannot open folders)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
