"""The folder of a run: its lock, its facts in run.json, its tags and note, and whether a run may start in it."""

import errno
import os
import platform
import re
import signal
import stat
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from posttrain.base.errors import RunError
from posttrain.base.files import LEFTOVER, take_away
from posttrain.base.log import log
from posttrain.base.system import BINARY, IS_LINUX, NOFOLLOW, NONBLOCK, fcntl
from posttrain.base.terminal import escaped
from posttrain.runs.atomic import refusing, writing
from posttrain.runs.checkpoint import saved_step
from posttrain.runs.files import load_json, read_regular, save_json
from posttrain.runs.metrics import last_metrics

LOCK = ".lock"
SAFE = BINARY | NOFOLLOW | NONBLOCK  # a stranger's run may have a link or a pipe instead of the lock file
PATIENCE_S = 0.5  # seconds to wait, since `is_locked` in another process holds the lock for a moment
UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)  # some network file systems
NOTES = "notes.json"  # the tags and the note that a user gives a run; runs never read it
TAG = re.compile(r"[\w.+:/-]{1,40}")
LONGEST_NOTE = 20_000  # maximum characters
FORMAT = 1  # version of run.json and of notes.json
# The entries of run.json and their types.
FACTS = {
    "state": str, "reason": str | None, "started": str, "ended": str | None, "resumes": list, "provenance": dict,
    "counters": dict,
}  # fmt: skip
# The files and folders that a run may have before its first step.
FIRST_FILES = (
    LOCK, NOTES, "run.json", "config.yaml", "metrics.jsonl", "training.log", "tracking", "base", "best", "evaluation",
    "rollouts.sqlite", "rollouts.sqlite-wal", "rollouts.sqlite-shm", "rollouts.sqlite-journal",
)  # fmt: skip


class FolderLock:
    """Locks a folder until `release` or the end of this process. Raises RunError if another process holds the lock."""

    def __init__(self, folder: Path):
        path = folder / LOCK
        with writing(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | SAFE, 0o666)
        if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
            self.release()
            raise RunError(f"{path} is not a file: remove it")
        deadline = time.monotonic() + PATIENCE_S
        while _lock(self._descriptor) is False:
            if time.monotonic() > deadline:
                holder = os.read(self._descriptor, 300).decode(errors="replace") or "another process"
                self.release()
                raise RunError(f"{folder} is in use by {holder}: wait for it to end, or stop it first")
            time.sleep(0.02)
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, f"process {os.getpid()} on {platform.node()}".encode())

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_locked(folder: Path) -> bool | None:
    """Whether a process, perhaps this one, runs in the folder; None if that is unknown."""
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | SAFE)
    except FileNotFoundError:
        return False
    except OSError:  # another user's lock
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return False  # not a lock of posttrain
        taken = _lock(descriptor)
    finally:
        os.close(descriptor)
    return None if taken is None else not taken


def _lock(descriptor: int) -> bool | None:
    """Try to take the lock: True if taken, False if another process holds it, None if locks are not supported."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        log.warning("this file system does not support locks: run only one process in a folder")
        return None
    return True


def interrupt(folder: Path) -> None:
    """Send SIGINT, as Ctrl-C does, to the process that runs in a folder.

    A process id may have been given to another program meanwhile. So the signal is sent only to a process of this host
    that has the lock file open. Raises RunError if there is none, or if that cannot be verified.
    """
    path = folder / LOCK
    if is_locked(folder) is False:
        raise RunError(f"no process runs in {folder}")
    with refusing(f"the process in {folder} cannot be stopped"):
        holder = read_regular(path).decode(errors="replace")
        if (match := re.fullmatch(r"process (\d{1,9}) on (.*)", holder)) is None:
            raise RunError(f"{path} does not name the process that runs in {folder}")
        process, host = int(match[1]), match[2]
        by_hand = f"stop it there with Ctrl-C or kill -INT {process}"
        if host != platform.node():
            raise RunError(f"{folder} is in use by {escaped(holder)}, which is not this machine: {by_hand}")
        if not IS_LINUX:
            raise RunError(f"this system cannot verify that process {process} is the run: {by_hand}")
        handle = os.pidfd_open(process)  # of this process, even if it ends and its id is given to another
        try:
            wanted, found = path.stat(), False
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                with suppress(OSError):  # closed meanwhile
                    found = found or os.path.samestat(descriptor.stat(), wanted)
            if not found:
                raise RunError(f"process {process} is not the run in {folder}: the run's process has ended")
            signal.pidfd_send_signal(handle, signal.SIGINT)
        finally:
            os.close(handle)


def check_run_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise RunError(f"there is no run folder {folder}")
    if not (folder / "run.json").is_file():
        raise RunError(f"{folder} is not a run folder: it has no run.json")


def read_facts(folder: Path) -> dict[str, Any]:
    return load_facts(folder / "run.json", FACTS, "started", "ended")


def load_facts(path: Path, kinds: Mapping[str, Any], *times: str) -> dict[str, Any]:
    """Read a JSON file with entries of these types; `times` are ISO 8601. Raises RunError if it is damaged or from
    another version."""
    facts = load_json(path)
    valid = isinstance(facts, dict) and facts.get("format") == FORMAT
    valid = valid and all(name in facts and isinstance(facts[name], kind) for name, kind in kinds.items())
    try:
        moments = [datetime.fromisoformat(facts[name]) for name in times if valid and facts[name] is not None]
        # Between these years, the moment exists in every time zone.
        valid = valid and all(moment.tzinfo is not None and 1 < moment.year < 9999 for moment in moments)
    except ValueError:
        valid = False
    if not valid:
        raise RunError(f"{path} is damaged or from another version of posttrain")
    return facts


@dataclass(frozen=True, slots=True)
class Notes:
    """The tags of a run, in the order they were given, and its note."""

    tags: tuple[str, ...] = ()
    note: str = ""


def read_notes(folder: Path) -> Notes:
    """The notes of a run; empty if there are none. Raises RunError if the file is damaged."""
    path = folder / NOTES
    if not path.is_file():
        return Notes()
    facts = load_json(path)
    if isinstance(facts, dict) and facts.get("format") == FORMAT:
        tags, note = facts.get("tags"), facts.get("note")
        if isinstance(tags, list) and all(isinstance(tag, str) for tag in tags) and isinstance(note, str):
            return Notes(tuple(tags), note)
    raise RunError(f"{path} is damaged or from another version of posttrain: repair it, or delete it")


def write_notes(folder: Path, notes: Notes) -> None:
    """Replace the notes of a run atomically. Raises RunError for an invalid tag or a note that is too long."""
    for tag in notes.tags:
        if not TAG.fullmatch(tag):
            raise RunError(f"'{escaped(tag)}' is not a tag: give 1 to 40 letters, digits or characters of _.+:/-")
    if len(notes.note) > LONGEST_NOTE:
        raise RunError(f"the note has {len(notes.note):,} characters: at most {LONGEST_NOTE:,} are allowed")
    save_json(folder / NOTES, {"format": FORMAT, "tags": list(dict.fromkeys(notes.tags)), "note": notes.note})


def never_stepped(folder: Path) -> bool:
    """Whether a run folder has nothing worth keeping: no checkpoint, logged step, stored completion or user file.

    A run that ended before its first step has at most the results of the evaluation before training: metrics,
    completions, and the initial model in `best`.
    """
    if not (folder / "run.json").is_file():
        return False
    names = {path.name for path in folder.iterdir()}
    leftovers = [match for name in names if (match := LEFTOVER.fullmatch(name))]
    half_written = {match[0] for match in leftovers if match["kind"] == "tmp"}  # leftovers of kind `old` are complete
    if names - half_written - set(FIRST_FILES):
        return False
    try:
        if "best" in names and saved_step(folder / "best") > 0:
            return False
        if read_facts(folder)["state"] == "finished" or last_metrics(folder).get("step", 0) > 0:
            return False
        file = folder / "rollouts.sqlite"  # a step's completions are written before its line of metrics
        if not file.is_file() or file.stat().st_size == 0:
            return True
        from posttrain.runs.stored_rollouts import StoredRun  # imports numpy, which listing runs does not need

        with StoredRun(folder) as stored:
            return not stored.steps()
    except RunError:  # damaged, so not empty
        return False


def refuse_occupied(folder: Path, overwrite: bool) -> None:
    """Raise RunError unless a run may start in `folder`."""
    starting = re.compile(rf"{re.escape(LOCK)}|run\.json\.tmp-\d+")  # files of a run killed at its very start
    entries = [path.name for path in folder.iterdir() if not starting.fullmatch(path.name)] if folder.exists() else []
    if not entries:
        return
    if nested := sorted(path.parent.name for path in folder.glob("*/run.json")):
        raise RunError(
            f"{folder} contains other runs ({', '.join(nested)}): choose another name, or delete the folder yourself"
        )
    if "run.json" not in entries:
        raise RunError(
            f"{folder} is not empty and not a run folder (no run.json), so posttrain will not touch it: choose another "
            "name or output_dir"
        )
    if not overwrite and not never_stepped(folder):
        raise RunError(
            f"{folder} has a run already: resume it (--resume), replace it (--overwrite), or choose another name"
        )


def empty(folder: Path, keep: Collection[str] = ()) -> None:
    """Delete everything in a run folder except its lock and the names in `keep`. run.json is deleted last, so that the
    folder is still recognised after a crash."""
    entries = sorted(folder.iterdir(), key=lambda path: path.name == "run.json")
    try:
        for path in (path for path in entries if path.name not in (LOCK, *keep)):
            take_away(path)
    except OSError as error:
        raise RunError(f"cannot empty {folder}: {error}") from error
