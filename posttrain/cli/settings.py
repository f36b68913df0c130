"""The arguments of commands with settings, and loading them."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from posttrain.base.errors import UsageError
from posttrain.base.terminal import say
from posttrain.config import DevicesConfig, Stage, load
from posttrain.config.reading.explain import explain
from posttrain.config.reading.files import parse_value
from posttrain.config.schema.base import Settings
from posttrain.config.schema.rewards import Reward

Config = Annotated[
    str | None, typer.Argument(metavar="CONFIG|PRESET", help="A YAML or JSON file, or a preset of `config list`.")
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="a.b=c", help="Settings by path, such as training.max_steps=200.")
]


def load_stages(config: str | None, overrides: list[str] | None, flags: Mapping[str, str]) -> tuple[Stage, ...]:
    """The checked configuration, with one unnamed stage if it has none; notes about it go to stderr."""
    config, given = split_arguments(config, overrides)
    loaded = load(config, given, flags)
    for note in loaded.notes:
        say(f"note: {note}", error=True)
    return loaded.stages


def split_arguments(config: str | None, overrides: list[str] | None) -> tuple[str | None, list[str]]:
    """The file or preset, if any, and the overrides, in any order."""
    given = list(overrides or [])
    if config is not None and "=" in config and not Path(config).is_file():
        # The file comes after overrides, or is missing: overrides alone are enough.
        given.insert(0, config)
        config = next((text for text in given if "=" not in text), None)
        if config is not None:
            given.remove(config)
    return config, given


def devices_from_flag(device: str) -> DevicesConfig:
    """The device that `--device` names. Raises UsageError for an unknown one."""
    found = re.fullmatch(r"(auto|cpu|mps|cuda)(?:(?<=cuda):(\d+))?", device)
    if found is None:
        raise UsageError(f"--device is {device!r}: it is one of auto, cpu, cuda, cuda:0 (a GPU by number), mps")
    return DevicesConfig(type=found[1], ids=found[2] and (int(found[2]),))  # pyright: ignore[reportArgumentType]


class _Rewards(Settings):
    """A list of rewards, as in a full configuration."""

    rewards: tuple[Reward, ...]


def rewards_from_flags(texts: Sequence[str]) -> tuple[Reward, ...]:
    """The rewards that `--reward` names: `math` is {type: math}, `my_rewards:brevity` a function, braces are settings.

    Raises UsageError with the messages of a configuration.
    """
    values: dict[str, Any] = {"rewards": []}
    for text in texts:
        if text.lstrip().startswith("{"):
            values["rewards"].append(parse_value(text, "--reward").values["value"])
        else:
            values["rewards"].append({"type": "python", "function": text} if ":" in text else {"type": text})
    try:
        return _Rewards.model_validate(values).rewards
    except ValidationError as error:
        given = {("rewards", place): f"--reward {text}" for place, text in enumerate(texts)}
        raise UsageError("\n".join(explain(error, values, given))) from error


def saved_settings(folder: Path) -> Path | None:
    """The settings next to a checkpoint, or of the run that a folder is or belongs to."""
    if (folder / "config.yaml").is_file() and ((folder / "run.json").is_file() or (folder / "state.json").is_file()):
        return folder / "config.yaml"
    above = folder.absolute().parent
    return above / "config.yaml" if folder.is_dir() and (above / "run.json").is_file() else None
