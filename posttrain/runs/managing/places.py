"""Run folders as the targets of commands: what a folder stands for, its locks, and names for new ones."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from posttrain.base.atomic import LEFTOVER
from posttrain.base.errors import RunError
from posttrain.base.terminal import CONTROLS, escaped
from posttrain.base.words import SAVED, counted
from posttrain.runs.finding import RUN_FILE, find_runs, is_whole_run, runs_below
from posttrain.runs.lock import FolderLock

NAME = re.compile(rf"(?![.-])[^/\\{CONTROLS}\ud800-\udfff]+")
NAME_BYTES = 200
SWEEP = "sweep.json"


@contextmanager
def held(runs: Iterable[Path]) -> Iterator[None]:
    """Holds the locks of these run folders, so that none in progress is touched. Raises RunError if one is."""
    with ExitStack() as locks:
        for run in runs:
            locks.callback(FolderLock(run).release)
        yield


def folders_of(target: Path) -> list[Path]:
    """The runs that a folder stands for: itself, or those of a whole run or a sweep. Else RunError."""
    if (target / RUN_FILE).is_file():
        return [target]
    if is_group(target) and (runs := find_runs(target)):
        return runs
    raise RunError(f"{target} is not a run folder: it has no run.json")


def is_group(target: Path) -> bool:
    """Whether this is the folder of a whole run, with its models and stages, or of a sweep, with its trials."""
    return is_whole_run(target) or (target / SWEEP).is_file()


def checked_name(name: str) -> str:
    """A name for a folder next to the others. Raises RunError for paths and for names that posttrain uses itself."""
    shown = escaped(name)
    if not NAME.fullmatch(name) or name != name.strip() or len(name.encode()) > NAME_BYTES:
        raise RunError(
            f"'{shown}' cannot name a run: give a name without / and control characters, of at most {NAME_BYTES} "
            "bytes, that does not begin with a space, . or -"
        )
    if LEFTOVER.fullmatch(name) or SAVED.fullmatch(name) or name.endswith(".set-aside"):
        raise RunError(f"'{shown}' cannot name a run: posttrain uses such names for parts of a run")
    return name


def is_garbage(path: Path) -> bool:
    """Whether this was left by a crash, and is no folder moved aside whose successor never came."""
    leftover = LEFTOVER.fullmatch(path.name)
    return leftover is not None and (leftover["kind"] == "tmp" or os.path.lexists(path.with_name(leftover["name"])))


def short(path: Path) -> str:
    """A path from here, if it lies below the current folder."""
    place, here = path.absolute(), Path.cwd()
    return str(place.relative_to(here)) if place.is_relative_to(here) else str(path)


def named(run: str, output_dir: Path, whole: bool = False) -> Path:
    """The run folder that a user names, by path or by name below `output_dir`; with `whole` also that of a whole run.

    Raises RunError, which lists the existing runs.
    """
    places = [Path(run).expanduser(), output_dir / run]
    for place in places:
        if (place / RUN_FILE).is_file() or (whole and is_group(place) and find_runs(place)):
            return place
    for place in places:
        if place.is_dir() and (below := runs_below(place)):
            raise RunError(f"{place} contains {counted(len(below), 'run')}: name one, such as {below[-1]}")
    if places[0].is_dir():
        raise RunError(f"{run} is not a run folder: it has no run.json")
    known = [os.path.relpath(path, output_dir) for path in runs_below(output_dir)]
    raise RunError(f"there is no run {run}; in {output_dir} there are {', '.join(known[-8:]) or 'none'}")
