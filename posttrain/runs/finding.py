"""Finds runs and their models on disk, tells what a folder is, locks run folders, and checks names for new runs.
Reads no more of a run than this requires."""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from difflib import get_close_matches
from pathlib import Path

from posttrain.base.errors import RunError
from posttrain.base.files import LEFTOVER, final_model, is_model, without_model
from posttrain.base.terminal import CONTROLS, escaped
from posttrain.base.words import SAVED, counted, model_name
from posttrain.runs.checkpoint import newest_complete
from posttrain.runs.folder import FolderLock

RUN_FILE = "run.json"
SNAPSHOTS = ".snapshots"  # folder next to the runs, with full copies of some of them
SWEEP = "sweep.json"  # file in the folder of a sweep's trials
BASE = "base"  # link in a run folder to the base model of its adapters
LEVELS = 3  # levels of folders that are searched below the folder of runs
NAME = re.compile(rf"(?![.-])[^/\\{CONTROLS}\ud800-\udfff]+")
NAME_BYTES = 200


def find_runs(output_dir: Path) -> list[Path]:
    """The run folders at `output_dir` or up to three levels below it ({name}/{model}/{stage}), sorted by path."""
    return sorted(map(Path, _measured(output_dir)))


def measured_runs(output_dir: Path) -> list[tuple[Path, int, float]]:
    """The run folders of `find_runs` without leftovers of an interrupted deletion, oldest first, each with its bytes
    and the time when its run.json last changed (Unix, s)."""
    runs = [(Path(folder), *facts) for folder, facts in _measured(output_dir).items()]
    return sorted((run for run in runs if not LEFTOVER.fullmatch(run[0].name)), key=lambda run: (run[2], run[0]))


def runs_below(output_dir: Path) -> list[Path]:
    """The run folders of `measured_runs`, oldest first."""
    return [folder for folder, _, _ in measured_runs(output_dir)]


def _measured(output_dir: Path) -> dict[str, tuple[int, float]]:
    """The bytes and the time of run.json for each run folder, in one pass over all files. Links are not followed;
    snapshots and folders that cannot be read or are removed meanwhile are skipped."""
    runs: dict[str, tuple[int, float]] = {}

    def measure(folder: str, depth: int) -> int:
        """The bytes below a folder; the runs in it, down to LEVELS, are added to `runs`."""
        size, changed = 0, None
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    size += measure(entry.path, depth + 1) if entry.name != SNAPSHOTS else 0
                    continue
                with suppress(OSError):
                    facts = entry.stat(follow_symlinks=False)
                    size += facts.st_size
                    if entry.name == RUN_FILE and entry.is_file(follow_symlinks=False):
                        changed = facts.st_mtime
            if changed is not None and depth <= LEVELS:
                runs[folder] = size, changed
        return size

    measure(os.fspath(output_dir), 0)
    return runs


def links_in(folder: Path) -> list[str]:
    """The links in a folder, each with its target (`old -> /data/old`); only `base` of a run is ever followed."""
    return [f"{path.name} -> {os.readlink(path)}" for path in sorted(folder.iterdir()) if path.is_symlink()]


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder; a link counts only its own bytes."""
    return sum(os.lstat(Path(root, name)).st_size for root, _, names in os.walk(folder) for name in names)


def newest_model(folder: Path) -> Path:
    """The folder itself if it contains a model; for a run, its final model, otherwise its newest checkpoint. Raises
    RunError if there is none."""
    final = Path(final_model(str(folder)))
    if final != folder or is_model(folder):
        return final
    if not (folder / RUN_FILE).is_file():
        raise RunError(f"{folder} {without_model(folder)}")
    return newest_complete(folder)[0]


def locate_model(model: str) -> tuple[str, str, Path]:
    """The path of a model (the newest of a run) or of recorded completions, its name, and the default folder of its
    evaluation."""
    folder = Path(model).expanduser()
    if folder.is_file():
        return str(folder), folder.stem, Path("evaluations") / folder.stem
    saved = newest_model(folder) if folder.is_dir() else None
    if saved is not None and (saved.parent / RUN_FILE).is_file():
        return str(saved), f"{saved.parent.name}/{saved.name}", saved.parent / "evaluation" / saved.name
    name = model_name(model)
    return str(saved or model), name, Path("evaluations") / name


def is_inside(path: Path, folder: Path) -> bool:
    """Whether the folder `path` is inside the whole run to which the run folder `folder` belongs."""
    return path.is_dir() and path.resolve().is_relative_to(root_of(folder))


def root_of(folder: Path) -> Path:
    """The folder of the whole run, with all models and stages; for a single run, the run folder itself."""
    here = folder.resolve()
    return next((at for at in here.parents[:2] if is_whole_run(at)), here)


def is_whole_run(folder: Path) -> bool:
    """Whether this is the folder of several runs, not that of a single run or of a checkpoint in one."""
    inside_one = any((at / RUN_FILE).exists() for at in (folder, folder.absolute().parent))
    return (folder / "config.yaml").is_file() and not inside_one


@contextmanager
def held(runs: Iterable[Path]) -> Iterator[None]:
    """Hold the locks of these run folders until the block ends. Raises RunError if a process runs in one."""
    with ExitStack() as locks:
        for run in runs:
            locks.callback(FolderLock(run).release)
        yield


def folders_of(target: Path) -> list[Path]:
    """The run folders of `target`: itself, or the runs of a whole run or a sweep. Raises RunError if there are none."""
    if (target / RUN_FILE).is_file():
        return [target]
    if is_group(target) and (runs := find_runs(target)):
        return runs
    raise RunError(f"{target} is not a run folder: it has no run.json")


def is_group(target: Path) -> bool:
    """Whether this is the folder of a whole run, with its models and stages, or of a sweep, with its trials."""
    return is_whole_run(target) or (target / SWEEP).is_file()


def checked_name(name: str) -> str:
    """The name, if it can name a new run. Raises RunError for paths and for names that posttrain uses itself."""
    shown = escaped(name)
    if not NAME.fullmatch(name) or name != name.strip() or len(name.encode()) > NAME_BYTES:
        raise RunError(
            f"'{shown}' cannot name a run: give a name without / or control characters, of at most {NAME_BYTES} "
            "bytes, that does not begin with a space, . or -"
        )
    if LEFTOVER.fullmatch(name) or SAVED.fullmatch(name) or name.endswith(".set-aside"):
        raise RunError(f"'{shown}' cannot name a run: posttrain uses such names for parts of a run")
    return name


def is_garbage(path: Path) -> bool:
    """Whether this is a crash's leftover to delete. A folder moved aside is not, if its replacement is missing."""
    leftover = LEFTOVER.fullmatch(path.name)
    return leftover is not None and (leftover["kind"] == "tmp" or os.path.lexists(path.with_name(leftover["name"])))


def short(path: Path) -> str:
    """The path, relative to the current folder if it lies below that folder."""
    absolute, here = path.absolute(), Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(path)


def named(run: str, output_dir: Path, whole: bool = False) -> Path:
    """The run folder that a user names, by path or by name below `output_dir`; with `whole`, also a whole run or sweep.
    Raises RunError, with a list of the existing runs, if there is none."""
    folders = [Path(run).expanduser(), output_dir / run]
    for folder in folders:
        if (folder / RUN_FILE).is_file() or (whole and is_group(folder) and find_runs(folder)):
            return folder
    for folder in folders:
        if folder.is_dir() and (below := runs_below(folder)):
            raise RunError(f"{folder} contains {counted(len(below), 'run')}: name one, such as {below[-1]}")
    if folders[0].is_dir():
        raise RunError(f"{run} is not a run folder: it has no run.json")
    known = [os.path.relpath(path, output_dir) for path in runs_below(output_dir)]
    near = [name for name in known if run in name][-3:] or get_close_matches(run, known, n=3, cutoff=0.5)
    if near:
        raise RunError(f"there is no run {run}; did you mean {' or '.join(near)}?")
    raise RunError(f"there is no run {run}; in {output_dir} there are {', '.join(known[-8:]) or 'none'}")
