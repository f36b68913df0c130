"""The paths by which runs refer to one another: which runs need files of another run, and how a run is renamed.
Runs refer to the models that they start from or read, to the base of adapters, and to files of rows."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.base.errors import PosttrainError, RunError
from posttrain.base.words import by_key, counted
from posttrain.runs.atomic import write_file
from posttrain.runs.checkpoint import MODELS, list_checkpoints
from posttrain.runs.files import as_mapping, flat, load_json, read_regular, save_json
from posttrain.runs.finding import BASE, SWEEP, checked_name, find_runs, folders_of, held, root_of, short
from posttrain.runs.managing.copies import is_copy, original_of, snapshots_of
from posttrain.runs.summary import RunSummary

JOURNAL = "renaming.json"  # file in a folder while it is renamed: which settings to update
OWN = ("name", "output_dir", "logging_dir")  # last parts of the settings that do not name an input


@dataclass(frozen=True, slots=True)
class Need:
    """`run` refers to the absolute `path` in `what`, a setting or a file."""

    run: Path
    what: str
    path: Path

    def __str__(self) -> str:
        return f"{short(self.run)} ({self.what})"


def needed(targets: Sequence[Path], beside: Iterable[Path] = ()) -> list[Need]:
    """What other runs need from the folders `targets`. Runs and snapshots next to each target's whole run and in the
    folders `beside` are checked; runs elsewhere are not."""
    folders = {target.resolve() for target in targets}
    names = {folder.name for folder in folders}
    needs: list[Need] = []
    for other in _others(folders, beside):
        if within(other.resolve(), folders):
            continue
        has = {original_of(other)} if is_copy(other) else set[Path]()  # a snapshot needs nothing that is copied in it
        needs += [need for need in _needs(other, names) if within(need.path, folders) and not within(need.path, has)]
    return list(dict.fromkeys(needs))


def within(path: Path, folders: Set[Path]) -> bool:
    """Whether a path is one of these folders or lies in one."""
    return path in folders or not folders.isdisjoint(path.parents)


def refuse_needed(targets: Sequence[Path], beside: Iterable[Path], what: str) -> None:
    """Raise RunError, with the names of the runs, if other runs need one of these folders."""
    if needs := needed(targets, beside):
        raise RunError(f"{what}: {described(needs)}. Keep it, remove the runs that need it first, or use --force")


def described(needs: Sequence[Need]) -> str:
    """The needs as `needed by 1 other run: runs/x (models.0.path)`."""
    by_run = by_key((need.run, need.what) for need in needs)
    listed = [f"{short(run)} ({', '.join(dict.fromkeys(settings))})" for run, settings in by_run.items()]
    more = f" and {len(listed) - 8} more" if len(listed) > 8 else ""
    return f"needed by {counted(len(by_run), 'other run')}: {', '.join(listed[:8])}{more}"


def _others(targets: Iterable[Path], beside: Iterable[Path]) -> Iterator[Path]:
    """The folders whose needs are checked: runs, whole runs and snapshots, each once."""
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
    """What a run refers to. Its settings are parsed only if they contain one of the `names`."""
    provenance = as_mapping(_json(folder / "run.json").get("provenance"))
    started_in = Path(str(provenance.get("folder") or "."))
    home = original_of(folder)  # a snapshot's relative paths are those of the run
    recorded = list(as_mapping(provenance.get("models")).items())
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
    """The absolute paths that a recorded path may mean: from the run's folder, from its start folder, or from here."""
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
    # YAML may escape or fold such a name and so write it differently: then the settings are always parsed.
    return any(name in text or not name.isascii() or " " in name for name in names)


def _json(path: Path) -> Mapping[str, Any]:
    try:
        return as_mapping(load_json(path)) if path.is_file() else {}
    except RunError:
        return {}


@dataclass(slots=True)
class Renamed:
    """The new folder, the files in which the old path was replaced, and those that still have it, with the reasons."""

    folder: Path
    updated: list[Path] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def rename(target: Path, name: str, beside: Iterable[Path] = (), force: bool = False) -> Renamed:
    """Give a run, or a whole run, another name in the same folder.

    The new path replaces the old path in the settings and provenance of all runs next to it, and the new name replaces
    the old name in the run's own settings. Checkpoints have checksums and do not change: a resume compares models by
    content. Raises RunError for an invalid or taken name, for a model or stage of a whole run, if a process runs in it
    or in a run that needs it, and, without `force`, if an adapter of another run names it as its base.
    """
    checked_name(name)
    runs, old = folders_of(target), target.resolve()
    if target.is_symlink():
        raise RunError(f"{target} is a link to {old}: give that folder")
    if root_of(target) != old:
        raise RunError(f"{target} is named after a model or stage of {root_of(target).name}: rename that run instead")
    if (old.parent / SWEEP).is_file():
        raise RunError(f"{target} is not renamed: it is a trial of the sweep {old.parent.name}, which needs its name")
    new = old.with_name(name)
    if os.path.lexists(new):
        raise RunError(f"{target.with_name(name)} exists: choose another name")
    needs = needed([target], beside)
    sealed = [need for need in needs if need.what.endswith("adapter_config.json") or is_copy(need.run)]
    if sealed and not force:
        raise RunError(
            f"{target} is not renamed: {', '.join(map(str, dict.fromkeys(sealed)))} would lose it, because files with "
            "checksums are not changed. Keep the name, or use --force"
        )
    others = [run for run in dict.fromkeys(need.run for need in needs) if not is_copy(run)]
    with held([*runs, *(run for other in others for run in _runs_in(other))]):
        within = [os.path.relpath(run.resolve(), old) for run in runs]
        save_json(old / JOURNAL, {"old": str(old), "new": str(new), "runs": within, "others": [*map(str, others)]})
        try:
            os.rename(old, new)
        except OSError as error:
            (old / JOURNAL).unlink()
            raise RunError(f"cannot rename {target}: {error.strerror}") from error
        done = Renamed(target.with_name(name))
        _update_all(old, new, [done.folder / run for run in within], others, done)
    done.left += [f"{short(need.run)}: {need.what}" for need in sealed]
    return done


def finish_renaming(folder: Path) -> bool:
    """Finish an interrupted renaming, or drop its record if nothing had changed; returns whether there was one. Raises
    RunError if a process runs in one of the runs, or the record is damaged."""
    if not (folder / JOURNAL).is_file():
        return False
    facts, here = load_json(folder / JOURNAL), folder.resolve()
    kinds = {"old": str, "new": str, "runs": list, "others": list}
    if not isinstance(facts, dict) or not all(isinstance(facts.get(name), kind) for name, kind in kinds.items()):
        raise RunError(f"{folder / JOURNAL} is damaged: remove it")
    old, new = Path(facts["old"]), Path(facts["new"])
    if here.parent != old.parent or new != here or os.path.lexists(old):
        (folder / JOURNAL).unlink()
        return True
    runs = [folder / str(run) for run in facts["runs"] if ".." not in Path(str(run)).parts]
    others = [Path(str(run)) for run in facts["others"] if Path(str(run)).resolve().is_relative_to(here.parent)]
    with held([run for named in [folder, *others] for run in _runs_in(named)]):
        _update_all(old, new, runs, others, Renamed(folder))
    return True


def _update_all(old: Path, new: Path, own: list[Path], others: list[Path], done: Renamed) -> None:
    for folder in dict.fromkeys([done.folder, *own, *others]):
        _update(folder, old, new, folder == done.folder or folder in own, done)
    (done.folder / JOURNAL).unlink()


def _runs_in(folder: Path) -> list[Path]:
    return [folder] if (folder / "run.json").is_file() else find_runs(folder)


def _update(folder: Path, old: Path, new: Path, own: bool, done: Renamed) -> None:
    """Replace the old path in a run's settings and provenance; with `own`, also the run's name."""
    from posttrain.config.reading.files import read_settings, write_yaml  # the settings' schema takes a while to import

    config, facts = folder / "config.yaml", folder / "run.json"
    try:
        saved = load_json(facts) if facts.is_file() else {}
        provenance = (saved.get("provenance") if isinstance(saved, dict) else None) or {}
        replaced = _replacer(old, new, Path(str(provenance.get("folder") or ".")))
        settings = read_settings(config).values if config.is_file() else {}
        changed = _mapped(settings, replaced)
        if own and "name" in changed:
            changed["name"] = new.name
        if changed != settings:
            write_file(config, write_yaml(changed))
            done.updated.append(config)
        if isinstance(models := provenance.get("models"), dict):
            provenance["models"] = {
                setting: {**model, "path": replaced(model["path"])}
                if isinstance(model, dict) and isinstance(model.get("path"), str)
                else model
                for setting, model in models.items()
            }
            if provenance["models"] != models:
                save_json(facts, saved)
                done.updated.append(facts)
    except (PosttrainError, OSError, ValueError) as error:
        done.left.append(f"{short(folder)}: {error}")


def _replacer(old: Path, new: Path, started_in: Path) -> Callable[[str], str]:
    """A function that replaces paths at or below `old`, absolute or relative to the run's start folder or to here."""

    def replaced(value: str) -> str:
        if old.name not in value or "/" not in value:  # a single word is not a model in a run
            return value
        path = Path(value).expanduser()
        for start in (started_in, Path()):
            absolute = (start / path).resolve()
            if absolute == old or old in absolute.parents:
                moved = new / absolute.relative_to(old)
                return str(moved) if path.is_absolute() else os.path.relpath(moved, start.resolve())
        return value

    return replaced


def _mapped(node: Any, replaced: Callable[[str], str]) -> Any:
    if isinstance(node, str):
        return replaced(node)
    if isinstance(node, dict):
        return {key: value if key in OWN else _mapped(value, replaced) for key, value in node.items()}
    return [_mapped(value, replaced) for value in node] if isinstance(node, list) else node
