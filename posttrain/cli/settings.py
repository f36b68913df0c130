"""The arguments that every command with settings takes, and loading them."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from posttrain.config import Stage, load

Config = Annotated[
    str | None, typer.Argument(metavar="CONFIG|PRESET", help="A YAML or JSON file, or a preset of `config list`.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="a.b=c", help="Settings by path, such as training.max_steps=200.")
]


def load_stages(config: str | None, overrides: list[str] | None, flags: Mapping[str, str]) -> tuple[Stage, ...]:
    """The checked configuration, a stage without a name where it has none; notes about it go to stderr."""
    given = list(overrides or [])
    if config is not None and "=" in config and not Path(config).is_file():
        # The file comes after overrides, or there is none: settings alone make a run too.
        given.insert(0, config)
        config = next((text for text in given if "=" not in text), None)
        if config is not None:
            given.remove(config)
    loaded = load(config, given, flags)
    for note in loaded.notes:
        print(f"note: {note}", file=sys.stderr)
    return loaded.stages
