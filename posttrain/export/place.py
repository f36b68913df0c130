"""Folders that commands make: complete or absent, and nothing of the user's is ever overwritten.

A folder of ours has a file that marks it, such as `export.json`; only such a folder is replaced, and only if asked.
"""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from posttrain.base.atomic import put_folder, settle
from posttrain.base.errors import RunError
from posttrain.base.words import in_units
from posttrain.runs.atomic import cannot_write

NO_ROOM = "nothing was written, and the model is intact: free some space, or give --output on another disk"


def refuse_target(target: Path, overwrite: bool, mark: str) -> None:
    """Raise RunError unless the folder may be written: it is absent or empty, or has the mark and is to be replaced."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not target.is_dir():
        raise RunError(f"{target} is a file: give a folder with --output")
    if not (target / mark).is_file():
        raise RunError(
            f"{target} is not empty and has no {mark}, so it is not ours and is not touched: give another --output"
        )
    if not overwrite:
        raise RunError(f"{target} exists: replace it with --overwrite, or give another folder with --output")


def put(target: Path, write: Callable[[Path], None], overwrite: bool, mark: str) -> None:
    """Make the folder from what `write` writes to a temporary one. Raises RunError if the disk refuses."""

    def readable(folder: Path) -> None:
        write(folder)
        for path in folder.glob("*.safetensors"):  # safetensors makes them readable by their owner only
            path.chmod((folder / mark).stat().st_mode)

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        settle(target.parent, target.name)  # of an export that was killed
        put_folder(target, readable, replace=overwrite)
    except (OSError, SafetensorError) as error:
        raise cannot_write(target, error, NO_ROOM) from error
    if not (target / mark).is_file():
        raise RunError(f"{target} has appeared meanwhile and is not touched: give another folder with --output")


def refuse_full_disk(target: Path, size: int) -> None:
    """Raise RunError if the weights do not fit on the disk."""
    place = next(parent for parent in target.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(place).free
    if free < size:
        full = OSError(errno.ENOSPC, f"{in_units(size)} needed, {in_units(free)} free")
        raise cannot_write(target, full, NO_ROOM)
