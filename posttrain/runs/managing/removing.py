"""Deletion of runs, and of what a run no longer needs: old checkpoints, folders set aside, leftovers of crashes."""

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.base.errors import RunError
from posttrain.base.files import leftovers, settle
from posttrain.base.words import counted, in_units
from posttrain.runs.atomic import remove
from posttrain.runs.checkpoint import list_checkpoints, saved_step, verify
from posttrain.runs.finding import RUN_FILE, SNAPSHOTS, folders_of, held, is_garbage, is_group, root_of, size_of
from posttrain.runs.folder import refuse_occupied
from posttrain.runs.managing.copies import COPY
from posttrain.runs.managing.paths import Need, finish_renaming, needed, refuse_needed, within
from posttrain.runs.summary import RunSummary

ASIDE = ".set-aside"
ARCHIVE = re.compile(r"\.(?:tar|tar\.gz|tgz)\.tmp-\d+$")


@dataclass(frozen=True, slots=True)
class Item:
    """A folder or file to delete, and why."""

    path: Path
    size: int
    why: str


@dataclass(slots=True)
class Plan:
    """What pruning deletes from a run, and what it keeps because other runs need it."""

    run: Path
    items: list[Item] = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(item.size for item in self.items)


def described(target: Path) -> str:
    """Describe a run, a whole run or a snapshot in one line."""
    if (target / COPY).is_dir():
        return f"{target}: snapshot, {in_units(size_of(target))}"
    runs = folders_of(target)
    if runs != [target]:
        return f"{target}: {counted(len(runs), 'run')}, {in_units(size_of(target))}"
    run = RunSummary(target)
    return f"{target}: {run.method} of {run.model}, {run.state} at step {run.step}, {in_units(run.size)}"


def delete(target: Path, beside: Iterable[Path] = (), force: bool = False) -> None:
    """Delete the folder of a run, or of a whole run, with its content; links are removed, not followed.

    Raises RunError if a process runs in it, if it is a link or not a run, if it is a run with other runs in it, or,
    without `force`, if other runs need it.
    """
    if target.is_symlink():
        raise RunError(f"{target} is a link to {target.resolve()}: give that folder, or remove the link yourself")
    runs = folders_of(target)
    if not force:
        refuse_needed([target], beside, f"{target} is not deleted")
    if runs == [target]:
        refuse_occupied(target, overwrite=True)  # it may contain other runs
    with held(runs):
        remove(target)


def settle_runs(root: Path, targets: Iterable[Path] = ()) -> list[str]:
    """Finish or undo what interrupted commands left beside the runs in `root` or beside `targets`; returns a line each.
    Files that a running process is writing, or that cannot be changed, are kept."""
    done = []
    for folder in _homes(root, targets):
        with suppress(OSError):
            done += [f"{folder / name}: left by an interrupted command, settled" for name in settle(folder)]
            if folder.name == SNAPSHOTS and not any(folder.iterdir()):
                folder.rmdir()
            for run in folder.iterdir():
                with suppress(RunError):
                    if finish_renaming(run):
                        done.append(f"{run}: an interrupted renaming is finished")
    return done


def left_over(root: Path) -> list[Plan]:
    """What interrupted commands left beside the runs in a folder, and half-written archives in the current folder."""
    plans = []
    for folder in dict.fromkeys([*_homes(root), Path()]):
        own = folder != Path() or folder.resolve() == root.resolve()
        for path in leftovers(folder) if folder.is_dir() else []:
            if is_garbage(path) and (own or ARCHIVE.search(path.name)):
                plans.append(Plan(path, [Item(path, _size(path), "left by an interrupted command")]))
    return plans


def _homes(root: Path, targets: Iterable[Path] = ()) -> list[Path]:
    """The folders that directly contain runs, down to the stages of whole runs, and the folders of snapshots."""
    homes = [root, *(target.parent for target in targets)]
    for folder in homes[:]:
        with suppress(OSError):
            groups = [below for below in folder.iterdir() if _is_own_folder(below) and is_group(below)]
            homes += [folder / SNAPSHOTS, *groups]
            homes += [below for group in groups for below in group.iterdir() if _is_own_folder(below)]
    return [home for home in dict.fromkeys(homes) if home.is_dir() and not (home / RUN_FILE).is_file()]


def plan_prune(run: Path, keep_last: int = 1, keep_best: bool = False) -> Plan:
    """What pruning deletes from a run, whether or not other runs need it; nothing is deleted yet.

    The `keep_last` newest checkpoints are kept and, with `keep_best`, that of the step of `best/`. They are verified: a
    damaged one does not count as kept. Raises RunError if no checkpoint is intact, or if a process runs in the run.
    """
    with held([run]):
        checkpoints = list_checkpoints(run)
        kept, damaged = _kept(run, checkpoints, keep_last, keep_best)
        why = {0: "a checkpoint", 1: "older than the newest"}.get(keep_last, f"older than the {keep_last} newest")
        items = [
            Item(path, size_of(path), f"damaged: {damaged[path]}" if path in damaged else why)
            for path in checkpoints
            if path not in kept
        ]
        for path in sorted(run.iterdir()):
            if path.name.endswith(ASIDE) and _is_own_folder(path):
                items.append(Item(path, size_of(path), "set aside by a resume, never read again"))
            elif is_garbage(path):
                items.append(Item(path, _size(path), "left by a crash"))
    return Plan(run, items)


def spare_needed(plans: Sequence[Plan], beside: Iterable[Path] = ()) -> None:
    """Move what other runs need from the plans' `items` to their `needs`."""
    items = [item.path for plan in plans for item in plan.items]
    homes = [*beside, *dict.fromkeys(root_of(plan.run).parent for plan in plans)]
    needs = needed(items, homes) if items else []
    for plan in plans:
        by_item = [(item, [need for need in needs if within(need.path, {item.path.resolve()})]) for item in plan.items]
        plan.needs += [need for _, needing in by_item for need in needing]
        plan.items = [item for item, needing in by_item if not needing]


def _kept(run: Path, checkpoints: Sequence[Path], keep_last: int, keep_best: bool) -> tuple[set[Path], dict[Path, str]]:
    """The checkpoints that are kept, and the problems of the damaged ones among the newest."""
    kept: set[Path] = set()
    damaged: dict[Path, str] = {}
    if len(checkpoints) <= keep_last:
        return set(checkpoints), damaged
    for path in reversed(checkpoints):
        if len(kept) == keep_last:
            break
        if problems := verify(path):
            damaged[path] = "; ".join(problems)
        else:
            kept.add(path)
    if keep_last and not kept:
        raise RunError(
            f"{run} has no intact checkpoint ({checkpoints[-1].name}: {damaged[checkpoints[-1]]}), so none is deleted; "
            "--keep-last 0 deletes all"
        )
    if keep_best and (run / "best").is_dir():
        try:
            step = saved_step(run / "best")
        except RunError:  # best/ is damaged: keep every checkpoint that it may be a copy of
            return set(checkpoints), {}
        kept |= {path for path in checkpoints if path.name == f"checkpoint-{step}"}
    return kept, damaged


def prune(plan: Plan) -> int:
    """Delete a plan's items; returns their bytes. Raises RunError, and deletes nothing, if the run is in progress."""
    with held([plan.run] if (plan.run / RUN_FILE).is_file() else []):
        existing = [item for item in plan.items if os.path.lexists(item.path)]
        for item in existing:
            remove(item.path)
    return sum(item.size for item in existing)


def _is_own_folder(path: Path) -> bool:
    """Whether this is a folder, not a link to one."""
    return path.is_dir() and not path.is_symlink()


def _size(path: Path) -> int:
    return size_of(path) if _is_own_folder(path) else path.lstat().st_size
