"""posttrain and TRL 1.16 on the same work: `make bench`, or `python -m benchmarks.run dpo reward sft --rounds 3`.

Both sides train the same random model on the same rows in the same order, in separate processes, in turn. Times are
those of the training loop; memory is the peak of the whole process. Prints the table and writes results/cpu.json. Leave
the machine alone meanwhile: two threads that share their cores with other work wait for each other.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoConfig, PreTrainedConfig

from benchmarks.common import THREADS, add_results, in_own_process, make_models, processors, put_table
from posttrain.models.matmul import product

RESULTS = Path(__file__).parent / "results"
STEPS = {"dpo": 12, "dpo-lora": 12, "kto": 12, "orpo": 12, "reward": 12, "sft": 12}
# Method, and how many of a batch's 8 rows TRL takes per forward pass (8 is its default). Row by row, TRL uses the least
# memory, and in SFT, where rows share nothing, is also fastest: this is measured too, without a goal.
COMPARISONS = {name: (name, 8) for name in STEPS} | {"sft, row by row": ("sft", 1)}
GOALS = {  # minimum of TRL's time over ours, maximum of our memory over TRL's
    "dpo": (4.5, 0.4),
    "dpo-lora": (3.5, 0.5),
    "kto": (3.0, 0.5),
    "orpo": (3.0, 0.5),
    "reward": (3.0, 0.5),
    "sft": (1.5, 0.6),
}
LARGEST_LOSS_DIFFERENCE = 1e-3


def matmul_rate() -> float:
    """Float32 GFLOP/s of products with the shapes of the model (2,048 tokens through its MLP), the best of several."""
    torch.set_num_threads(THREADS)
    x, weight = torch.randn(2048, 512), torch.randn(1536, 512)
    best = float("inf")
    for _ in range(30):
        began = time.perf_counter()
        product(x, weight)
        best = min(best, time.perf_counter() - began)
    return 2 * x.numel() * len(weight) / best / 1e9


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers from which useful work is counted: the weights of all layers, of one MLP and of the head; and
    attention's multiplications and additions, in all layers, for one query with one key and its value."""

    layers: int
    mlp: int
    head: int
    attention: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> Sizes:
        """The sizes of a model with layers like those of Qwen and LLaMA."""
        heads, hidden, depth = config.num_attention_heads, config.hidden_size, config.num_hidden_layers
        size = getattr(config, "head_dim", None) or hidden // heads
        mlp = 3 * hidden * config.intermediate_size
        layer = mlp + 2 * hidden * size * (heads + config.num_key_value_heads)
        return cls(depth * layer, mlp, config.vocab_size * hidden, depth * 4 * heads * size)


def useful_flops(work: list[dict], frozen: bool, sizes: Sizes) -> float:
    """2 x weights used x tokens for forward, twice that for backward, or once if weights are frozen; plus attention.

    Recomputation is not counted, nor is needless work: the head and the last MLP for tokens whose output is not read.
    """
    total = 0.0
    for pack in work:
        used = sizes.layers * pack["tokens"] - sizes.mlp * (pack["tokens"] - pack["read"])
        used += sizes.head * pack["scored"]
        passes = (2 if frozen else 3) if pack["backward"] else 1
        total += passes * (2 * used + sizes.attention * pack["visible"])
    return total


def run_side(module: str, method: str, models: Path, folder: Path, *arguments: str) -> dict:
    """Run one side in a separate process, and return its measurements."""
    given = [method, "--models", str(models), "--steps", str(STEPS[method]), *arguments]
    return in_own_process(module, *given, POSTTRAIN_CACHE=str(folder / "cache"))


def compare(name: str, models: Path, rounds: int) -> dict:
    """Run both sides in turn, `rounds` times: medians, ratios per round, the largest difference of a step's loss."""
    method, micro_batch = COMPARISONS[name]
    ours, theirs, rate = [], [], matmul_rate()
    print(f"{name}: float32 matmul rate on {THREADS} threads {rate:.0f} GFLOP/s", flush=True)
    for number in range(rounds):
        sides = (("posttrain_side", ours, []), ("trl_side", theirs, ["--micro-batch", str(micro_batch)]))
        for module, results, arguments in sides:
            with TemporaryDirectory() as folder:
                results.append(run_side(module, method, models, Path(folder), *arguments))
            last = results[-1]
            print(f"  {name} {number + 1}/{rounds}: {last['side']} {last['seconds']:.1f} s", flush=True)
    difference = max(
        abs(a - b)
        for one, two in zip(ours, theirs, strict=True)
        for a, b in zip(one["losses"], two["losses"], strict=True)
    )
    times = [two["seconds"] / one["seconds"] for one, two in zip(ours, theirs, strict=True)]
    memories = [one["memory_peak_gb"] / two["memory_peak_gb"] for one, two in zip(ours, theirs, strict=True)]
    seconds = statistics.median(one["seconds"] for one in ours)
    sizes = Sizes.of(AutoConfig.from_pretrained(make_models(models)["policy"]))
    return {
        "time_ratio": statistics.median(times),
        "time_ratios": times,
        "memory_ratio": statistics.median(memories),
        "seconds": seconds,
        "trl_seconds": statistics.median(two["seconds"] for two in theirs),
        "memory_gb": statistics.median(one["memory_peak_gb"] for one in ours),
        "trl_memory_gb": statistics.median(two["memory_peak_gb"] for two in theirs),
        "largest_loss_difference": difference,
        "gflops_per_second": useful_flops(ours[0]["work"], method == "dpo-lora", sizes) / seconds / 1e9,
        "matmul_gflops_per_second": rate,
        "posttrain": ours,
        "trl": theirs,
    }


def table(results: dict[str, dict]) -> str:
    """The comparison as Markdown."""
    lines = [
        "| method | TRL time ÷ ours | goal | our peak memory ÷ TRL's | goal | s, ours / TRL | GB, ours / TRL "
        "| largest loss difference | share of matmul rate |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for method, r in results.items():
        faster, leaner = (f"≥ {GOALS[method][0]}", f"≤ {GOALS[method][1]}") if method in GOALS else ("", "")
        spread = f"{min(r['time_ratios']):.2f} to {max(r['time_ratios']):.2f}"
        lines.append(
            f"| {method} | {r['time_ratio']:.2f} ({spread}) | {faster} "
            f"| {r['memory_ratio']:.2f} | {leaner} | {r['seconds']:.1f} / {r['trl_seconds']:.1f} "
            f"| {r['memory_gb']:.2f} / {r['trl_memory_gb']:.2f} | {r['largest_loss_difference']:.1e} "
            f"| {r['gflops_per_second'] / r['matmul_gflops_per_second']:.0%} |"
        )
    return "\n".join([*lines, "", processors(results)])


def missed(results: dict[str, dict]) -> list[str]:
    """The goals that were not reached."""
    found = []
    for method, r in results.items():
        faster, leaner = GOALS.get(method, (0.0, float("inf")))
        if r["time_ratio"] < faster:
            found.append(f"{method}: {r['time_ratio']:.2f} times as fast, goal {faster}")
        if r["memory_ratio"] > leaner:
            found.append(f"{method}: {r['memory_ratio']:.2f} of the memory, goal {leaner}")
        if r["largest_loss_difference"] > LARGEST_LOSS_DIFFERENCE:
            found.append(f"{method}: a loss differs by {r['largest_loss_difference']:.1e}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=list(COMPARISONS), metavar="METHOD", help=", ".join(COMPARISONS))
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    results = {}
    with TemporaryDirectory() as folder:
        models = Path(folder)
        make_models(models)
        for name in arguments.methods:
            results[name] = compare(name, models, arguments.rounds)
            whole = add_results(RESULTS / "cpu.json", {name: results[name]})
            put_table(RESULTS.parent / "README.md", table(whole))
    print(table({name: whole[name] for name in results}))
    failures = missed(results)
    if failures:
        raise SystemExit("goals missed: " + "; ".join(failures))


if __name__ == "__main__":
    main()
