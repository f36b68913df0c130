"""A small model beside a busy process: `python -m benchmarks.neighbour`. Prints a table, writes results/neighbour.json.

The quickstart's SFT, 150 steps, runs in a separate process: alone on the cores, and beside a process that is always
busy. It runs with posttrain's defaults, and with each way in which OpenMP threads can be set to wait.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import add_results, in_own_process, put_table
from posttrain import runner
from posttrain.config import load
from posttrain.quickstart import Size, settings_files
from posttrain.quickstart.model import make_model

STEPS = 150
GOAL_IDLE, GOAL_BUSY = 1.1, 2.5  # idle: times the fastest way's idle time; busy: times posttrain's own idle time
RESULTS = Path(__file__).parent / "results" / "neighbour.json"
# Name -> its environment variables. If OMP_WAIT_POLICY or GOMP_SPINCOUNT is set, posttrain does not change waiting.
OURS = "posttrain's default"
WAYS = {
    OURS: {},
    "always spinning (PyTorch's default)": {"GOMP_SPINCOUNT": "300000"},
    "never spinning": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def train(folder: Path) -> dict[str, float]:
    """Seconds of the steps, without loading and saving, and the last logged loss."""
    make_model(folder / "model", seed=0)
    settings = folder / "sft.yaml"
    settings.write_text(settings_files(folder, 0, Size())["sft"], encoding="utf-8")
    quiet = ["data.source=builtin:arithmetic", f"training.max_steps={STEPS}", "evaluation.eval_steps=-1"]
    runner.train(load(settings, [*quiet, "checkpoint.save_steps=100000"]).config)
    results = json.loads((folder / "sft" / "results.json").read_text())
    return {"seconds": results["train_runtime"], "loss": results["final"]["loss"]}


@contextmanager
def neighbour(busy: bool) -> Iterator[None]:
    """If `busy`, run a process that uses one core during the block."""
    if not busy:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(rounds: int) -> dict[str, dict]:
    """For each way, the seconds without and with the neighbour, alternating in every round, and the last losses."""
    found: dict[str, dict] = {way: {"idle": [], "busy": [], "losses": []} for way in WAYS}
    for number in range(rounds):
        for kind in ("idle", "busy"):
            for way, environment in WAYS.items():
                with neighbour(busy=kind == "busy"):
                    run = in_own_process("neighbour", "--once", **environment)
                found[way][kind].append(round(run["seconds"], 2))
                found[way]["losses"].append(run["loss"])
                print(f"round {number + 1}, {kind}, {way}: {run['seconds']:.1f} s", flush=True)
    return found


def table_of(found: dict[str, dict]) -> str:
    """The table of medians, one line per way."""
    lines = ["| threads wait | s alone | s beside a busy process |", "|---|---|---|"]
    for way, runs in found.items():
        idle, busy = (
            f"{statistics.median(runs[kind]):.1f} ({min(runs[kind]):.1f} to {max(runs[kind]):.1f})"
            for kind in ("idle", "busy")
        )
        lines.append(f"| {way} | {idle} | {busy} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--once", action="store_true", help="one run in this process; print its numbers")
    arguments = parser.parse_args()
    if arguments.once:
        with TemporaryDirectory() as folder:
            print(json.dumps(train(Path(folder))))
        return
    found = measure(arguments.rounds)
    print(table_of(found))
    add_results(RESULTS, found)
    put_table(Path(__file__).parent / "README.md", table_of(found), "neighbour")
    ours = found[OURS]
    idle, busy = statistics.median(ours["idle"]), statistics.median(ours["busy"])
    best = min(statistics.median(runs["idle"]) for runs in found.values())
    losses = {loss for way, runs in found.items() if way != "one thread" for loss in runs["losses"]}
    print(
        f"alone {idle / best:.2f} times the best way's time (goal {GOAL_IDLE}), "
        f"busy {busy / idle:.2f} times idle (goal {GOAL_BUSY})"
    )
    if idle > GOAL_IDLE * best or busy > GOAL_BUSY * idle:
        raise SystemExit("goal missed")
    if len(losses) > 1:
        raise SystemExit(f"the way threads wait changed the loss: {sorted(losses)}")


if __name__ == "__main__":
    main()
