"""A lock that lets only one process use a run folder."""

import errno
import logging
import os
import platform
import stat
import time
from pathlib import Path

from posttrain.base.errors import RunError
from posttrain.base.system import BINARY, NOFOLLOW, NONBLOCK, fcntl
from posttrain.runs.atomic import cannot_write

LOCK = ".lock"
SAFE = BINARY | NOFOLLOW | NONBLOCK  # a stranger's run may have a link or a pipe in its place
PATIENCE_S = 0.5  # `is_locked` in another process holds the lock for an instant
UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # some network file systems


class FolderLock:
    """Locks a folder for this process until `release` or the end of the process.

    Raises RunError if another process holds the lock.
    """

    def __init__(self, folder: Path):
        path = folder / LOCK
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | SAFE, 0o666)
        except OSError as error:
            raise cannot_write(path, error) from error
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            self.release()
            raise RunError(f"{path} is no file: remove it")
        deadline = time.monotonic() + PATIENCE_S
        while _lock(self._descriptor) is False:
            if time.monotonic() > deadline:
                holder = os.read(self._descriptor, 300).decode(errors="replace") or "another process"
                self.release()
                raise RunError(f"{folder} is in use by {holder}: wait for it to end, or stop it first")
            time.sleep(0.02)
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"process {os.getpid()} on {platform.node()}".encode())

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_locked(folder: Path) -> bool | None:
    """Whether a process (this one included) runs in the folder; None if it cannot be known."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | SAFE)
    except FileNotFoundError:
        return False
    except OSError:  # another user's
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False  # no lock of ours
        taken = _lock(descriptor)
    finally:
        os.close(descriptor)
    return None if taken is None else not taken


def _lock(descriptor: int) -> bool | None:
    """Try to take the lock: True if taken, False if another process holds it, None if locks are not supported."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        logging.getLogger("posttrain").warning(
            "this file system does not support locks: run only one process in a folder"
        )
        return None
    return True
