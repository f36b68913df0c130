"""Turning pydantic's complaints into one line each: where it was written, which setting, what is wrong, what was meant."""

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Lt
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from posttrain.config.base import PATTERNS, SettingsConflict
from posttrain.config.files import KeyPath
from posttrain.config.methods import METHODS
from posttrain.config.schema import RunConfig

# What users of TRL and transformers write -> what to write here.
HINTS = {
    "per_device_train_batch_size": "training.batch_size counts the examples of a step over all devices",
    "per_device_eval_batch_size": "evaluation needs no batch size; training.tokens_per_pack sets the memory",
    "gradient_accumulation_steps": "it follows from training.batch_size and training.tokens_per_pack",
    "epochs": "write training.num_train_epochs",
    "num_epochs": "write training.num_train_epochs",
    "lr": "write training.learning_rate",
    "model_name_or_path": "write model.path",
    "model_name": "write model.path",
    "dataset_name": "write data.source",
    "dataset": "write data.source",
    "bf16": "write model.dtype: bfloat16",
    "fp16": "write model.dtype: bfloat16; float16 is not offered",
    "warmup_ratio": "write training.warmup_steps; below 1 it is a share",
    "packing": "examples are always packed",
    "reference_free": "write method.use_ref_model: false",
    "early_stopping": "write checkpoint.early_stopping_patience",
    "metric_for_best_model": "write checkpoint.best_metric",
    "load_best_model_at_end": "write checkpoint.best_metric; best/ is kept beside final/",
    "optim": "write training.optimizer",
    "use_lora": "write model.lora: {r: 16}, or leave it out",
    "truncation": "write data.overlong: truncate",
}


def explain(error: ValidationError, values: Mapping[str, Any], origins: Mapping[KeyPath, str]) -> list[str]:
    """One line for each thing wrong with `values`, in the order of the settings."""
    found: dict[KeyPath, str] = {}
    for problem in error.errors(include_url=False):
        for path, message in _messages(problem, values):
            found.setdefault(path, message)
    # A union complains once for each branch: the complaint about an entry inside says more than one about the whole.
    paths = [p for p in found if not any(other != p and other[: len(p)] == p for other in found)]
    paths = [p for p in paths if not (found[p].startswith("is missing") and _meant_elsewhere(p, found, values))]
    paths.sort(key=lambda p: _line(_where(p, origins)))
    return [f"{_where(path, origins)}{_dotted(path, values)} {found[path]}" for path in paths]


def _meant_elsewhere(path: KeyPath, found: Mapping[KeyPath, str], values: Mapping[str, Any]) -> bool:
    """Is a missing setting the one that an unknown name beside it probably meant?"""
    return any(f"did you mean {_dotted(path, values)}?" in message for message in found.values())


def _line(where: str) -> tuple[str, int]:
    name, _, line = where.removesuffix(": ").rpartition(":")
    return (name, int(line)) if line.isdecimal() else (where, 0)


def _messages(problem: Any, values: Mapping[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    path, annotation = _locate(problem["loc"], values)
    conflict = problem.get("ctx", {}).get("error")
    if problem["type"] == "extra_forbidden":
        yield path, unknown(path, values)
    elif problem["type"] == "missing":
        yield path, "is missing" + _missing_hint(path)
    elif isinstance(conflict, SettingsConflict):
        for inner, message in conflict.problems:
            keys = [int(key) if key.isdecimal() else key for key in inner.split(".") if key]
            yield (*path, *keys), message
    elif problem["type"].startswith("union_tag"):
        given = _value_at(values, path)
        if isinstance(given, dict):
            kind = given.get("type")
            yield (*path, "type"), _literal_message(kind, (*METHODS, "ipo")) if "type" in given else "is missing"
        else:
            yield path, _type_message(given, annotation)
    else:
        yield path, _type_message(_value_at(values, path), annotation)


def _locate(loc: tuple[str | int, ...], values: Any) -> tuple[KeyPath, Any]:
    """The key path of an error without pydantic's names for the branches of a union, and that setting's annotation."""
    path: list[str | int] = []
    node, annotation = values, RunConfig
    for key in loc:
        inner = _step(annotation, key, node)
        if inner is None and not (
            isinstance(node, dict) and key in node and isinstance(key, str) and _is_model(annotation)
        ):
            continue  # the name of a union's branch
        path.append(key)
        annotation = inner
        node = node.get(key) if isinstance(node, dict) else node[key] if _has_index(node, key) else None
    return tuple(path), annotation


def _step(annotation: Any, key: str | int, node: Any) -> Any:
    """The annotation of an entry inside a setting, or None where there is no such entry."""
    for option in _options(annotation, node):
        if isinstance(option, type) and issubclass(option, BaseModel):
            if key in option.model_fields:
                return _full(option.model_fields[str(key)])
        elif get_origin(option) in (tuple, list) and isinstance(key, int):
            return get_args(option)[0]
        elif get_origin(option) is dict and isinstance(node, dict) and key in node:
            return get_args(option)[1]
    return None


def _full(info: FieldInfo) -> Any:
    """A field's annotation with the constraints that pydantic took apart."""
    return Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation


def _options(annotation: Any, node: Any = None) -> list[Any]:
    """The branches of a union without their constraints; of the methods, the one that `node` names."""
    if get_origin(annotation) is Annotated:
        return _options(get_args(annotation)[0], node)
    if get_origin(annotation) in (Union, UnionType):
        options = [option for branch in get_args(annotation) for option in _options(branch, node)]
        kind = node.get("type") if isinstance(node, dict) else None
        if set(METHODS.values()) <= set(options) and kind in METHODS:
            return [METHODS[kind]]
        return options
    return [annotation]


def _is_model(annotation: Any) -> bool:
    return any(isinstance(option, type) and issubclass(option, BaseModel) for option in _options(annotation))


def _has_index(node: Any, key: str | int) -> bool:
    return isinstance(node, list | tuple) and isinstance(key, int) and key < len(node)


def _value_at(values: Any, path: KeyPath) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else values[key] if _has_index(values, key) else None
    return values


def _where(path: KeyPath, origins: Mapping[KeyPath, str]) -> str:
    """Where the setting, or else the nearest heading above it, was written."""
    for length in range(len(path), 0, -1):
        if path[:length] in origins:
            return f"{origins[path[:length]]}: "
    return ""


def _dotted(path: KeyPath, values: Mapping[str, Any]) -> str:
    models = values.get("models")
    if path[:2] == ("models", 0) and isinstance(models, list) and len(models) == 1:
        path = ("model", *path[2:])
    return ".".join(map(str, path)) or "the configuration"


def _missing_hint(path: KeyPath) -> str:
    return {
        ("models",): "; name one, e.g. `model: openai-community/gpt2`",
        ("method",): f"; choose one of {', '.join((*METHODS, 'ipo'))}, e.g. `method: sft`",
        ("data",): "; say what to train on, e.g. `data: {source: rows.jsonl}`",
        ("data", "source"): "; give a hub id, a file or a folder",
    }.get(path, "")


# --- unknown names --------------------------------------------------------------------------------------------------


def known_paths() -> dict[str, list[str]]:
    """Every setting's last name -> the dotted paths that end in it (`model.` for an entry of models)."""
    found: dict[str, list[str]] = {}
    for dotted in leaves(RunConfig):
        found.setdefault(dotted.rsplit(".", 1)[-1], []).append(dotted)
    return found


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The dotted paths of all settings of a class; the methods' together, without repeats."""
    seen: set[str] = set()
    for name, info in model.model_fields.items():
        name = "model" if prefix == "" and name == "models" else name
        inner = [o for o in _options(info.annotation) if isinstance(o, type) and issubclass(o, BaseModel)]
        inner += [get_args(o)[0] for o in _options(info.annotation) if name == "model" and get_origin(o) is tuple]
        for path in [f"{prefix}{name}"] if not inner else [p for o in inner for p in leaves(o, f"{prefix}{name}.")]:
            if path not in seen:
                seen.add(path)
                yield path


def unknown(path: KeyPath, values: Mapping[str, Any]) -> str:
    """What to say about a key that does not exist: the nearest name here, the section it belongs to, or what there is."""
    key, parent = str(path[-1]), path[:-1]
    _, annotation = _locate(parent, values)
    node = _value_at(values, parent)
    here = [
        n
        for o in _options(annotation, node)
        if isinstance(o, type) and issubclass(o, BaseModel)
        for n in o.model_fields
    ]
    if not parent:
        here.append("model")
    prefix = _dotted(parent, values) + "." if parent else ""
    start = "is not a setting"
    if parent == ("method",):
        owners = [name for name, cls in METHODS.items() if key in cls.model_fields]
        kind = node.get("type") if isinstance(node, dict) else None
        start = f"is not a setting of {kind}"
        if owners:
            return f"{start}, but of {' and '.join(owners)}"
    if key in HINTS:
        return f"{start}; {HINTS[key]}"
    near = get_close_matches(key, here, n=1, cutoff=0.7)
    everywhere = known_paths()
    if not near and key in everywhere:
        return f"{start}; did you mean {' or '.join(everywhere[key])}?"
    if not near:
        near = get_close_matches(key, here, n=1, cutoff=0.6)
    if near:
        return f"{start}; did you mean {prefix}{near[0]}?"
    elsewhere = get_close_matches(key, everywhere, n=1, cutoff=0.75)
    if elsewhere:
        return f"{start}; did you mean {' or '.join(everywhere[elsewhere[0]])}?"
    return f"{start}; {prefix.rstrip('.') or 'a configuration'} has {', '.join(here)}"


# --- values of the wrong kind ---------------------------------------------------------------------------------------


def _literal_message(given: Any, choices: tuple[Any, ...]) -> str:
    near = get_close_matches(str(given).lower(), [str(choice) for choice in choices], n=1, cutoff=0.5)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"is {_show(given)}; {meant}it is one of {', '.join(map(str, choices))}"


def _type_message(given: Any, annotation: Any) -> str:
    literals = [
        choice for option in _options(annotation) if get_origin(option) is Literal for choice in get_args(option)
    ]
    literals += ["true", "false"] if literals and bool in _options(annotation) else []
    others = [o for o in _options(annotation) if get_origin(o) is not Literal and o not in (type(None), bool)]
    if isinstance(given, str) and literals and not others:
        return _literal_message(given, tuple(literals))
    return f"is {_show(given)}; it must be {expected(annotation)}"


def expected(annotation: Any) -> str:
    """What a setting accepts, in words: "a whole number, 1 or more; or null"."""
    if get_origin(annotation) is Annotated:
        base, *constraints = get_args(annotation)
        words, bounds = expected(base), _bounds(constraints)
        if bounds and words.endswith(" or null"):
            return f"{words.removesuffix(' or null')} {bounds} or null"
        return f"{words} {bounds}".strip()
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(dict.fromkeys(expected(branch) for branch in get_args(annotation)))
    if get_origin(annotation) is Literal:
        return " or ".join(map(str, get_args(annotation)))
    if get_origin(annotation) is tuple:
        return f"a list of {_plural(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "a mapping of names to text"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping with {', '.join(annotation.model_fields)}"
    return {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}[
        annotation
    ]


def _plural(annotation: Any) -> str:
    words = expected(annotation)
    if words.startswith("a whole number"):
        return words.replace("a whole number", "whole numbers", 1)
    if words.startswith("a number"):
        return words.replace("a number", "numbers", 1)
    return words.replace("a mapping", "mappings", 1)


def _bounds(constraints: list[Any]) -> str:
    words = []
    for constraint in [c for item in constraints for c in (item.metadata if isinstance(item, FieldInfo) else [item])]:
        if isinstance(constraint, Ge):
            words.append(f"of {_number(constraint.ge)} or more")
        elif isinstance(constraint, Gt):
            words.append(f"above {_number(constraint.gt)}")
        elif isinstance(constraint, Lt):
            words.append(f"below {_number(constraint.lt)}")
        elif getattr(constraint, "pattern", None) is not None:
            words.append(PATTERNS[getattr(constraint, "pattern")])  # noqa: B009 - pydantic's own class has no public name
    return " and ".join(words)


def _number(value: Any) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _show(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    text = str(value)
    short = text if len(text) <= 60 else text[:57] + "..."
    return repr(short) if isinstance(value, str) else short
