"""Files and folders that appear whole or not at all.

Everything is written to a temporary sibling, synced to the disk, and renamed into place; a rename is atomic on one file
system. A crash leaves at most siblings named `*.tmp-*` (half written, or half deleted) and `*.old-*` (the previous
folder, moved aside for the instant of its replacement); `recover` puts the second kind back and removes the first.
"""

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from posttrain.errors import RunError

# What a full disk says: no space, quota reached, file size limit reached.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LEFTOVER = re.compile(r"(?P<name>.+)\.(?P<kind>tmp|old)-\d+")


def write_file(path: Path, data: str | bytes) -> None:
    """Write `data` (text as UTF-8) to `path`, replacing it atomically.

    Raises RunError when it cannot be written; then, as after Ctrl-C, the previous content is untouched.
    """
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise cannot_write(path, error) from error
        raise


def write_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Make the folder `target` from what `write(temporary_folder)` puts there, replacing an existing one.

    Raises RunError when the disk refuses; then, as after any exception of `write`, the previous `target` is untouched
    and the temporary folder is gone.
    """
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    try:
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
        write(temporary)
        sync_tree(temporary)
        _put_in_place(temporary, target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise cannot_write(target, error) from error
        raise


def _put_in_place(temporary: Path, target: Path) -> None:
    if target.exists():
        old = target.with_name(f"{target.name}.old-{os.getpid()}")
        os.rename(target, old)
        try:
            os.rename(temporary, target)
        except OSError:
            os.rename(old, target)
            raise
        sync_folder(target.parent)
        remove_folder(old)
    else:
        os.rename(temporary, target)
        sync_folder(target.parent)


def remove_folder(folder: Path) -> None:
    """Delete a folder so that a crash halfway never leaves it there with some of its files missing.

    Raises RunError when the system refuses.
    """
    temporary = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    try:
        os.rename(folder, temporary)
        shutil.rmtree(temporary)
    except OSError as error:
        raise RunError(f"cannot delete {folder}: {_reason(error)}") from error


def recover(folder: Path) -> list[str]:
    """Clear what earlier crashes left directly in `folder`; returns the names of the siblings removed or put back.

    Call it only while no other process writes there (a `Run` holds its lock).
    """
    handled = []
    for path in sorted(folder.iterdir()):
        leftover = LEFTOVER.fullmatch(path.name)
        if leftover is None:
            continue
        target = path.with_name(leftover["name"])
        if leftover["kind"] == "old" and not target.exists():
            os.rename(path, target)
        elif path.is_dir() and not path.is_symlink():
            remove_folder(path)
        else:
            path.unlink()
        handled.append(path.name)
    return handled


def sync_tree(folder: Path) -> None:
    """Force every file and folder under `folder` (and itself) to the disk."""
    for root, _, files in os.walk(folder):
        for name in files:
            with open(Path(root) / name, "rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(root))


def sync_folder(folder: Path) -> None:
    """Force a folder's list of names to the disk (where the system lets folders be opened, that is, not on Windows)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(path: Path, error: OSError | SafetensorError) -> RunError:
    """The message for a failed write, with the remedy when the disk is full."""
    if _number(error) in FULL:
        return RunError(
            f"no space to write {path} ({_reason(error)}): what was saved before is intact. "
            "Free some disk space (or raise the quota), then go on with --resume; "
            "checkpoint.save_total_limit bounds how many checkpoints are kept."
        )
    return RunError(f"cannot write {path}: {_reason(error)}")


def _number(error: OSError | SafetensorError) -> int | None:
    """The system's error number; safetensors gives it only inside its message."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"os error (\d+)|code: (\d+)", str(error))
    return int(found[1] or found[2]) if found else None


def _reason(error: OSError | SafetensorError) -> str:
    number = _number(error)
    return os.strerror(number) if number is not None else str(error)


class LineFile:
    """A file that grows line by line, unbuffered: what `write` returned from, a crash of the process does not lose.

    Methods raise OSError as the system does.
    """

    def __init__(self, path: Path):
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

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
