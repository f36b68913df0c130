"""`posttrain rollouts`, `why`, `regrade` and `losses`: a run's steps, down to the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.table import Table
from rich.text import Text

from posttrain.base.console import PlainConsole, text_table
from posttrain.base.errors import UsageError
from posttrain.base.imports import quick_imports
from posttrain.base.options import Flag
from posttrain.base.terminal import say, visible
from posttrain.base.words import counted
from posttrain.config.options import OVERWRITE
from posttrain.config.reading.explain import did_you_mean

if TYPE_CHECKING:  # imports numpy, which the help does not need
    from posttrain.runs.receipt import CompletionReceipt, GroupReceipt
    from posttrain.runs.stored_rollouts import StoredRun

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder of a method that samples completions.")]
OneStep = Annotated[int | None, Flag("The completions of one step; default: all steps.", "--step", min=1)]
SHOWN = 60  # characters of a string in a table
_table = partial(text_table, left=("completion", "token", "metric", "rewards"))
UNSIGNED = ("ratio", "entropy")  # columns of numbers without a sign


def rollouts(
    run: Run,
    step: OneStep = None,
    to: Annotated[str | None, Flag("Write rows for training instead: sft, pairs or kto.", metavar="KIND")] = None,
    output: Annotated[Path | None, Flag("File for these rows, .jsonl.", "-o", metavar="FILE")] = None,
    best: Annotated[int | None, Flag("Rows of each prompt, the most rewarded first. [default: 1]", min=1)] = None,
    above: Annotated[float | None, Flag("Reward above which a completion is good.")] = None,
    overwrite: Annotated[bool, OVERWRITE] = False,
) -> None:
    """List the completions that a run was trained on, from its rollouts.sqlite: a summary by step, or one step.

    With --to, write rows for another training: of each prompt, over all steps, the best completion (sft), the most and
    the least rewarded one (pairs), or every one with a label (kto: above the prompt's mean, or above --above).

        posttrain rollouts runs/grpo --to sft --best 2 --above 0.5 --output best.jsonl
        posttrain train --method sft --model runs/grpo --source best.jsonl
    """
    from posttrain.runs.receipt import step_receipt
    from posttrain.runs.stored_rollouts import StoredRun

    flags = {"--output": output, "--best": best, "--above": above}
    if to is None and (unread := next((flag for flag, value in flags.items() if value is not None), None)):
        raise UsageError(f"{unread} is for rows that --to writes: sft, pairs or kto")
    with StoredRun(_folder(run)) as stored:
        if to is not None:
            _write_rows(stored, to, output, stored.steps() if step is None else [step], best, above, overwrite)
            return
        if step is None:
            table = _steps_table(stored.summary())
        else:
            table = _completions_table(sorted(step_receipt(stored, step), key=lambda group: group.prompt))
    PlainConsole().print(table)


def _write_rows(
    stored: StoredRun,
    to: str,
    output: Path | None,
    steps: Sequence[int],
    best: int | None,
    above: float | None,
    overwrite: bool,
) -> None:
    from posttrain.runs.files import save_rows
    from posttrain.runs.selection import TARGETS, select

    if to not in TARGETS:
        raise UsageError(f"--to {to}: {did_you_mean(to, TARGETS)}")
    if output is None:
        raise UsageError("--to needs --output FILE, such as rows.jsonl")
    if best is not None and to == "kto":
        raise UsageError("--best is not read by kto, which labels every completion")
    if above is not None and to == "pairs":
        raise UsageError("--above is not read by pairs, which compare the completions of a prompt")
    if output.exists() and not overwrite:
        raise UsageError(f"{output} exists: give another file, or --overwrite")
    for step in steps:
        stored.require(step)
    rows, counts = select(stored, cast(Any, to), steps, best, above)
    save_rows(output, rows)
    total = counts.pop("completions")
    left = "".join(f", {count:,} {reason}" for reason, count in counts.items() if count)
    say(f"{output}: {counted(len(rows), 'row')} of {counted(total, 'completion')}{left}")
    said = [row[name] for row in rows for name in ("completion", "chosen", "rejected") if name in row]
    if any(len(each) > 1 for each in said if isinstance(each, list)):
        say(
            "Some rows have several turns: train them with method.assistant_only_loss=true, so that only replies count."
        )


def why(
    run: Run,
    step: Annotated[int, Flag("Step to explain, from 1.", min=1)],
    prompt: Annotated[int | None, Flag("Show the rewards of this prompt of the step by part.", min=0)] = None,
    rollout: Annotated[int | None, Flag("Show the tokens of this completion of the prompt.", min=0)] = None,
) -> None:
    """Explain a step: its metrics, its groups, a group's rewards by part, a completion's tokens.

    For each token: the advantage, the ratio, its log-probability under the engine, the old, the new and the reference
    policy, its push on the gradient, and whether it was clipped.
    """
    if rollout is not None and prompt is None:
        raise UsageError("--rollout needs --prompt")
    from posttrain.runs.receipt import group_receipt, step_receipt
    from posttrain.runs.stored_rollouts import StoredRun

    folder, console = _folder(run), PlainConsole()
    with StoredRun(folder) as stored:
        if prompt is None:
            for table in (*_metrics_tables(folder, step), _groups_table(step_receipt(stored, step))):
                console.print(table)
            return
        group = group_receipt(stored, step, prompt)
    if rollout is not None:
        completion = group.completion(rollout)
        if completion.turns:
            console.print(_turns_table(completion))
        console.print(_tokens_table(folder, group, completion))
        return
    console.print(Text(visible(f"row {group.row}: {group.text}"), style="dim"))
    console.print(_parts_table(group))


def regrade(
    run: Run,
    reward: Annotated[
        list[str], Flag('A reward: its type, module:function, or settings such as "{type: length, target: 50}".')
    ],
    step: OneStep = None,
    limit: Annotated[int, Flag("Maximum rows of the table; sign changes come first.", min=0)] = 50,
) -> None:
    """Compute other rewards for a run's stored completions, and list the advantages that change sign. Needs no GPU.

    Advantages that become 0, or were 0, are listed and counted separately.
    """
    from posttrain.cli.settings import rewards_from_flags
    from posttrain.inspection import regrade as regrading  # imports torch, which takes seconds

    regraded, console = regrading.regrade(_folder(run), rewards_from_flags(reward), step), PlainConsole()
    if not regraded.has_tokenizer:
        console.print("The run's tokenizer is missing: rewards cannot tell which prompts open <think>.")
    if shown := regraded.changed[:limit]:
        table = _table("step", "prompt", "rollout", "change", "reward", "new", "A", "new A", "completion")
        for change in shown:
            where = map(str, (change.step, change.prompt, change.rollout, change.change))
            table.add_row(*where, *map(_number, (*change.rewards, *change.advantages)), Text(_short(change.text)))
        console.print(table)
    if len(regraded.changed) > len(shown):
        console.print(f"and {len(regraded.changed) - len(shown):,} more: --limit shows them")
    counts = regraded.counts
    console.print(
        f"{counts[regrading.SIGN]:,} of {counts.total():,} advantages change sign, "
        f"{counts[regrading.TO_ZERO]:,} become 0 and {counts[regrading.FROM_ZERO] + counts[regrading.STAYS_ZERO]:,} "
        f"were 0, of which {counts[regrading.STAYS_ZERO]:,} are still 0"
    )
    if regraded.approximate:
        console.print("New advantages are approximate: method.whiten_rewards scaled the run's own rewards.")


def _folder(path: Path, flag: str = "") -> Path:
    if not path.is_dir():
        raise UsageError(f"{flag}{path}: no such folder")
    return path


def _steps_table(steps: Sequence[dict]) -> Table:
    table = _table("step", "prompts", "completions", "reward", "lowest", "highest", "no reward", "truncated")
    for step in steps:
        counts = [str(step[name]) for name in ("step", "prompts", "completions")]
        rewards = [_number(step[name]) for name in ("reward", "lowest", "highest")]
        table.add_row(*counts, *rewards, str(step["left_out"]), f"{step['truncated']:.0%}")
    return table


def _completions_table(groups: Sequence[GroupReceipt]) -> Table:
    table = _table("prompt", "rollout", "reward", "advantage", "tokens", "ended by", "completion")
    for group in groups:
        table.add_section()
        table.add_row(str(group.prompt), "", "", "", "", "", Text(_short(group.text), style="dim"))
        for completion in group.completions:
            numbers = (_number(completion.reward), _number(completion.advantage), str(len(completion.tokens)))
            text = Text(_short(completion.text))
            table.add_row("", str(completion.rollout), *numbers, completion.finish_reason, text)
    return table


def _metrics_tables(folder: Path, step: int) -> list[Table]:
    """The logged metrics of the step. Unless every step is logged, they cover the steps since the previous line."""
    from posttrain.runs.metrics import read_metrics

    lines = [line for line in read_metrics(folder) if line["step"] >= step and "loss" in line]
    if not lines:
        return []
    table = _table("metric", "value")
    for name, value in lines[0].items():
        if name not in ("step", "time"):
            table.add_row(name, _number(value))
    after = "" if lines[0]["step"] == step else f" (logged at step {lines[0]['step']}, with the steps before it)"
    table.title = f"step {step}{after}"
    return [table]


def _groups_table(groups: Sequence[GroupReceipt]) -> Table:
    names = ("prompt", "row", "rewards", "largest advantage", "clipped", "ratio furthest from 1", "share of the push")
    table, total = _table(*names), sum(group.push for group in groups)
    for group in groups:
        rewards = ", ".join(_number(completion.reward) for completion in group.completions)
        advantages = [completion.advantage for completion in group.completions if completion.advantage is not None]
        largest = _number(max(advantages, key=abs, default=None))  # none of a group outside the loss
        numbers = (largest, str(group.clipped), f"{group.furthest_ratio:.4f}")
        share = f"{group.push / total:.0%}" if total > 0 else "0%"
        table.add_row(str(group.prompt), str(group.row), rewards, *numbers, share)
    return table


def _parts_table(group: GroupReceipt) -> Table:
    table = _table("rollout", "reward", "advantage", *group.part_names, "completion")
    for completion in group.completions:
        parts = [_short(str(completion.parts.get(name, "-"))) for name in group.part_names]
        numbers = (_number(completion.reward), _number(completion.advantage))
        table.add_row(str(completion.rollout), *numbers, *parts, Text(_short(completion.text)))
    return table


def _turns_table(completion: CompletionReceipt) -> Table:
    """The turns of an episode; a call is shown with the reply that made it."""
    table = _table("turn", "author", "tokens", "reward", "advantage", "push", "completion")
    replies = counted(sum(turn.author == "model" for turn in completion.turns), "reply", "replies")
    branch = "" if completion.trunk is None else f", branch of rollout {completion.trunk}"
    table.title = f"{replies}, ended by {completion.finish_reason}{branch}"
    for number, turn in enumerate(completion.turns):
        advantage, push = completion.of_turn(turn)
        values = ["-"] * 3
        if turn.author == "model":
            values = [_number(turn.reward), _number(advantage), _number(push)]
        said = [turn.text, *turn.calls, f"({counted(turn.failed, 'call')} failed)" if turn.failed else ""]
        table.add_row(str(number), turn.author, f"{turn.stop - turn.start:,}", *values, Text(_short(" ".join(said))))
    return table


def _tokens_table(folder: Path, group: GroupReceipt, completion: CompletionReceipt) -> Table:
    from posttrain.runs.receipt import decoder_of, token_texts

    decoder = decoder_of(folder)
    if decoder is None:  # a tokenizer on the hub, or one without a tokenizer.json
        from posttrain.inspection.regrade import tokenizer_of  # imports torch, which takes seconds

        decoder = tokenizer_of(folder)
    numbers, columns = completion.numbers, completion.numbers.columns
    table = _table("", "token", *columns, "push", "")
    table.padding = (0, 1, 0, 0)  # all numbers of most runs fit into 80 columns
    for at, text in enumerate(token_texts(completion.tokens.tolist(), decoder, group.tokens.tolist())):
        values = [f"{values[at]:{'' if name in UNSIGNED else '+'}.4f}" for name, values in columns.items()]
        push, note = f"{numbers.push[at]:+.4f}", "clipped" if numbers.clipped[at] else ""
        if not numbers.trained[at]:
            values, push, note = ["-"] * len(columns), "-", "not sampled"
        table.add_row(str(at), Text(token_shown(text)), *values, push, note)
    return table


def token_shown(text: str | None) -> str:
    """A token's text on one line; an ellipsis for a token that ends within a character."""
    return "…" if text is None else repr(text)[1:-1]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _short(text: str) -> str:
    flat = visible(" ".join(text.split()))
    return flat if len(flat) <= SHOWN else flat[: SHOWN - 1] + "…"


def losses(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, of any method.")],
    step: Annotated[int, Flag("Step whose batch is used, from 1.", min=1)],
    loss: Annotated[
        Sequence[str], Flag("Losses besides the run's own; default: all that fit. Repeatable.", metavar="NAME,…")
    ] = (),
    set_: Annotated[
        Sequence[str],
        Flag(
            "Values of a setting of the method, such as epsilon=0.1,0.4. Repeatable: every combination is a row.",
            "--set",
            metavar="NAME=VALUE,…",
        ),
    ] = (),
    output: Annotated[Path | None, Flag("Folder for the files; default: RUN.", "-o")] = None,
    device: Annotated[
        str | None, Flag("auto, cpu, cuda, a GPU by number (cuda:1), or mps; default: the run's.")
    ] = None,
) -> None:
    """Compare losses on one step's batch: what would this step have been under DAPO?

    The run's own loss and every other loss that fits are computed for the step's batch (completions from
    rollouts.sqlite, or rows of the data in the run's order) with the weights before the step, or those of the nearest
    earlier checkpoint. Each loss has a row: its value, the norm of its gradient, the cosine with the gradient of the
    run's own loss (1: the same direction, 0: unrelated, -1: the opposite), and the share of tokens clipped. Nothing is
    trained. losses-step-N.json, and losses-step-N.svg with the cosines of all pairs, are written to the run folder.

      posttrain losses runs/grpo --step 40
      posttrain losses runs/grpo --step 40 --loss dapo --set epsilon=0.1,0.4
    """
    from posttrain.cli.settings import devices_from_flag

    folder = _folder(run)
    target = folder if output is None else _folder(output, "--output ")
    devices = None if device is None else devices_from_flag(device)
    with quick_imports():
        from posttrain.inspection.loss_inputs import parsed  # these import torch, which takes seconds
        from posttrain.inspection.loss_tables import save, show
        from posttrain.inspection.losslab import losses as compute

    names = [name.strip() for text in loss for name in text.split(",") if name.strip()]
    lab = compute(folder, step, names, parsed(set_), devices)
    show(lab, PlainConsole())
    for path in save(lab, target):
        say(f"written: {path}")
