"""Files and folders that appear complete or not at all.

Everything is written to a temporary sibling, synced to the disk, and renamed into place; a rename is atomic on one file
system. A crash leaves at most siblings named `*.tmp-*` (unfinished, or being deleted) and `*.old-*` (the previous
folder, moved aside while it is replaced). Functions raise OSError as the system does.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from posttrain.base.system import sync_file, sync_folder

LEFTOVER = re.compile(r"(?P<name>.+)\.(?P<kind>tmp|old)-\d+")
# A name made by `beside` ends with a process id and six digits; a shorter number or a date is a user's.
MADE_HERE = re.compile(r".+-(?!(19|20)\d{6}$)\d{7,}")


def put_file(path: Path, data: str | bytes) -> None:
    """Write `data` (a string as UTF-8) to `path`, replacing it atomically. On any exception the old file stays."""
    temporary = beside(path, "tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def put_folder(target: Path, write: Callable[[Path], None], replace: bool = True) -> None:
    """Make the folder `target` from what `write(temporary_folder)` writes to it.

    An existing `target` is replaced; without `replace` it stays (another process was faster). On an exception it stays,
    too, and the temporary folder is removed.
    """
    temporary = beside(target, "tmp")
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        sync_tree(temporary)
        if not replace:
            try:
                os.rename(temporary, target)
            except OSError:
                if not target.exists():
                    raise
        elif target.exists():
            old = beside(target, "old")
            os.rename(target, old)
            try:
                os.rename(temporary, target)
            except OSError:
                os.rename(old, target)
                raise
            sync_folder(target.parent)
            with contextlib.suppress(OSError):  # `target` is in place; leftovers are removed later
                take_away(old)
        else:
            os.rename(temporary, target)
        sync_folder(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def take_away(folder: Path) -> None:
    """Delete a folder so that a crash never leaves it in place with some of its files missing."""
    temporary = beside(folder, "tmp")
    os.rename(folder, temporary)
    shutil.rmtree(temporary)


def beside(path: Path, kind: str) -> Path:
    """A sibling of a name that no other process or thread uses."""
    return path.with_name(f"{path.name}.{kind}-{os.getpid()}{secrets.randbelow(10**6):06}")


def leftovers(folder: Path, name: str | None = None, ended: bool = True) -> list[Path]:
    """The leftovers of crashes directly in `folder`, of all targets or of that `name`.

    With `ended`, for a folder that also has users' own: only leftovers that `beside` named and whose process has ended,
    as far as this machine knows.
    """
    return [
        path
        for path in sorted(folder.iterdir())
        if (leftover := LEFTOVER.fullmatch(path.name))
        and (name is None or leftover["name"] == name)
        and not (ended and (not MADE_HERE.fullmatch(path.name) or _is_written(path.name)))
    ]


def _is_written(name: str) -> bool:
    """Whether the process named by a leftover is alive."""
    from psutil import pid_exists  # rarely needed

    try:
        return pid_exists(int(name.rpartition("-")[2][:-6]))  # the last digits are random
    except (ValueError, OverflowError):
        return False


def settle(folder: Path, name: str | None = None, ended: bool = True) -> list[str]:
    """Finish or undo what crashes left in `folder` (see `leftovers`); returns the names, removed or put back."""
    handled = []
    for path in leftovers(folder, name, ended):
        leftover = LEFTOVER.fullmatch(path.name)
        target = path.with_name(leftover["name"] if leftover else path.name)
        if leftover and leftover["kind"] == "old" and not os.path.lexists(target):
            os.rename(path, target)
        elif path.is_dir() and not path.is_symlink():
            take_away(path)
        else:
            path.unlink()
        handled.append(path.name)
    return handled


def sync_tree(folder: Path) -> None:
    """Force `folder` and everything under it to the disk."""
    for root, _, files in os.walk(folder):
        for name in files:
            sync_file(Path(root) / name)
        sync_folder(Path(root))
