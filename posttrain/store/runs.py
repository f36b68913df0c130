"""Finding, reading and removing runs on disk, in any state."""

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
    """The facts of a run folder for `posttrain runs`, read without opening the run."""

    folder: Path
    state: str  # as in run.json; `killed` if it says running and no process holds the lock
    reason: str | None
    started: str
    ended: str | None
    last: dict[str, Any]  # the last line of metrics.jsonl, or empty
    provenance: dict[str, Any]
    counters: dict[str, Any]


def read_run(folder: Path | str) -> RunInfo:
    """The facts of one run; RunError if it is not a run folder or is damaged."""
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
    for at, folders, files in os.walk(output_dir, followlinks=True):  # tolerates files that an active run removes
        folder = Path(at)
        if "run.json" in files:
            found.append(folder)
        if len(folder.relative_to(output_dir).parts) == 3:
            folders.clear()
    return sorted(found)


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
        empty(folder)
        (folder / LOCK).unlink(missing_ok=True)
        folder.rmdir()
    except OSError as error:
        raise RunError(f"cannot delete {folder}: {error.strerror}") from error
    finally:
        lock.release()
