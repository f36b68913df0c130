"""Trains runs by one process and then by two ranks, and keeps the gradients of every update for tests/test_ranks.py.

    python tests/ranks_worker.py ONE TWO

All processes are forks of this one, which has imported what they need. Each is in its folder, ONE or TWO, and trains
the configurations that `runs.json` there names in turn; `gradients.safetensors` goes to the folder of each run. In
those named `double-…`, weights and gradients are float64, and a single process makes the packs that two ranks have.
`refused.json` is a run for ranks that differ; what each says goes to `refused-RANK.json`.
"""

import gc
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import chdir, nullcontext
from pathlib import Path

import torch
from safetensors.torch import save_file

from posttrain import runner
from posttrain.base.errors import RankError
from posttrain.config import RunConfig, load
from posttrain.optim.adamw import AdamW
from posttrain.optim.variants import ShardedAdamW
from posttrain.parallel import ranks
from posttrain.runner import one
from posttrain.training import job

kept: dict[str, torch.Tensor] = {}
norms = {kind: kind._norm for kind in (AdamW, ShardedAdamW)}
packed, policy = job.pack, job.Job.policy


def keep(self: AdamW) -> torch.Tensor:
    """Called once all gradients are there; of sharded ones each rank has its rows."""
    update = len({name.partition("|")[0] for name in kept})
    own = {name: master.grad.clone() for name, master in self.masters.items() if master.grad is not None}
    parts = self._ranks.gather(own) if isinstance(self, ShardedAdamW) else [own]
    for number, name in enumerate(self.masters):
        if name in own:
            rows = [part[name] for part in parts] if self.is_part(f"{name}|exp_avg") else [own[name]]
            kept[f"{update}|{number}"] = torch.cat(rows)
    return norms[type(self)](self)


def refuse(here: ranks.Ranks, config: RunConfig) -> None:
    """Train on ranks with other settings, with other data, and with another number of steps behind them."""
    root, said = Path(config.output_dir), dict[str, str | int]()

    def hear(name: str, work: Callable[[], object]) -> None:
        try:
            said[name] = str(work())
        except RankError as error:
            said[name] = str(error)

    rate = config.training.model_copy(update={"learning_rate": 1e-3 * (1 + here.index)})
    hear("settings", lambda: runner.train(config.model_copy(update={"name": "settings", "training": rate})))
    with chdir(root / f"rank-{here.index}"):
        hear("data", lambda: runner.train(config.model_copy(update={"name": "data"})))
    here.at_step(7 + here.index)
    hear("step", lambda: here.gather(None))
    here.at_step(0)
    (root / f"refused-{here.index}.json").write_text(json.dumps(said))


def main(files: list[str]) -> None:
    AdamW._norm = ShardedAdamW._norm = keep
    os.fsync = lambda descriptor: None
    one.write_curves = lambda lines, path, title: None
    one.write_report = lambda folder, title: None
    with ranks.joined() as here:
        # As the runner does it, but connected once for all runs.
        runner.joined = lambda: nullcontext(here)
        for file in files:
            kept.clear()
            gc.freeze()  # what is imported need not be looked through again and again
            double = "double" in Path(file).name
            job.pack = (lambda *given: packed(*given[:4], ranks=2)) if double else packed
            job.Job.policy = (lambda self, head: policy(self, head).double()) if double else policy
            config = load(Path(file)).config
            if Path(file).stem == "refused":
                refuse(here, config)
                continue
            runner.train(config)
            if here.is_first:
                save_file(kept, Path(config.output_dir) / str(config.name) / "gradients.safetensors")


def forked(folder: str, rank: int, ranks: int, port: int) -> int:
    """A process that is one of the ranks in this folder."""
    if process := os.fork():
        return process
    status = 1
    try:
        os.chdir(folder)
        sys.path.insert(0, folder)
        if ranks > 1:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        main(json.loads(Path("runs.json").read_text()))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    for number, place in enumerate(sys.argv[1:], 1):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        processes = [forked(place, rank, number, port) for rank in range(number)]
        if any([os.waitpid(process, 0)[1] for process in processes]):
            sys.exit(1)
