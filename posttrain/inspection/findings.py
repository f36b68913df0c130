"""Findings about sampled completions: statistics by prompt, a table, and what to change before training."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from rich.table import Table

from posttrain.base.console import text_table
from posttrain.base.words import counted
from posttrain.config import DataConfig
from posttrain.config.schema.rollout import RolloutConfig

FEW = 0.5  # threshold for reporting a share
COLUMNS = ("tokens, mean", "range", "cut off", "distinct", "in format", "reward, mean", "spread")

InFormat = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Measured:
    """Statistics of the completions of one prompt. Shares are shares of these completions."""

    row: int
    lengths: tuple[int, ...]
    truncated: float  # share that reached the length limit
    distinct: float
    formatted: float | None  # share that follows the template's format; None if the template has none
    rewards: tuple[float, ...] | None = None  # rewards of the completions that have one; None without rewards


def tags_of(data: DataConfig) -> tuple[str, ...]:
    """The tags that the template asks for in a completion."""
    if data.template == "tags":
        return data.tags.reasoning_end, data.tags.solution_start, data.tags.solution_end
    return {"r1_zero": ("</think>", "<answer>", "</answer>"), "question_only": ("\\boxed{",)}.get(data.template, ())


def format_of(data: DataConfig) -> InFormat | None:
    """A function that checks whether a completion follows the template's format; None if the template has none."""
    if data.template == "tags":
        return lambda text: all(text.count(tag) == 1 for tag in tags_of(data))
    pattern = {"r1_zero": r"</think> <answer>.*</answer>", "question_only": r"\\boxed\{.*\}"}.get(data.template)
    return None if pattern is None else lambda text: re.search(pattern, text, re.DOTALL) is not None


def table(measured: Mapping[float, Sequence[Measured]], title: str) -> Table:
    """A table by prompt or, for several temperatures, by temperature, with the mean of the prompts' spreads."""
    sweep = len(measured) > 1
    names = ("temperature" if sweep else "row", *COLUMNS, *(("no spread",) if sweep else ()))
    shown = text_table(*names, left=(), title=title)
    for temperature, prompts in measured.items():
        if sweep:
            same = [float(len(set(prompt.rewards)) < 2) for prompt in prompts if prompt.rewards]
            shown.add_row(f"{temperature:g}", *_cells(prompts), _share(same))
        else:
            for prompt in prompts:
                shown.add_row(str(prompt.row), *_cells([prompt]))
    return shown


def _cells(prompts: Sequence[Measured]) -> list[str]:
    lengths = [length for prompt in prompts for length in prompt.lengths]
    rewards = [prompt.rewards for prompt in prompts if prompt.rewards]
    return [
        f"{fmean(lengths):.0f}",
        f"{min(lengths)} to {max(lengths)}",
        _share([prompt.truncated for prompt in prompts]),
        _share([prompt.distinct for prompt in prompts]),
        _share([prompt.formatted for prompt in prompts if prompt.formatted is not None]),
        shown_number(fmean(itertools.chain(*rewards)) if rewards else None),
        shown_number(fmean(map(pstdev, rewards)) if rewards else None),
    ]


def _share(shares: Sequence[float]) -> str:
    return f"{fmean(shares):.0%}" if shares else "-"


def shown_number(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3g}"


def over_temperatures(measured: Mapping[float, Sequence[Measured]], rollout: RolloutConfig) -> list[str]:
    """The suggestions without repetitions, each with the temperatures at which it applies."""
    temperatures: dict[str, list[str]] = {}
    for temperature, prompts in measured.items():
        for line in suggestions(prompts, rollout.model_copy(update={"temperature": temperature})):
            temperatures.setdefault(line, []).append(f"{temperature:g}")
    if len(measured) == 1:
        return list(temperatures)
    return [f"At temperature {', '.join(at)}: {line}" for line, at in temperatures.items()]


def suggestions(measured: Sequence[Measured], rollout: RolloutConfig) -> list[str]:
    """What to change before training on such completions."""
    found = []
    if fmean(prompt.truncated for prompt in measured) > FEW:
        found.append(
            f"Most completions are truncated at {rollout.max_completion_length} tokens, so rewards see no ending: "
            "raise rollout.max_completion_length, or train with SFT first, which teaches the model to stop."
        )
    if fmean(prompt.distinct for prompt in measured) < FEW:
        found.append(
            "Most completions of a prompt are the same, so a group has nothing to compare: raise the temperature "
            f"(it is {rollout.temperature:g}) or choose harder prompts."
        )
    formats = [prompt.formatted for prompt in measured if prompt.formatted is not None]
    if formats and fmean(formats) < FEW:
        found.append(
            f"Only {fmean(formats):.0%} of completions follow the template's format, so a reward that checks only the "
            "answer would count most as wrong. Train with SFT first, or add a format reward."
        )
    rewards = [prompt.rewards for prompt in measured if prompt.rewards is not None]
    sampled, rewarded = sum(len(prompt.lengths) for prompt in measured), sum(map(len, rewards))
    if rewards and not rewarded:
        found.append(
            f"None of the {sampled} completions has a reward (no verdict, or no reward applies), so nothing can be "
            "trained on: check whether the data has the answers that the rewards need, and completions the format."
        )
    elif rewards and rewarded < sampled:
        found.append(
            f"{sampled - rewarded} of {counted(sampled, 'completion')} have no reward: no verdict, or none applies."
        )
    same = sum(len(set(some)) == 1 for some in rewards)
    if same:
        advice = (
            ": choose easier prompts where the reward is low and harder ones where it is high, generate more "
            "completions (-n), or add a reward for partial success."
        )
        found.append(
            f"Of {counted(len(rewards), 'prompt')}, {same} {'has' if same == 1 else 'have'} completions with equal "
            "rewards, from which nothing is learned" + (advice if same / len(rewards) > FEW else ".")
        )
    return found or ["No problems found."]
