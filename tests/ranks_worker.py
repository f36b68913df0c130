"""Trains runs on the ranks of torchrun, or alone, and keeps the gradients of every update for tests/test_ranks.py.

    python -m torch.distributed.run --nproc-per-node 2 tests/ranks_worker.py FILE.json…

Each FILE.json is a configuration; `gradients.safetensors` goes to its run folder. In those named `double-…`, weights
and gradients are float64, and a single process makes the packs that two ranks have.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import save_file

from posttrain import ranks, runner
from posttrain.config import load
from posttrain.ranks import Ranks
from posttrain.training import finish, job

kept: dict[str, torch.Tensor] = {}
summed = Ranks.sum_gradients
packed, policy = job.pack, job.Job.policy


def keep(self: Ranks, parameters) -> None:
    summed(self, parameters)
    update = len({name.partition("|")[0] for name in kept})
    kept.update({f"{update}|{i}": p.grad.clone() for i, p in enumerate(parameters) if p.grad is not None})


def main(files: list[str]) -> None:
    Ranks.sum_gradients = keep
    os.fsync = lambda descriptor: None
    finish.write_curves = lambda lines, path, title: None
    finish.write_report = lambda folder, title: None
    with ranks.joined() as here:
        # As the runner does it, but connected once for all runs.
        runner.joined = lambda: nullcontext(here)
        for file in files:
            kept.clear()
            double = Path(file).name.startswith("double")
            job.pack = (lambda *given: packed(*given[:4], ranks=2)) if double else packed
            job.Job.policy = (lambda self, head: policy(self, head).double()) if double else policy
            config = load(Path(file)).config
            runner.train(config)
            if here.is_first:
                save_file(kept, Path(config.output_dir) / str(config.name) / "gradients.safetensors")


if __name__ == "__main__":
    main(sys.argv[1:])
