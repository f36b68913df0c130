"""Finding, reading and removing runs on disk, in any state."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.base.errors import RunError
from posttrain.runs.atomic import remove_folder
from posttrain.runs.folder import check_run_folder, read_facts, refuse_occupied
from posttrain.runs.lock import FolderLock, is_locked
from posttrain.runs.metrics import last_metrics

RUN_FILE = "run.json"
SNAPSHOTS = ".snapshots"  # next to the runs: whole copies of some
LEVELS = 3  # of folders below the folder of runs


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The facts of a run folder for `posttrain runs`, read without opening the run."""

    folder: Path
    state: str  # as in run.json; `killed` if it says running and no process holds the lock
    reason: str | None
    started: str
    ended: str | None
    last: dict[str, Any]  # the last line of metrics.jsonl, or empty
    provenance: dict[str, Any]
    counters: dict[str, Any]
    checks: dict[str, Any] | None  # what each check found; None if the run's version did not record it


def read_run(folder: Path | str) -> RunInfo:
    """The facts of one run; RunError if it is not a run folder or is damaged."""
    folder = Path(folder)
    check_run_folder(folder)
    facts = read_facts(folder)
    return RunInfo(
        folder=folder,
        state=state_of(folder, facts["state"]),
        reason=facts["reason"],
        started=facts["started"],
        ended=facts["ended"],
        last=last_metrics(folder),
        provenance=facts["provenance"],
        counters=facts["counters"],
        checks=checks if isinstance(checks := facts.get("checks"), dict) else None,
    )


def state_of(folder: Path, recorded: str) -> str:
    """The state in run.json, or `killed` if that is running and no process holds the lock."""
    return "killed" if recorded == "running" and is_locked(folder) is False else recorded


def find_runs(output_dir: Path) -> list[Path]:
    """The run folders at `output_dir` or up to three levels below it ({name}/{model}/{stage}), sorted by path."""
    return sorted(Path(folder) for folder in measured_runs(output_dir))


def measured_runs(output_dir: Path) -> dict[str, tuple[int, float]]:
    """The run folders as in `find_runs`, each with its bytes and the time when its run.json last changed.

    One pass over all files. A link counts as a link, and is not followed. What cannot be read, or is removed meanwhile,
    is passed over, and so are snapshots.
    """
    found: dict[str, tuple[int, float]] = {}
    _measure(os.fspath(output_dir), 0, found)
    return found


def _measure(folder: str, depth: int, found: dict[str, tuple[int, float]]) -> int:
    """The bytes below a folder; adds the runs in it down to LEVELS to `found`."""
    size, changed = 0, None
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name != SNAPSHOTS:
                        size += _measure(entry.path, depth + 1, found)
                    continue
                try:
                    facts = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                size += facts.st_size
                if entry.name == RUN_FILE and entry.is_file(follow_symlinks=False):
                    changed = facts.st_mtime
    except OSError:
        return size
    if changed is not None and depth <= LEVELS:
        found[folder] = size, changed
    return size


def remove_run(folder: Path) -> None:
    """Delete a run folder and its content; links in it are removed, not followed.

    Raises RunError if it is not a run folder, contains other runs, is a link itself, or a process runs in it.
    """
    if folder.is_symlink():
        raise RunError(f"{folder} is a link to {folder.resolve()}: give that folder, or remove the link yourself")
    check_run_folder(folder)
    refuse_occupied(folder, overwrite=True)
    lock = FolderLock(folder)
    try:
        remove_folder(folder)
    finally:
        lock.release()


def is_inside(place: Path, folder: Path) -> bool:
    """Whether `place` is inside the whole run that the run folder `folder` belongs to."""
    return place.is_dir() and place.resolve().is_relative_to(root_of(folder))


def root_of(folder: Path) -> Path:
    """The folder of the whole run, with all models and stages; or the run folder itself, for a single run."""
    here = folder.resolve()
    return next((at for at in here.parents[:2] if is_whole_run(at)), here)


def is_whole_run(folder: Path) -> bool:
    """Whether this is the folder of several runs, and not of a single run or of a checkpoint in one."""
    inside_one = any((at / "run.json").exists() for at in (folder, folder.absolute().parent))
    return (folder / "config.yaml").is_file() and not inside_one
