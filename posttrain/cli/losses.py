"""`posttrain losses`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from posttrain.base.console import PlainConsole
from posttrain.base.errors import UsageError
from posttrain.base.imports import quick_imports
from posttrain.base.options import Flag
from posttrain.base.terminal import say
from posttrain.cli.settings import devices_from_flag


def losses(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, of any method.")],
    step: Annotated[int, Flag("Whose batch: a step of the run, from 1.", min=1)],
    loss: Annotated[
        Sequence[str],
        Flag("Losses beside the run's own; default: all that fit. Repeatable.", metavar="NAME,…"),
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

    The step's batch (completions from rollouts.sqlite, or rows of the data in the run's order) is put through the run's
    own loss and every other that fits it, with the weights that the step began with, or those of the nearest earlier
    checkpoint. Each loss has a row: its value, the norm of its gradient, the cosine with the gradient of the run's own
    loss (1: the same direction, 0: unrelated, -1: the opposite), and the share of tokens clipped. Nothing is trained.

    The run folder gets losses-step-N.json, and losses-step-N.svg with the cosines of all pairs.

      posttrain losses runs/grpo --step 40
      posttrain losses runs/grpo --step 40 --loss dapo --set epsilon=0.1,0.4
    """
    if not run.is_dir():
        raise UsageError(f"{run}: no such folder")
    if output is not None and not output.is_dir():
        raise UsageError(f"--output {output}: no such folder")
    devices = None if device is None else devices_from_flag(device)
    with quick_imports():
        from posttrain.inspection.loss_inputs import parsed  # these import torch, which takes seconds
        from posttrain.inspection.losslab import losses as compute
        from posttrain.inspection.losslab import save, show

    names = [name.strip() for text in loss for name in text.split(",") if name.strip()]
    lab = compute(run, step, names, parsed(set_), devices)
    show(lab, PlainConsole())
    for path in save(lab, output or run):
        say(f"written: {path}")
