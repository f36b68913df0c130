"""`posttrain sample`: a few completions of a model, sampled and rewarded as in training, and findings about them:
lengths, truncation, format, spread of rewards."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from statistics import fmean, pstdev

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.base.errors import DataError, RunError
from posttrain.base.terminal import visible
from posttrain.base.threads import sharing_cores
from posttrain.base.words import counted
from posttrain.config import DataConfig, DevicesConfig, ModelConfig
from posttrain.config.schema.rewards import Reward
from posttrain.config.schema.rollout import RolloutConfig
from posttrain.data.prompts import Prompt, completion_faults, prompts_of, stop_faults
from posttrain.data.report import Malformed
from posttrain.data.sources import open_source
from posttrain.data.templates import choose_template
from posttrain.engines import Completion, make_engine, stop_token_ids, text_of
from posttrain.evaluation.answering import too_long
from posttrain.inspection.rows import generate_all
from posttrain.models.devices import compute_dtype, take_device
from posttrain.models.load import is_reward_model, load_model, load_tokenizer
from posttrain.rewards import compose
from posttrain.rollout import sampling_of, to_reward

SHOWN = 2_000  # maximum characters printed of a completion; the middle of a longer one is omitted
FEW = 0.5  # threshold for reporting a share
COLUMNS = ("tokens, mean", "range", "cut off", "distinct", "in format", "reward, mean", "spread")

InFormat = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Setup:
    """The training settings that affect completions: model, prompts and sampling."""

    model: ModelConfig
    data: DataConfig
    rewards: tuple[Reward, ...]
    rollout: RolloutConfig
    devices: DevicesConfig
    longest_prompt: int | None  # tokens; training drops longer prompts
    seed: int  # for the rows of a built-in task
    behavior_version: int = 2  # that of the run


@dataclass(frozen=True, slots=True)
class Measured:
    """Statistics of the completions of one prompt. Shares are shares of these completions."""

    row: int
    lengths: tuple[int, ...]
    truncated: float  # share that reached the length limit
    distinct: float
    formatted: float | None  # share that follows the template's format; None if the template has none
    rewards: tuple[float, ...] | None = None  # rewards of the completions that have one; None without rewards


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """The completions of one prompt at one temperature, with their strings and rewards (if any)."""

    prompt: Prompt
    completions: Sequence[Completion]
    texts: Sequence[str]
    rewards: Sequence[float | None] | None
    parts: Sequence[str]  # for each reward, the weighted sum that makes it

    def measure(self, in_format: InFormat | None) -> Measured:
        n = len(self.completions)
        return Measured(
            row=self.prompt.row,
            lengths=tuple(len(completion.tokens) for completion in self.completions),
            truncated=sum(completion.finish_reason == "length" for completion in self.completions) / n,
            distinct=len(set(self.texts)) / n,
            formatted=None if in_format is None else sum(map(in_format, self.texts)) / n,
            rewards=None if self.rewards is None else tuple(reward for reward in self.rewards if reward is not None),
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
    """Sample and reward completions at each temperature, and print `show` completions of every prompt.

    Then print a table, tokenisation problems, and suggestions. The table has a line per prompt or, with several
    temperatures, per temperature.
    """
    if is_reward_model(setup.model):
        raise RunError(f"{setup.model.path} is a reward model, which cannot generate completions: sample from a policy")
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
            generated = generate_all(engine, prompts, replace(sampling, temperature=temperature), "sampling")
            texts = {
                prompt.row: [text_of(done, stops, tokenizer, prompt.tokens) for done in generated[prompt.row]]
                for prompt in prompts
            }
            sampled[temperature] = rewarded(prompts, generated, texts, rewards)

    in_format = format_of(setup.data)
    measured = {at: [group.measure(in_format) for group in groups] for at, groups in sampled.items()}
    for malformed in unused:
        console.print(Text(visible(f"not used: {malformed}")))
    if str(limit := setup.data.max_prompt_length).startswith("p"):
        console.print(
            Text(f"data.max_prompt_length: {limit} is not applied: training computes it from all its prompts")
        )
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
    """The first usable prompts of the validation set (without one, of the training set), and unusable rows among them.

    Raises DataError if none of the first rows has a usable prompt."""
    data, held, skip = setup.data, setup.data.validation, 0
    if held is not None and held.source is not None:
        source, split = held.source, held.split
    elif isinstance(data.source, str):
        source, split, skip = data.source, data.split, data.skip_rows
    else:
        source, split = data.source[0].source, data.source[0].split
    rows = open_source(source, split, None, setup.seed, choose_template(data, tokenizer).compose).read()
    records = list(itertools.islice(rows, skip, skip + 4 * count))  # some may be malformed
    usable: list[Prompt] = []
    unused: list[Malformed] = []
    prompts = prompts_of(records, data, tokenizer, source, setup.behavior_version)
    for record, prompt in zip(records, prompts, strict=True):
        wrong = prompt if isinstance(prompt, Malformed) else too_long(prompt, policy)
        if isinstance(prompt, Prompt) and wrong is None and len(prompt.tokens) > (setup.longest_prompt or 1 << 62):
            wrong = Malformed("", 0, f"{len(prompt.tokens):,} tokens, but training allows {setup.longest_prompt:,}", 0)
        if wrong is not None:
            unused.append(Malformed(record.file, record.line, wrong.reason, record.row))
        elif isinstance(prompt, Prompt):
            usable.append(prompt)
        if len(usable) == count:
            break
    if not usable:
        raise DataError(f"none of the first {len(records)} rows of {source} has a usable prompt: {unused[0]}")
    return usable, unused


def rewards_of(setup: Setup) -> AbstractContextManager[compose.Rewards | None]:
    """A context manager with the rewards of training; None if there are none."""
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
    """Group the completions by prompt, with their rewards."""
    if rewards is None:
        return [SampledGroup(prompt, sampled[prompt.row], texts[prompt.row], None, ()) for prompt in prompts]
    results = iter(
        rewards(
            [
                to_reward(completion, text, prompt.text, prompt.facts)
                for prompt in prompts
                for text, completion in zip(texts[prompt.row], sampled[prompt.row], strict=True)
            ]
        )
    )
    groups = []
    for prompt in prompts:
        group = list(itertools.islice(results, len(sampled[prompt.row])))
        sums = [
            " + ".join(f"{part.weight:g} x {shown_number(part.value)} ({part.name})" for part in reward.parts)
            for reward in group
        ]
        totals = [reward.total for reward in group]
        groups.append(SampledGroup(prompt, sampled[prompt.row], texts[prompt.row], totals, sums))
    return groups


def token_faults(
    setup: Setup, tokenizer: PreTrainedTokenizerBase, stops: tuple[int, ...], sampled: Sequence[SampledGroup]
) -> list[str]:
    """Problems with stop tokens and tags."""
    completions = [
        (group.prompt, tokens)
        for group in sampled
        for completion in group.completions
        if (tokens := [token for token in completion.tokens if token not in stops])
    ]
    return [
        *stop_faults(tokenizer, stops, setup.rollout.stop, setup.data.template != "none"),
        *completion_faults(completions, tags_of(setup.data), tokenizer),
    ]


def show_completions(sampled: Mapping[float, Sequence[SampledGroup]], show: int, console: Console) -> None:
    """Print every prompt as the model sees it, and its first completions at each temperature."""
    for groups in zip(*sampled.values(), strict=True) if show else ():
        prompt = groups[0].prompt
        console.rule(f"row {prompt.row}, prompt of {len(prompt.tokens):,} tokens", align="left", characters="-")
        console.print(Text(visible(_shortened(prompt.text)), style="dim"))
        for temperature, group in zip(sampled, groups, strict=True):
            at = f", temperature {temperature:g}" if len(sampled) > 1 else ""
            for number, text in enumerate(group.texts[:show]):
                worth = ""
                if group.rewards is not None:
                    worth = f", reward {shown_number(group.rewards[number])} = {group.parts[number]}"
                console.rule(Text(visible(f"row {prompt.row}{at}{worth}")), align="left", characters="-")
                console.print(Text(visible(_shortened(text))))


def _shortened(text: str) -> str:
    if len(text) <= SHOWN:
        return text
    return f"{text[: SHOWN // 2]} ... {len(text) - SHOWN:,} characters ... {text[-SHOWN // 2 :]}"


# --- findings ---------------------------------------------------------------------------------------------------------


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
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left", title_style="bold")
    for name in ("temperature" if sweep else "row", *COLUMNS, *(("no spread",) if sweep else ())):
        shown.add_column(name, justify="right")
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
