"""The operating system: available features, and differences between systems. Windows lacks the POSIX features."""

import ipaddress
import os
import signal
import socket
import sys

try:
    import fcntl
except ImportError:  # Windows has no flock: there, users must not run two processes in one folder
    fcntl = None
try:
    import resource
except ImportError:  # Windows
    resource = None

IS_LINUX = sys.platform == "linux"  # has /proc, prctl, Landlock and namespaces
CAN_FORK = hasattr(os, "fork") and hasattr(socket, "send_fds")
BINARY = getattr(os, "O_BINARY", 0)  # without this flag, `os.write` on Windows writes each newline as two characters
NOFOLLOW, NONBLOCK = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_NONBLOCK", 0)  # 0 on Windows
HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)  # sent when the terminal is closed


def usable_cores() -> int:
    """The number of cores that this process may use; all cores if the system does not report it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def leave_signals_to_parent() -> None:
    """Ignore SIGINT (Ctrl-C) and SIGHUP (a closed terminal): the parent handles both and ends this process."""
    for number in (signal.SIGINT, HANGUP):
        if number is not None:
            signal.signal(number, signal.SIG_IGN)


def is_loopback(host: str) -> bool:
    """Whether a host name or address is a loopback address, which only this machine can reach."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def sync(path: str | os.PathLike[str]) -> None:
    """Sync a file, or a folder's list of files, to the disk. Does nothing for a folder on Windows, which opens none."""
    is_windows = os.name == "nt"  # which syncs only files that are open for writing
    if is_windows and os.path.isdir(path):
        return
    descriptor = os.open(path, (os.O_RDWR if is_windows else os.O_RDONLY) | BINARY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
