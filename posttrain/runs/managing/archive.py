"""A run as one archive (.tar.gz or .tar), complete or absent."""

import os
import tarfile
from dataclasses import dataclass
from pathlib import Path

from posttrain.base.atomic import beside, settle
from posttrain.base.errors import RunError
from posttrain.runs.atomic import cannot_write
from posttrain.runs.checkpoint import MANIFEST
from posttrain.runs.files import is_regular
from posttrain.runs.lock import LOCK
from posttrain.runs.managing.needs import BASE
from posttrain.runs.managing.places import folders_of, held, is_garbage

KINDS = {".tar.gz": "w:gz", ".tgz": "w:gz", ".tar": "w"}
LEVEL = 1  # of gzip: weights hardly get smaller, so a higher level only takes time


@dataclass(slots=True)
class Archived:
    """What went into an archive."""

    path: Path
    files: int = 0
    size: int = 0  # of the files, in bytes


def pack_run(target: Path, path: Path, checkpoints: bool = True, overwrite: bool = False) -> Archived:
    """Write a run, or a whole run, to an archive whose only folder has the run's name.

    Without `checkpoints`, the folders that only a resume reads stay out. Links inside the run stay links; the base of
    adapters, a link to a model outside, goes in as files. Raises RunError if a process runs in it, for another kind of
    archive, and for a file that exists, without `overwrite`.
    """
    runs = folders_of(target)
    kind = next((mode for suffix, mode in KINDS.items() if path.name.endswith(suffix)), None)
    if kind is None:
        raise RunError(f"{path} is no archive that can be written: give a name that ends in {', '.join(KINDS)}")
    if os.path.lexists(path) and not overwrite:
        raise RunError(f"{path} exists: replace it with --overwrite, or give another file with --output")
    if path.resolve().is_relative_to(target.resolve()):
        raise RunError(f"{path} lies in the run itself: give another place with --output")
    temporary = beside(path, "tmp")
    done = Archived(path)
    options = {"compresslevel": LEVEL} if kind == "w:gz" else {}
    with held(runs):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            settle(path.parent, path.name)  # of an export that was killed
            with open(temporary, "wb") as file:
                with tarfile.open(fileobj=file, mode=kind, **options) as archive:  # pyright: ignore[reportArgumentType, reportCallIssue]
                    _add(archive, target, target.resolve().name, target.resolve(), checkpoints, done)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            raise cannot_write(path, error, "free some, or give another place with --output") from error
        finally:
            temporary.unlink(missing_ok=True)
    return done


def _add(archive: tarfile.TarFile, path: Path, name: str, root: Path, checkpoints: bool, done: Archived) -> None:
    """Add a path under a name, folders with their content in the order of names."""
    outside = path.is_symlink() and path.name == BASE and _is_model_beside(path.resolve(), root)
    if path.is_symlink() and not outside:
        archive.add(path, name, recursive=False, filter=_nobodys)
    elif path.is_dir():
        archive.addfile(_nobodys(archive.gettarinfo(str(path.resolve()), name)))
        for entry in sorted(path.iterdir()):
            if entry.name != LOCK and not is_garbage(entry) and (checkpoints or not _is_for_resume(entry)):
                _add(archive, entry, f"{name}/{entry.name}", root, checkpoints, done)
    elif path.is_file():
        archive.add(path, name, recursive=False, filter=_nobodys)
        done.files += 1
        done.size += path.stat().st_size


def _is_model_beside(found: Path, root: Path) -> bool:
    """Whether a link out of a run leads to a model in the folder that the run lies in, such as an earlier stage's."""
    beside = found.is_relative_to(root.parent) and not found.is_relative_to(root)
    return beside and any(is_regular(found / name) for name in (MANIFEST, "config.json", "adapter_config.json"))


def _nobodys(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without the name and number of its owner here, which mean nothing elsewhere."""
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def _is_for_resume(path: Path) -> bool:
    return path.is_dir() and (path.name.startswith("checkpoint-") or path.name.endswith(".set-aside"))
