"""Turns each validation error into one line: place, setting, problem and suggestion."""

import json
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import ValidationError

from posttrain.base.errors import ConfigError, PosttrainError
from posttrain.config.reading.fields import choices, expected, full, kinds_of, known_paths, models_in, step
from posttrain.config.reading.files import KeyPath, origin_of, value_at
from posttrain.config.reading.hints import hint
from posttrain.config.schema.base import Settings, SettingsConflict
from posttrain.config.schema.methods import METHOD_NAMES, METHODS
from posttrain.config.schema.run import RunConfig

MISSING: dict[KeyPath, str] = {
    ("models",): "; name one, e.g. `model: openai-community/gpt2`",
    ("method",): f"; choose one of {', '.join(METHOD_NAMES)}, e.g. `method: sft`",
    ("data",): "; set the data to train on, e.g. `data: rows.jsonl`",
    ("data", "source"): "; give a hub id, a file or a folder",
}

Group = TypeVar("Group", bound=Settings)


def explain(error: ValidationError, values: Mapping[str, Any], origins: Mapping[KeyPath, str]) -> list[str]:
    """One line for each problem of `values`, sorted by place."""
    messages: dict[KeyPath, str] = {}
    for problem in error.errors(include_url=False):
        for path, message in _messages(problem, values):
            messages.setdefault(path, message)
    # A union reports an error for each branch. An error about an entry inside says more than one about the whole value.
    paths = [p for p in messages if not any(other != p and other[: len(p)] == p for other in messages)]
    # If a missing setting is suggested for an unknown name, the name probably means that setting.
    meant = {p for p in paths if any(f"did you mean {dotted(p, values)}?" in message for message in messages.values())}
    paths = [p for p in paths if not (messages[p].startswith("is missing") and p in meant)]
    places = {path: origin_of(path, origins) for path in paths}
    paths.sort(key=lambda p: _line(places[p]))
    return [f"{places[p]}{': ' if places[p] else ''}{dotted(p, values)} {messages[p]}" for p in paths]


def checked(
    group: type[Group],
    values: Mapping[str, Any],
    noun: str,
    origin: str = "",
    refusal: type[PosttrainError] = ConfigError,
) -> Group:
    """A separate group of settings, which messages call `noun`, such as `a suite`. Raises the `refusal` with one line
    for each problem, after its `origin`."""
    try:
        return group.model_validate(values)
    except ValidationError as error:
        problems = problems_of_group(error, values, group, noun)
        prefix = f"{origin}: " if origin else ""
        raise refusal("\n".join(f"{prefix}{name} {message}" for name, message in problems.items())) from error


def problems_of_group(
    error: ValidationError, values: Mapping[str, Any], group: type[Settings], noun: str = "this group"
) -> dict[str, str]:
    """The problems of a group's settings, by the name of the setting."""
    messages: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        conflict = problem.get("ctx", {}).get("error")
        if isinstance(conflict, SettingsConflict):
            for path, message in conflict.problems:
                messages.setdefault(path, message)
            continue
        name = str(problem["loc"][0])
        if problem["type"] == "extra_forbidden":
            messages[name] = f"is not a setting of {noun}; {did_you_mean(name, group.model_fields)}"
        elif problem["type"] == "missing":
            messages[name] = "is missing"
        else:
            messages[name] = wrong_value(values.get(name), full(group.model_fields[name]))
    return messages


def _line(origin: str) -> tuple[str, int]:
    name, _, line = origin.rpartition(":")
    return (name, int(line)) if line.isdecimal() else (origin, 0)


def _messages(problem: Any, values: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    path, annotation = _locate(problem["loc"], values)
    conflict = problem.get("ctx", {}).get("error")
    kinds, whole = METHOD_NAMES if path == ("method",) else kinds_of(annotation), value_at(values, path)
    if problem["type"] == "extra_forbidden":
        yield path, unknown(path, values)
    elif problem["type"] == "missing":
        yield path, "is missing" + MISSING.get(path, "")
    elif isinstance(conflict, SettingsConflict):
        for inner, message in conflict.problems:
            keys = [int(key) if key.isdecimal() else key for key in inner.split(".") if key]
            yield (*path, *keys), message
    elif kinds and not isinstance(whole, dict):
        meant = did_you_mean(whole, kinds) if isinstance(whole, str) else f"it must be one of {', '.join(kinds)}"
        own = " a function FILE.py:FUNCTION," if "python" in kinds else ""
        yield path, f"is {show(whole)}; {meant},{own} or a mapping with type and its settings"
    elif problem["type"].startswith("union_tag"):
        value = whole.get("type")
        yield (*path, "type"), "is missing" if value is None else f"is {show(value)}; {did_you_mean(value, kinds)}"
    else:
        yield path, wrong_value(problem["input"], annotation)


def _locate(loc: tuple[str | int, ...], values: Any) -> tuple[KeyPath, Any]:
    """The key path of an error without pydantic's names of union branches, and the setting's annotation."""
    path: list[str | int] = []
    node, annotation = values, RunConfig
    for key in loc:
        inner = step(annotation, key, node)
        unknown_key = isinstance(node, dict) and key in node and models_in(annotation)
        if inner is None and not unknown_key:
            continue  # the name of a union's branch
        path.append(key)
        annotation = inner
        node = value_at(node, (key,))
    return tuple(path), annotation


def dotted(path: KeyPath, values: Mapping[str, Any]) -> str:
    """A path as users write it; if `values` has only one model, its path begins with `model`."""
    models = values.get("models")
    if path[:2] == ("models", 0) and isinstance(models, list) and len(models) == 1:
        path = ("model", *path[2:])
    return ".".join(map(str, path)) or "the configuration"


def unknown(path: KeyPath, values: Mapping[str, Any]) -> str:
    """The message about a key that does not exist: the nearest name, its section, or the existing names."""
    key, parent = str(path[-1]), path[:-1]
    _, annotation = _locate(parent, values)
    node = value_at(values, parent)
    here = [info.alias or name for model in models_in(annotation, node) for name, info in model.model_fields.items()]
    if not parent:
        here.append("model")
    prefix = dotted(parent, values) + "." if parent else ""
    start = "is not a setting"
    if parent == ("method",):
        start = f"is not a setting of {node.get('type') if isinstance(node, dict) else None}"
        if owners := [name for name, cls in METHODS.items() if key in cls.model_fields]:
            return f"{start}, but of {', '.join(owners)}"
    if message := hint(key) or hint("_".join(map(str, path[-2:]))):
        return f"{start}; {message}"
    known = known_paths()
    meant = known.get(key) or [f"{prefix}{name}" for name in get_close_matches(key, here, n=1, cutoff=0.6)]
    meant = meant or [path for name in get_close_matches(key, known, n=1, cutoff=0.75) for path in known[name]]
    if meant:
        return f"{start}; did you mean {' or '.join(meant)}?"
    return f"{start}; {prefix.rstrip('.') or 'a configuration'} has {', '.join(here)}"


def did_you_mean(value: Any, words: Iterable[str]) -> str:
    """Suggest the nearest word, if one is near, and list all words."""
    words = list(words)
    near = get_close_matches(str(value).lower(), words, n=1, cutoff=0.6)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"{meant}it must be one of {', '.join(words)}"


def wrong_value(value: Any, annotation: Any) -> str:
    """The message about a value that its setting does not take: the value and what is expected."""
    words = choices(annotation)
    if words and isinstance(value, str):
        return f"is {show(value)}; {did_you_mean(value, words)}"
    return f"is {show(value)}; it must be {expected(annotation)}"


def show(value: Any) -> str:
    """A value in a message: short, and on one line."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    text = str(value)
    short = text if len(text) <= 60 else text[:57] + "..."
    return repr(short) if isinstance(value, str) else short
