"""Settings of a new run as typed into a page: checked as the command line checks flags, and written as YAML."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.base.errors import ConfigError
from posttrain.config import RunConfig, load
from posttrain.config.reading.fields import Setting, all_settings
from posttrain.config.reading.files import write_yaml
from posttrain.config.reading.interpolation import escaped
from posttrain.config.reading.layers import Layers, override
from posttrain.config.reading.load import FlagText
from posttrain.config.render import flow, reads
from posttrain.config.schema.methods import METHOD_NAMES
from posttrain.ui.parts import Query

METHOD, NAME, OUTPUT = "method.type", "name", "output_dir"
# Group of settings without a field in the form -> the field that shows its messages.
SHOWN_AT = {"models": "model.path", "data": "data.source", "method": METHOD}


@dataclass(frozen=True, slots=True)
class Draft:
    """A new run. `problems` are messages by setting; settings in `missing` have no other problem than no value."""

    method: str
    given: Mapping[str, str]  # values as typed, by path
    name: str
    text: str  # the settings file
    config: RunConfig | None  # None: there are problems
    problems: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()  # problems of no single setting, and notes
    notes: tuple[str, ...] = ()


def fields_of(method: str) -> list[Setting]:
    """The settings that a form for this method has. Groups that are off by default have their entries alone, but those
    that are switched on; the method and the folder of the runs are given by the page."""
    return [
        setting
        for setting in all_settings()
        if reads(method, setting)
        and setting.path not in (METHOD, OUTPUT)
        and (setting.switch or not setting.group or setting.path == "rewards")
    ]


def draft(query: Query, root: Path) -> Draft:
    """The settings in an address, with their problems. Unknown names are dropped."""
    method = query.choice(METHOD, METHOD_NAMES)
    known = [setting.path for setting in fields_of(method)]
    given = {path: value for path in known if (value := query.one(path).strip())}
    name = given.get(NAME) or ""
    values = {METHOD: method, OUTPUT: flow(escaped(str(root))), **given}
    config, notes, lines = _checked(values)
    if not name and config is not None:
        name = _free_name(root, f"{config.method.type}-{config.models[0].folder_name}")
        values[NAME] = flow(escaped(name))
        config, notes, lines = _checked(values)
    problems, elsewhere = _by_setting(lines, known)
    return Draft(
        method=method,
        given=given,
        name=(config.name or "") if config else name,
        text=_as_file(values),
        config=config,
        problems=problems,
        missing=tuple(path for path, problem in problems.items() if " is missing;" in problem),
        elsewhere=tuple(elsewhere),
        notes=tuple(notes),
    )


def _checked(values: Mapping[str, str]) -> tuple[RunConfig | None, list[str], list[str]]:
    """The settings or None, notes about them, and a line per problem."""
    try:
        loaded = load(None, (), {path: FlagText(text, path) for path, text in values.items()})
    except ConfigError as error:
        first, *rest = str(error).split("\n")
        return None, [], [line.strip() for line in rest] or [first]
    return loaded.config, loaded.notes, []


def _by_setting(lines: list[str], known: list[str]) -> tuple[dict[str, str], list[str]]:
    """The messages by the setting whose field shows them, and the other messages."""
    by_setting: dict[str, str] = {}
    others: list[str] = []
    for line in lines:
        where, _, problem = line.partition(": ")
        if where not in (*known, METHOD, OUTPUT):
            problem = line
        named = problem.partition(" ")[0]
        named = SHOWN_AT.get(named, named)
        # A message about several settings begins with one of them, which may differ from `where`.
        path = next((path for path in (named, where) if path in known), "")
        if path:
            inside = named == path or named.startswith(f"{path}.")
            by_setting.setdefault(path, problem if inside else f"{path}: {problem}")
        else:
            others.append(line)
    return by_setting, others


def _as_file(values: Mapping[str, str]) -> str:
    """A settings file that `load` reads like these values; empty if they cannot be read."""
    layers = Layers()
    try:
        override(layers, [(path, text, path) for path, text in values.items()])
    except ConfigError:
        return ""
    tree: dict[str, Any] = dict(layers.values)
    if models := tree.pop("models", None):
        tree["model"] = models[0]["path"] if list(models[0]) == ["path"] else models[0]
    if isinstance(tree.get("method"), dict) and list(tree["method"]) == ["type"]:
        tree["method"] = tree["method"]["type"]
    first = [NAME, OUTPUT, "seed", "model", "method", "data", "rewards"]
    order = {key: at for at, key in enumerate(first)}
    return write_yaml({key: tree[key] for key in sorted(tree, key=lambda key: order.get(key, len(order)))})


def _free_name(root: Path, wanted: str) -> str:
    """The name, with the first number that makes it new where a run has it."""
    names = (f"{wanted}-{number}" if number > 1 else wanted for number in itertools.count(1))
    return next(name for name in names if not (root / name).exists())
