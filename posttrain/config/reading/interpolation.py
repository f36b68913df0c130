"""Resolves `${a.b}` in a setting to the value of another setting, given or default."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.base.errors import ConfigError
from posttrain.config.reading.files import KeyPath, origin_of
from posttrain.config.reading.layers import merge
from posttrain.config.schema.data import DataConfig
from posttrain.config.schema.run import RunConfig

# Limit on the total length of all ${...}: references that double at every step would exhaust memory.
MOST_CHARACTERS = 1_000_000
_REFERENCE = re.compile(r"(?P<slashes>\\*)\$\{(?:(?P<name>[^{}$]*)\})?")


def interpolate(values: dict[str, Any], origins: Mapping[KeyPath, str]) -> dict[str, Any]:
    r"""Replace every `${a.b}` in the values by the setting that it names; `\${` is a literal `${`.

    A string that is exactly one `${a.b}` becomes that value, of any type. Raises ConfigError for unknown settings, for
    settings that refer to one another in a cycle, and for replacements longer than MOST_CHARACTERS in total.
    """
    if not any("${" in leaf for leaf in leaves(values) if isinstance(leaf, str)):
        return values
    return _Interpolation(values, origins).resolved((), values)


class _Interpolation:
    """Resolves each string only once, even if several settings refer to it."""

    def __init__(self, values: dict[str, Any], origins: Mapping[KeyPath, str]):
        models = values.get("models")
        model = {"model": models[0]} if isinstance(models, list) and len(models) == 1 else {}
        defaults = RunConfig.model_construct(data=DataConfig.model_construct())  # without the required settings
        self.tree = merge(defaults.model_dump(mode="json"), values) | model
        self.origins = origins
        self.done: dict[KeyPath, Any] = {}
        self.open: list[KeyPath] = []  # the strings being resolved, each needed by the previous one
        self.left = MOST_CHARACTERS

    def resolved(self, path: KeyPath, node: Any) -> Any:
        """The value of a node with its references resolved."""
        if isinstance(node, dict):
            return {key: self.resolved((*path, key), value) for key, value in node.items()}
        if isinstance(node, list):
            return [self.resolved((*path, index), value) for index, value in enumerate(node)]
        if not isinstance(node, str) or "${" not in node:
            return node
        path = ("models", 0, *path[1:]) if path[:1] == ("model",) else path
        if path not in self.done:
            if path in self.open:
                raise self.wrong(path, node, "settings refer to one another in a cycle")
            self.open.append(path)
            try:
                self.done[path] = self.text(path, node)
            except RecursionError:
                raise self.wrong(path, node, "the chain of references is too long") from None
            self.open.pop()
        return self.done[path]

    def text(self, path: KeyPath, text: str) -> Any:
        """A string with its references resolved."""
        whole = _REFERENCE.fullmatch(text)
        if whole and whole["name"] is not None and not whole["slashes"]:
            return self.spend(path, text, self.named(path, text, whole["name"]))

        def replaced(found: re.Match[str]) -> str:
            half, is_literal = divmod(len(found["slashes"]), 2)
            if is_literal:
                return "\\" * half + found[0].removeprefix(found["slashes"])
            if found["name"] is None:
                raise self.wrong(path, text, "the name of a setting and a } must follow ${")
            return "\\" * half + str(self.spend(path, text, self.named(path, text, found["name"])))

        return _REFERENCE.sub(replaced, text)

    def named(self, path: KeyPath, text: str, name: str) -> Any:
        """The resolved value of the setting `name`."""
        if ":" in name:
            raise self.wrong(path, text, "only settings can be named in ${...}, e.g. ${model.path}")
        node: Any = self.tree
        at: KeyPath = ()
        for key in re.sub(r"\[(\w+)\]", r".\1", name.strip()).split("."):
            if isinstance(node, str):
                node = self.resolved(at, node)
            try:
                index: Any = int(key) if isinstance(node, list) else key
                node, at = node[index], (*at, index)
            except (KeyError, IndexError, TypeError, ValueError):
                raise self.wrong(path, text, f"there is no setting {name.strip() or 'without a name'}") from None
        return self.resolved(at, node)

    def spend(self, path: KeyPath, text: str, value: Any) -> Any:
        """Count the value against the limit and return it. Raises ConfigError if the limit is exceeded."""
        for leaf in leaves(value):
            self.left -= 1 + (len(leaf) if isinstance(leaf, str) else 0)
            if self.left < 0:
                raise self.wrong(path, text[:60], f"the ${{...}} expand to more than {MOST_CHARACTERS:,} characters")
        return value

    def wrong(self, path: KeyPath, text: str, reason: str) -> ConfigError:
        return ConfigError(f"{origin_of(path, self.origins, 'settings')}: {text}: {reason}")


def escaped(node: Any) -> Any:
    """Escape `${` in all strings, so that they read back equal."""
    if isinstance(node, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", node)
    if isinstance(node, dict):
        return {key: escaped(value) for key, value in node.items()}
    return [escaped(value) for value in node] if isinstance(node, list) else node


def leaves(node: Any) -> Iterator[Any]:
    """The values at any depth that are neither mappings nor lists."""
    if not isinstance(node, dict | list):
        yield node
        return
    for value in node.values() if isinstance(node, dict) else node:
        yield from leaves(value)
