"""Layers of settings (preset, file, overrides, flags): short forms are expanded, and layers merged in order."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from posttrain.base.errors import ConfigError
from posttrain.base.files import table_beside
from posttrain.config.reading.files import KeyPath, Tree, parse_value, value_at
from posttrain.config.schema.methods import PPO_NAMES, spell_out
from posttrain.config.schema.model import ModelConfig
from posttrain.config.schema.types import OnOff

# Names of other systems -> names here, by section.
ALIASES: dict[str, dict[str, tuple[str, ...]]] = {
    section: {alias: tuple(target.split(".")) for alias, target in aliases.items()}
    for section, aliases in table_beside(__file__, "aliases.yaml").items()
}
ON_OFF = frozenset(name for name, info in ModelConfig.model_fields.items() if OnOff in info.metadata)
SECTIONS = ("data", "training", "evaluation", "checkpoint", "tracking", "devices", "rollout", "rewards")
# Settings of which only one may be set: if an upper layer sets another one, it replaces the lower layer's choice.
CHOICES: dict[KeyPath, tuple[str, ...]] = {("data", "validation"): ("ratio", "rows", "source")}


@dataclass(slots=True)
class Layers:
    """Merged settings as plain values (`models` is always a list), the origin of each setting, and notes."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def copy(self) -> "Layers":
        """A copy of the values and origins, without the notes, to merge further layers into."""
        return Layers(deepcopy(self.values), dict(self.origins), [])

    def lay(self, layer: Tree, every_model: bool = False) -> None:
        """Merge a tree over the present values. If there is one model, `model` is merged into it. If there are several,
        `model` is merged into each with `every_model` (overrides); otherwise it replaces them (files)."""
        layer = spell_out_layer(layer, self.notes)
        values = dict(layer.values)
        model = values.pop("model", None)
        origins = {path: where for path, where in layer.origins.items() if path[:1] != ("model",)}
        if model is not None:
            count = self._lay_model(model, layer.origins.get(("model",), ""), every_model)
            for index in range(count):
                origins |= {("models", index, *p[1:]): w for p, w in layer.origins.items() if p[:1] == ("model",)}
        self.values = merge(self.values, values)
        self.origins |= origins
        method = self.values.get("method")
        if isinstance(method, dict) and method.get("type") == "ppo":  # a layer without the method has general names
            self.values["method"] = spell_out(method)
            for alias, name in PPO_NAMES.items():
                if alias in method and ("method", alias) in self.origins:
                    self.origins["method", name] = self.origins["method", alias]
        replaced = object()
        gone = {path for path in self.origins if len(path) > 1 and value_at(self.values, path, replaced) is replaced}
        self.origins = {path: at for path, at in self.origins.items() if path not in gone}

    def _lay_model(self, model: dict[str, Any], where: str, every_model: bool) -> int:
        models = self.values.get("models")
        if not isinstance(models, list) or not models or (len(models) > 1 and not every_model):
            models = [{}]
        if len(models) > 1 and {"path", "name", "revision"} & set(model):
            raise ConfigError(
                f"{where}: there are {len(models)} models; say which: models.0.path=..., or "
                f"replace the list: models=[...]"
            )
        # Short forms inside the list are already expanded, because every layer passes through spell_out_layer.
        self.values["models"] = [merge(old, model) if isinstance(old, dict) else model for old in models]
        return len(models)

    def put(self, path: list[str], value: Any, where: str) -> None:
        """Set an entry of a list, or a value inside an entry: `method.loss_weights.1`, `models.0.path`."""
        node: Any = self.values
        for depth, key in enumerate(path):
            last, here = depth == len(path) - 1, ".".join(path[: depth + 1])
            if isinstance(node, list):
                if not _is_index(key) or int(key) >= len(node):
                    raise ConfigError(f"{where}: {'.'.join(path[:depth])} has entries 0 to {len(node) - 1}, not {key}")
                index: Any = int(key)
            else:
                index = key
                if not last and not isinstance(node.get(key), dict | list):
                    if path[depth + 1].isdecimal():
                        raise ConfigError(f"{where}: {here} is not a list with entries to change")
                    node[key] = {}
            if last:
                node[index] = value
            elif not isinstance(node[index], dict | list):
                raise ConfigError(f"{where}: {here} has no settings inside it")
            node = node[index]
        at = tuple(int(part) if _is_index(part) else part for part in path)
        self.origins = {known: line for known, line in self.origins.items() if known[: len(at)] != at} | {at: where}


def _is_index(key: str) -> bool:
    """Whether a key can be the index of a list. At most 9 digits, because Python refuses to parse thousands."""
    return key.isdecimal() and len(key) < 10


def merge(lower: dict[str, Any], upper: dict[str, Any], path: KeyPath = ()) -> dict[str, Any]:
    """Merge two mappings: nested mappings are merged; the upper layer replaces other values, including lists."""
    if path == ("method",) and upper.get("type", lower.get("type")) != lower.get("type") and "type" in lower:
        return dict(upper)  # the settings of the old method do not apply to another method
    choice = CHOICES.get(path, ())
    if any(upper.get(name) is not None and lower.get(name) is None for name in choice):
        lower = {}
    result = dict(lower)
    for key, value in upper.items():
        old = result.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = merge(old, value, (*path, key))
        result[key] = value
    return result


def spell_out_layer(layer: Tree, notes: list[str]) -> Tree:
    """Expand the short forms of a layer: a string for a model, a method or the data, one reward, aliases, `ipo`."""
    values, origins = dict(layer.values), dict(layer.origins)
    if "model" in values and "models" in values:
        raise ConfigError(f"{origins.get(('models',), 'settings')}: both model and models are given; keep one")
    for section in SECTIONS:
        if section in values and values[section] is None:
            del values[section]  # a heading with all its settings commented out
    if "model" in values:
        values["model"] = _spell_out_model(values["model"], ("model",), origins, notes)
    for name in ("models", "rewards"):
        if isinstance(values.get(name), str | dict):
            values[name] = [values[name]]
    if isinstance(values.get("data"), str | list):
        values["data"] = {"source": values["data"]}
    if isinstance(values.get("models"), list):
        values["models"] = [
            _spell_out_model(model, ("models", index), origins, notes) for index, model in enumerate(values["models"])
        ]
    method = values.get("method")
    if isinstance(method, dict):
        method = _rename(method, "method", ("method",), origins, notes)
    if method is not None:
        values["method"] = spell_out(method)
    return Tree(values, origins)


def _spell_out_model(model: Any, path: KeyPath, origins: dict[KeyPath, str], notes: list[str]) -> Any:
    if isinstance(model, str):
        return {"path": model}
    if isinstance(model, dict):
        switched = {key: {} if model[key] else None for key in ON_OFF & model.keys() if isinstance(model[key], bool)}
        return _rename({**model, **switched}, "models", path, origins, notes)
    return model


def _rename(
    values: dict[str, Any], section: str, path: KeyPath, origins: dict[KeyPath, str], notes: list[str]
) -> dict[str, Any]:
    """Rename aliases to posttrain's names. Some aliases of other methods are settings of PPO."""
    own = PPO_NAMES.values() if values.get("type") == "ppo" else ()
    aliases = {alias: target for alias, target in ALIASES[section].items() if alias not in own}
    result = {key: value for key, value in values.items() if key not in aliases}
    for alias, target in aliases.items():
        if alias not in values:
            continue
        where = origins.get((*path, alias), "settings")
        dotted = ".".join(target)
        node = result
        for key in target[:-1]:
            if not isinstance(node.get(key), dict | None):
                raise ConfigError(
                    f"{where}: {alias} means {dotted}, but {key} is also given and is not a mapping; keep one"
                )
            node[key] = dict(node.get(key) or {})
            node = node[key]
        if target[-1] in node:
            raise ConfigError(f"{where}: {alias} is another name for {dotted}, which is also given; keep one")
        node[target[-1]] = values[alias]
        origins[*path, *target] = where
        notes.append(f"{where}: {alias} is read as {dotted}")
    return result


def override(layers: Layers, assignments: Sequence[tuple[str, Any, str]]) -> None:
    """Merge assignments (dotted path, value or string to parse, origin) over the layers."""
    nested = Layers()
    indexed: list[tuple[list[str], Any, str]] = []
    for dotted, raw, where in assignments:
        path = dotted.split(".")
        if not all(path):
            raise ConfigError(f"{where}: {dotted!r} is not the path of a setting, such as training.max_steps")
        tree = parse_value(raw, where) if isinstance(raw, str) else Tree({"value": raw}, {("value",): where})
        value = tree.values["value"]
        if any(part.isdecimal() for part in path):
            indexed.append((path, value, where))
            continue
        prefix = tuple(path)
        origins: dict[KeyPath, str] = dict.fromkeys([prefix, *([("model",)] if path[0] == "model" else [])], where)
        origins |= {(*prefix, *inner[1:]): where for inner in tree.origins}
        for part in reversed(path):
            value = {part: value}
        piece = spell_out_layer(Tree(value, origins), layers.notes)
        nested.values = merge(nested.values, piece.values)
        nested.origins |= piece.origins
    if nested.values:
        layers.lay(Tree(nested.values, nested.origins), every_model=True)
    for path, value, where in indexed:
        layers.put(path, value, where)
    if indexed:
        done = spell_out_layer(Tree(layers.values, layers.origins), layers.notes)
        layers.values, layers.origins = done.values, done.origins
