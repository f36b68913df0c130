"""`posttrain quickstart`."""

from pathlib import Path
from typing import Annotated

import typer

from posttrain.base.imports import quick_imports
from posttrain.base.terminal import say

OutputDir = Annotated[Path, typer.Option("--output-dir", help="Folder for all files.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier quickstart in that folder.")]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Random seed of model and data.")]


def quickstart(output_dir: OutputDir = Path("runs/quickstart"), overwrite: Overwrite = False, seed: Seed = 0) -> None:
    """The whole chain in minutes, without a download: a small model, SFT, a reward model, DPO, PPO, GRPO, compared."""
    say("This makes a model and data, trains and compares; it takes a few minutes.")
    import torch  # takes seconds

    with quick_imports():
        from posttrain.quickstart import quickstart as run

    # So small a model gains little from more threads, loses much on shared cores, and its sums depend on their number.
    torch.set_num_threads(1)
    run(output_dir, seed=seed, overwrite=overwrite)
