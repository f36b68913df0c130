"""Two ranks with one thread each against one process with two: `python -m benchmarks.ranks dpo grpo --rounds 3`.

Both have the same settings, rows and steps, and run in turn; the time is that of the steps, without loading and saving.
The model is that of the other benchmarks (31.7M parameters, float32); GRPO, PPO and distillation use 8 prompts x 4
completions of at most 64 tokens, and make one update per step. Prints the table and writes results/ranks.json. Leave
the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import (
    BATCH_SIZE,
    LEARNING_RATES,
    MAX_LENGTH,
    THREADS,
    add_results,
    make_models,
    preference_rows,
    processors,
    put_table,
    rows_of,
    write_rows,
)

RESULTS = Path(__file__).parent / "results"
METHODS = ("sft", "dpo", "dpo-lora", "kto", "orpo", "reward", "grpo", "ppo", "distill")
ONLINE = ("grpo", "ppo", "distill")
GOAL = 0.9  # time of one process over time of two ranks
STEPS = 10
REWARD = "def brief(completions, **columns):\n    return [-len(one) / 100 for one in completions]\n"


def settings(method: str, folder: Path, models: Path) -> list[str]:
    chosen = make_models(models)["reward" if method == "reward" else "policy"]
    common = [
        f"output_dir={folder}", f"model.path={chosen}", "data.template=none", "data.shuffle=false",
        f"training.max_steps={STEPS}", f"training.batch_size={BATCH_SIZE}", "training.tokens_per_pack=3072",
        "training.lr_scheduler_type=constant", "tracking.logging_steps=1", "checkpoint.save_steps=1000",
        "devices.type=cpu",
    ]  # fmt: skip
    if method in ONLINE:
        prompts = [{"prompt": row["prompt"]} for row in preference_rows()]
        (folder / "brevity.py").write_text(REWARD)
        reward = "rewards=[{type: python, function: 'brevity:brief'}]"
        own = {
            "grpo": [reward],
            "ppo": [reward, "method.num_ppo_epochs=1", "method.num_minibatches=1"],
            "distill": [f"method.teacher={chosen}"],
        }
        return [
            *common, f"method.type={method}", "method.num_generations=4", *own[method],
            f"data.source={write_rows(folder / 'prompts.jsonl', prompts)}", "data.max_length=1024",
            "rollout.max_completion_length=64", "training.learning_rate=1e-6",
        ]  # fmt: skip
    lora = ["model.lora.r=16", "model.lora.dropout=0"] if method == "dpo-lora" else []
    return [
        *common, *lora, f"method.type={method.removesuffix('-lora')}", f"data.max_length={MAX_LENGTH}",
        "data.overlong=truncate", f"training.learning_rate={LEARNING_RATES[method]}",
        f"data.source={write_rows(folder / 'rows.jsonl', rows_of(method))}",
    ]  # fmt: skip


def measure(method: str, ranks: int, models: Path) -> float:
    """Seconds that the steps take."""
    with TemporaryDirectory() as folder:
        given = [*settings(method, Path(folder), models), "name=run"]
        start = ["launch", "--nproc", str(ranks)] if ranks > 1 else ["train"]
        done = subprocess.run(
            [sys.executable, "-m", "posttrain", *start, *given], capture_output=True, text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(THREADS // ranks), "PYTHONPATH": f"{folder}:{Path.cwd()}"},
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{method} on {ranks} ranks failed:\n{done.stdout}\n{done.stderr}")
        return json.loads((Path(folder) / "run/results.json").read_text())["train_runtime"]


def table(found: dict[str, dict]) -> str:
    lines = ["| method | one process, 2 threads | two ranks | ratio (goal 0.9) |", "|---|---|---|---|"]
    for method, one in found.items():
        alone, both = (statistics.median(one[name]) for name in ("one", "two"))
        ratio = statistics.median(a / b for a, b in zip(one["one"], one["two"], strict=True))
        lines.append(f"| {method} | {alone:.1f} s | {both:.1f} s | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=METHODS, metavar="METHOD", help=", ".join(METHODS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", type=Path, default=Path("build/bench-models"))
    arguments = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {method: {"one": [], "two": []} for method in arguments.methods}
    for number in range(arguments.rounds):
        for method, one in found.items():
            one["one"].append(measure(method, 1, arguments.models))
            one["two"].append(measure(method, 2, arguments.models))
            print(f"round {number + 1}, {method}: {one['one'][-1]:.2f} s alone, {one['two'][-1]:.2f} s on two ranks")
    results = add_results(RESULTS / "ranks.json", {method: {**one, "goal": GOAL} for method, one in found.items()})
    shown = f"{table(results)}\n\n{processors(results)}"
    put_table(Path(__file__).with_name("README.md"), shown, "ranks")
    print(shown)


if __name__ == "__main__":
    main()
