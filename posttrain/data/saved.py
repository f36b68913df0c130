"""Data sets saved for offline use: a file of rows for each split, and a manifest of the source.

The folder appears by one rename, so it is complete or absent; each file's hash is verified when it is used.
"""

import gzip
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.base.atomic import put_folder, settle
from posttrain.base.errors import DataError
from posttrain.base.progress import progress
from posttrain.data.readers import Record

MANIFEST = "posttrain-data.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class SavedSplit:
    """What was written for one split."""

    name: str
    rows: int
    malformed: int
    bytes: int


def save(
    folder: Path, splits: Iterable[tuple[str, Iterable[Record], str | None]], facts: dict[str, Any]
) -> list[SavedSplit]:
    """Write splits (name, rows, revision on the hub) and a manifest with the `facts` to a new folder.

    Raises DataError if the folder exists or cannot be written, or a split has no readable row.
    """
    if folder.exists():
        raise DataError(f"{folder} already exists: choose another folder, or remove it first")
    done: list[SavedSplit] = []

    def write(work: Path) -> None:
        entries = {}
        for name, records, revision in splits:
            file = work / f"{name}.jsonl.gz"
            rows, malformed = _write(file, progress(records, f"saving {name}"))
            if not rows:
                raise DataError(f"the split {name} has no readable row")
            done.append(SavedSplit(name, rows, malformed, file.stat().st_size))
            entries[name] = {"file": file.name, "rows": rows, "revision": revision, "sha256": _sha256(file)}
        manifest = {"format": FORMAT, **facts, "splits": entries}
        (work / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        if folder.exists():  # created meanwhile: `put_folder` would replace it
            raise DataError(f"{folder} already exists: choose another folder, or remove it first")

    try:
        if folder.absolute().parent.is_dir():
            settle(folder.absolute().parent, folder.name)  # of a command that was killed
        put_folder(folder.absolute(), write)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror or error}") from error
    return done


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder made by `save`; None for any other folder. Raises DataError for a damaged one."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}): save the data set again") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{path} is damaged or of another version of posttrain: save the data set again")
    return manifest


def saved_files(folder: Path, split: str) -> tuple[Path, ...] | None:
    """The file of a split in a folder made by `save`, verified; None for any other folder."""
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    splits = manifest["splits"]
    if split not in splits:
        raise DataError(f"{folder} has no split {split!r}: it has {', '.join(splits)}")
    path = folder / splits[split]["file"]
    if not path.is_file():
        raise DataError(f"{path} is missing: save the data set again")
    if _sha256(path) != splits[split]["sha256"]:
        raise DataError(f"{path} is damaged or was changed since it was saved: save the data set again")
    return (path,)


def _write(file: Path, records: Iterable[Record]) -> tuple[int, int]:
    rows = malformed = 0
    with file.open("wb") as raw, gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as stream:
        for record in records:  # the same rows give the same bytes
            if record.value is None:
                malformed += 1
                continue
            stream.write(json.dumps(record.value, default=str).encode() + b"\n")
            rows += 1
    return rows, malformed


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
