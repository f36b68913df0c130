"""Checkpoints: complete, hashed folders that are verified before every use.

`checkpoint-{step}/` has its writer's files and `manifest.json`, with the size and SHA-256 of every file. The manifest
is written last, so a folder with a valid manifest is complete. It is compared byte for byte with what posttrain would
write, which also detects a flipped bit in the manifest itself.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from posttrain.base.errors import RunError
from posttrain.runs.atomic import remove, write_file, write_folder
from posttrain.runs.files import open_regular, parse_json, read_regular

MANIFEST = "manifest.json"
MODELS = ("best", "ema", "final")  # a run's saved models, in addition to its checkpoints
VERSION = 1
NO_FILE = "not a regular file"  # a folder, or a pipe, on which reading might never end
Inspect = Callable[[Path], list[str]]  # returns the problems of a checkpoint with intact files


def save_checkpoint(run_dir: Path, step: int, write: Callable[[Path], None], limit: int | None) -> Path:
    """Save `checkpoint-{step}` with the files that `write(temporary_folder)` makes; returns its path.

    Afterwards the oldest checkpoints beyond `limit` (at least 1; None keeps all) are deleted, but never the one just
    saved or the newest. Raises RunError if it cannot be written; earlier checkpoints remain intact.
    """
    target = run_dir / f"checkpoint-{step}"
    save_folder(target, step, write)
    if limit is not None:
        existing = list_checkpoints(run_dir)
        removable = [path for path in existing[:-1] if path != target]
        for path in removable[: max(len(existing) - limit, 0)]:
            remove(path)
    return target


def save_folder(target: Path, step: int, write: Callable[[Path], None]) -> None:
    """Make or replace the folder `target`, atomically, with the files of `write(temporary_folder)` and a manifest."""

    def write_all(folder: Path) -> None:
        write(folder)
        names = _files(folder)
        with ThreadPoolExecutor(2) as threads:  # SHA-256 releases the GIL: model and optimizer are hashed in parallel
            hashed = threads.map(lambda name: _fingerprint(folder / name), names)
            files = dict(zip(names, hashed, strict=True))
        write_file(folder / MANIFEST, _render(step, files))

    write_folder(target, write_all)


def verify(folder: Path) -> list[str]:
    """The problems of a saved folder, one line per file; empty if every byte is as saved.

    A checkpoint must have been saved at the step in its name. Hidden files are ignored (desktop systems create them);
    any other file that is not in the manifest is a problem.
    """
    if not folder.is_dir():
        return ["the folder is missing"]
    manifest = _read_manifest(folder)
    if isinstance(manifest, str):
        return [f"{MANIFEST}: {manifest}"]
    step, expected = manifest
    present = _files(folder)
    renamed = step_of(folder) not in (-1, step)
    problems = [f"{MANIFEST}: it belongs to step {step}: the folder was renamed"] if renamed else []
    problems += [f"{name}: missing" for name in expected if name not in present]
    problems += [f"{name}: not in the manifest" for name in present if name not in expected]
    differences = ((name, _difference(folder / name, expected[name])) for name in sorted(expected.keys() & present))
    return problems + [f"{name}: {difference}" for name, difference in differences if difference]


def _difference(path: Path, expected: dict[str, Any]) -> str | None:
    """How a file differs from its entry in the manifest; None if it does not."""
    if not path.is_file():
        return NO_FILE
    try:
        actual = _fingerprint(path)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if actual["size"] < expected["size"]:
        return f"truncated to {actual['size']} of {expected['size']} bytes"
    if actual["size"] > expected["size"]:
        return f"{actual['size']} bytes, expected {expected['size']}"
    return None if actual == expected else "SHA-256 differs from the manifest"


def file_hashes(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the named files in a folder; pipes and other files that are not regular are omitted."""
    return {name: _fingerprint(folder / name)["sha256"] for name in names if (folder / name).is_file()}


def saved_step(folder: Path) -> int:
    """The step of a saved folder (a checkpoint, `best`, `final`). Raises RunError if its manifest is damaged."""
    manifest = _read_manifest(folder)
    if isinstance(manifest, str):
        raise RunError(f"{folder / MANIFEST}: {manifest}")
    return manifest[0]


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest step first, damaged ones included."""
    paths = [(step, path) for path in run_dir.glob("checkpoint-*") if (step := step_of(path)) >= 0]
    return [path for _, path in sorted(paths) if path.is_dir() and not path.is_symlink()]


def has_saved(run_dir: Path) -> bool:
    """Whether a run has a checkpoint or its final model."""
    return bool(list_checkpoints(run_dir)) or (run_dir / "final").exists()


def newest_complete(
    run_dir: Path, inspect: Inspect = lambda folder: [], rejected: Mapping[str, str] | None = None
) -> tuple[Path, list[str]]:
    """The newest intact checkpoint, and the reasons why newer ones were skipped.

    `inspect` finds further problems of a checkpoint with intact files; `rejected`: known problems by checkpoint name.
    Raises RunError if no checkpoint is intact.
    """
    skipped, rejected = [], rejected or {}
    for path in reversed(list_checkpoints(run_dir)):
        problems = [rejected[path.name]] if path.name in rejected else verify(path) or inspect(path)
        if not problems:
            return path, skipped
        skipped.append(f"{path.name} is damaged ({'; '.join(problems)})")
    if skipped:
        raise RunError(f"no checkpoint in {run_dir} can be used: {'. '.join(skipped)}. Start again with --overwrite.")
    raise RunError(f"{run_dir} has no checkpoint to resume from: start again with --overwrite")


def named_checkpoint(folder: Path, inspect: Inspect = lambda folder: []) -> Path:
    """Verify and return a checkpoint that the user named by path; `inspect` is as in `newest_complete`. Raises
    RunError, with a list of the run's other checkpoints, if it is missing or damaged."""
    if problems := verify(folder) or inspect(folder):
        raise unusable(folder, problems)
    return folder


def unusable(folder: Path, problems: list[str]) -> RunError:
    """The error for a named checkpoint that cannot be used; it lists the run's other checkpoints."""
    others = [path.name for path in list_checkpoints(folder.parent) if path.name != folder.name]
    instead = f"there are {', '.join(others)}" if others else "there is no other"
    if not folder.is_dir():
        return RunError(f"there is no checkpoint {folder}: in {folder.parent} {instead}")
    return RunError(f"{folder} is damaged ({'; '.join(problems)}): in {folder.parent} {instead}")


def set_aside_after(run_dir: Path, step: int) -> list[Path]:
    """Rename checkpoints and saved models (MODELS) that are damaged or later than `step` to `….set-aside`; returns the
    new paths."""
    moved = []
    models = [run_dir / name for name in MODELS if (run_dir / name).is_dir()]
    for path in [*reversed(list_checkpoints(run_dir)), *models]:
        if _made_at(path) > step:
            aside = path.with_name(f"{path.name}.set-aside")
            if aside.exists():
                remove(aside)
            moved.append(path.rename(aside))
    return moved


def _made_at(folder: Path) -> float:
    """The step in a checkpoint's name, or in a saved model's manifest; infinity if the manifest is damaged."""
    if (step := step_of(folder)) >= 0:
        return step
    manifest = _read_manifest(folder)
    return math.inf if isinstance(manifest, str) else manifest[0]


def step_of(path: Path) -> int:
    """The step in a checkpoint's name; -1 in any other name."""
    match = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return int(match[1]) if match else -1


def _files(folder: Path) -> list[str]:
    """Relative POSIX names of the files that belong to a saved folder, without the manifest."""
    names = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if not path.is_dir()]
    return [name.as_posix() for name in names if name.as_posix() != MANIFEST and not name.name.startswith(".")]


def _fingerprint(path: Path) -> dict[str, Any]:
    with open_regular(path, links=True) as file:
        return {"size": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _is_entry(value: Any) -> bool:
    """Whether this is the entry of a file in a manifest."""
    return isinstance(value, dict) and {key: type(fact) for key, fact in value.items()} == {"size": int, "sha256": str}


def _render(step: int, files: dict[str, dict[str, Any]]) -> str:
    """The manifest; `check` is the SHA-256 of its content."""
    check = hashlib.sha256(json.dumps([VERSION, step, files]).encode()).hexdigest()
    return json.dumps({"version": VERSION, "step": step, "files": files, "check": check}, indent=1) + "\n"


def _read_manifest(folder: Path) -> tuple[int, dict[str, dict[str, Any]]] | str:
    """Step and files of a folder's manifest, or a description of its problem."""
    path = folder / MANIFEST
    try:
        if path.exists() and not path.is_file():
            return NO_FILE
        manifest = parse_json(raw := read_regular(path))
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except ValueError:
        return "damaged"
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        return "damaged"
    step, files, version = manifest.get("step"), manifest["files"], manifest.get("version")
    if type(version) is int and version != VERSION and manifest.get("check"):
        return f"version {version}, but this posttrain reads version {VERSION}"
    if type(step) is not int or not all(map(_is_entry, files.values())) or raw != _render(step, files).encode():
        return "damaged"
    return step, files
