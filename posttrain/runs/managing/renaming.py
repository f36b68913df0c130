"""Renaming a run, and updating the paths to it that it and other runs have saved."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.base.errors import PosttrainError, RunError
from posttrain.runs.atomic import write_file
from posttrain.runs.files import load_json, save_json
from posttrain.runs.finding import SWEEP, checked_name, find_runs, folders_of, held, root_of, short
from posttrain.runs.managing.copies import is_copy
from posttrain.runs.managing.needs import OWN, needed

JOURNAL = "renaming.json"  # in a folder while it is renamed: which settings to update


@dataclass(slots=True)
class Renamed:
    """The new folder, the files in which the old path was replaced, and those that still have it, with the reason."""

    folder: Path
    updated: list[Path] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def rename(target: Path, name: str, beside: Iterable[Path] = (), force: bool = False) -> Renamed:
    """Give a run, or a whole run, another name in the same folder.

    The new path replaces the old one in settings and provenance of all runs next to it, and the new name the old one in
    its own settings. Checkpoints are sealed and stay as they are: a resume compares models by content. Raises RunError
    for an invalid or taken name, for a model or stage of a whole run, if a process runs in it or in a run that needs
    it, and, without `force`, if an adapter of another run names it as its base.
    """
    checked_name(name)
    runs, old = folders_of(target), target.resolve()
    if target.is_symlink():
        raise RunError(f"{target} is a link to {old}: give that folder")
    if root_of(target) != old:
        raise RunError(f"{target} is named by the model or stage of {root_of(target).name}: rename that instead")
    if (old.parent / SWEEP).is_file():
        raise RunError(f"{target} is not renamed: it is a trial of the sweep {old.parent.name}, which names it")
    new = old.with_name(name)
    if os.path.lexists(new):
        raise RunError(f"{target.with_name(name)} exists: choose another name")
    needs = needed([target], beside)
    sealed = [need for need in needs if need.what.endswith("adapter_config.json") or is_copy(need.run)]
    if sealed and not force:
        raise RunError(
            f"{target} is not renamed: {', '.join(map(str, dict.fromkeys(sealed)))} would lose it, since files with "
            "checksums are not changed. Keep the name, or give --force"
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
    """Finish a renaming that was killed, or drop its record if nothing had changed; returns whether there was one.

    Raises RunError if a process runs in one of the runs, or the record is damaged.
    """
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
    with held([run for place in [folder, *others] for run in _runs_in(place)]):
        _update_all(old, new, runs, others, Renamed(folder))
    return True


def _update_all(old: Path, new: Path, own: list[Path], others: list[Path], done: Renamed) -> None:
    for folder in dict.fromkeys([done.folder, *own, *others]):
        _update(folder, old, new, folder == done.folder or folder in own, done)
    (done.folder / JOURNAL).unlink()


def _runs_in(folder: Path) -> list[Path]:
    return [folder] if (folder / "run.json").is_file() else find_runs(folder)


def _update(folder: Path, old: Path, new: Path, own: bool, done: Renamed) -> None:
    """Replace the old path in a run's settings and provenance, and its own name."""
    config, facts = folder / "config.yaml", folder / "run.json"
    try:
        saved = load_json(facts) if facts.is_file() else {}
        provenance = (saved.get("provenance") if isinstance(saved, dict) else None) or {}
        replaced = _replacer(old, new, Path(str(provenance.get("folder") or ".")))
        _update_settings(config, new.name if own else None, replaced, done)
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


def _update_settings(config: Path, name: str | None, replaced: Callable[[str], str], done: Renamed) -> None:
    from posttrain.config.reading.files import read_settings, write_yaml  # the settings' schema takes a while to import

    if not config.is_file():
        return
    settings = read_settings(config).values
    changed = _mapped(settings, replaced)
    if name is not None and "name" in changed:
        changed["name"] = name
    if changed != settings:
        write_file(config, write_yaml(changed))
        done.updated.append(config)


def _replacer(old: Path, new: Path, started_in: Path) -> Callable[[str], str]:
    """Replaces a path at or below `old`, absolute or relative to where the run was started or to here."""

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
