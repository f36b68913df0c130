"""Snapshots: whole copies of runs in `.snapshots` next to them, which pruning and deleting the run leave alone.

.snapshots/{run}-{time}/snapshot.json    the run's path from here, when, a text, SHA-256 of files without a manifest
.snapshots/{run}-{time}/run/             the copy
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from posttrain.base.atomic import LEFTOVER
from posttrain.base.errors import RunError
from posttrain.base.words import in_units
from posttrain.runs.atomic import remove_folder, write_folder
from posttrain.runs.checkpoint import MANIFEST, MODELS, file_hashes, list_checkpoints, verify
from posttrain.runs.files import load_json, save_json
from posttrain.runs.finding import SNAPSHOTS, root_of, size_of
from posttrain.runs.lock import LOCK
from posttrain.runs.managing.places import checked_name, folders_of, held, is_garbage
from posttrain.runs.provenance import now

FACTS, COPY, FORMAT = "snapshot.json", "run", 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot's facts. `run` is where the run was, and is restored to."""

    folder: Path
    run: Path
    made: str
    note: str
    size: int
    problem: str = ""


def home_of(target: Path) -> Path:
    """The folder that has a run's snapshots: the one that its whole run lies in."""
    return root_of(target).parent


def snapshots_of(root: Path) -> list[Path]:
    """The snapshot folders of the runs in a folder, oldest first, damaged ones included."""
    try:
        found = [path for path in (root / SNAPSHOTS).iterdir() if (path / COPY).is_dir()]
    except OSError:
        return []
    return sorted((path for path in found if not LEFTOVER.fullmatch(path.name)), key=lambda path: path.stat().st_mtime)


def read_snapshot(folder: Path) -> Snapshot:
    """A snapshot's facts; a damaged one has a `problem` and the place that its name suggests."""
    try:
        facts = _facts(folder)
    except RunError as error:
        return Snapshot(folder, folder.parent.parent / folder.name, "", "", size_of(folder), str(error))
    run = Path(os.path.normpath(folder.parent.parent / facts["run"]))
    return Snapshot(folder, run, facts["made"], facts["note"], size_of(folder))


def original_of(folder: Path) -> Path:
    """The place of the run whose copy a folder is; the folder itself if it is no snapshot's copy."""
    return read_snapshot(folder.parent).run.resolve() if is_copy(folder) else folder.resolve()


def is_copy(folder: Path) -> bool:
    """Whether a folder is a snapshot's copy, whose files are sealed."""
    return folder.name == COPY and (folder.parent / FACTS).is_file()


def take(target: Path, name: str = "", note: str = "") -> Path:
    """Copy a run, or a whole run; returns the snapshot's folder.

    Raises RunError if a process runs in it, the disk is too full, or the name is taken.
    """
    runs, home = folders_of(target), home_of(target)
    place = Path(os.path.relpath(target.resolve(), home))
    name = checked_name(name) if name else f"{'-'.join(place.parts)}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = home / SNAPSHOTS / name
    if os.path.lexists(folder):
        raise RunError(f"there is a snapshot {folder} already: give another --name")
    with held(runs):
        size, free = size_of(target), shutil.disk_usage(home).free
        if size > free:
            raise RunError(f"no space for a copy of {target}: it has {in_units(size)}, and {in_units(free)} are free")

        def write(temporary: Path) -> None:
            _copy(target, temporary / COPY)
            hashes = file_hashes(temporary / COPY, _unsealed(temporary / COPY))
            facts = {"format": FORMAT, "run": str(place), "made": now(), "note": note, "files": hashes}
            save_json(temporary / FACTS, facts)

        write_folder(folder, write)
    return folder


def restore(snapshot: Path, to: Path | None = None, replace: bool = False) -> Path:
    """Copy a snapshot back to where the run was, or to the folder `to`; returns that.

    Every file is verified first. Raises RunError if one is damaged; if there is something at the place, unless it is a
    run to `replace`; and if a process runs in that.
    """
    problems = problems_of(snapshot)
    if problems:
        raise RunError(f"{snapshot} is damaged ({'; '.join(problems[:5])}): nothing was restored")
    target = to or read_snapshot(snapshot).run
    there = os.path.lexists(target)
    if there and not replace:
        raise RunError(f"{target} exists: replace it with --replace, or restore under another name with --to")
    if there and target.is_symlink():
        raise RunError(f"{target} is a link: give another name with --to")
    size, free = size_of(snapshot), shutil.disk_usage(snapshot).free
    if size > free:
        raise RunError(f"no space to restore {snapshot}: it has {in_units(size)}, and {in_units(free)} are free")
    with held(folders_of(target) if there else []):
        write_folder(target, lambda temporary: _copy(snapshot / COPY, temporary))
    return target


def problems_of(snapshot: Path) -> list[str]:
    """The problems of a snapshot's files, by the manifests of checkpoints and models and its own list of the others."""
    try:
        facts = _facts(snapshot)
    except RunError as error:
        return [str(error)]
    copy = snapshot / COPY
    problems = [f"{folder.relative_to(copy)}: {what}" for folder in _sealed(copy) for what in verify(folder)]
    names = set(_unsealed(copy))
    problems += [f"{name}: missing" for name in facts["files"] if name not in names]
    problems += [f"{name}: not in {FACTS}" for name in names if name not in facts["files"]]
    now = file_hashes(copy, [name for name in facts["files"] if name in names])
    return problems + [f"{name}: SHA-256 differs" for name, found in now.items() if found != facts["files"][name]]


def drop(snapshot: Path) -> None:
    """Delete a snapshot."""
    if not (snapshot / COPY).is_dir():
        raise RunError(f"there is no snapshot {snapshot}")
    remove_folder(snapshot)


def _copy(source: Path, target: Path) -> None:
    """Copy a tree with its links as links, without locks and leftovers of crashes."""

    def ignored(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if name == LOCK or not _is_copied(Path(folder, name))]

    shutil.copytree(source, target, symlinks=True, ignore=ignored, dirs_exist_ok=True)


def _is_copied(path: Path) -> bool:
    """Whether this is a file, a folder or a link that is of use; pipes and sockets cannot be copied."""
    return not is_garbage(path) and (path.is_symlink() or path.is_dir() or path.is_file())


def _sealed(copy: Path) -> list[Path]:
    """The folders below a copy whose own manifest has the hashes of their files."""
    runs = {path.parent for path in copy.rglob("run.json")} | {copy}
    saved = [folder for run in runs for folder in [*list_checkpoints(run), *(run / name for name in MODELS)]]
    return sorted(folder for folder in saved if (folder / MANIFEST).is_file() and not folder.is_symlink())


def _unsealed(copy: Path) -> list[str]:
    return sorted(path.relative_to(copy).as_posix() for path in _files(copy, set(_sealed(copy))))


def _files(folder: Path, without: set[Path]) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            if path not in without:
                yield from _files(path, without)
        elif path.is_file() and not path.is_symlink():
            yield path


def _facts(snapshot: Path) -> dict[str, Any]:
    facts = load_json(snapshot / FACTS)
    kinds = {"run": str, "made": str, "note": str, "files": dict}
    fine = isinstance(facts, dict) and facts.get("format") == FORMAT
    fine = fine and all(isinstance(facts.get(name), kind) for name, kind in kinds.items())
    fine = fine and _is_time(facts["made"])
    if not fine or Path(facts["run"]).is_absolute() or ".." in Path(facts["run"]).parts:
        raise RunError(f"{snapshot / FACTS} is damaged or of another version of posttrain")
    return facts


def _is_time(text: str) -> bool:
    try:
        return bool(datetime.fromisoformat(text))
    except ValueError:
        return False
