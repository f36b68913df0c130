"""Copies of runs: archives (.tar.gz or .tar), and snapshots, which pruning or deleting the run does not affect.

.snapshots/{run}-{time}/snapshot.json    the run's relative path, time, note, SHA-256 of the files without a manifest
.snapshots/{run}-{time}/run/             the copy
"""

import os
import shutil
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from posttrain.base.errors import RunError
from posttrain.base.files import LEFTOVER, beside, settle
from posttrain.base.system import sync
from posttrain.base.words import in_units
from posttrain.runs.atomic import write_folder, writing
from posttrain.runs.checkpoint import MANIFEST, MODELS, file_hashes, list_checkpoints, verify
from posttrain.runs.files import is_regular, ready_to_write, save_json
from posttrain.runs.finding import BASE, SNAPSHOTS, checked_name, folders_of, held, is_garbage, root_of, size_of
from posttrain.runs.folder import FORMAT, LOCK, load_facts
from posttrain.runs.provenance import now

FACTS, COPY = "snapshot.json", "run"
KINDS = {".tar.gz": "w:gz", ".tgz": "w:gz", ".tar": "w"}  # ending of an archive's name -> mode of tarfile
LEVEL = 1  # compression level of gzip: weights hardly compress, so a higher level only takes time


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot's facts. `run` is the path that the run had, and to which it is restored."""

    folder: Path
    run: Path
    made: str
    note: str
    size: int
    problem: str = ""


def snapshots_of(root: Path) -> list[Path]:
    """The snapshot folders of the runs in a folder, oldest first, damaged ones included."""
    folders = (path.parent for path in (root / SNAPSHOTS).glob(f"*/{COPY}") if path.is_dir())
    whole = (folder for folder in folders if not LEFTOVER.fullmatch(folder.name))
    return sorted(whole, key=lambda folder: folder.stat().st_mtime)


def read_snapshot(folder: Path) -> Snapshot:
    """A snapshot's facts. If it is damaged, `problem` says why, and the path `run` is derived from its name."""
    try:
        facts = _facts(folder)
    except RunError as error:
        return Snapshot(folder, folder.parent.parent / folder.name, "", "", size_of(folder), str(error))
    run = Path(os.path.normpath(folder.parent.parent / facts["run"]))
    return Snapshot(folder, run, facts["made"], facts["note"], size_of(folder))


def original_of(folder: Path) -> Path:
    """The path of the original run, if the folder is a snapshot's copy; otherwise the folder itself."""
    return read_snapshot(folder.parent).run.resolve() if is_copy(folder) else folder.resolve()


def is_copy(folder: Path) -> bool:
    """Whether a folder is a snapshot's copy, whose files must not change."""
    return folder.name == COPY and (folder.parent / FACTS).is_file()


def take(target: Path, name: str = "", note: str = "") -> Path:
    """Copy a run, or a whole run; returns the snapshot's folder. Raises RunError if a process runs in it, the disk is
    too full, or the name is taken."""
    runs, home = folders_of(target), root_of(target).parent
    relative = Path(os.path.relpath(target.resolve(), home))
    name = checked_name(name) if name else f"{'-'.join(relative.parts)}-{datetime.now():%Y%m%d-%H%M%S}"
    folder = home / SNAPSHOTS / name
    if os.path.lexists(folder):
        raise RunError(f"the snapshot {folder} already exists: give another --name")
    with held(runs):
        size, free = size_of(target), shutil.disk_usage(home).free
        if size > free:
            raise RunError(f"no space for a copy of {target}: it takes {in_units(size)}, but {in_units(free)} are free")

        def write(temporary: Path) -> None:
            _copy(target, temporary / COPY)
            hashes = file_hashes(temporary / COPY, _unsealed(temporary / COPY))
            facts = {"format": FORMAT, "run": str(relative), "made": now(), "note": note, "files": hashes}
            save_json(temporary / FACTS, facts)

        write_folder(folder, write)
    return folder


def restore(snapshot: Path, to: Path | None = None, replace: bool = False) -> Path:
    """Copy a snapshot back to where the run was, or to the folder `to`; returns that folder.

    Every file is verified first. Raises RunError if a file is damaged, if the folder exists (unless it is a run and
    `replace` is set), or if a process runs in it.
    """
    if problems := problems_of(snapshot):
        raise RunError(f"{snapshot} is damaged ({'; '.join(problems[:5])}): nothing was restored")
    target = to or read_snapshot(snapshot).run
    exists = os.path.lexists(target)
    if exists and not replace:
        raise RunError(f"{target} exists: replace it with --replace, or restore under another name with --to")
    if exists and target.is_symlink():
        raise RunError(f"{target} is a link: give another name with --to")
    size, free = size_of(snapshot), shutil.disk_usage(snapshot).free
    if size > free:
        raise RunError(f"no space to restore {snapshot}: it takes {in_units(size)}, but {in_units(free)} are free")
    with held(folders_of(target) if exists else []):
        write_folder(target, lambda temporary: _copy(snapshot / COPY, temporary))
    return target


def problems_of(snapshot: Path) -> list[str]:
    """The problems of a snapshot's files, checked against the manifests of saved models and its list of other files."""
    try:
        facts = _facts(snapshot)
    except RunError as error:
        return [str(error)]
    copy = snapshot / COPY
    problems = [f"{folder.relative_to(copy)}: {what}" for folder in _sealed(copy) for what in verify(folder)]
    names = set(_unsealed(copy))
    problems += [f"{name}: missing" for name in facts["files"] if name not in names]
    problems += [f"{name}: not in {FACTS}" for name in names if name not in facts["files"]]
    hashes = file_hashes(copy, [name for name in facts["files"] if name in names])
    return problems + [f"{name}: SHA-256 differs" for name, value in hashes.items() if value != facts["files"][name]]


def _copy(source: Path, target: Path) -> None:
    """Copy a tree, with links as links, without locks, leftovers of crashes, pipes and sockets."""

    def ignored(folder: str, names: list[str]) -> list[str]:
        paths = [Path(folder, name) for name in names]
        special = [path for path in paths if not (path.is_symlink() or path.is_dir() or path.is_file())]
        return [path.name for path in paths if path.name == LOCK or is_garbage(path) or path in special]

    shutil.copytree(source, target, symlinks=True, ignore=ignored, dirs_exist_ok=True)


def _sealed(copy: Path) -> list[Path]:
    """The folders below a copy that have a manifest with the hashes of their files."""
    runs = {path.parent for path in copy.rglob("run.json")} | {copy}
    saved = [folder for run in runs for folder in [*list_checkpoints(run), *(run / name for name in MODELS)]]
    return sorted(folder for folder in saved if (folder / MANIFEST).is_file() and not folder.is_symlink())


def _unsealed(copy: Path) -> list[str]:
    """The relative names of the files below a copy that no manifest covers."""
    sealed = set(_sealed(copy))
    files = [path for path in copy.rglob("*") if is_regular(path) and sealed.isdisjoint(path.parents)]
    return sorted(path.relative_to(copy).as_posix() for path in files)


def _facts(snapshot: Path) -> dict[str, Any]:
    facts = load_facts(snapshot / FACTS, {"run": str, "made": str, "note": str, "files": dict}, "made")
    if Path(facts["run"]).is_absolute() or ".." in Path(facts["run"]).parts:
        raise RunError(f"{snapshot / FACTS} is damaged or from another version of posttrain")
    return facts


def pack_run(target: Path, path: Path, checkpoints: bool = True, overwrite: bool = False) -> list[int]:
    """Write a run, or a whole run, to an archive whose only folder has the run's name; returns the bytes of each file.

    Without `checkpoints`, folders that only a resume reads are omitted. Links are archived as links, except the link
    `base` to a model beside the run, which is archived as files. Raises RunError if a process runs in the run, for
    another kind of archive, and for an existing file without `overwrite`.
    """
    runs = folders_of(target)
    kind = next((mode for suffix, mode in KINDS.items() if path.name.endswith(suffix)), None)
    if kind is None:
        raise RunError(f"{path} is not a supported kind of archive: give a name that ends in {', '.join(KINDS)}")
    if path.resolve().is_relative_to(target.resolve()):
        raise RunError(f"{path} is inside the run: give another path with --output")
    ready_to_write(path, overwrite=overwrite)
    temporary, home = beside(path, "tmp"), target.resolve()  # `target` itself may be a link
    options = {"compresslevel": LEVEL} if kind == "w:gz" else {}
    with held(runs), writing(path, full="free some space, or give another path with --output"):
        try:
            settle(path.parent, path.name)  # removes what a killed export left
            with tarfile.open(temporary, kind, **options) as archive:  # pyright: ignore[reportArgumentType, reportCallIssue]
                sizes = list(_add(archive, home, home.name, home, checkpoints))
            sync(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return sizes


def _add(archive: tarfile.TarFile, path: Path, name: str, root: Path, checkpoints: bool) -> Iterator[int]:
    """Add a path under a name; folders with their content, sorted by name. Yields the bytes of each file."""
    outside = path.is_symlink() and path.name == BASE and _is_model_beside(path.resolve(), root)
    if path.is_symlink() and not outside:
        archive.add(path, name, recursive=False, filter=_without_owner)
    elif path.is_dir():
        archive.addfile(_without_owner(archive.gettarinfo(str(path.resolve()), name)))
        for entry in sorted(path.iterdir()):
            for_resume = entry.name.startswith("checkpoint-") or entry.name.endswith(".set-aside")
            left_out = for_resume and entry.is_dir() and not checkpoints
            if entry.name != LOCK and not is_garbage(entry) and not left_out:
                yield from _add(archive, entry, f"{name}/{entry.name}", root, checkpoints)
    elif path.is_file():
        archive.add(path, name, recursive=False, filter=_without_owner)
        yield path.stat().st_size


def _is_model_beside(folder: Path, root: Path) -> bool:
    """Whether a link out of a run leads to a model beside the run, such as an earlier stage's."""
    outside = folder.is_relative_to(root.parent) and not folder.is_relative_to(root)
    return outside and any(is_regular(folder / name) for name in (MANIFEST, "config.json", "adapter_config.json"))


def _without_owner(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """The entry without its owner, who means nothing on another machine."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info
