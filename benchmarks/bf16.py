"""bfloat16 on this processor: `python -m benchmarks.bf16`, a part of `make bench`.

Training with DPO and SFT, sampling 128 completions at a time, and a GRPO step: each in bfloat16 is compared with our
float32 and with TRL in bfloat16, in separate processes, in turn. Models, rows and settings are those of
`benchmarks.run`, `.generate` and `.online`. Losses must equal those of float32 to 1e-2.

On a processor without instructions for bfloat16 (AVX512-BF16, AMX), bfloat16 gains nothing. There only the losses of
two steps are compared, and the table names the processor. Prints the table and writes results/bf16.json.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common import add_results, in_own_process, make_models, processors, put_table
from benchmarks.run import run_side
from posttrain.models.matmul import multiplies_bfloat16

RESULTS = Path(__file__).parent / "results"
TRAINING = ("dpo", "sft")
GOALS = {"dpo": (1.6, 5.0), "sft": (1.6, 5.0), "generate": (1.8, None), "grpo": (None, 6.0)}  # over float32; over TRL
LARGEST_LOSS_DIFFERENCE = 1e-2


def trained(name: str, models: Path, side: str, dtype: str, *more: str) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        return run_side(f"{side}_side", name, models, Path(folder), "--dtype", dtype, *more)


def generated(models: Path, dtype: str) -> dict[str, Any]:
    return in_own_process(
        "generate", "--side", "embedded", "--work", "bench", "--model", str(models / "policy"), "--dtype", dtype
    )


def stepped(models: Path, side: str) -> dict[str, Any]:
    with TemporaryDirectory() as cache:
        given = ["grpo", "--side", side, "--models", str(models), "--dtype", "bfloat16"]
        return in_own_process("online", *given, POSTTRAIN_CACHE=cache)


def in_turn(rounds: int, **sides: Callable[[], dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, run in sides.items():
            found[name].append(run())
            print(f"  {number + 1}/{rounds} {name}: {found[name][-1]['seconds']:.1f} s", flush=True)
    return found


def compare(name: str, models: Path, rounds: int) -> dict[str, Any]:
    print(name, flush=True)
    if name in TRAINING:
        found = in_turn(
            rounds,
            float32=lambda: trained(name, models, "posttrain", "float32"),
            bfloat16=lambda: trained(name, models, "posttrain", "bfloat16"),
            trl=lambda: trained(name, models, "trl", "bfloat16"),
        )
    elif name == "generate":
        found = in_turn(rounds, **{d: partial(generated, models, d) for d in ("float32", "bfloat16")})
    else:
        found = in_turn(rounds, bfloat16=lambda: stepped(models, "posttrain"), trl=lambda: stepped(models, "trl"))
    result: dict[str, Any] = {"sides": found}
    for side in ("float32", "trl"):
        if side in found:
            pairs = zip(found[side], found["bfloat16"], strict=True)
            result[f"{side}_ratio"] = statistics.median(one["seconds"] / ours["seconds"] for one, ours in pairs)
    if name in TRAINING:
        result["loss_difference"] = loss_difference(found)
    return result


def compare_losses(name: str, models: Path) -> dict[str, Any]:
    """Make two steps in each dtype, for a processor without instructions for bfloat16."""
    print(f"{name}: losses alone", flush=True)
    dtypes = ("float32", "bfloat16")
    found = {dtype: [trained(name, models, "posttrain", dtype, "--steps", "2")] for dtype in dtypes}
    return {"sides": found, "loss_difference": loss_difference(found)}


def loss_difference(found: dict[str, list[dict[str, Any]]]) -> float:
    pairs = zip(found["float32"], found["bfloat16"], strict=True)
    return max(abs(a - b) for one, two in pairs for a, b in zip(one["losses"], two["losses"], strict=True))


def table(results: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| work | our float32's time ÷ bfloat16's | goal | TRL's ÷ ours | goal | largest difference of a loss | goal |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, r in results.items():
        cells = []
        for key, goal in zip(("float32_ratio", "trl_ratio"), GOALS[name], strict=True):
            cells += [f"{r[key]:.2f}" if key in r else "", f"≥ {goal:g}" if goal and key in r else ""]
        loss = r.get("loss_difference")
        cells += ["", ""] if loss is None else [f"{loss:.1e}", f"≤ {LARGEST_LOSS_DIFFERENCE:g}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    slow = [r["machine"]["processor"] for r in results.values() if not r["has_bfloat16"]]
    note = f"\n\nWithout instructions for bfloat16, so tested for correctness alone: {slow[0]}." if slow else ""
    return "\n".join([*lines, "", processors(results)]) + note


def missed(results: dict[str, dict[str, Any]]) -> list[str]:
    found = []
    for name, r in results.items():
        for key, goal in zip(("float32_ratio", "trl_ratio"), GOALS[name], strict=True):
            if goal is not None and key in r and r[key] < goal:
                found.append(f"{name}: {key.replace('_', ' ')} {r[key]:.2f}, not {goal}")
        if r.get("loss_difference", 0.0) > LARGEST_LOSS_DIFFERENCE:
            found.append(f"{name}: a loss differs by {r['loss_difference']:.1e}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    has_bfloat16 = multiplies_bfloat16() is not False
    with TemporaryDirectory() as folder:
        models = Path(folder)
        make_models(models)
        if has_bfloat16:
            results = {name: compare(name, models, arguments.rounds) for name in GOALS}
        else:
            results = {name: compare_losses(name, models) for name in TRAINING}
    for result in results.values():
        result["has_bfloat16"] = has_bfloat16
    whole = add_results(RESULTS / "bf16.json", results)
    put_table(RESULTS.parent / "README.md", table(whole), "bf16")
    print(table(whole))
    if failures := missed(results):
        raise SystemExit("goals missed: " + "; ".join(failures))


if __name__ == "__main__":
    main()
