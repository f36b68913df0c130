"""Cores, memory, what the platform lacks, and folders: space, speed, renames, locks, SQLite."""

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path

from posttrain.base import system
from posttrain.base.atomic import put_file, put_folder
from posttrain.base.words import in_units
from posttrain.doctor.checks import Broken, Found
from posttrain.runs.folder import FolderLock, is_locked

LEAST_FREE_BYTES = 5_000_000_000  # below this a checkpoint or a model may not fit
SLOW_BYTES_PER_SECOND = 20e6
BLOCK, BLOCKS = 1 << 20, 64
# Files with a container's share of the cores, in versions 2 and 1 of Linux's control groups.
QUOTAS = (("/sys/fs/cgroup/cpu.max",), ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"))
# A second process that wants to write while the first one does: locks within one process would prove nothing.
RIVAL = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=0)
print(connection.execute("SELECT count(*) FROM t").fetchone()[0])
try:
    connection.execute("BEGIN IMMEDIATE")
    print("both write")
except sqlite3.OperationalError as error:
    print(error)
"""


def usable_cores() -> int:
    """Cores that this process may use: those of its affinity, within a container's share."""
    there = system.usable_cores()
    for files in QUOTAS:
        try:
            quota, period, *_ = " ".join(Path(file).read_text() for file in files).split()
        except (OSError, ValueError):
            continue
        if quota not in ("max", "-1"):
            return max(1, min(there, round(int(quota) / int(period))))
    return there


def cores() -> Found:
    """Usable cores and memory."""
    count = usable_cores()
    memory = _main_memory()
    return Found(f"{count} of {os.cpu_count()} cores usable{f', {memory}' if memory else ''}")


def _main_memory() -> str:
    """Total and available main memory, as far as the system says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return ""
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return f"{in_units(sizes['MemAvailable'])} of {in_units(sizes['MemTotal'])} of memory available"


def platform_limits(system: str = sys.platform) -> Found:
    """What posttrain does without on this system. Runs need none of it."""
    lacks = {
        "linux": (),
        "darwin": (
            "graders have no memory limit, no network namespace and no Landlock",
            "no Triton",
            "no measure of contended cores",
        ),
        "win32": (
            "graders have no limits but their deadline",
            "folders are not locked: run one process per run folder",
            "the list of a folder's files is not synced",
            "no Triton",
        ),
    }.get(system)
    if lacks is None:
        return Found(f"{system}: has not been tried", "limited")
    return Found("; ".join(lacks), "limited") if lacks else Found("Linux: nothing is missing")


def run_folder(path: str) -> Found:
    """The disk of the runs: space, write speed, complete files, locks, SQLite. Leaves nothing behind."""
    place = _existing(Path(path))
    with _scratch(place) as name:
        folder = Path(name)
        found = _disk(place, folder)
        _complete_files(folder)
        locked = _locks(folder)
        _sqlite(folder / "rollouts.sqlite")
    state, mend = found.state, found.mend
    if not locked:
        state, mend = "limited", "run one process per run folder, or use another disk: posttrain doctor --output-dir"
    also = ["renames", *(["locks"] if locked else []), "SQLite"]
    return Found(f"{found.detail}; {', '.join(also)} work{'' if locked else '; no locks'}", state, mend)


def cache_folder(path: str) -> Found:
    """The disk of a cache: space, write speed, complete files."""
    place = _existing(Path(path))
    with _scratch(place) as name:
        found = _disk(place, Path(name))
        _complete_files(Path(name))
    return found


def hub_cache() -> Found:
    """The disk of the hub's cache."""
    from huggingface_hub import constants

    return cache_folder(constants.HF_HUB_CACHE)


def _existing(path: Path) -> Path:
    """The folder itself, or the nearest one above it, where it would be made."""
    path = path.expanduser().absolute()
    place = next(one for one in (path, *path.parents) if one.exists())
    if not place.is_dir():
        raise Broken(f"{place} is a file, not a folder", "choose another folder")
    return place


def _scratch(place: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix=".posttrain-doctor-", dir=place, ignore_cleanup_errors=True)
    except OSError as error:
        raise Broken(
            f"cannot write in {place}: {error.strerror}", f"choose another folder, or: chmod u+w {place}"
        ) from error


def _disk(place: Path, folder: Path) -> Found:
    """Free space, and the speed of synced writes of data that does not compress."""
    free, block = shutil.disk_usage(place).free, os.urandom(BLOCK)
    if free < 2 * BLOCK * BLOCKS:
        raise Broken(f"{place}: {in_units(free)} free", "free some space, or choose another disk")
    began = time.perf_counter()
    with open(folder / "speed", "wb", buffering=0) as file:
        for _ in range(BLOCKS):
            file.write(block)
        os.fsync(file.fileno())
    speed = BLOCK * BLOCKS / (time.perf_counter() - began)
    (folder / "speed").unlink()
    detail = f"{place}: {in_units(free)} free, writes {in_units(round(speed))}/s"
    if free < LEAST_FREE_BYTES:
        return Found(detail, "limited", "free some space: `posttrain runs list` shows the size of each run")
    if speed < SLOW_BYTES_PER_SECOND:
        return Found(f"{detail}, which is slow", "limited", "choose a faster disk: saves will take long")
    return Found(detail)


def _complete_files(folder: Path) -> None:
    """Replace a file and a folder atomically. Raises Broken if either is not the new one."""
    for content in ("old", "new"):
        put_file(folder / "file", content)
        put_folder(folder / "folder", lambda target, content=content: put_file(target / "file", content))
    names = sorted(path.name for path in folder.iterdir())
    texts = [(folder / name).read_text() for name in ("file", "folder/file")]
    if texts != ["new", "new"] or names != ["file", "folder"]:
        raise Broken("a file or folder that was replaced by a rename is not the new one", "choose a local disk")


def _locks(folder: Path) -> bool:
    """Whether a run folder's lock keeps others out; False if the file system has none. Raises Broken if it does not."""
    lock = FolderLock(folder)
    try:
        seen = is_locked(folder)
    finally:
        lock.release()
    if seen is False:
        raise Broken("a lock does not keep others out", "choose a local disk")
    return seen is not None


def _sqlite(path: Path) -> None:
    """A database as `rollouts.sqlite` is used: while one process writes, others read, and none writes."""
    remedy = "choose a local disk: SQLite needs working locks and shared memory"
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as writer:
            [mode] = writer.execute("PRAGMA journal_mode = WAL").fetchone()
            writer.execute("CREATE TABLE t (x)")
            writer.execute("BEGIN IMMEDIATE")
            writer.execute("INSERT INTO t VALUES (1)")
            rival = subprocess.run([sys.executable, "-c", RIVAL, str(path)], capture_output=True, text=True, timeout=20)
            writer.execute("COMMIT")
    except sqlite3.Error as error:
        raise Broken(f"SQLite does not work there: {error}", remedy) from error
    if mode != "wal" or rival.stdout.splitlines() != ["0", "database is locked"]:
        said = (rival.stdout + rival.stderr).strip().splitlines()
        raise Broken(f"SQLite's locks do not work there: {mode}, {said[-1] if said else 'no answer'}", remedy)
