"""Atomic writes: files and folders that appear complete or not at all, and errors that name the remedy."""

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from posttrain.base.errors import RunError
from posttrain.base.files import LEFTOVER, put_file, put_folder, settle, take_away
from posttrain.base.system import BINARY, NOFOLLOW, NONBLOCK

# Errors of a full disk: no space, quota reached, file size limit reached.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_file(path: Path, data: str | bytes) -> None:
    """Write `data` (a string as UTF-8) to `path`, replacing it atomically.
    Raises RunError if it cannot be written. The previous content is then unchanged, as it is after Ctrl-C."""
    with writing(path):
        put_file(path, data)


def write_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Make or replace the folder `target`; `write(temporary_folder)` writes its content.

    Raises RunError if the disk refuses. After this or any exception of `write`, the previous `target` is unchanged and
    the temporary folder is removed.
    """
    with writing(target):
        put_folder(target, write)


def remove(path: Path) -> None:
    """Delete a file, a link, or a folder, of which even a crash leaves no part in its place. Raises RunError if the
    system refuses."""
    with refusing(f"cannot delete {path}"):
        take_away(path)


def recover(folder: Path) -> list[str]:
    """Remove or restore the leftovers of crashes directly in `folder`; returns their names.
    Call this only while no other process writes in `folder` (a `Run` holds its lock)."""
    with refusing(f"cannot delete {folder}"):
        return settle(folder, ended=False)


GO_ON = (
    "what was saved before is intact. Free some disk space (or raise the quota), then continue with --resume; "
    "checkpoint.save_total_limit limits the number of checkpoints."
)


@contextmanager
def writing(path: Path, full: str = GO_ON) -> Iterator[None]:
    """A context in which a failed write becomes a RunError; `full` is the remedy if the disk is full."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # the temporary folder of `write_folder` means nothing to the user
        path = Path(*(made["name"] if (made := LEFTOVER.fullmatch(part)) else part for part in path.parts))
        if _number(error) in FULL:
            raise RunError(f"no space to write {path} ({_reason(error)}): {full}") from error
        raise RunError(f"cannot write {path}: {_reason(error)}") from error


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """A context in which an error of the system becomes a RunError, such as `cannot delete x: Permission denied`."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{what}: {_reason(error)}") from error


def _number(error: OSError | SafetensorError) -> int | None:
    """The system's error number; safetensors gives it only in its message."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    match = re.search(r"os error (\d+)|code: (\d+)", str(error))
    return int(match[1] or match[2]) if match else None


def _reason(error: OSError | SafetensorError) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    number = _number(error)
    return os.strerror(number) if number is not None else str(error)


def open_itself(path: Path, flags: int, links: bool = False) -> int:
    """Open a regular file in a run folder, which may come from a stranger; returns the descriptor. Raises OSError for a
    link, which may lead anywhere (unless `links` is set), and for a pipe or a device, on which reading may never end.
    """
    link = not links and path.is_symlink()
    descriptor = -1 if link else os.open(path, flags | BINARY | NONBLOCK | (0 if links else NOFOLLOW), 0o666)
    if link or not stat.S_ISREG(os.fstat(descriptor).st_mode):
        if not link:
            os.close(descriptor)
        raise OSError(errno.EINVAL, f"it is a {'link' if link else 'pipe, folder or device'}, not a file", str(path))
    return descriptor


class LineFile:
    """A file written line by line, without a buffer: once `write` has returned, a crash of the process loses nothing.
    Methods raise OSError; the constructor raises it also if the path is not a regular file (`open_itself`)."""

    def __init__(self, path: Path):
        self._descriptor = open_itself(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, line: str) -> None:
        data = (line + "\n").encode(errors="backslashreplace")
        while data:
            data = data[os.write(self._descriptor, data) :]

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
