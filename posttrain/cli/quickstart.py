"""`posttrain quickstart`."""

from pathlib import Path
from typing import Annotated

from posttrain.base.imports import quick_imports
from posttrain.base.options import Flag
from posttrain.base.terminal import say


def quickstart(
    output_dir: Annotated[Path, Flag("Folder for all files.")] = Path("runs/quickstart"),
    overwrite: Annotated[bool, Flag("Replace an earlier quickstart in that folder.")] = False,
    seed: Annotated[int, Flag("Random seed of model and data.", min=0, max=2**32 - 1)] = 0,
) -> None:
    """The whole chain in minutes, without a download: a small model, SFT, a reward model, DPO, PPO, GRPO, compared."""
    say("This makes a model and data, trains and compares; it takes a few minutes.")
    import torch  # takes seconds

    with quick_imports():
        from posttrain.quickstart import quickstart as run

    # So small a model gains little from more threads, loses much on shared cores, and its sums depend on their number.
    torch.set_num_threads(1)
    run(output_dir, seed=seed, overwrite=overwrite)
