"""Findings about the completions of a few prompts: lengths, truncation, format, spread of rewards."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from rich import box
from rich.table import Table

from posttrain.base.words import counted
from posttrain.config import DataConfig, TagsConfig
from posttrain.config.schema.rollout import RolloutConfig

Keeps = Callable[[str], bool]
FEW = 0.5  # a share below this is reported


@dataclass(frozen=True, slots=True)
class Measured:
    """Statistics of the completions of one prompt. Shares are of the completions."""

    row: int
    lengths: tuple[int, ...]
    truncated: float  # reached the length limit
    distinct: float
    formatted: float | None  # follow the template's format; None if it has none
    rewards: tuple[float, ...] | None = None  # of the completions that have one; None without rewards


def tags_of(data: DataConfig) -> tuple[str, ...]:
    """The tags that the template asks a completion to write."""
    if data.template == "tags":
        return data.tags.reasoning_end, data.tags.solution_start, data.tags.solution_end
    return {"r1_zero": ("</think>", "<answer>", "</answer>"), "question_only": ("\\boxed{",)}.get(data.template, ())


def format_of(data: DataConfig) -> Keeps | None:
    """Whether a completion follows the template's format; None if it has none."""
    if data.template == "tags":
        tags: TagsConfig = data.tags
        parts = (tags.reasoning_end, tags.solution_start, tags.solution_end)
        return lambda text: all(text.count(part) == 1 for part in parts)
    pattern = {"r1_zero": r"</think> <answer>.*</answer>", "question_only": r"\\boxed\{.*\}"}.get(data.template)
    return None if pattern is None else lambda text: re.search(pattern, text, re.DOTALL) is not None


COLUMNS = ("tokens, mean", "range", "cut off", "distinct", "in format", "reward, mean", "spread")


def table(measured: Mapping[float, Sequence[Measured]], title: str) -> Table:
    """A table by prompt, or with several temperatures by temperature, with the mean of the prompts' spreads."""
    sweep = len(measured) > 1
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for name in ("temperature" if sweep else "row", *COLUMNS, *(("no spread",) if sweep else ())):
        shown.add_column(name, justify="right")
    for temperature, prompts in measured.items():
        if sweep:
            same = [float(len(set(one.rewards)) < 2) for one in prompts if one.rewards]
            shown.add_row(f"{temperature:g}", *_cells(prompts), _share(same))
        else:
            for one in prompts:
                shown.add_row(str(one.row), *_cells([one]))
    return shown


def _cells(prompts: Sequence[Measured]) -> list[str]:
    lengths = [length for one in prompts for length in one.lengths]
    rewards = [one.rewards for one in prompts if one.rewards]
    return [
        f"{fmean(lengths):.0f}",
        f"{min(lengths)} to {max(lengths)}",
        _share([one.truncated for one in prompts]),
        _share([one.distinct for one in prompts]),
        _share([one.formatted for one in prompts if one.formatted is not None]),
        shown_number(fmean(itertools.chain(*rewards)) if rewards else None),
        shown_number(fmean(map(pstdev, rewards)) if rewards else None),
    ]


def _share(shares: Sequence[float]) -> str:
    return f"{fmean(shares):.0%}" if shares else "-"


def shown_number(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3g}"


def over_temperatures(measured: Mapping[float, Sequence[Measured]], rollout: RolloutConfig) -> list[str]:
    """The suggestions, each once with its temperatures."""
    where: dict[str, list[str]] = {}
    for temperature, prompts in measured.items():
        for line in suggestions(prompts, rollout.model_copy(update={"temperature": temperature})):
            where.setdefault(line, []).append(f"{temperature:g}")
    if len(measured) == 1:
        return list(where)
    return [f"At temperature {', '.join(at)}: {line}" for line, at in where.items()]


def suggestions(measured: Sequence[Measured], rollout: RolloutConfig) -> list[str]:
    """Suggestions before, or instead of, training on the completions."""

    found = []
    if fmean([one.truncated for one in measured]) > FEW:
        found.append(
            f"Most completions are truncated at {rollout.max_completion_length} tokens, so a reward sees no ending: "
            "raise rollout.max_completion_length, or train with SFT first, which teaches the model to stop."
        )
    if fmean([one.distinct for one in measured]) < FEW:
        found.append(
            "Most completions of a prompt are the same, so a group has nothing to compare: raise the temperature "
            f"(it is {rollout.temperature:g}) or choose harder prompts."
        )
    formats = [one.formatted for one in measured if one.formatted is not None]
    if formats and fmean(formats) < FEW:
        found.append(
            f"Only {fmean(formats):.0%} follow the template's format: with a reward on the answer alone most would "
            "count as wrong. Train with SFT first, or add a format reward."
        )
    rewards = [one.rewards for one in measured if one.rewards is not None]
    sampled, rewarded = sum(len(one.lengths) for one in measured), sum(map(len, rewards))
    if rewards and not rewarded:
        found.append(
            f"None of the {sampled} completions has a reward: no verdict, or none that applies. Nothing can be trained "
            "on: check whether the data has the answers, and the completions the format, that the rewards need."
        )
    elif rewards and rewarded < sampled:
        found.append(
            f"{sampled - rewarded} of {counted(sampled, 'completion')} have no reward: no verdict, or none applies."
        )
    same = sum(len(set(some)) == 1 for some in rewards)
    if same:
        advice = (
            ": choose easier prompts where it is low and harder ones where it is high, generate more completions (-n), "
            "or add a reward for partial success."
        )
        found.append(
            f"Of {counted(len(rewards), 'prompt')} {same} {'has' if same == 1 else 'have'} completions of one and the "
            "same reward, which teach a group nothing" + (advice if same / len(rewards) > FEW else ".")
        )
    return found or ["No problems found."]
