"""Reading a settings file: plain YAML or JSON. The line of every key is kept for messages."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from posttrain.base.errors import ConfigError
from posttrain.base.files import MOST_DEPTH, is_too_deep, remember_settings
from posttrain.base.terminal import visible

KeyPath = tuple[str | int, ...]
MOST_BYTES = 1_000_000  # maximum size of a settings file
# Limits on a file's nodes and characters. Each use of an alias counts, because YAML aliases can expand exponentially.
MOST_NODES, MOST_CHARACTERS = 100_000, 2_000_000


@dataclass(frozen=True, slots=True)
class Tree:
    """Plain values (dict, list, str, bool, numbers, None), and the place of each key path, such as file and line."""

    values: dict[str, Any]
    origins: dict[KeyPath, str] = field(default_factory=dict)


def origin_of(path: KeyPath, origins: Mapping[KeyPath, str], default: str = "") -> str:
    """The place of a setting. If it is unknown, the place of the nearest heading above the setting."""
    return next((origins[path[:n]] for n in range(len(path), 0, -1) if path[:n] in origins), default)


def value_at(values: Any, path: KeyPath, default: Any = None) -> Any:
    """The value at a path, or the default if there is none."""
    for key in path:
        if isinstance(values, list | tuple):
            values = dict(enumerate(values))
        if not isinstance(values, dict) or key not in values:
            return default
        values = values[key]
    return values


class _Loader(yaml.SafeLoader):
    """PyYAML's reader with the scalars of YAML 1.2: `1e-6` is a number, `no` and `2024-01-01` are strings."""


class _Dumper(yaml.SafeDumper):
    """PyYAML's writer; quotes strings that YAML 1.1 or 1.2 would read as another type."""


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    # YAML reads these as line breaks and folds them unless they are escaped.
    style = '"' if set("\r\x85\u2028\u2029") & set(value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _represent_text)
_Loader.yaml_implicit_resolvers = {}  # removes the scalars of YAML 1.1, in this class only
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))

_SYNTAX_HINTS = {
    "mapping values are not allowed": " (text that contains `: ` needs quotes)",
    "expected <block end>": " (is the line indented like its neighbours?)",
    "expected ',' or": " (a bracket is not closed)",
    "cannot start any token": " (text that begins with this character needs quotes)",
}
# The values of scalars by the names of their tags; all others are strings.
_SCALARS: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": lambda text: int(text, {"0o": 8, "0x": 16}.get(text[:2], 10)),
    "float": lambda text: float(re.sub(r"\.(?=inf|nan)", "", text.lower())),
}
_PLAIN = {f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float", "str", "seq", "map")}


def write_yaml(values: Any, flow: bool | None = False) -> str:
    """Write plain values as YAML, with mappings in their order; `flow=True` writes a single line. If a string contains
    control characters, all non-ASCII characters are written as YAML escapes, which read back equal."""
    width = 10_000 if flow else 110
    write = partial(yaml.dump, values, Dumper=_Dumper, sort_keys=False, width=width, default_flow_style=flow)
    text = write(allow_unicode=True)
    return text if visible(text) == text else write(allow_unicode=False)


def read_settings(path: Path, name: str | None = None) -> Tree:
    """Read a YAML or JSON file of settings; messages call it `name`, by default its path. Raises ConfigError if it is
    unreadable, too large, not UTF-8 or not a mapping, or has bad syntax (line and column), a tag or a repeated key."""
    text = read_text(path)
    remember_settings(path)
    return parse_settings(text, name or str(path), path.suffix.lower() == ".json")


def read_text(path: Path) -> str:
    """The text of a settings file. Raises ConfigError if it is unreadable, too large or not UTF-8."""
    try:
        with path.open("rb") as stream:
            content = stream.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ConfigError(f"{path} is not a settings file: it has more than {MOST_BYTES:,} bytes")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def parse_settings(text: str, name: str, is_json: bool = False) -> Tree:
    """Read settings from the text of a YAML or JSON file. Raises ConfigError as `read_settings` does."""
    tree = _read_json(text, name) if is_json else _Reader(name).read(text)
    if not isinstance(tree.values, dict):
        kind = type(tree.values)
        found = {list: "list", str: "string", type(None): "null value"}.get(kind, kind.__name__)
        what = "must be a mapping of settings; a file of rows is given with --data"
        raise ConfigError(f"{name} contains a {found}, but {what}")
    return tree


def parse_value(text: str, origin: str) -> Tree:
    """Read the value of an override or flag as YAML: `1e-6`, `true`, `null`, `[a, b]`, `{ratio: 0.05}`, or plain text.

    A string without quotes is kept whole, even where YAML would drop a comment, fold lines or read an anchor.
    In the returned tree, the value is under the key "value", and the place of everything inside it is `origin`.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except (RecursionError, yaml.YAMLError) as error:
        if is_too_deep(error):
            raise ConfigError(f"{origin[:60]}: the value is nested too deeply") from None
        if text[:1] in "[{":
            raise ConfigError(f"{origin}: {text!r} does not close its bracket, or is not a YAML value") from None
        return Tree({"value": text}, {("value",): origin})
    plain = node is None or (isinstance(node, yaml.ScalarNode) and node.style is None)
    block = isinstance(node, yaml.CollectionNode) and not node.flow_style
    if block or (plain and text.strip() != ("" if node is None else node.value)):
        return Tree({"value": text}, {("value",): origin})  # `a: b` is a string here; a mapping is written {a: b}
    reader = _Reader(origin, lines=False)
    value = None if node is None else reader.convert(node, ("value",))
    return Tree({"value": value}, {**reader.origins, ("value",): origin})


def _read_json(text: str, name: str) -> Tree:
    try:
        values = json.loads(text or "{}")
    except json.JSONDecodeError as error:
        raise ConfigError(f"{name}:{error.lineno}: not valid JSON at column {error.colno}: {error.msg}") from error
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{name}: not usable JSON: {error}") from error
    # JSON is YAML except for tabs between tokens (in a JSON string a tab is \t), so the YAML reader finds the lines.
    return Tree(values, _Reader(name).read(text.replace("\t", " ")).origins)


class _Reader:
    """Converts composed YAML nodes to plain values, and records the place of each key."""

    def __init__(self, name: str, lines: bool = True):
        self.name, self.lines, self.nodes, self.characters = name, lines, 0, 0
        self.origins: dict[KeyPath, str] = {}

    def read(self, text: str) -> Tree:
        try:
            node = yaml.compose(text, Loader=_Loader)
        except (RecursionError, yaml.YAMLError) as error:
            if is_too_deep(error):
                raise ConfigError(f"{self.name} is nested too deeply") from error
            if isinstance(error, yaml.MarkedYAMLError):
                raise ConfigError(self._syntax(error, text)) from error
            # a character that YAML does not allow, such as NUL
            raise ConfigError(f"{self.name} is not plain text: {str(error).splitlines()[0]}") from error
        return Tree({} if node is None else self.convert(node, ()), self.origins)

    def convert(self, node: yaml.Node, path: KeyPath) -> Any:
        self.nodes += 1
        self.characters += len(node.value) if isinstance(node, yaml.ScalarNode) else 0
        if self.nodes > MOST_NODES or self.characters > MOST_CHARACTERS:
            raise ConfigError(
                f"{self.name} is too large, or its YAML aliases expand too far: more than {MOST_NODES:,} values "
                f"or {MOST_CHARACTERS:,} characters"
            )
        if len(path) > MOST_DEPTH:
            name = self.name if self.lines else self.name[:60]
            raise ConfigError(f"{name} has an alias that contains itself, or is nested too deeply")
        if node.tag == "tag:yaml.org,2002:merge":
            raise ConfigError(f"{self._at(node)}: `<<` is not supported; use `extends: other.yaml`")
        if node.tag not in _PLAIN:
            raise ConfigError(f"{self._at(node)}: the YAML tag {_short(node.tag)} is refused; write a plain value")
        if path:
            self.origins.setdefault(path, self._at(node))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.convert(child, (*path, index)) for index, child in enumerate(node.value)]
        try:
            return _SCALARS.get(node.tag.rsplit(":", 1)[-1], str)(node.value)
        except ValueError:  # a tag that does not fit the value, such as `!!int abc`, or a number of thousands of digits
            raise ConfigError(f"{self._at(node)}: {node.value[:40]!r} is not a {_short(node.tag)}") from None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise ConfigError(f"{self._at(key_node)}: `<<` is not supported; use `extends: other.yaml`")
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{self._at(key_node)}: a name is expected before the colon, not a list or mapping")
            key = key_node.value
            if key in result:
                first = self.origins[*path, key].rsplit(":", 1)[-1]
                raise ConfigError(f"{self._at(key_node)}: {key} is given twice, first on line {first}; keep one")
            self.origins[*path, key] = self._at(key_node)
            result[key] = self.convert(value_node, (*path, key))
        return result

    def _at(self, node: yaml.Node) -> str:
        return f"{self.name}:{node.start_mark.line + 1}" if self.lines else self.name

    def _syntax(self, error: yaml.MarkedYAMLError, text: str) -> str:
        mark = error.problem_mark or error.context_mark
        if mark is None:
            return f"{self.name}: not valid YAML: {error.problem}"
        line = text.splitlines()[mark.line] if mark.line < len(text.splitlines()) else ""
        place = f"{self.name}:{mark.line + 1}: not valid YAML at column {mark.column + 1}"
        if "\t" in line[: len(line) - len(line.lstrip())]:
            return f"{place}: the line is indented with a tab; indent with spaces"
        problem = error.problem or error.context or ""
        hint = next((hint for sign, hint in _SYNTAX_HINTS.items() if sign in problem), "")
        return f"{place}: {problem}{hint}" + (f"\n    {line.strip()[:100]}" if line.strip() else "")


def _short(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!")
