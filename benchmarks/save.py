"""The cost of checkpoints: `python -m benchmarks.save`. Prints a line and writes results/save.json.

DPO with the benchmark's model and a checkpoint every two steps: the time of a save (weights, optimizer and hashes, all
flushed to disk, and the oldest deleted) compared with the time of the steps between two saves at the default interval.
"""

import json
import re
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.common import THREADS, machine
from benchmarks.posttrain_side import settings
from posttrain import runner
from posttrain.base.words import in_units
from posttrain.config import CheckpointConfig, load
from posttrain.runs.files import save_json
from posttrain.runs.finding import size_of

STEPS, EVERY = 12, 2
GOAL = 0.02  # maximum share of the time that steps take


def measure(folder: Path) -> dict:
    """Train, and read the times of steps and saves from the run folder."""
    given = settings("dpo", folder, folder / "models", STEPS)
    runner.train(load(None, [*given, f"checkpoint.save_steps={EVERY}"]).config)
    run = folder / "bench"
    saves = [float(s) for s in re.findall(r"saved checkpoint-\d+ in ([\d.]+) s", (run / "training.log").read_text())]
    step = json.loads((run / "results.json").read_text())["train_runtime"] / STEPS
    save, interval = statistics.median(saves), CheckpointConfig().save_steps
    return {
        "bytes": size_of(run / f"checkpoint-{STEPS}"),
        "save_seconds": round(save, 3),
        "save_seconds_each": saves,
        "step_seconds": round(step, 3),
        "save_steps": interval,
        "share": round(save / (interval * step), 6),
        "goal": GOAL,
        "goal_met_from_step_seconds": round(save / (interval * GOAL), 4),
        "threads": torch.get_num_threads(),
        "machine": machine(),
    }


def main() -> None:
    torch.set_num_threads(THREADS)
    with TemporaryDirectory() as folder:
        result = measure(Path(folder))
    save_json(Path(__file__).parent / "results" / "save.json", result)
    print(
        f"a checkpoint of {in_units(result['bytes'])} takes {result['save_seconds']:.2f} s, a step "
        f"{result['step_seconds']:.2f} s: at one every {result['save_steps']} steps {result['share']:.2%} of step time "
        f"(goal: below {GOAL:.0%}, met where a step takes {result['goal_met_from_step_seconds']:.3f} s or more)"
    )
    if result["share"] >= GOAL:
        raise SystemExit("goal missed")


if __name__ == "__main__":
    main()
