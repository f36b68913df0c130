"""How long `posttrain runs list` takes over 500 runs: `python -m benchmarks.runs_list`.

Makes 500 run folders with the files of real ones (settings, 200 lines of metrics, a log, two checkpoints, best, final)
and times the command in separate processes, including the start of Python, with the folders in the system's cache.

Prints the table and writes results/runs_list.json. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import add_results, processors, put_table
from posttrain.config import RunConfig, dump
from posttrain.runs.run import Run

RESULTS, PAGE = Path(__file__).parent / "results/runs_list.json", Path(__file__).parent / "README.md"
RUNS, LINES, GOAL = 500, 200, 0.5
FILES = ("adapter_model.safetensors", "adapter_config.json", "tokenizer.json", "tokenizer_config.json")
STATE = ("optimizer.safetensors", "rng.safetensors", "state.json", "config.yaml")
METHODS = ("sft", "dpo", "grpo", "reward")
METRICS = {
    "sft": {"loss": 1.5, "eval_loss": 1.4},
    "dpo": {"loss": 0.6, "rewards/accuracies": 0.7, "rewards/margins": 0.3, "eval_rewards/accuracies": 0.65},
    "grpo": {"loss": 0.1, "reward": 0.4, "reward_std": 0.2, "kl": 0.01, "entropy": 0.5, "eval_reward": 0.5},
    "reward": {"loss": 0.5, "accuracy": 0.7, "margin": 0.4, "eval_accuracy": 0.69},
}
OTHERS = {f"diagnostic/{number}": 0.123456789 + number for number in range(25)}


def make_runs(root: Path, count: int = RUNS) -> None:
    """Make run folders with everything that could slow the list down, except large weights."""
    os.fsync = lambda descriptor: None  # pyright: ignore[reportAttributeAccessIssue] (made, measured and deleted)
    for number in range(count):
        method = METHODS[number % len(METHODS)]
        settings = {
            "models": [{"path": f"models/Qwen3-0.6B-variant-{number % 7}"}],
            "method": {"type": method},
            "data": {"source": f"data/rows-{number % 5}.jsonl", "validation": {"rows": 20}},
            "name": f"{method}-lr-{number:03}",
        }
        if method == "grpo":
            settings |= {"rewards": [{"type": "check_answer"}]}
        folder = root / f"{method}-lr-{number:03}"
        with Run.create(folder, dump(RunConfig.model_validate(settings)), {"seed": number}) as run:
            lines = [
                json.dumps({"step": s, "epoch": s / 100, "time": 1.7e9 + s} | METRICS[method] | OTHERS)
                for s in range(1, LINES + 1)
            ]
            (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
            for name in ("results.json", "curves.png", "report.html"):
                (folder / name).write_bytes(b"x" * 20_000)
            for step in (100, 200):
                run.save_checkpoint(step, lambda at: _fill(at, (*FILES, *STATE)), limit=None)
            run.save_model(run.best, 100, lambda at: _fill(at, FILES))
            run.save_model(run.final, 200, lambda at: _fill(at, FILES))


def _fill(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (folder / name).write_bytes(b"x" * 1000)


def measure(root: Path, repeats: int) -> dict[str, float]:
    """Wall and CPU seconds of the command: medians, and the lowest wall time."""
    command = [sys.executable, "-m", "posttrain", "runs", "list", "--output-dir", str(root)]
    wall, cpu = [], []
    for _ in range(repeats + 1):
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        wall.append(time.perf_counter() - started)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert f"{RUNS} runs" in done.stdout, done.stdout[-300:]
    wall, cpu = wall[1:], cpu[1:]  # the first run fills the system's cache
    return {"wall": statistics.median(wall), "least": min(wall), "cpu": statistics.median(cpu)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="Make the runs here and keep them.")
    options = parser.parse_args()
    with TemporaryDirectory() as temporary:
        root = options.folder or Path(temporary)
        if not any(root.glob("*/run.json")):
            make_runs(root)
        found = measure(root, options.repeats)
    results = add_results(RESULTS, {"list": found})
    one = results["list"]
    table = "\n".join(
        (
            "| `posttrain runs list`, 500 folders | wall s, median (least) | goal | CPU s |",
            "|---|---|---|---|",
            f"| start of Python included | {one['wall']:.2f} ({one['least']:.2f}) | < {GOAL} | {one['cpu']:.2f} |",
            "",
            processors(results),
        )
    )
    put_table(PAGE, table, "runs list")
    print(table)


if __name__ == "__main__":
    main()
