"""Deleting runs, and what a run no longer needs: checkpoints by rule, folders set aside, leftovers of crashes."""

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.base.atomic import leftovers, settle
from posttrain.base.errors import RunError
from posttrain.runs.atomic import remove_folder
from posttrain.runs.checkpoint import list_checkpoints, saved_step, verify
from posttrain.runs.finding import RUN_FILE, SNAPSHOTS, remove_run, root_of, size_of
from posttrain.runs.managing.needs import Need, needed, refuse_needed, within
from posttrain.runs.managing.places import folders_of, held, is_garbage, is_group
from posttrain.runs.managing.renaming import finish_renaming

ASIDE = ".set-aside"
ARCHIVE = re.compile(r"\.(?:tar|tar\.gz|tgz)\.tmp-\d+$")


@dataclass(frozen=True, slots=True)
class Item:
    """A folder or file that goes, and why."""

    path: Path
    size: int
    why: str


@dataclass(slots=True)
class Plan:
    """What pruning removes from a run, and what other runs need of what the rule would remove."""

    run: Path
    items: list[Item] = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(item.size for item in self.items)


@dataclass(frozen=True, slots=True)
class Rule:
    """Which checkpoints stay: the newest intact ones, and with `keep_best` that of the step of `best/`."""

    keep_last: int = 1
    keep_best: bool = False

    def __post_init__(self) -> None:
        if self.keep_last < 0:
            raise RunError(f"--keep-last {self.keep_last}: give 0 or more")


def delete(target: Path, beside: Iterable[Path] = (), force: bool = False) -> None:
    """Delete a run folder, or that of a whole run, with its content; links are removed, not followed.

    Raises RunError if a process runs in it, it is a link or no run, or, without `force`, if other runs need it.
    """
    if target.is_symlink():
        raise RunError(f"{target} is a link to {target.resolve()}: give that folder, or remove the link yourself")
    runs = folders_of(target)
    if not force:
        refuse_needed([target], beside, f"{target} is not deleted")
    if runs == [target]:
        remove_run(target)
        return
    with held(runs):
        remove_folder(target)


def settle_runs(root: Path, places: Iterable[Path] = ()) -> list[str]:
    """Finish or undo what interrupted commands left beside the runs in a folder, or beside `places`: a line each.

    What a living process writes stays, and so does what cannot be changed.
    """
    done = []
    for folder in _homes(root, places):
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
    """What interrupted commands left to delete beside the runs in a folder, and archives of runs in the current one."""
    plans = []
    for folder in dict.fromkeys([*_homes(root), Path()]):
        found = leftovers(folder) if folder.is_dir() else []
        own = folder != Path() or folder.resolve() == root.resolve()
        for path in found:
            if is_garbage(path) and (own or ARCHIVE.search(path.name)):
                plans.append(Plan(path, [Item(path, _size(path), "left by an interrupted command")]))
    return plans


def _homes(root: Path, places: Iterable[Path] = ()) -> list[Path]:
    """The folders that have runs directly in them: down to the stages of whole runs, and those of snapshots."""
    found = [root, *(place.parent for place in places)]
    for folder in found[:]:
        with suppress(OSError):
            below = [one for one in folder.iterdir() if one.is_dir() and not one.is_symlink()]
            groups = [one for one in below if is_group(one)]
            found += [folder / SNAPSHOTS, *groups]
            found += [one for group in groups for one in group.iterdir() if one.is_dir() and not one.is_symlink()]
    return [one for one in dict.fromkeys(found) if one.is_dir() and not (one / RUN_FILE).is_file()]


def plan_prune(run: Path, rule: Rule) -> Plan:
    """What the rule removes from a run, needed by others or not. Deletes nothing.

    Kept checkpoints are verified: a damaged one does not count as one that is kept. Raises RunError if no checkpoint is
    intact, or a process runs in the run.
    """
    with held([run]):
        return Plan(run, _items(run, rule))


def spare_needed(plans: Sequence[Plan], beside: Iterable[Path] = ()) -> None:
    """Take out of the plans what other runs need, and list it in their `needs`."""
    items = [item.path for plan in plans for item in plan.items]
    places = [*beside, *dict.fromkeys(root_of(plan.run).parent for plan in plans)]
    needs = needed(items, places) if items else []
    for plan in plans:
        kept = []
        for item in plan.items:
            wanted = [need for need in needs if within(need.place, {item.path.resolve()})]
            plan.needs += wanted
            kept += [] if wanted else [item]
        plan.items = kept


def _items(run: Path, rule: Rule) -> list[Item]:
    checkpoints = list_checkpoints(run)
    kept, damaged = _kept(run, checkpoints, rule)
    older = {0: "a checkpoint", 1: "older than the newest"}.get(
        rule.keep_last, f"older than the {rule.keep_last} newest"
    )
    items = [
        Item(path, size_of(path), f"damaged: {damaged[path]}" if path in damaged else older)
        for path in checkpoints
        if path not in kept
    ]
    for path in sorted(run.iterdir()):
        if path.name.endswith(ASIDE) and path.is_dir() and not path.is_symlink():
            items.append(Item(path, size_of(path), "set aside by a resume, never read again"))
        elif is_garbage(path):
            items.append(Item(path, _size(path), "left by a crash"))
    return items


def _kept(run: Path, checkpoints: Sequence[Path], rule: Rule) -> tuple[set[Path], dict[Path, str]]:
    """The checkpoints that the rule keeps, and the damaged ones that were found on the way."""
    kept: set[Path] = set()
    damaged: dict[Path, str] = {}
    if len(checkpoints) <= rule.keep_last:
        return set(checkpoints), damaged
    for path in reversed(checkpoints):
        if len(kept) == rule.keep_last:
            break
        if problems := verify(path):
            damaged[path] = "; ".join(problems)
        else:
            kept.add(path)
    if rule.keep_last and not kept:
        raise RunError(
            f"{run} has no intact checkpoint ({checkpoints[-1].name}: {damaged[checkpoints[-1]]}), so none is deleted; "
            "--keep-last 0 deletes all"
        )
    if rule.keep_best and (run / "best").is_dir():
        try:
            step = saved_step(run / "best")
        except RunError:  # best/ is damaged: the checkpoints are all there is of it
            return set(checkpoints), {}
        kept |= {path for path in checkpoints if path.name == f"checkpoint-{step}"}
    return kept, damaged


def prune(plan: Plan) -> int:
    """Delete what a plan lists; returns the bytes. Raises RunError, and deletes nothing, if the run is in progress."""
    freed = 0
    with held([plan.run] if (plan.run / RUN_FILE).is_file() else []):
        for item in plan.items:
            if not os.path.lexists(item.path):
                continue
            if item.path.is_dir() and not item.path.is_symlink():
                remove_folder(item.path)
            else:
                _unlink(item.path)
            freed += item.size
    return freed


def _unlink(path: Path) -> None:
    try:
        path.unlink()
    except OSError as error:
        raise RunError(f"cannot delete {path}: {error.strerror}") from error


def _size(path: Path) -> int:
    return size_of(path) if path.is_dir() and not path.is_symlink() else path.lstat().st_size
