"""Each setting of the schema: path, default, description, and its accepted values in words."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from posttrain.base.words import by_key
from posttrain.config.schema.methods import METHOD_NAMES, METHODS
from posttrain.config.schema.model import ModelConfig
from posttrain.config.schema.run import RunConfig
from posttrain.config.schema.types import PATTERNS, OnOff

_BOUNDS = {"ge": "of {} or more", "gt": "above {}", "lt": "below {}", "le": "at most {}"}
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `path` is dotted and has `model.` for an entry of `models`. `methods` is empty if the setting
    applies to every method."""

    path: str
    annotation: Any
    default: Any
    required: bool
    description: str
    methods: tuple[str, ...] = ()

    @property
    def section(self) -> str:
        """The first part of the path, or "run" for a setting outside every section."""
        return self.path.split(".")[0] if "." in self.path else "run"

    @property
    def group(self) -> bool:
        """Whether the setting is a mapping of further settings, such as model.lora."""
        return bool(models_in(self.annotation))

    @property
    def switch(self) -> bool:
        """Whether the setting may be `true` or `false`."""
        return bool in options(self.annotation) or OnOff in getattr(self.annotation, "__metadata__", ())


def all_settings() -> list[Setting]:
    """Every setting, in the order of the schema. A setting of methods appears once for all methods that give it the
    same values, default and description, and again for each variant."""
    kinds = Literal[*METHOD_NAMES]
    kind = Setting("method.type", kinds, None, True, "The training method; ipo is dpo with the ipo loss.")
    settings: dict[str, Setting] = {}
    for setting in settings_in(RunConfig, ""):
        if setting.path == kind.path:
            settings[kind.path] = kind
            continue
        key = repr((setting.path, setting.annotation, setting.default, setting.description))
        old = settings.get(key)
        settings[key] = setting if old is None else replace(old, methods=old.methods + setting.methods)
    return list(settings.values())


@cache
def known_paths() -> dict[str, list[str]]:
    """Last part of a path -> the dotted paths of all settings that end in it."""
    return by_key((path.rpartition(".")[2], path) for path in dict.fromkeys(each.path for each in all_settings()))


def settings_in(model: type[BaseModel], prefix: str, method: str = "") -> Iterator[Setting]:
    """Yield the settings of a group, with a prefix before their paths; `method`: whose settings they are."""
    for name, info in model.model_fields.items():
        path = f"{prefix}{'model' if not prefix and name == 'models' else info.alias or name}"
        inner = [ModelConfig] if path == "model" else models_in(full(info))
        optional = type(None) in options(full(info))
        if not inner or optional:
            methods = (method,) if method else ()
            default = None if info.is_required() else info.get_default()
            yield Setting(path, full(info), default, info.is_required(), info.description or "", methods)
        for cls in inner:
            owner = next((name for name, owned in METHODS.items() if owned is cls), method)
            yield from settings_in(cls, f"{path}.", owner)


def full(info: FieldInfo) -> Any:
    """A field's annotation with the constraints that pydantic split off."""
    return Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation


def options(annotation: Any, value: Any = None) -> list[Any]:
    """The branches of a union, without constraints. If one has the `type` of the mapping `value`, only that branch."""
    if get_origin(annotation) is Annotated:
        return options(get_args(annotation)[0], value)
    if get_origin(annotation) not in (Union, UnionType):
        return [annotation]
    branches = [option for branch in get_args(annotation) for option in options(branch, value)]
    kind = value.get("type") if isinstance(value, dict) else None
    named = [branch for branch in branches if kind is not None and kind in kinds_of(branch)]
    return named or branches


def kinds_of(annotation: Any) -> list[str]:
    """The values of `type` that distinguish the groups of settings in `annotation`."""
    types = (cls.model_fields["type"] for cls in models_in(annotation) if "type" in cls.model_fields)
    return [kind for info in types for kind in get_args(info.annotation)]


def models_in(annotation: Any, value: Any = None) -> list[type[BaseModel]]:
    """The branches of an annotation that are groups of settings."""
    return [each for each in options(annotation, value) if isinstance(each, type) and issubclass(each, BaseModel)]


def step(annotation: Any, key: str | int, value: Any) -> Any:
    """The annotation of the entry `key` inside a setting, or None."""
    for option in options(annotation, value):
        if isinstance(option, type) and issubclass(option, BaseModel):
            if key in option.model_fields:
                return full(option.model_fields[str(key)])
        elif get_origin(option) is tuple and isinstance(key, int):
            return get_args(option)[0]
        elif get_origin(option) is dict and isinstance(value, dict) and key in value:
            return get_args(option)[1]
    return None


def choices(annotation: Any) -> list[str]:
    """The allowed words of a setting that takes one of a few words; otherwise an empty list."""
    branches = options(annotation)
    words = [str(word) for option in branches if get_origin(option) is Literal for word in get_args(option)]
    others = [option for option in branches if get_origin(option) is not Literal and option not in (bool, type(None))]
    if not words or others:
        return []
    return words + (["true", "false"] if bool in branches else []) + (["null"] if type(None) in branches else [])


def expected(annotation: Any) -> str:
    """The accepted values of a setting in words: "a whole number of 1 or more or null"."""
    if get_origin(annotation) is Annotated:
        base, *constraints = get_args(annotation)
        words, bounds = expected(base), _bounds(constraints)
        if OnOff in constraints:
            return f"true or false or {words}"
        if bounds and words.endswith(" or null"):
            return f"{words.removesuffix(' or null')} {bounds} or null"
        return f"{words} {bounds}".strip()
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(dict.fromkeys(expected(branch) for branch in get_args(annotation)))
    if get_origin(annotation) is Literal:
        return " or ".join(map(str, get_args(annotation)))
    if get_origin(annotation) is tuple and len(models_in(get_args(annotation)[0])) > 1:
        return "a list of mappings, each with its type"
    if get_origin(annotation) is tuple:
        entries = re.sub(r"^a (whole number|number|mapping)", r"\1s", expected(get_args(annotation)[0]))
        return f"a list of {entries}"
    if get_origin(annotation) is dict:
        return f"a mapping of names to {'values' if get_args(annotation)[1] is Any else 'text'}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a mapping with {', '.join(info.alias or name for name, info in annotation.model_fields.items())}"
    return _WORDS[annotation]


def _bounds(constraints: list[Any]) -> str:
    words = []
    for constraint in [c for item in constraints for c in (item.metadata if isinstance(item, FieldInfo) else [item])]:
        for name, form in _BOUNDS.items():
            if (bound := getattr(constraint, name, None)) is not None:
                words.append(form.format(bound if isinstance(bound, int) else f"{bound:g}"))
        if (pattern := getattr(constraint, "pattern", None)) is not None:
            words.append(PATTERNS[pattern])
    return " and ".join(words)
