"""`posttrain rollouts`, `why` and `regrade`: from a step's metrics down to the tokens behind its gradient."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from posttrain import engines
from posttrain.base.errors import PosttrainError, RunError
from posttrain.base.terminal import visible
from posttrain.config import RunConfig, load
from posttrain.config.schema.rewards import Reward
from posttrain.data.pieces import pieces
from posttrain.models.load import load_tokenizer
from posttrain.recipes import REGRADED
from posttrain.reports.gradient import groups_of
from posttrain.rewards.compose import RewardInput, Rewards
from posttrain.rollout import end_of, to_reward
from posttrain.runs.inputs import dated, located
from posttrain.runs.metrics import read_metrics
from posttrain.runs.stored_rollouts import StoredRun

SHOWN = 60  # characters of a string in a table


def show_rollouts(folder: Path, step: int | None, console: Console) -> None:
    """All steps of a run, one per line, or the completions of one step."""
    with StoredRun(folder) as stored:
        if step is None:
            table = _table("step", "prompts", "completions", "reward", "lowest", "highest", "no reward", "truncated")
            for line in stored.summary():
                numbers = [line[name] for name in ("reward", "lowest", "highest")]
                counts = [line[name] for name in ("step", "prompts", "completions")]
                table.add_row(
                    *map(str, counts), *map(_number, numbers), str(line["left_out"]), f"{line['truncated']:.0%}"
                )
            console.print(table)
            return
        stored.require(step)
        prompts = stored.prompts(step)
        table = _table("prompt", "rollout", "reward", "advantage", "tokens", "ended by", "completion")
        for one in stored.rollouts(step):
            first = f"{one['prompt_index']}" if one["rollout_index"] == 0 else ""
            if first:
                table.add_section()
                table.add_row(
                    first, "", "", "", "", "", Text(_short(prompts[one["prompt_index"]]["prompt"]), style="dim")
                )
            cells = (_number(one["reward"]), _number(one["advantage"]), str(len(one["tokens"])), one["finish_reason"])
            table.add_row("", str(one["rollout_index"]), *cells, Text(_short(one["completion"])))
        console.print(table)


def why(folder: Path, step: int, prompt: int | None, rollout: int | None, console: Console) -> None:
    """The step's metrics and groups; with `prompt` a group's rewards by parts; with `rollout` its tokens."""
    with StoredRun(folder) as stored:
        stored.require(step)
        if prompt is None:
            _print_metrics(folder, step, console)
            _print_groups(stored, step, console)
            return
        group = stored.rollouts(step, prompt)
        if not group:
            raise RunError(f"step {step} has no prompt {prompt}: its prompts are 0 to {len(stored.prompts(step)) - 1}")
        asked = stored.prompts(step)[prompt]
        if rollout is None:
            console.print(Text(visible(f"row {asked['row']}: {asked['prompt']}"), style="dim"))
            _print_parts(group, console)
            return
        if not 0 <= rollout < len(group):
            raise RunError(f"prompt {prompt} of step {step} has the rollouts 0 to {len(group) - 1}, no {rollout}")
        _print_tokens(group[rollout], asked["tokens"].tolist(), _tokenizer(folder), console)


def _print_metrics(folder: Path, step: int, console: Console) -> None:
    """The logged metrics of the step: alone if every step is logged, else with the steps since the previous line."""
    lines = [line for line in read_metrics(folder) if line["step"] >= step and "loss" in line]
    if not lines:
        return
    table = _table("metric", "value")
    for name, value in lines[0].items():
        if name not in ("step", "time"):
            table.add_row(name, _number(value))
    after = "" if lines[0]["step"] == step else f" (logged at step {lines[0]['step']}, with the steps before it)"
    table.title = f"step {step}{after}"
    console.print(table)


def _print_groups(stored: StoredRun, step: int, console: Console) -> None:
    """The groups of a step, that with the largest push on the gradient first (posttrain/reports/gradient.py)."""
    names = ("prompt", "row", "rewards", "largest advantage", "clipped", "ratio furthest from 1", "share of the push")
    table, prompts, groups = _table(*names), stored.prompts(step), groups_of(stored.rollouts(step))
    whole = sum(group.push for group in groups)
    for group in groups:
        rewards = ", ".join(_number(one["reward"]) for one, _ in group.members)
        advantages = [one["advantage"] for one, _ in group.members if one["advantages"] is not None]
        cells = (_number(max(advantages, key=abs, default=None)), str(group.clipped), f"{group.furthest_ratio:.4f}")
        share = f"{group.push / whole:.0%}" if whole > 0 else "0%"
        table.add_row(str(group.prompt), str(prompts[group.prompt]["row"]), rewards, *cells, share)
    console.print(table)


def _print_parts(group: Sequence[Mapping[str, Any]], console: Console) -> None:
    names = list(group[0]["parts"])
    table = _table("rollout", "reward", "advantage", *names, "completion")
    for one in group:
        parts = [_part(one["parts"][name]) for name in names]
        row = (str(one["rollout_index"]), _number(one["reward"]), _number(one["advantage"]), *parts)
        table.add_row(*row, Text(_short(one["completion"])))
    console.print(table)


def _part(part: Mapping[str, Any]) -> str:
    value = f"{part['weight']:g} x {_number(part['value'])}"
    if part.get("verdict"):
        value += f" {part['verdict']}"
    return value + (f" ({part['extracted']})" if part.get("extracted") else "")


def _print_tokens(
    one: Mapping[str, Any], prompt: Sequence[int], tokenizer: PreTrainedTokenizerBase | None, console: Console
) -> None:
    columns = {
        "sampler_logprobs": "sampler",
        "old_logprobs": "old",
        "new_logprobs": "new",
        "ref_logprobs": "ref",
        "old_values": "value",
        "returns": "return",
        "advantages": "advantage",
    }
    there = [name for name in columns if one[name] is not None]
    table = _table("", "token", *(columns[name] for name in there), "ratio", "clipped")
    for place, text in enumerate(_texts(one["tokens"].tolist(), tokenizer, prompt)):
        values = [f"{one[name][place]:+.4f}" for name in there]
        ratio = clipped = "-"
        if one["new_logprobs"] is not None:
            ratio = f"{math.exp(float(one['new_logprobs'][place] - one['old_logprobs'][place])):.4f}"
            clipped = "clipped" if one["clipped"][place] else ""
        table.add_row(str(place), Text(text), *values, ratio, clipped)
    console.print(table)


def _texts(
    tokens: Sequence[int], tokenizer: PreTrainedTokenizerBase | None, prompt: Sequence[int] = ()
) -> Iterator[str]:
    """The text of each token after a prompt; of several that hold one character, the last shows it."""
    if tokenizer is None:
        yield from map(str, tokens)
        return
    for count, text in pieces(tokens, tokenizer, prompt):
        yield from ["…"] * (count - 1) + [repr(text)[1:-1]]


def regrade(
    folder: Path, settings: Sequence[Reward], console: Console, step: int | None = None, limit: int = 50
) -> int:
    """Compute other rewards for the stored completions of a step, or of all; list advantages that change sign.

    The run's advantages are those that it stored; the new ones are computed as in training, over the completions that
    have a reward in both. Sign changes are counted separately from advantages that become 0, or were 0; the table has
    `limit` rows, sign changes first. Returns the number of sign changes.
    """
    config = _config(folder)
    method, found, counts, approximate = config.method, [], Counter(), False
    regraded = REGRADED.get(method.type)
    if regraded is None:
        raise RunError(f"{folder} is a run of {method.type}, which does not learn from rewards")
    most, tokenizer = config.rollout.max_completion_length, _tokenizer(folder)
    if tokenizer is None:
        console.print("The run's tokenizer is missing: rewards do not know which prompts open <think>.")
    with (
        StoredRun(folder) as stored,
        Rewards(
            settings,
            tags=config.data.tags,
            devices=config.devices,
            max_completion_length=most,
            date=config.data.date,
        ) as rewards,
    ):
        if step is not None:
            stored.require(step)
        for number in stored.steps() if step is None else [step]:
            prompts, rollouts = stored.prompts(number), stored.rollouts(number)
            graded = rewards([_completion(prompts[one["prompt_index"]], one, tokenizer) for one in rollouts]).totals
            usable = [(one, new) for one, new in zip(rollouts, graded, strict=True) if None not in (one["reward"], new)]
            approximate |= not method.regrades_exactly and any(one.get("penalties") is None for one, _ in usable)
            new = regraded(method, [one for one, _ in usable], [reward for _, reward in usable])
            for (one, reward), after in zip(usable, new, strict=True):
                before = one["advantage"]
                if before is None or after is None:  # outside the loss
                    continue
                change = _change(before, after)
                counts[change] += 1
                if change not in (SAME, STAYS_ZERO):
                    found.append((change, number, one, reward, before, after))
    _print_changes(found, limit, console)
    console.print(
        f"{counts[SIGN]:,} of {counts.total():,} advantages change their sign; besides, {counts[TO_ZERO]:,} become 0 "
        f"and {counts[FROM_ZERO] + counts[STAYS_ZERO]:,} were 0, of which {counts[STAYS_ZERO]:,} stay 0"
    )
    if approximate:
        console.print("New advantages are approximate: method.whiten_rewards scaled the run's own rewards.")
    return counts[SIGN]


SIGN, TO_ZERO, FROM_ZERO, STAYS_ZERO, SAME = "sign", "to 0", "from 0", "stays 0", "same sign"


def _change(before: float, after: float) -> str:
    if before * after < 0:
        return SIGN
    if before == 0:
        return STAYS_ZERO if after == 0 else FROM_ZERO
    return TO_ZERO if after == 0 else SAME


def _print_changes(
    found: Sequence[tuple[str, int, Mapping[str, Any], float, float, float]], limit: int, console: Console
):
    shown = sorted(found, key=lambda one: one[0] != SIGN)[:limit]  # sign changes first, else in their order
    if shown:
        table = _table("step", "prompt", "rollout", "change", "reward", "new", "A", "new A", "completion")
        for change, number, one, reward, before, after in shown:
            where = (number, one["prompt_index"], one["rollout_index"], change)
            numbers = (one["reward"], reward, before, after)
            table.add_row(*map(str, where), *map(_number, numbers), Text(_short(one["completion"])))
        console.print(table)
    if len(found) > len(shown):
        console.print(f"and {len(found) - len(shown):,} more: --limit shows them")


def _completion(
    prompt: Mapping[str, Any], one: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None
) -> RewardInput:
    """A stored completion as the input of rewards; without a tokenizer no prompt is known to open `<think>`."""
    sampled = engines.Completion(one["tokens"].tolist(), [], one["finish_reason"], one["version"])
    end = "" if tokenizer is None else end_of(prompt["tokens"], tokenizer)
    return to_reward(sampled, one["completion"], end, prompt["facts"])


def _config(folder: Path) -> RunConfig:
    return located(dated(load(folder / "config.yaml").config, folder), folder)


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """The run's tokenizer; None if it is missing, and tokens are shown as numbers."""
    model = _config(folder).models[0]
    for path in (folder / "final", None):
        try:
            return load_tokenizer(model if path is None else model.model_copy(update={"path": str(path)}))
        except PosttrainError:
            continue
    return None


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", title_style="bold")
    for name in columns:
        left = name in ("completion", "token", "metric", "rewards")
        table.add_column(name, justify="left" if left else "right", overflow="fold")  # no number is cut short
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _short(text: str) -> str:
    flat = visible(" ".join(text.split()))
    return flat if len(flat) <= SHOWN else flat[: SHOWN - 1] + "…"
