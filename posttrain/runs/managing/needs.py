"""Which runs need what lies in another run: models they start from or read, the base of adapters, files of rows."""

import os
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.base.errors import RunError
from posttrain.base.words import counted
from posttrain.runs.checkpoint import MODELS, list_checkpoints
from posttrain.runs.files import flat, load_json, read_regular
from posttrain.runs.finding import BASE, find_runs, root_of, short
from posttrain.runs.managing.copies import original_of, snapshots_of
from posttrain.runs.summary import RunSummary

OWN = ("name", "output_dir", "logging_dir")  # last parts of settings that name no input


@dataclass(frozen=True, slots=True)
class Need:
    """`run` names the absolute `path` in `what`: a setting, or a file."""

    run: Path
    what: str
    path: Path

    def __str__(self) -> str:
        return f"{short(self.run)} ({self.what})"


def needed(targets: Sequence[Path], beside: Iterable[Path] = ()) -> list[Need]:
    """What runs other than `targets` need in one of these folders.

    Reads the runs and snapshots next to each target's whole run, and in the folders `beside`; not runs elsewhere.
    """
    folders = {target.resolve() for target in targets}
    names = {folder.name for folder in folders}
    needs: list[Need] = []
    for other in _others(folders, beside):
        if not within(other.resolve(), folders):
            needs += [need for need in _needs(other, names) if within(need.path, folders)]
    return list(dict.fromkeys(needs))


def within(path: Path, folders: Set[Path]) -> bool:
    """Whether a path is one of these folders or lies in one."""
    return path in folders or not folders.isdisjoint(path.parents)


def refuse_needed(targets: Sequence[Path], beside: Iterable[Path], what: str) -> None:
    """Raise RunError, which names them, if other runs need one of these folders."""
    if needs := needed(targets, beside):
        raise RunError(f"{what}: {described(needs)}. Keep it, remove those first, or give --force")


def described(needs: Sequence[Need]) -> str:
    """The needs as `needed by 1 other run: runs/x (models.0.path)`."""
    by_run: dict[Path, list[str]] = {}
    for need in needs:
        by_run.setdefault(need.run, []).append(need.what)
    listed = [f"{short(run)} ({', '.join(dict.fromkeys(settings))})" for run, settings in by_run.items()]
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return f"needed by {counted(len(by_run), 'other run')}: {', '.join(listed[:8])}{more}"


def _others(targets: Iterable[Path], beside: Iterable[Path]) -> Iterator[Path]:
    """The folders whose needs count: runs, whole runs and snapshots, each once."""
    roots = dict.fromkeys([*(root_of(target).parent for target in targets), *(path.resolve() for path in beside)])
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
    recorded = [(setting, facts) for setting, facts in (models if isinstance(models, dict) else {}).items()]
    if _mentions(folder / "config.yaml", names):
        recorded += [
            (setting, {"path": value})
            for setting, value in flat(RunSummary(folder).config, lists=True).items()
            if isinstance(value, str) and setting.rpartition(".")[2] not in OWN and "/" in value
        ]
    if (link := folder / BASE).is_symlink():
        recorded.append((BASE, {"from_here": os.readlink(link)}))
    for saved in [*list_checkpoints(folder), *(folder / name for name in MODELS)]:
        base = _json(saved / "adapter_config.json").get("base_model_name_or_path")
        recorded.append((f"{saved.name}/adapter_config.json", {"path": base}))
    for what, facts in recorded:
        for path in _meant(facts, started_in, home) if isinstance(facts, dict) else ():
            yield Need(folder, what, path)


def _meant(facts: dict[str, Any], started_in: Path, home: Path) -> Iterator[Path]:
    """The absolute paths that a recorded path may mean: from the run's folder, from where it was started, from here."""
    if isinstance(facts.get("from_here"), str):
        yield Path(os.path.normpath(home / facts["from_here"])).resolve()
    if isinstance(facts.get("path"), str):
        for start in (started_in, Path()):
            path = Path(os.path.normpath(start / Path(facts["path"]).expanduser()))
            if path.exists():
                yield path.resolve()


def _mentions(path: Path, names: set[str]) -> bool:
    try:
        text = read_regular(path).decode(errors="replace") if path.is_file() else ""
    except OSError:
        return False
    # A name that YAML escapes or folds may be written otherwise: then the settings are parsed in any case.
    return any(name in text or not name.isascii() or " " in name for name in names)


def _json(path: Path) -> dict[str, Any]:
    try:
        data = load_json(path) if path.is_file() else {}
    except RunError:
        return {}
    return data if isinstance(data, dict) else {}
