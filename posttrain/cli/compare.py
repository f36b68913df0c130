"""`posttrain compare`."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.errors import UsageError
from posttrain.terminal import say

Sides = Annotated[
    list[str],
    typer.Argument(
        metavar="A B…",
        help="Two or more: runs (RUN, RUN@STEP), evaluation folders, files of posttrain score, grade or generate. "
        "NAME=PATH names a side; several paths of one name are runs that differ by their seed.",
        show_default=False,
    ),
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Folder to write to; default: comparisons/A-B.")]
Confidence = Annotated[float, typer.Option("--confidence", min=0.5, max=0.9999, help="Coverage of the intervals.")]
Resamples = Annotated[int, typer.Option("--resamples", min=100, help="Resamples of the bootstrap.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Random seed of the bootstrap.")]
AllPairs = Annotated[bool, typer.Option("--all-pairs", help="Compare every two sides, not each with the first.")]
ById = Annotated[bool, typer.Option("--by-id", help="Items of one id are the same, whatever their prompts.")]


def compare(
    sides: Sides,
    output: Output = None,
    confidence: Confidence = 0.95,
    resamples: Resamples = 10_000,
    seed: Seed = 0,
    all_pairs: AllPairs = False,
    by_id: ById = False,
) -> None:
    """Compare models item by item: is B better than A, and on which items?

    The items that both answered are compared one by one: how many B won, lost and tied, the difference with its
    interval, a test (exact McNemar for one right or wrong answer each, else a paired bootstrap), and the smallest
    difference that would have been detected. Without a clear difference it says "no difference shown". With several
    seeds of each side, a difference must also be larger than seeds alone make. compare.json and compare.html have the
    items that flipped, with both texts.

        posttrain compare runs/sft runs/grpo
        posttrain compare runs/grpo@0 runs/grpo
        posttrain compare sft=runs/sft-0 sft=runs/sft-1 grpo=runs/grpo-0 grpo=runs/grpo-1
        posttrain compare small.scored.jsonl large.scored.jsonl
    """
    if len(sides) < 2:
        raise UsageError(f"give at least two sides to compare; {sides[0]} is one")
    if len(set(sides)) < len(sides):
        twice = next(side for side in sides if sides.count(side) > 1)
        raise UsageError(f"{twice} is given twice: a side compared with itself does not differ")
    from posttrain.comparing.differences import Options
    from posttrain.comparing.differences import compare as compare_sides
    from posttrain.comparing.page import show, write
    from posttrain.comparing.sides import make_sides, split_name
    from posttrain.comparing.sources import read_source
    from posttrain.console import PlainConsole

    named = [(name, read_source(path)) for name, path in map(split_name, sides)]
    found = compare_sides(make_sides(named), Options(confidence, resamples, seed, all_pairs, by_id))
    folder = output or Path("comparisons") / _folder_name([side.name for side in found.sides])
    write(found, folder)
    show(found, PlainConsole())
    say(f"written: {folder}/compare.html, compare.json, compare.png")


def _folder_name(names: Sequence[str]) -> str:
    """The names of the sides as one folder name."""
    safe = [re.sub(r"[^\w.@-]+", "-", name).strip("-.")[:40] or "side" for name in names]
    return "-".join(safe[:3]) + (f"-and-{len(safe) - 3}-more" if len(safe) > 3 else "")
