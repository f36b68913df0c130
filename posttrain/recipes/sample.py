"""`posttrain sample`: a few completions from a checkpoint as its training would draw them, and what they show."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.config import DataConfig, RunConfig, TagsConfig
from posttrain.config.rollout import RolloutConfig
from posttrain.data.prompts import Prompt, prompts_of
from posttrain.data.sources import open_source
from posttrain.data.templates import choose_template
from posttrain.engines import Completion, make_engine, stop_token_ids
from posttrain.errors import DataError, RunError
from posttrain.models.load import compute_dtype, device_of, is_reward_model, load_model, load_tokenizer
from posttrain.recipes.generate import draw_all, text_of, too_long
from posttrain.rewards import compose
from posttrain.rollout import ends_in_thinking, sampling_of
from posttrain.store.checkpoint import newest_complete
from posttrain.terminal import visible
from posttrain.threads import sharing_cores

Keeps = Callable[[str], bool]
FEW = 0.5  # a share below this is worth a word


@dataclass(frozen=True, slots=True)
class Measured:
    """What the completions of one prompt show. Shares are of the completions."""

    row: int
    lengths: tuple[int, ...]
    truncated: float  # ended by the limit
    distinct: float
    formatted: float | None  # keep the template's format; None where it has none
    rewards: tuple[float, ...] | None = None  # of the completions that have one; None where the run has no rewards


@sharing_cores()
def sample(
    folder: Path,
    config: RunConfig,
    rollout: RolloutConfig,
    num_prompts: int,
    num_generations: int,
    show: int,
    seed: int,
    console: Console,
) -> list[Measured]:
    """Draw, reward as the run does, print a table with what it suggests, and `show` completions of every prompt."""
    folder = newest_model(folder)
    update = {"path": str(folder), "revision": None, "lora": None, "load_in_4bit": False}
    model = config.models[0].model_copy(update=update)
    if is_reward_model(model):
        raise RunError(f"{folder} is a reward model, which draws no completions: sample from a policy")
    device, tokenizer = device_of(config.devices), load_tokenizer(model)
    policy = load_model(model, "lm", compute_dtype(model, device), device)
    sampling = sampling_of(rollout, num_generations, stop_token_ids(policy, tokenizer), seed)
    prompts = first_prompts(config, policy, tokenizer, num_prompts)
    with closing(make_engine(rollout.engine, policy, tokenizer, vllm=rollout.vllm)) as engine:
        drawn = draw_all(engine, prompts, sampling, "sampling")

    texts = {row: [text_of(one, sampling, tokenizer) for one in group] for row, group in drawn.items()}
    totals = rewards_of(prompts, drawn, texts, config, rollout)

    keeps = format_of(config.data)
    measured = []
    for prompt in prompts:
        row = prompt.row
        measured.append(measure(row, drawn[row], texts[row], keeps, totals.get(row)))
        for number, text in enumerate(texts[row][:show]):
            reward = f", reward {_number(totals[row][number])}" if totals else ""
            console.rule(f"row {row}{reward}", align="left", characters="-")
            console.print(Text(visible(prompt.text[-200:].lstrip("\n")), style="dim"))
            console.print(Text(visible(text)))
    console.print(table(measured, str(folder)))
    for line in suggestions(measured, rollout):
        console.print(Text(line))
    return measured


def newest_model(folder: Path) -> Path:
    """The folder itself if it holds a model; of a run, its final model or else its newest checkpoint."""
    if any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        return folder
    return folder / "final" if (folder / "final").is_dir() else newest_complete(folder)[0]


def first_prompts(
    config: RunConfig, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int
) -> list[Prompt]:
    """The first usable prompts of the validation set, or else of the training set. Raises DataError without any."""
    data, held = config.data, config.data.validation
    if held is not None and held.source is not None:
        source, split = held.source, held.split
    elif isinstance(data.source, str):
        source, split = data.source, data.split
    else:
        source, split = data.source[0].source, data.source[0].split
    rows = open_source(source, split, None, config.seed, choose_template(data, tokenizer).compose).read()
    records = list(itertools.islice(rows, 4 * count))  # some may be malformed
    asked = [prompt for prompt in prompts_of(records, data, tokenizer, source) if isinstance(prompt, Prompt)]
    found = [prompt for prompt in asked if too_long(prompt, policy) is None]
    if not found:
        raise DataError(f"none of the first {len(records)} rows of {source} has a usable prompt")
    return found[:count]


def format_of(data: DataConfig) -> Keeps | None:
    """Whether a completion keeps the format that the template asks for; None where it asks for none."""
    if data.template == "tags":
        tags: TagsConfig = data.tags
        parts = (tags.reasoning_end, tags.solution_start, tags.solution_end)
        return lambda text: all(text.count(part) == 1 for part in parts)
    pattern = {"r1_zero": r"</think> <answer>.*</answer>", "question_only": r"\\boxed\{.*\}"}.get(data.template)
    return None if pattern is None else lambda text: re.search(pattern, text, re.DOTALL) is not None


def rewards_of(
    prompts: Sequence[Prompt],
    drawn: Mapping[int, Sequence[Completion]],
    texts: Mapping[int, Sequence[str]],
    config: RunConfig,
    rollout: RolloutConfig,
) -> dict[int, list[float | None]]:
    """The run's own rewards of every completion, by the prompt's row; none where the run has none."""
    if not config.rewards:
        return {}
    limit = rollout.max_completion_length
    with compose.Rewards(
        config.rewards, tags=config.data.tags, devices=config.devices, max_completion_length=limit
    ) as rewards:
        asked = [
            compose.Completion(
                text,
                completion.tokens,
                truncated=completion.finish_reason == "length",
                thinking=ends_in_thinking(prompt.text),
                **prompt.facts,
            )
            for prompt in prompts
            for text, completion in zip(texts[prompt.row], drawn[prompt.row], strict=True)
        ]
        totals = iter(rewards(asked).totals)
    return {prompt.row: [next(totals) for _ in drawn[prompt.row]] for prompt in prompts}


def measure(
    row: int,
    completions: Sequence[Completion],
    texts: Sequence[str],
    keeps: Keeps | None,
    rewards: Sequence[float | None] | None,
) -> Measured:
    n = len(completions)
    return Measured(
        row=row,
        lengths=tuple(len(completion.tokens) for completion in completions),
        truncated=sum(completion.finish_reason == "length" for completion in completions) / n,
        distinct=len(set(texts)) / n,
        formatted=None if keeps is None else sum(map(keeps, texts)) / n,
        rewards=None if rewards is None else tuple(reward for reward in rewards if reward is not None),
    )


def table(measured: Sequence[Measured], title: str) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for name in ("row", "tokens, mean", "range", "cut off", "distinct", "in format", "reward, mean", "spread"):
        shown.add_column(name, justify="right")
    for one in measured:
        shown.add_row(
            str(one.row),
            f"{fmean(one.lengths):.0f}",
            f"{min(one.lengths)} to {max(one.lengths)}",
            *("-" if share is None else f"{share:.0%}" for share in (one.truncated, one.distinct, one.formatted)),
            *(_number(how(one.rewards) if one.rewards else None) for how in (fmean, pstdev)),
        )
    return shown


def _number(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3g}"


def suggestions(measured: Sequence[Measured], rollout: RolloutConfig) -> list[str]:
    """What the completions suggest to do before, or instead of, training on them."""

    found = []
    if fmean([one.truncated for one in measured]) > FEW:
        found.append(
            f"Most completions are cut off at {rollout.max_completion_length} tokens, so a reward sees no ending: "
            "raise rollout.max_completion_length, or train with SFT first, which teaches where to stop."
        )
    if fmean([one.distinct for one in measured]) < FEW:
        found.append(
            "Most completions of a prompt are the same, so a group has nothing to compare: raise the temperature "
            f"(it is {rollout.temperature:g}) or choose harder prompts."
        )
    formats = [one.formatted for one in measured if one.formatted is not None]
    if formats and fmean(formats) < FEW:
        found.append(
            f"Only {fmean(formats):.0%} keep the template's format: with a reward on the answer alone most would count "
            "as wrong. Train with SFT first, or add a format reward."
        )
    rewards = [one.rewards for one in measured if one.rewards is not None]
    drawn, rewarded = sum(len(one.lengths) for one in measured), sum(map(len, rewards))
    if rewards and not rewarded:
        found.append(
            f"None of the {drawn} completions has a reward: no verdict, or none that applies. Nothing can be trained "
            "on: see whether the data has the answers, and the reward the format, that it needs."
        )
    elif rewards and rewarded < drawn:
        found.append(f"{drawn - rewarded} of {drawn} completions have no reward: no verdict, or none that applies.")
    same = sum(len(set(some)) == 1 for some in rewards)
    if same:
        advice = (
            ": choose easier prompts where it is low and harder ones where it is high, generate more completions (-n), "
            "or add a reward that gives part of the way."
        )
        found.append(
            f"Of {len(rewards)} prompts {same} have completions of one and the same reward, which teach a group nothing"
            + (advice if same / len(rewards) > FEW else ".")
        )
    return found or ["No problems found."]
