"""`posttrain sample`: a few completions of a model, sampled and rewarded as in training, and findings about them."""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.base.errors import DataError, RunError
from posttrain.base.terminal import visible
from posttrain.base.threads import sharing_cores
from posttrain.config import DataConfig, DevicesConfig, ModelConfig
from posttrain.config.schema.rewards import Reward
from posttrain.config.schema.rollout import RolloutConfig
from posttrain.data.prompts import Prompt, prompts_of
from posttrain.data.report import Malformed
from posttrain.data.sources import open_source
from posttrain.data.templates import choose_template
from posttrain.data.tokencheck import completion_faults, stop_faults
from posttrain.engines import Completion, make_engine, stop_token_ids, text_of
from posttrain.evaluation.answering import too_long
from posttrain.inspection.findings import (
    Keeps,
    Measured,
    format_of,
    over_temperatures,
    shown_number,
    table,
    tags_of,
)
from posttrain.inspection.generate import generate_all
from posttrain.models.devices import compute_dtype, take_device
from posttrain.models.load import is_reward_model, load_model, load_tokenizer
from posttrain.rewards import compose
from posttrain.rollout import sampling_of, to_reward

SHOWN = 2_000  # characters of a completion; the middle of a longer one is omitted


@dataclass(frozen=True, slots=True)
class Setup:
    """Model, prompts and sampling: the settings of training that affect completions."""

    model: ModelConfig
    data: DataConfig
    rewards: tuple[Reward, ...]
    rollout: RolloutConfig
    devices: DevicesConfig
    longest_prompt: int | None  # tokens; training drops longer ones
    seed: int  # of the rows of a built-in task
    behavior_version: int = 2  # of the run


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """The completions of one prompt at one temperature, with their strings and rewards (if any)."""

    prompt: Prompt
    completions: Sequence[Completion]
    texts: Sequence[str]
    rewards: Sequence[float | None] | None
    parts: Sequence[str]  # of each reward: its sum in words

    def measure(self, keeps: Keeps | None) -> Measured:
        n = len(self.completions)
        return Measured(
            row=self.prompt.row,
            lengths=tuple(len(one.tokens) for one in self.completions),
            truncated=sum(one.finish_reason == "length" for one in self.completions) / n,
            distinct=len(set(self.texts)) / n,
            formatted=None if keeps is None else sum(map(keeps, self.texts)) / n,
            rewards=None if self.rewards is None else tuple(one for one in self.rewards if one is not None),
        )


@sharing_cores()
def sample(
    setup: Setup,
    temperatures: Sequence[float],
    num_prompts: int,
    num_generations: int,
    show: int,
    seed: int,
    console: Console,
) -> dict[float, list[Measured]]:
    """Sample and reward at each temperature; print `show` completions of every prompt, a table, and suggestions.

    The table has a line for each prompt, or with several temperatures for each of these. Tokenisation problems are
    reported first.
    """
    if is_reward_model(setup.model):
        raise RunError(f"{setup.model.path} is a reward model, which does not generate: sample from a policy")
    device, tokenizer = take_device(setup.devices), load_tokenizer(setup.model)
    policy = load_model(setup.model, "lm", compute_dtype(setup.model, device), device)
    rollout = setup.rollout
    prompts, unused = first_prompts(setup, policy, tokenizer, num_prompts)
    stops = stop_token_ids(policy, tokenizer, setup.data.template != "none")
    sampling = sampling_of(rollout, num_generations, stops, seed)
    sampled: dict[float, list[SampledGroup]] = {}
    with (
        rewards_of(setup) as rewards,
        closing(make_engine(rollout.engine, policy, tokenizer, vllm=rollout.vllm)) as engine,
    ):
        for temperature in temperatures:
            found = generate_all(engine, prompts, replace(sampling, temperature=temperature), "sampling")
            texts = {
                prompt.row: [text_of(one, stops, tokenizer, prompt.tokens) for one in found[prompt.row]]
                for prompt in prompts
            }
            sampled[temperature] = rewarded(prompts, found, texts, rewards)

    keeps = format_of(setup.data)
    measured = {temperature: [one.measure(keeps) for one in group] for temperature, group in sampled.items()}
    for malformed in unused:
        console.print(Text(visible(f"not used: {malformed}")))
    if str(given := setup.data.max_prompt_length).startswith("p"):
        said = f"data.max_prompt_length: {given} is not applied: training computes it from all its prompts"
        console.print(Text(said))
    show_completions(sampled, show, console)
    console.print(table(measured, setup.model.path))
    for fault in token_faults(setup, tokenizer, stops, list(itertools.chain(*sampled.values()))):
        console.print(Text(visible(f"Tokenisation: {fault}")))
    for line in over_temperatures(measured, rollout):
        console.print(Text(line))
    return measured


def first_prompts(
    setup: Setup, policy: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, count: int
) -> tuple[list[Prompt], list[Malformed]]:
    """The first usable prompts of the validation set, or else of the training set; and the unusable rows among them.

    Raises DataError if none of the first rows has one.
    """
    data, held, skip = setup.data, setup.data.validation, 0
    if held is not None and held.source is not None:
        source, split = held.source, held.split
    elif isinstance(data.source, str):
        source, split, skip = data.source, data.split, data.skip_rows
    else:
        source, split = data.source[0].source, data.source[0].split
    rows = open_source(source, split, None, setup.seed, choose_template(data, tokenizer).compose).read()
    records = list(itertools.islice(rows, skip, skip + 4 * count))  # some may be malformed
    found: list[Prompt] = []
    unused: list[Malformed] = []
    prompts = prompts_of(records, data, tokenizer, source, setup.behavior_version)
    for record, prompt in zip(records, prompts, strict=True):
        wrong = prompt if isinstance(prompt, Malformed) else too_long(prompt, policy)
        if isinstance(prompt, Prompt) and wrong is None and len(prompt.tokens) > (setup.longest_prompt or 1 << 62):
            wrong = Malformed("", 0, f"{len(prompt.tokens):,} tokens, and training allows {setup.longest_prompt:,}", 0)
        if wrong is not None:
            unused.append(Malformed(record.file, record.line, wrong.reason, record.row))
        elif isinstance(prompt, Prompt):
            found.append(prompt)
        if len(found) == count:
            break
    if not found:
        raise DataError(f"none of the first {len(records)} rows of {source} has a usable prompt: {unused[0]}")
    return found, unused


def rewards_of(setup: Setup) -> AbstractContextManager[compose.Rewards | None]:
    """The rewards of training, or None."""
    if not setup.rewards:
        return nullcontext()
    limit = setup.rollout.max_completion_length
    return compose.Rewards(setup.rewards, tags=setup.data.tags, devices=setup.devices, max_completion_length=limit)


def rewarded(
    prompts: Sequence[Prompt],
    sampled: Mapping[int, Sequence[Completion]],
    texts: Mapping[int, Sequence[str]],
    rewards: compose.Rewards | None,
) -> list[SampledGroup]:
    """Each prompt's completions with their rewards."""
    if rewards is None:
        return [SampledGroup(prompt, sampled[prompt.row], texts[prompt.row], None, ()) for prompt in prompts]
    result = rewards(
        [
            to_reward(completion, text, prompt.text, prompt.facts)
            for prompt in prompts
            for text, completion in zip(texts[prompt.row], sampled[prompt.row], strict=True)
        ]
    )
    found, rest = [], iter(result)
    for prompt in prompts:
        group = list(itertools.islice(rest, len(sampled[prompt.row])))
        sums = [
            " + ".join(f"{part.weight:g} x {shown_number(part.value)} ({part.name})" for part in reward.parts)
            for reward in group
        ]
        totals = [reward.total for reward in group]
        found.append(SampledGroup(prompt, sampled[prompt.row], texts[prompt.row], totals, sums))
    return found


def token_faults(
    setup: Setup, tokenizer: PreTrainedTokenizerBase, stops: tuple[int, ...], sampled: Sequence[SampledGroup]
) -> list[str]:
    """Problems of stop tokens and tags."""
    completions = [
        (one.prompt, [token for token in completion.tokens if token not in stops])
        for one in sampled
        for completion in one.completions
    ]
    return [
        *stop_faults(tokenizer, stops, setup.rollout.stop, setup.data.template != "none"),
        *completion_faults([one for one in completions if one[1]], tags_of(setup.data), tokenizer),
    ]


def show_completions(sampled: Mapping[float, Sequence[SampledGroup]], show: int, console: Console) -> None:
    """Print every prompt as the model sees it, and its first completions at each temperature."""
    for groups in zip(*sampled.values(), strict=True) if show else ():
        prompt = groups[0].prompt
        console.rule(f"row {prompt.row}, prompt of {len(prompt.tokens):,} tokens", align="left", characters="-")
        console.print(Text(visible(_shortened(prompt.text)), style="dim"))
        for temperature, one in zip(sampled, groups, strict=True):
            at = f", temperature {temperature:g}" if len(sampled) > 1 else ""
            for number, text in enumerate(one.texts[:show]):
                worth = ""
                if one.rewards is not None:
                    worth = f", reward {shown_number(one.rewards[number])} = {one.parts[number]}"
                console.rule(Text(visible(f"row {prompt.row}{at}{worth}")), align="left", characters="-")
                console.print(Text(visible(_shortened(text))))


def _shortened(text: str) -> str:
    if len(text) <= SHOWN:
        return text
    return f"{text[: SHOWN // 2]} ... {len(text) - SHOWN:,} characters ... {text[-SHOWN // 2 :]}"
