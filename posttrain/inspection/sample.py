"""`posttrain sample`: a few completions of a model, sampled and rewarded as in training, and findings about them:
lengths, truncation, format, spread of rewards."""

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from statistics import fmean, pstdev

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.base.console import text_table
from posttrain.base.errors import DataError, RunError
from posttrain.base.terminal import visible
from posttrain.base.threads import sharing_cores
from posttrain.base.words import counted
from posttrain.config import DataConfig, RunConfig
from posttrain.config.options import SampleOptions
from posttrain.config.schema.rollout import RolloutConfig
from posttrain.data.prompts import Prompt, completion_faults, prompts_of, stop_faults
from posttrain.data.reading import SourcePart, malformed_of, parts_of
from posttrain.data.report import Malformed
from posttrain.data.templates import choose_template
from posttrain.engines import Completion, Engine, Sampling, make_engine, seed_of, stop_token_ids, text_of
from posttrain.environments.episode import start_of
from posttrain.environments.episodes import Episodes, Limits, acting
from posttrain.environments.trajectory import Trajectory, rewarded_as
from posttrain.inspection.rows import generate_all
from posttrain.models.devices import compute_dtype, take_device
from posttrain.models.families import positions_of
from posttrain.models.load import is_reward_model, load_model, load_tokenizer
from posttrain.rewards.compose import Rewards
from posttrain.rewards.parts import RewardInput
from posttrain.sampler import sampling_of, to_reward

SHOWN = 2_000  # maximum characters printed of a completion; the middle of a longer one is omitted
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


@dataclass(frozen=True, slots=True)
class SampledGroup:
    """The completions of one prompt at one temperature, with their strings and rewards (if any)."""

    prompt: Prompt
    completions: Sequence[Completion]
    texts: Sequence[str]
    inputs: Sequence[RewardInput]  # each completion as the input of rewards
    rewards: Sequence[float | None] | None = None
    parts: Sequence[str] = ()  # for each reward, the weighted sum that makes it

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
    config: RunConfig, longest: int | None, temperatures: Sequence[float], options: SampleOptions, console: Console
) -> None:
    """Sample and reward completions at each temperature, and print `options.show` completions of every prompt.

    Then print a table, tokenisation problems, and suggestions. The table has a line per prompt or, with several
    temperatures, per temperature. Prompts of over `longest` tokens are not used, as in training.
    """
    model, rollout = config.models[0], config.rollout
    if is_reward_model(model):
        raise RunError(f"{model.path} is a reward model, which cannot generate completions: sample from a policy")
    device, tokenizer = take_device(config.devices), load_tokenizer(model)
    policy = load_model(model, "lm", compute_dtype(model, device), device)
    of_run = config.seed, config.behavior_version, longest
    prompts, unused = first_prompts(config.data, policy, tokenizer, options.prompts, *of_run)
    stops = stop_token_ids(policy, tokenizer, config.data.template != "none")
    sampling = sampling_of(rollout, options.num_generations, stops, options.seed)
    sampled: dict[float, list[SampledGroup]] = {}
    with ExitStack() as resources:
        engine = resources.enter_context(closing(make_engine(rollout.engine, policy, tokenizer, vllm=rollout.vllm)))
        episodes = None
        if config.environments or config.tools:
            room, workers, date = longest or config.data.max_length, rollout.environment_workers, config.data.date
            limits = Limits.of(rollout, room, policy.config, behavior_version=config.behavior_version)
            acts = acting(config.environments, config.tools, engine, tokenizer, limits, workers, date)
            episodes = resources.enter_context(acts)
        rewards = resources.enter_context(rewards_of(config, episodes))
        for temperature in temperatures:
            at = replace(sampling, temperature=temperature)
            if episodes is None:
                groups = [*generated(engine, prompts, at, tokenizer)]
            else:
                live = Live(console) if options.show and not sampled else None
                groups = [*acted(episodes, prompts, at, tokenizer, live)]
            sampled[temperature] = groups if rewards is None else [*rewarded(groups, rewards)]

    in_format = format_of(config.data)
    measured = {at: [group.measure(in_format) for group in groups] for at, groups in sampled.items()}
    for malformed in unused:
        console.print(Text(visible(f"not used: {malformed}")))
    if str(limit := config.data.max_prompt_length).startswith("p"):
        unset = f"data.max_prompt_length: {limit} is not applied: training computes it from all its prompts"
        console.print(Text(unset))
    show_completions(sampled, options.show, console)
    console.print(table(measured, model.path))
    # What tools write is not tokenised with what the model writes.
    tokenised = list(itertools.chain(*sampled.values())) if episodes is None else []
    for fault in token_faults(config, tokenizer, stops, tokenised):
        console.print(Text(visible(f"Tokenisation: {fault}")))
    for line in over_temperatures(measured, rollout):
        console.print(Text(line))


def first_prompts(
    data: DataConfig,
    policy: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    seed: int,
    behavior_version: int,
    longest: int | None = None,
) -> tuple[list[Prompt], list[Malformed]]:
    """The first usable prompts of the validation set (without one, of the training set), and unusable rows among them.
    Raises DataError if none of the first rows has a usable prompt."""
    held, part = data.validation, parts_of(data)[0]
    if held is not None and held.source is not None:
        part = SourcePart(held.source, held.split, None)
    rows = part.open(None, seed, choose_template(data, tokenizer).compose)[0].read()
    records = list(itertools.islice(rows, part.skip_rows, part.skip_rows + 4 * count))  # some may be malformed
    usable: list[Prompt] = []
    unused: list[Malformed] = []
    prompts = prompts_of(records, data, tokenizer, part.source, behavior_version, positions_of(policy.config))
    for record, prompt in zip(records, prompts, strict=True):
        if isinstance(prompt, Malformed):
            unused.append(prompt)
        elif longest and len(prompt.tokens) > longest:
            unused.append(malformed_of(record, f"{len(prompt.tokens):,} tokens, but training allows {longest:,}"))
        else:
            usable.append(prompt)
        if len(usable) == count:
            break
    if not usable:
        raise DataError(f"none of the first {len(records)} rows of {part.source} has a usable prompt: {unused[0]}")
    return usable, unused


def rewards_of(config: RunConfig, episodes: Episodes | None) -> AbstractContextManager[Rewards | None]:
    """A context manager with the rewards of training; None if there are none."""
    kinds = [] if episodes is None else [kind for kind in episodes.environments.kinds.values() if kind.rewards]
    if not config.rewards and not kinds:
        return nullcontext()
    titles = list(dict.fromkeys(kind.title for kind in kinds))
    return Rewards.of_run(config, config.rewards, environments=titles)


class Live:
    """Prints the messages of the first episode as they come."""

    def __init__(self, console: Console):
        self._console, self._shown = console, 0

    def __call__(self, index: int, trajectory: Trajectory) -> None:
        if index:
            return
        for message in trajectory.messages[self._shown :]:
            self._console.rule(f"first episode, {message['role']}", align="left", characters="-")
            calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ()]
            self._console.print(Text(visible(_shortened("\n".join([str(message["content"]), *calls]).strip()))))
        self._shown = len(trajectory.messages)


def generated(
    engine: Engine, prompts: Sequence[Prompt], sampling: Sampling, tokenizer: PreTrainedTokenizerBase
) -> Iterator[SampledGroup]:
    """Sample completions of each prompt."""
    for prompt, completions in zip(prompts, generate_all(engine, prompts, sampling, "sampling").values(), strict=True):
        texts = [text_of(done, sampling.stop_token_ids, tokenizer, prompt.tokens) for done in completions]
        both = zip(completions, texts, strict=True)
        inputs = [to_reward(done, text, prompt.text, prompt.facts) for done, text in both]
        yield SampledGroup(prompt, completions, texts, inputs)


def acted(
    episodes: Episodes,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    tokenizer: PreTrainedTokenizerBase,
    live: Live | None,
) -> Iterator[SampledGroup]:
    """Sample episodes of each prompt. A group's prompt is that of its first episode."""
    seeds, one = [seed_of(sampling.seed, prompt.row) for prompt in prompts], replace(sampling, num_generations=1)
    starts = [start_of(prompt.facts) for prompt in prompts]
    seen = live or (lambda index, trajectory: None)
    made = episodes.run(starts, sampling.num_generations, one, seeds, seen)
    for prompt, group in zip(prompts, made, strict=True):
        first = group[0].prompt
        completions = [Completion(each.tokens, each.logprobs, each.finish_reason, each.version) for each in group]
        texts = [str(tokenizer.decode(each.tokens)) for each in group]
        inputs = [rewarded_as(each, prompt.facts) for each in group]
        shown = replace(prompt, text=str(tokenizer.decode(first)), tokens=first)
        yield SampledGroup(shown, completions, texts, inputs)


def rewarded(groups: Sequence[SampledGroup], rewards: Rewards) -> Iterator[SampledGroup]:
    """The groups with their rewards; the completions of all groups are rewarded together."""
    results = iter(rewards([completion for group in groups for completion in group.inputs]))
    for group in groups:
        some = list(itertools.islice(results, len(group.inputs)))
        sums = [
            " + ".join(f"{part.weight:g} x {shown_number(part.value)} ({part.name})" for part in reward.parts)
            for reward in some
        ]
        yield replace(group, rewards=[reward.total for reward in some], parts=sums)


def token_faults(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, stops: tuple[int, ...], sampled: Sequence[SampledGroup]
) -> list[str]:
    """Problems with stop tokens and tags."""
    completions = [
        (group.prompt, tokens)
        for group in sampled
        for completion in group.completions
        if (tokens := [token for token in completion.tokens if token not in stops])
    ]
    return [
        *stop_faults(tokenizer, stops, config.rollout.stop, config.data.template != "none"),
        *completion_faults(completions, tags_of(config.data), tokenizer),
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
