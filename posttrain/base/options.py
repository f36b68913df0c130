"""Command-line options, declared once: `Flag` marks a function's parameter or a field of an options dataclass."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Flag:
    """Marks `name: Annotated[type, Flag(help)]` as the option `--name` of a command. `names`: a short name to add, such
    as -o, or a spelling that replaces --name. `parse` converts the string; with `str`, the command checks it."""

    help: str
    names: str = ""
    min: float | None = None
    max: float | None = None
    metavar: str | None = None
    hidden: bool = False
    parse: Callable[[str], Any] | None = None


def values_of(options: Any) -> dict[str, Any]:
    """The values of an options dataclass by field name; the values are not copied."""
    return {field.name: getattr(options, field.name) for field in fields(options)}
