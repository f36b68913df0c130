"""Runs on disk: read, found and removed, whatever their state."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import RunError
from posttrain.store.folder import check_run_folder, empty, read_facts, refuse_occupied
from posttrain.store.lock import LOCK, FolderLock, is_locked
from posttrain.store.metrics import last_metrics


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What `posttrain runs` tells about a folder, read without opening the run."""

    folder: Path
    state: str  # as in run.json; `killed` for one that says running while no process holds it
    reason: str | None
    started: str
    ended: str | None
    last: dict[str, Any]  # the last line of metrics.jsonl, or nothing
    provenance: dict[str, Any]
    counters: dict[str, Any]


def read_run(folder: Path | str) -> RunInfo:
    """What is known about one run; RunError when it is no run folder or is damaged."""
    folder = Path(folder)
    check_run_folder(folder)
    facts = read_facts(folder)
    state = facts["state"]
    if state == "running" and is_locked(folder) is False:
        state = "killed"
    return RunInfo(
        folder=folder,
        state=state,
        reason=facts["reason"],
        started=facts["started"],
        ended=facts["ended"],
        last=last_metrics(folder),
        provenance=facts["provenance"],
        counters=facts["counters"],
    )


def find_runs(output_dir: Path) -> list[Path]:
    """The run folders at `output_dir` or up to three levels below it ({name}/{model}/{stage}), sorted by path."""
    found = []
    for at, folders, files in os.walk(output_dir, followlinks=True):  # passes over what a run at work takes away
        folder = Path(at)
        if "run.json" in files:
            found.append(folder)
        if len(folder.relative_to(output_dir).parts) == 3:
            folders.clear()
    return sorted(found)


def remove_run(folder: Path) -> None:
    """Delete a run folder with all that is in it; links in it are removed, not followed.

    Raises RunError when it is no run folder, holds other runs, is a link itself, or a process runs in it.
    """
    if folder.is_symlink():
        raise RunError(f"{folder} is a link to {folder.resolve()}: give that folder, or remove the link yourself")
    check_run_folder(folder)
    refuse_occupied(folder, overwrite=True)
    lock = FolderLock(folder)
    try:
        empty(folder)
        (folder / LOCK).unlink(missing_ok=True)
        folder.rmdir()
    except OSError as error:
        raise RunError(f"cannot delete {folder}: {error.strerror}") from error
    finally:
        lock.release()
