"""`posttrain sample`: a few completions from a checkpoint as its training would draw them, and what they show."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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
from posttrain.rollout import sampling_of
from posttrain.store.checkpoint import newest_complete

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
    """Draw, print a table with what it suggests, and `show` completions of every prompt."""
    folder = newest_model(folder)
    update = {"path": str(folder), "revision": None, "lora": None, "load_in_4bit": False}
    model = config.models[0].model_copy(update=update)
    if is_reward_model(model):
        raise RunError(f"{folder} is a reward model, which draws no completions: sample from a policy")
    device, tokenizer = device_of(config.devices), load_tokenizer(model)
    policy = load_model(model, "lm", compute_dtype(model, device), device)
    engine = make_engine(rollout.engine, policy, tokenizer)
    sampling = sampling_of(rollout, num_generations, stop_token_ids(policy, tokenizer), seed)
    prompts = first_prompts(config, policy, tokenizer, num_prompts)
    drawn = draw_all(engine, prompts, sampling, "sampling")

    keeps = format_of(config.data)
    measured = []
    for prompt in prompts:
        texts = [text_of(completion, sampling, tokenizer) for completion in drawn[prompt.row]]
        measured.append(measure(prompt.row, drawn[prompt.row], texts, keeps))
        for text in texts[:show]:
            console.rule(f"row {prompt.row}", align="left", characters="-")
            console.print(Text(prompt.text[-200:].lstrip("\n"), style="dim"))
            console.print(Text(text))
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


def measure(row: int, completions: Sequence[Completion], texts: Sequence[str], keeps: Keeps | None) -> Measured:
    n = len(completions)
    return Measured(
        row=row,
        lengths=tuple(len(completion.tokens) for completion in completions),
        truncated=sum(completion.finish_reason == "length" for completion in completions) / n,
        distinct=len(set(texts)) / n,
        formatted=None if keeps is None else sum(map(keeps, texts)) / n,
    )


def table(measured: Sequence[Measured], title: str) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for name in ("row", "tokens, mean", "range", "ended by the limit", "distinct", "in format"):
        shown.add_column(name, justify="right")
    for one in measured:
        mean = sum(one.lengths) / len(one.lengths)
        shares = [one.truncated, one.distinct, *([] if one.formatted is None else [one.formatted])]
        cells = [f"{share:.0%}" for share in shares] + (["-"] if one.formatted is None else [])
        shown.add_row(str(one.row), f"{mean:.0f}", f"{min(one.lengths)} to {max(one.lengths)}", *cells)
    return shown


def suggestions(measured: Sequence[Measured], rollout: RolloutConfig) -> list[str]:
    """What the completions suggest to do before, or instead of, training on them."""

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    found = []
    if mean([one.truncated for one in measured]) > FEW:
        found.append(
            f"Most completions are cut off at {rollout.max_completion_length} tokens, so a reward sees no ending: "
            "raise rollout.max_completion_length, or train with SFT first, which teaches where to stop."
        )
    if mean([one.distinct for one in measured]) < FEW:
        found.append(
            "Most completions of a prompt are the same, so a group has nothing to compare: raise the temperature "
            f"(it is {rollout.temperature:g}) or choose harder prompts."
        )
    formats = [one.formatted for one in measured if one.formatted is not None]
    if formats and mean(formats) < FEW:
        found.append(
            f"Only {mean(formats):.0%} keep the template's format: with a reward on the answer alone most would count "
            "as wrong. Train with SFT first, or add a format reward."
        )
    return found or ["Nothing stands in the way of training on these."]
