"""The length limits of a data set: the settings, a percentile of the training prompts, room for a completion."""

from typing import NamedTuple

import numpy as np

from posttrain.base.errors import DataError
from posttrain.config.schema.base import Kind
from posttrain.config.schema.data import DataConfig
from posttrain.data.dataset import Limits, Table


class Room(NamedTuple):
    """The tokens of a completion, which prompts leave room for, and their setting."""

    tokens: int
    setting: str = "rollout.max_completion_length"


class Longest(NamedTuple):
    """The maximum tokens of a prompt, None without a limit; `note` is the limit other than `max_length`."""

    tokens: int | None = None
    note: str = ""


def longest_prompt(data: DataConfig, kind: Kind, room: Room, positions: int | None) -> Longest:
    """The longest prompt that leaves `room` in `max_length` and in the model's positions; no limit if the data has the
    completions. A completion's last token needs no position: nothing is predicted from it."""
    if kind != "prompt":
        return Longest()
    if positions is None or positions + 1 >= data.max_length:
        return Longest(data.max_length - room.tokens)
    if positions < room.tokens:
        raise DataError(
            f"the model has {positions:,} positions, and {room.setting} is {room.tokens:,}, which leaves no room for a "
            "prompt: lower it"
        )
    most = positions + 1 - room.tokens
    note = (
        f"the model has {positions:,} positions: prompts have at most {most:,} tokens, so that {room.setting} fits "
        "behind them"
    )
    return Longest(most, note)


def training_limits(data: DataConfig, kind: Kind, longest: Longest, table: Table) -> Limits:
    """The limits of the training data, which is `table`."""
    given = data.max_prompt_length
    if given == "auto":
        given = "p90" if kind == "prompt" and data.overlong == "drop" else None
    if isinstance(given, str):  # p90: the length that 90 % of the prompts do not exceed
        lengths = table.prompt_lengths()
        given = max(1, int(np.percentile(lengths, int(given[1:]), method="higher"))) if len(lengths) else None
    return _within(data, given, longest)


def evaluation_limits(data: DataConfig, longest: Longest, training: Limits) -> Limits:
    """The limits of evaluation sets, from those of the training data.

    The percentile of `auto` keeps training packs small; benchmarks are evaluated whole.
    """
    given = data.max_prompt_length
    if isinstance(given, str):
        given = None if given == "auto" else training.max_prompt_length
    return _within(data, given, longest)


def _within(data: DataConfig, given: int | None, longest: Longest) -> Limits:
    if longest.tokens is not None:
        given = longest.tokens if given is None else min(given, longest.tokens)
    return Limits(data.max_length, given, data.overlong, longest.note)
