"""Checks of folders before a run starts in them: is it a run folder, is it worth keeping; and emptying one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.base.atomic import LEFTOVER
from posttrain.base.errors import RunError
from posttrain.runs.checkpoint import saved_step
from posttrain.runs.files import load_json
from posttrain.runs.lock import LOCK
from posttrain.runs.metrics import last_metrics
from posttrain.runs.notes import NAME as NOTES

if TYPE_CHECKING:  # lists of runs need no settings
    from posttrain.config import Stage

FORMAT = 1
# What run.json has, and of which type.
FACTS = {
    "state": str,
    "reason": str | None,
    "started": str,
    "ended": str | None,
    "resumes": list,
    "provenance": dict,
    "counters": dict,
}
# The files that a run may have before its first step.
FIRST_FILES = (
    LOCK,
    NOTES,
    "run.json",
    "config.yaml",
    "metrics.jsonl",
    "training.log",
    "tracking",
    "base",
    "best",
    "evaluation",
    "rollouts.sqlite",
    "rollouts.sqlite-wal",
    "rollouts.sqlite-shm",
    "rollouts.sqlite-journal",
)


def check_run_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise RunError(f"there is no run folder {folder}")
    if not (folder / "run.json").is_file():
        raise RunError(f"{folder} is not a run folder: it has no run.json")


def read_facts(folder: Path) -> dict[str, Any]:
    facts = load_json(folder / "run.json")
    if not isinstance(facts, dict) or facts.get("format") != FORMAT or not _are_facts(facts):
        raise RunError(f"{folder / 'run.json'} is damaged or of another version of posttrain")
    return facts


def _are_facts(facts: dict[str, Any]) -> bool:
    if not all(name in facts and isinstance(facts[name], kind) for name, kind in FACTS.items()):
        return False
    try:
        times = [datetime.fromisoformat(time) for time in (facts["started"], facts["ended"]) if time is not None]
        # Between these years there is such a time in every zone.
        return all(time.tzinfo is not None and 1 < time.year < 9999 for time in times)
    except ValueError:
        return False


def never_stepped(folder: Path) -> bool:
    """Whether a run folder has nothing worth keeping: no checkpoint, logged step, stored completion or user file.

    A run that ended before its first step has, at most, the results of the evaluation before training: its metrics, its
    completions, and the initial model in `best`.
    """
    if not (folder / "run.json").is_file():
        return False
    names = {path.name for path in folder.iterdir()}
    leftovers = [found for name in names if (found := LEFTOVER.fullmatch(name))]
    half_written = {
        found[0] for found in leftovers if found["kind"] == "tmp"
    }  # a leftover of the other kind is complete
    if names - half_written - set(FIRST_FILES):
        return False
    try:
        if "best" in names and saved_step(folder / "best") > 0:
            return False
        if read_facts(folder)["state"] == "finished" or last_metrics(folder).get("step", 0) > 0:
            return False
        return not _has_rollouts(folder)
    except RunError:  # damaged, so not empty
        return False


def _has_rollouts(folder: Path) -> bool:
    """Whether completions of a step are stored, which happens before its line of metrics."""
    file = folder / "rollouts.sqlite"
    if not file.is_file() or file.stat().st_size == 0:
        return False
    from posttrain.runs.stored_rollouts import StoredRun  # imports numpy, which listing runs does not need

    with StoredRun(folder) as stored:
        return bool(stored.steps())


def refuse_occupied(folder: Path, overwrite: bool) -> None:
    """Raise RunError unless a run may start in `folder`."""
    starting = re.compile(rf"{re.escape(LOCK)}|run\.json\.tmp-\d+")  # of a run killed at its very start
    entries = [path.name for path in folder.iterdir() if not starting.fullmatch(path.name)] if folder.exists() else []
    if not entries:
        return
    nested = sorted(path.parent.name for path in folder.glob("*/run.json"))
    if nested:
        raise RunError(
            f"{folder} contains other runs ({', '.join(nested)}): choose another name, or delete the folder yourself"
        )
    if "run.json" not in entries:
        raise RunError(
            f"{folder} is not empty and not a run folder (no run.json), so posttrain will not touch it: "
            "choose another name or output_dir"
        )
    if not overwrite and not never_stepped(folder):
        raise RunError(
            f"{folder} has a run already: resume it (--resume), replace it (--overwrite), or choose another name"
        )


def empty(folder: Path, keep: Collection[str] = ()) -> None:
    """Delete everything in a run folder but its lock and the names to keep.

    run.json goes last, so that after a crash the folder is still recognised.
    """
    entries = sorted(folder.iterdir(), key=lambda path: path.name == "run.json")
    try:
        for path in entries:
            if path.name == LOCK or path.name in keep:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    except OSError as error:
        raise RunError(f"cannot empty {folder}: {error}") from error


def run_folder(root: Path, stage: Stage, model: int, several_stages: bool) -> Path:
    """The folder in which a model is trained at a stage."""
    if len(stage.config.models) > 1:
        root = root / stage.config.models[model].folder_name
    return root / stage.name if several_stages else root
