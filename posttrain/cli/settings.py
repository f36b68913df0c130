"""Settings on the command line: arguments of commands that take them, and short forms such as --device and --reward."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from posttrain.base.errors import UsageError
from posttrain.base.options import Flag
from posttrain.base.terminal import say
from posttrain.config import DevicesConfig, Stage, load
from posttrain.config.reading.explain import explain
from posttrain.config.reading.files import parse_value
from posttrain.config.schema.base import Settings
from posttrain.config.schema.rewards import Reward

Config = Annotated[
    str | None, typer.Argument(metavar="CONFIG|PRESET", help="A YAML or JSON file, or a preset from `config list`.")
]
DRY_RUN = Flag("Only print what the run would do.")
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="a.b=c", help="Settings by path, such as training.max_steps=200.")
]


def load_stages(config: str | None, overrides: list[str] | None, flags: Mapping[str, str]) -> tuple[Stage, ...]:
    """The checked configuration, with one unnamed stage if it has no stages. Prints notes about it to stderr."""
    loaded = load(*split_arguments(config, overrides), flags, imports=True)
    for note in loaded.notes:
        say(f"note: {note}", error=True)
    return loaded.stages


def split_arguments(config: str | None, overrides: list[str] | None) -> tuple[str | None, list[str]]:
    """Split arguments, in any order, into the file or preset, if any, and the overrides."""
    rest = list(overrides or [])
    if config is not None and "=" in config and not Path(config).is_file():  # an override: the file is later, or absent
        rest.insert(0, config)
        config = next((text for text in rest if "=" not in text), None)
        if config is not None:
            rest.remove(config)
    return config, rest


def devices_from_flag(device: str) -> DevicesConfig:
    """The device that `--device` names. Raises UsageError for an unknown one."""
    match = re.fullmatch(r"(auto|cpu|mps|cuda)(?:(?<=cuda):(\d+))?", device)
    if match is None:
        raise UsageError(f"--device is {device!r}: it must be one of auto, cpu, cuda, cuda:0 (a GPU by number), mps")
    return DevicesConfig(type=match[1], ids=match[2] and (int(match[2]),))  # pyright: ignore[reportArgumentType]


class _Rewards(Settings):
    """A list of rewards, as in a full configuration."""

    rewards: tuple[Reward, ...]


def rewards_from_flags(texts: Sequence[str]) -> tuple[Reward, ...]:
    """Read `--reward`: `math` means {type: math}, `my_rewards:brevity` names a function, braces are settings.
    Raises UsageError with the messages that a settings file would get."""
    values = {"rewards": [parse_value(text, "--reward").values["value"] for text in texts]}
    try:
        return _Rewards.model_validate(values).rewards
    except ValidationError as error:
        origins = {("rewards", index): f"--reward {text}" for index, text in enumerate(texts)}
        raise UsageError("\n".join(explain(error, values, origins))) from error


def saved_settings(folder: Path) -> Path | None:
    """The settings file of a checkpoint folder, or of the run that a folder is or belongs to."""
    if (folder / "config.yaml").is_file() and ((folder / "run.json").is_file() or (folder / "state.json").is_file()):
        return folder / "config.yaml"
    above = folder.absolute().parent
    return above / "config.yaml" if folder.is_dir() and (above / "run.json").is_file() else None
