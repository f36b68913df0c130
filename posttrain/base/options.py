"""Options that are written once: a parameter or a field of a dataclass is a flag of the command line by its mark."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Flag:
    """Marks `name: Annotated[type, Flag(help)]` as the option `--name` of a command.

    `names`: a short name to add, such as -o, or what to write instead of --name. `parse` makes the value from a string;
    `str` leaves checking it to the command.
    """

    help: str
    names: str = ""
    min: float | None = None
    max: float | None = None
    metavar: str | None = None
    hidden: bool = False
    parse: Callable[[str], Any] | None = None


def values_of(options: Any) -> dict[str, Any]:
    """The fields of a group of options by name; not a deep copy."""
    return {field.name: getattr(options, field.name) for field in fields(options)}
