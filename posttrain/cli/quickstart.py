"""`posttrain quickstart`."""

from pathlib import Path
from typing import Annotated

import typer

from posttrain.imports import quick_imports
from posttrain.terminal import say

OutputDir = Annotated[Path, typer.Option("--output-dir", help="Everything is made in this folder.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier quickstart in that folder.")]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**32 - 1, help="Another seed makes another model and data.")]


def quickstart(output_dir: OutputDir = Path("runs/quickstart"), overwrite: Overwrite = False, seed: Seed = 0) -> None:
    """See it all in minutes, without a download: a small model, SFT, a reward model, DPO, PPO, GRPO, compared."""
    say("Everything is made here and now; that takes a few minutes.")
    import torch  # takes seconds

    with quick_imports():
        from posttrain.quickstart import quickstart as run

    # So small a model gains little from more threads, loses much where cores are shared, and sums in another order.
    torch.set_num_threads(1)
    run(output_dir, seed=seed, overwrite=overwrite)
