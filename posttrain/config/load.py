"""From a file or preset, overrides and flags to a RunConfig.

Precedence: flag, override, file, what the file extends, default.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError

from posttrain.config.explain import explain
from posttrain.config.files import KeyPath, Tree, read_settings, write_yaml
from posttrain.config.layers import Layers, merge, override
from posttrain.config.presets import preset_names, preset_path
from posttrain.config.schema import RunConfig
from posttrain.errors import ConfigError

_RESOLVER = re.compile(r"\$\{\s*[\w.]+\s*:")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, the plain values it was made of (without defaults), and notes for the log."""

    config: RunConfig
    values: dict[str, Any]
    notes: list[str]


def load(source: Path | str | None, overrides: Sequence[str] = (), flags: Mapping[str, object] | None = None) -> Loaded:
    """Read and check a configuration.

    `source` is a YAML or JSON file or the name of a preset; `overrides` are texts `a.b=c`; `flags` maps dotted paths to
    values (text is parsed like the value of an override). Raises ConfigError, which lists everything that is wrong.
    """
    layers = Layers()
    if source is not None:
        for tree in _chain(find(source)):
            layers.lay(tree)
    override(layers, [_assignment(text) for text in overrides])
    override(layers, [(path, value, f"--{path.replace('_', '-')}") for path, value in (flags or {}).items()])
    values = interpolate(layers.values, layers.origins)
    try:
        config = RunConfig.model_validate(values)
    except ValidationError as error:
        lines = explain(error, values, layers.origins)
        if len(lines) == 1:
            raise ConfigError(lines[0]) from error
        raise ConfigError(f"{len(lines)} settings are wrong:\n" + "\n".join(f"  {line}" for line in lines)) from error
    return Loaded(config, values, layers.notes)


def dump(config: RunConfig) -> str:
    """The whole configuration as YAML that `load` reads back to an equal one."""
    return write_yaml(_escaped(config.model_dump(mode="json")))


def find(source: Path | str) -> Path:
    """The file that `source` names: a path, or a preset. Raises ConfigError with the nearest names there are."""
    path = Path(source)
    if path.is_file():
        return path
    preset = preset_path(str(source))
    if preset is not None:
        return preset
    if path.is_dir():
        raise ConfigError(f"{source} is a folder; give a YAML or JSON file in it, or a preset")
    beside = [p for p in path.parent.glob("*") if p.suffix in (".yaml", ".yml", ".json")]
    stems = {p.stem: str(p) for p in beside} | {name: name for name in preset_names()}
    near = [stems[stem] for stem in get_close_matches(path.stem, stems, n=3, cutoff=0.6)]
    meant = f"; did you mean {' or '.join(near)}?" if near else ""
    presets = "" if near else f"; presets are {', '.join(preset_names())}"
    raise ConfigError(f"there is no file or preset {source}{meant}{presets}")


def _chain(path: Path, seen: tuple[Path, ...] = ()) -> Iterator[Tree]:
    """The file's settings, after those of every file it extends: the lowest layer first."""
    if path.resolve() in seen:
        raise ConfigError(" extends ".join(map(str, [*seen[seen.index(path.resolve()) :], path])) + ": a circle")
    preset = preset_path(path.stem) == path
    tree = read_settings(path, f"preset {path.stem}" if preset else str(path))
    base = tree.values.pop("extends", None)
    where = tree.origins.get(("extends",), str(path))
    for name in base if isinstance(base, list) else [base] if base is not None else []:
        if not isinstance(name, str):
            raise ConfigError(f"{where}: extends takes a file or preset, or a list of them")
        beside = path.parent / name
        try:
            found = beside if beside.is_file() else find(name) if preset_path(name) else find(beside)
        except ConfigError as error:
            raise ConfigError(f"{where}: extends: {error}") from error
        yield from _chain(found, (*seen, path.resolve()))
    yield tree


def _assignment(text: str) -> tuple[str, str, str]:
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        hint = " (one configuration file is taken)" if text.endswith((".yaml", ".yml", ".json")) else ""
        raise ConfigError(f"{text!r} is not an override such as training.max_steps=200{hint}")
    return path.strip().removeprefix("--"), value.strip(), f"override {text}"


def interpolate(values: dict[str, Any], origins: Mapping[KeyPath, str]) -> dict[str, Any]:
    """The values with every `${a.b}` replaced by the setting it names, which may be one left at its default."""
    texts = [(path, text) for path, text in _texts(values) if "${" in text]
    if not texts:
        return values
    for path, text in texts:
        if _RESOLVER.search(text):
            raise ConfigError(
                f"{_origin(path, origins)}: {text}: only settings can be named in ${{...}}, e.g. ${{model.path}}"
            )
    models = values.get("models")
    one = {"model": models[0]} if isinstance(models, list) and len(models) == 1 else {}
    resolved: dict[KeyPath, Any] = {}
    try:
        tree = OmegaConf.create({**merge(_defaults(RunConfig), values), **one})
    except OmegaConfBaseException as error:
        raise ConfigError(f"a ${{...}} cannot be read: {str(error).splitlines()[0]}") from error
    for path, text in texts:
        node: Any = tree
        try:
            for key in path:
                node = node[key]
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"{_origin(path, origins)}: {text}: {reason}") from error
        resolved[path] = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    return _replaced(values, resolved)


def _texts(node: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(node, str):
        yield path, node
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in entries:
        yield from _texts(value, (*path, key))


def _replaced(node: Any, new: Mapping[KeyPath, Any], path: KeyPath = ()) -> Any:
    if path in new:
        return new[path]
    if isinstance(node, dict):
        return {key: _replaced(value, new, (*path, key)) for key, value in node.items()}
    if isinstance(node, list):
        return [_replaced(value, new, (*path, index)) for index, value in enumerate(node)]
    return node


def _defaults(model: type[BaseModel]) -> dict[str, Any]:
    """The defaults of all sections; a section with a required setting gives the defaults of its others."""
    result: dict[str, Any] = {}
    for name, info in model.model_fields.items():
        default = info.get_default()
        if isinstance(default, BaseModel):
            result[name] = default.model_dump(mode="json")
        elif not info.is_required():
            result[name] = default
        elif isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            result[name] = _defaults(info.annotation)
    return result


def _origin(path: KeyPath, origins: Mapping[KeyPath, str]) -> str:
    return next((origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in origins), "settings")


def _escaped(node: Any) -> Any:
    """Text with `${` written so that it is read back as it is."""
    if isinstance(node, str):
        return re.sub(r"(\\*)\$\{", lambda m: m.group(1) * 2 + r"\${", node)
    if isinstance(node, dict):
        return {key: _escaped(value) for key, value in node.items()}
    return [_escaped(value) for value in node] if isinstance(node, list) else node
