"""A whole step of GRPO, PPO and distillation compared with TRL at natural lengths: `python -m benchmarks.online grpo`.

Prompts are the first of HH harmless. Each completion ends at the length, in the model's own tokens, of a recorded model
solution (at most 256), as if its stop token had been sampled there, so both sides have completions of the same lengths.
TRL generates with transformers, which is forced to sample the stop token there; the embedded engine receives the
lengths as limits. The sides run in separate processes, in turn. The time is from the start of the first completion to
the end of the last update; the memory is the peak of the process.

For our side, the time of the rollout store is also measured: gathering a step's numbers, and writing them, which a
thread does during training.

GRPO: 8 prompts x 8 completions per step, TRL 1.16 with its defaults, float32, no gradient checkpointing.
PPO: 16 prompts x 1 completion per step, 4 epochs, with a reward model. TRL 1.12, the last version with PPO, comes from
a separate folder (`make bench` fills it). Its value function is a second model, ours is a head on the policy.
Distillation: 8 prompts x 4 completions per step, reverse KL to a second model of the same size; GKD of TRL 1.16,
which receives each prompt four times.

Prints the table and writes results/online.json. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from benchmarks.common import (
    THREADS,
    add_results,
    in_own_process,
    make_models,
    peak_memory_gb,
    processors,
    put_table,
    write_rows,
)
from benchmarks.online_work import LIMIT, MAX_LENGTH, STEPS, WORK, draw_lengths, prompts_of

RESULTS = Path(__file__).parent / "results"
GOALS = {
    "grpo": (4.0, 0.4),
    "ppo": (3.0, float("inf")),
    "distill": (3.0, float("inf")),
}  # TRL's time over ours; our memory over TRL's
STORING = 0.02  # maximum share of a step's time


# --- posttrain --------------------------------------------------------------------------------------------------------


def run_posttrain(
    method: str, models: dict[str, Path], lengths: list[list[list[int]]], folder: Path, dtype: str = "float32"
) -> dict:
    from posttrain import runner
    from posttrain.config import load
    from posttrain.engines import EmbeddedEngine
    from posttrain.recipes.online import Step
    from posttrain.runs import rollouts

    times: list[float] = []
    storing = [timed(Step, "stored"), timed(rollouts.RolloutStore, "add"), timed(rollouts, "_insert")]
    generate, coming = EmbeddedEngine.generate, iter(lengths)

    def at_lengths(self, prompts, sampling, *, seeds=None, limits=None):
        began = time.perf_counter()
        sampled = generate(self, prompts, _without_stops(sampling), seeds=seeds, limits=next(coming))
        times.append(time.perf_counter() - began)
        return sampled

    EmbeddedEngine.generate = at_lengths
    prompts, n = WORK[method]
    reward = {"type": "python", "function": "benchmarks.online_work:characters"}
    settings = {
        "name": "bench",
        "output_dir": str(folder),
        "model": {"path": str(models["policy"]), "dtype": dtype},
        "method": {
            "grpo": {"type": "grpo", "num_generations": n, "beta": 0.0},
            "ppo": {"type": "ppo", "num_generations": n, "num_ppo_epochs": 4, "num_minibatches": 1, "kl_coef": 0.05},
            "distill": {"type": "distill", "num_generations": n, "teacher": str(models.get("teacher"))},
        }[method],
        "rewards": {"grpo": [reward], "ppo": [{"type": "model", "path": str(models.get("reward"))}], "distill": []}[
            method
        ],
        "data": {
            "source": str(write_rows(folder / "rows.jsonl", [{"prompt": text} for text in prompts_of(method)])),
            "template": "chat" if method == "distill" else "none",  # GKD only takes conversations
            "shuffle": False,
            "max_length": MAX_LENGTH,
            "max_prompt_length": None,  # TRL drops no prompt
        },
        "rollout": {"max_completion_length": LIMIT},
        "training": {
            "batch_size": prompts,
            "tokens_per_pack": 1280,
            "max_steps": STEPS[method],
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
        },
        "tracking": {"logging_steps": 1},
        "devices": {"type": "cpu"},
    }
    file = folder / "bench.json"
    file.write_text(json.dumps(settings))
    runner.train(load(file).config)
    results = json.loads((folder / "bench/results.json").read_text())
    lines = [json.loads(line) for line in (folder / "bench/metrics.jsonl").read_text().splitlines()]
    mean = statistics.fmean(line["completions/mean_length"] for line in lines)
    return {
        "seconds": results["train_runtime"],
        "sampling_seconds": sum(times),
        "storing_seconds": sum(map(sum, storing)),
        "mean_length": mean,
    }


def timed(owner: Any, name: str) -> list[float]:
    """A list to which every later call of a class's method or a module's function adds its seconds."""
    method, seconds = getattr(owner, name), []

    def measured(*arguments, **named):
        began = time.perf_counter()
        try:
            return method(*arguments, **named)
        finally:
            seconds.append(time.perf_counter() - began)

    setattr(owner, name, measured)
    return seconds


def _without_stops(sampling):
    from dataclasses import replace

    return replace(sampling, stop_token_ids=())


# --- the comparison ---------------------------------------------------------------------------------------------------


def models_in(folder: Path) -> dict[str, Path]:
    """Policy, reward model, and a teacher with different weights; created if missing."""
    return make_models(folder) | {"teacher": make_models(folder / "other", seed=1)["policy"]}


def one_side(side: str, method: str, models: Path, dtype: str) -> dict:
    torch.set_num_threads(THREADS)
    made = models_in(models)
    lengths = draw_lengths(method, made["policy"])
    with TemporaryDirectory() as folder:
        if side == "posttrain":
            found = run_posttrain(method, made, lengths, Path(folder), dtype)
        else:
            from benchmarks.online_trl import RUN

            found = RUN[method](made, lengths, Path(folder), dtype)
    sampled = [length for step in lengths for group in step for length in group]
    if abs(found["mean_length"] - statistics.fmean(sampled)) > 1e-3:
        raise SystemExit(f"{side} sampled {found['mean_length']} tokens a completion, not {statistics.fmean(sampled)}")
    return found | {"peak_gb": peak_memory_gb(), "steps": STEPS[method]}


def measure(side: str, method: str, models: Path, cache: Path) -> dict:
    """Measure one side in a separate process."""
    return in_own_process("online", method, "--side", side, "--models", str(models), POSTTRAIN_CACHE=str(cache))


def compare(method: str, models: Path, rounds: int) -> dict:
    """Measure both sides in turn, `rounds` times: medians, and the ratio of each round."""
    found: dict[str, list[dict]] = {"posttrain": [], "trl": []}
    for number in range(rounds):
        for side, results in found.items():
            with TemporaryDirectory() as cache:
                results.append(measure(side, method, models, Path(cache)))
            print(f"  {method} {number + 1}/{rounds}: {side} {results[-1]['seconds']:.1f} s", flush=True)
    pairs = list(zip(found["posttrain"], found["trl"], strict=True))
    times = [theirs["seconds"] / ours["seconds"] for ours, theirs in pairs]
    memories = [ours["peak_gb"] / theirs["peak_gb"] for ours, theirs in pairs]
    return {
        "time_ratio": statistics.median(times),
        "time_ratios": times,
        "memory_ratio": statistics.median(memories),
        **found,
    }


def storing_share(result: dict) -> float:
    return statistics.median(one["storing_seconds"] / one["seconds"] for one in result["posttrain"])


def table(results: dict[str, dict]) -> str:
    """The comparison as Markdown."""
    lines = [
        "| step | TRL time ÷ ours | goal | our peak memory ÷ TRL's | goal | s a step, ours / TRL "
        "| of it sampling | of ours storing | GB, ours / TRL |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for method, r in results.items():
        faster, leaner = GOALS[method]
        ours, theirs = (
            {key: statistics.median(one[key] for one in r[side]) for key in ("seconds", "sampling_seconds", "peak_gb")}
            for side in ("posttrain", "trl")
        )
        steps, spread = STEPS[method], f"{min(r['time_ratios']):.2f} to {max(r['time_ratios']):.2f}"
        goal = f"≤ {leaner}" if leaner < 1 else ""
        sampling = " / ".join(f"{one['sampling_seconds'] / one['seconds']:.0%}" for one in (ours, theirs))
        lines.append(
            f"| {method}, {WORK[method][0]} × {WORK[method][1]} | {r['time_ratio']:.2f} ({spread}) | ≥ {faster:.0f} "
            f"| {r['memory_ratio']:.2f} | {goal} | {ours['seconds'] / steps:.1f} / {theirs['seconds'] / steps:.1f} "
            f"| {sampling} "
            f"| {storing_share(r):.2%} | {ours['peak_gb']:.2f} / {theirs['peak_gb']:.2f} |"
        )
    return "\n".join([*lines, "", processors(results)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=list(WORK), metavar="METHOD", help=", ".join(WORK))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=["posttrain", "trl"], help="one side in this process")
    parser.add_argument("--models", type=Path, help="with --side: folder of the random models")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="with --side; not for ppo")
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(one_side(arguments.side, arguments.methods[0], arguments.models, arguments.dtype)))
        return
    results = {}
    with TemporaryDirectory() as folder:
        models_in(Path(folder))
        for method in arguments.methods:
            results[method] = compare(method, Path(folder), arguments.rounds)
    whole = add_results(RESULTS / "online.json", results)
    put_table(RESULTS.parent / "README.md", table(whole), "online")
    print(table({name: whole[name] for name in results}))
    failures = []
    for method, r in results.items():
        faster, leaner = GOALS[method]
        if r["time_ratio"] < faster or r["memory_ratio"] > leaner:
            failures.append(f"{method}: {r['time_ratio']:.2f} times as fast in {r['memory_ratio']:.2f} of the memory")
        if storing_share(r) >= STORING:
            failures.append(f"{method}: storing takes {storing_share(r):.1%} of the time")
    if failures:
        raise SystemExit("goals missed: " + "; ".join(failures))


if __name__ == "__main__":
    main()
