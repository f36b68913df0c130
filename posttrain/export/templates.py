"""The files of an export that are written from the Jinja templates beside this module."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment


def from_template(name: str, filters: Mapping[str, Callable[..., Any]], /, **values: Any) -> str:
    """The text of the template `name` with these filters and values."""
    environment = Environment(trim_blocks=True, keep_trailing_newline=True)
    environment.filters |= filters
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return environment.from_string(text).render(values)
