"""The time of a short run outside its steps: `python -m benchmarks.beside`. Writes results/beside.json and its table.

A `posttrain train` process makes ten SFT steps with a model of 44 million parameters. Its wall time minus the time of
the steps is the time for imports, data, model, the first step's check, the checkpoint, the final model, the plot and
the report. The result is the median of three runs, after one run that fills the data cache.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import SHARED, THREADS, machine, put_table
from benchmarks.models import write_model
from posttrain.runs.files import load_json, save_json

RESULTS = Path(__file__).parent / "results"
GOAL = 6.0  # seconds
IMPORTS = "from posttrain.base.imports import quick_imports\nwith quick_imports(): import posttrain.runner"
PICTURE = """
import sys, time
from pathlib import Path
began = time.perf_counter()
from posttrain.reports.curves import write_curves
write_curves(Path(sys.argv[1]).parent, Path(sys.argv[1]).with_name("again.png"), "again")
print(time.perf_counter() - began)
"""


def make_model(folder: Path) -> None:
    write_model(
        folder, SHARED / "tokenizers/minimind6400", hidden_size=512, num_hidden_layers=13, intermediate_size=1536,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip


def timed(*command: str) -> tuple[float, str]:
    """The wall time of a Python process, including its start and end, and what it prints."""
    environment = os.environ | {"OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return seconds, done.stdout


def measure(folder: Path, number: int) -> dict[str, float]:
    """The seconds that one run spends on each part."""
    settings = {
        "name": f"run-{number}",
        "output_dir": str(folder),
        "model": str(folder / "model"),
        "method": "sft",
        "data": {"source": str(SHARED / "data/sft-demo/alpaca_en_demo.json"), "max_rows": 200, "max_length": 512},
        "training": {"batch_size": 8, "max_steps": 10},
        "devices": {"type": "cpu"},
    }
    file, run = folder / "settings.json", folder / f"run-{number}"
    file.write_text(json.dumps(settings))
    wall, _ = timed("-m", "posttrain", "train", str(file))
    results = load_json(run / "results.json")
    imports, _ = timed("-c", IMPORTS)
    picture = float(timed("-c", PICTURE, str(run / "metrics.jsonl"))[1])
    beside = wall - results["train_runtime"]
    parts = {
        "imports of torch and transformers": imports,
        "the checkpoint": results["save_seconds"],
        "curves.png": picture,
    }
    return {"beside": beside, **parts, "data, model, check, final model, report": beside - sum(parts.values())}


def main() -> None:
    with TemporaryDirectory() as folder:
        make_model(Path(folder) / "model")
        rounds = [measure(Path(folder), number) for number in range(4)][1:]
    median = {name: round(statistics.median(one[name] for one in rounds), 2) for name in rounds[0]}
    save_json(RESULTS / "beside.json", {"goal": GOAL, "median": median, "rounds": rounds, "machine": machine()})
    lines = ["| | seconds |", "|---|---|"]
    lines += [f"| {name} | {seconds:.1f} |" for name, seconds in median.items() if name != "beside"]
    table = "\n".join([*lines, f"| all beside the steps (goal: below {GOAL:g}) | {median['beside']:.1f} |"])
    put_table(RESULTS.parent / "README.md", table, "beside")
    print(table)
    if median["beside"] >= GOAL:
        raise SystemExit("goal missed")


if __name__ == "__main__":
    main()
