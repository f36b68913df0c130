"""Which runs need what lies in another run: models they start from or read, the base of adapters, files of rows."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.base.errors import RunError
from posttrain.base.words import counted
from posttrain.runs.checkpoint import MODELS, list_checkpoints
from posttrain.runs.files import flat, load_json, read_regular
from posttrain.runs.finding import find_runs, root_of
from posttrain.runs.managing.places import short
from posttrain.runs.managing.snapshots import original_of, snapshots_of
from posttrain.runs.summary import RunSummary

BASE = "base"  # in a run folder, the base of its adapters
OWN = ("name", "output_dir", "logging_dir")  # last parts of settings that name no input


@dataclass(frozen=True, slots=True)
class Need:
    """`run` names `place`, an absolute path, in `what`: a setting, or a file."""

    run: Path
    what: str
    place: Path

    def __str__(self) -> str:
        return f"{short(self.run)} ({self.what})"


def needed(targets: Sequence[Path], beside: Iterable[Path] = ()) -> list[Need]:
    """What runs other than `targets` need in one of these folders.

    Looks at the runs and snapshots next to each target's whole run, and in the folders `beside`. Runs elsewhere are not
    known here.
    """
    places = {target.resolve() for target in targets}
    names = {place.name for place in places}
    found: list[Need] = []
    for folder in _others(places, beside):
        if not within(folder.resolve(), places):
            found += [need for need in _needs(folder, names) if within(need.place, places)]
    return list(dict.fromkeys(found))


def within(place: Path, folders: Set[Path]) -> bool:
    """Whether a path is one of these folders or lies in one."""
    return place in folders or not folders.isdisjoint(place.parents)


def refuse_needed(targets: Sequence[Path], beside: Iterable[Path], what: str) -> None:
    """Raise RunError, which names them, if other runs need one of these folders."""
    if found := needed(targets, beside):
        raise RunError(f"{what}: {described(found)}. Keep it, remove those first, or give --force")


def described(needs: Sequence[Need]) -> str:
    """Needs by run: needed by 1 other run: runs/x (models.0.path)."""
    by_run: dict[Path, list[str]] = {}
    for need in needs:
        by_run.setdefault(need.run, []).append(need.what)
    listed = [f"{short(run)} ({', '.join(dict.fromkeys(settings))})" for run, settings in by_run.items()]
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return f"needed by {counted(len(by_run), 'other run')}: {', '.join(listed[:8])}{more}"


def _others(places: Iterable[Path], beside: Iterable[Path]) -> Iterator[Path]:
    """The folders whose needs count: runs, whole runs and snapshots, each once."""
    roots = dict.fromkeys([*(root_of(place).parent for place in places), *(path.resolve() for path in beside)])
    seen: set[Path] = set()
    for root in roots:
        runs = find_runs(root)
        whole = [whole for run in runs if (whole := root_of(run)) != run.resolve()]
        for folder in [*runs, *whole, *(snapshot / "run" for snapshot in snapshots_of(root))]:
            if folder.resolve() not in seen:
                seen.add(folder.resolve())
                yield folder


def _needs(folder: Path, names: set[str]) -> Iterator[Need]:
    """What a run names outside itself. Its settings are parsed only if they have one of the `names`."""
    provenance = _json(folder / "run.json").get("provenance")
    provenance = provenance if isinstance(provenance, dict) else {}
    started_in = Path(str(provenance.get("folder") or "."))
    home = original_of(folder)  # a snapshot's relative paths are those of the run
    models = provenance.get("models")
    for setting, named in (models if isinstance(models, dict) else {}).items():
        if isinstance(named, dict):
            for place in _places(named, started_in, home):
                yield Need(folder, setting, place)
    if _mentions(folder / "config.yaml", names):
        for setting, value in flat(RunSummary(folder).config, lists=True).items():
            if isinstance(value, str) and setting.rpartition(".")[2] not in OWN and "/" in value:
                for place in _places({"path": value}, started_in, home):
                    yield Need(folder, setting, place)
    link = folder / BASE
    if link.is_symlink():
        yield Need(folder, BASE, Path(os.path.normpath(home / os.readlink(link))).resolve())
    for saved in [*list_checkpoints(folder), *(folder / name for name in MODELS)]:
        path = _json(saved / "adapter_config.json").get("base_model_name_or_path")
        if isinstance(path, str):
            for place in _places({"path": path}, started_in, home):
                yield Need(folder, f"{saved.name}/adapter_config.json", place)


def _places(named: dict[str, Any], started_in: Path, home: Path) -> Iterator[Path]:
    """The absolute paths that a recorded path may mean: from the run's folder, from where it was started, from here."""
    if isinstance(named.get("from_here"), str):
        yield Path(os.path.normpath(home / named["from_here"])).resolve()
    if isinstance(named.get("path"), str):
        path = Path(named["path"]).expanduser()
        for start in (started_in, Path()):
            place = Path(os.path.normpath(start / path))
            if place.exists():
                yield place.resolve()


def _mentions(path: Path, names: set[str]) -> bool:
    try:
        text = read_regular(path).decode(errors="replace") if path.is_file() else ""
    except OSError:
        return False
    # A name that YAML escapes or folds may be written otherwise: then the settings are parsed in any case.
    return any(name in text or not name.isascii() or " " in name for name in names)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = load_json(path) if path.is_file() else {}
    except (RunError, json.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}
