"""How fast the pages of `posttrain ui` answer: `python -m benchmarks.ui`, or `make bench-ui`.

    500 runs             of 200 logged steps with checkpoints, made by this script
    100,000 rollouts     of 256 tokens (800 steps of 125 completions), in one of the runs

Each page is requested over HTTP as by a browser: the page, then its content; first with empty caches, then again. Also
measured: the time of the rollout index, in a separate thread, and the memory of the process at the end. Prints the
table and writes results/ui.json.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from benchmarks.common import add_results, processors, put_table
from posttrain.runs.rollouts import GIB, RolloutStore, StoredPrompt, StoredRollout
from tests.pages import fetch, served, shown

RESULTS, PAGE = Path(__file__).parent / "results/ui.json", Path(__file__).parent / "README.md"
SAVED = Path(__file__).parent.parent / "tests/saved_run/run"
RUNS, LINES = 500, 200
STEPS, PROMPTS, GROUP, TOKENS = 800, 25, 5, 256
GOAL_S, GOAL_MB, ROUNDS = 1.0, 600, 5
WORDS = [
    "the",
    "a",
    "of",
    "sum",
    "answer",
    "is",
    "so",
    "we",
    "get",
    "then",
    "add",
    "subtract",
    "four",
    "seven",
    "nine",
    "total",
    "first",
    "next",
    "therefore",
    "number",
]

PAGES = {
    "Runs": "/",
    "Runs, found and sorted": "/?find=run-1&sort=result",
    "6 runs overlaid": "/?" + "&".join(f"chosen=run-{number:03}" for number in range(6)) + "&smooth=0.9",
    "Run": "/run?run=run-000",
    "Rollouts": "/rollouts?run=run-000",
    "Rollouts, a word that all have": "/rollouts?run=run-000&find=answer&sort=largest+push",
    "Rollouts, a phrase": "/rollouts?run=run-000&find=%22needle+in+the+hay%22",
    "Rollouts, by a reward's part and length": "/rollouts?run=run-000&part=exact&least=0.5&longest=256&verdict=correct",
    "a step": "/rollouts?run=run-000&step=400",
    "a group": "/rollouts?run=run-000&step=400&prompt=3",
    "a completion's tokens": "/rollouts?run=run-000&step=400&prompt=3&rollout=2",
    "Evaluations": "/evaluations",
}


def make(folder: Path) -> None:
    """Make the folder of runs, unless it exists."""
    if (folder / "made").exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    facts, settings = json.loads((SAVED / "run.json").read_text()), (SAVED / "config.yaml").read_text()
    head = json.loads((SAVED / "metrics.jsonl").read_text().splitlines()[0])
    random = np.random.default_rng(0)
    for number in range(RUNS):
        run = folder / f"runs/run-{number:03}"
        shutil.copytree(SAVED / "checkpoint-2", run / "checkpoint-2")
        shutil.copytree(SAVED / "checkpoint-2", run / "final")
        started = {"started": f"2026-01-{1 + number % 28:02}T00:00:{number % 60:02}+00:00"}
        (run / "run.json").write_text(json.dumps(facts | started))
        (run / "config.yaml").write_text(settings.replace("beta: 0.05", f"beta: {random.random():.3f}"))
        rows = [
            head | {"step": 4 * step + 4, "reward": float(random.random()), "time": 1.7e9 + step}
            for step in range(LINES)
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run / "training.log").write_text("2026-01-01 00:00:00,000 INFO step 10/800  loss 1.0  ETA 1m 00s\n" * 80)
    fill(folder / "runs/run-000", random)
    (folder / "made").touch()


def fill(run: Path, random: np.random.Generator) -> None:
    """Add 100,000 rollouts to a run."""
    store, words = RolloutStore(run, 20 * GIB, 0), np.array(WORDS)
    for step in range(1, STEPS + 1):
        prompts = [
            StoredPrompt(int(row), f"Question {row}: how much is it?", [1, 2, 3], {})
            for row in random.integers(0, 999, PROMPTS)
        ]
        made = []
        for prompt in range(PROMPTS):
            for index in range(GROUP):
                reward = float(random.random() < 0.4)
                text = " ".join(random.choice(words, TOKENS // 2)) + (
                    " needle in the hay" if step % 100 == 0 and not prompt else ""
                )
                numbers = -random.exponential(1.0, TOKENS)
                arrays = {
                    "tokens": random.integers(3, 500, TOKENS), "sampler_logprobs": numbers,
                    "old_logprobs": numbers + 0.001,
                    "new_logprobs": numbers + random.normal(0, 0.05, TOKENS), "ref_logprobs": numbers,
                    "advantages": np.full(TOKENS, reward - 0.4), "clipped": random.random(TOKENS) < 0.01,
                }  # fmt: skip
                parts = {"exact": {"weight": 1.0, "value": reward, "verdict": "correct" if reward else "wrong"}}
                made.append(StoredRollout(prompt, index, text, reward, reward - 0.4, "stop", step, parts, arrays))
        store.add(step, step / 100, prompts, made)
    store.flush()
    store.close()


def asked(address: str, path: str) -> float:
    """Seconds until a page and its content have arrived."""
    begin = time.perf_counter()
    made = shown(address, path)
    seconds = time.perf_counter() - begin
    assert "cannot be shown" not in made and 'class="message error"' not in made, (path, made[:400])
    return seconds


def indexed(address: str) -> float:
    """Seconds until the search covers all rollouts."""
    begin = time.perf_counter()
    while "being built" in shown(address, "/rollouts?run=run-000"):
        time.sleep(1)
    return time.perf_counter() - begin


def memory(process: int) -> float:
    return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{process}/status").read_text())[0]) / 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path("build/bench-ui"), help="where the runs are made, once: 1 GB"
    )
    folder = parser.parse_args().folder
    make(folder)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    os.environ["POSTTRAIN_CACHE"] = str((folder / "cache").absolute())
    found: dict[str, list[float]] = {}
    with served("ui", folder / "runs", "--no-browser") as (address, process):
        fetch(address)
        for name, path in PAGES.items():
            found[name] = [asked(address, path)]
            print(f"{name}: {found[name][0]:.3f} s the first time", flush=True)
        index = indexed(address)
        for name, path in PAGES.items():
            found[name] += [asked(address, path) for _ in range(ROUNDS)]
        used = memory(process)
    facts = {"pages": {name: {"goal": GOAL_S, "rounds": seconds} for name, seconds in found.items()}}
    results = add_results(
        RESULTS,
        {**facts["pages"], "index_seconds": {"rounds": [index]}, "megabytes": {"goal": GOAL_MB, "rounds": [used]}},
    )
    lines = ["| page | first time | then (median) |", "|---|---|---|"]
    lines += [f"| {name} | {first:.2f} s | {statistics.median(rest):.2f} s |" for name, (first, *rest) in found.items()]
    lines += ["", f"Index of the rollouts, in its own thread: {index:.0f} s. Memory at the end: {used:.0f} MB."]
    table = "\n".join(lines)
    put_table(PAGE, f"{table}\n\n{processors(results)}", "ui")
    print(table)
    met = max(max(seconds) for seconds in found.values()) < GOAL_S and used < GOAL_MB
    print("every goal is met" if met else "a goal is missed")
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
