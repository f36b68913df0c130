"""The plots of docs/guide.md: a healthy GRPO run and three unhealthy ones, on sums, and a run with the tagged rewards.

    python -m benchmarks.guide               # all; takes minutes
    python -m benchmarks.guide tagged        # only this run

`tagged` also writes results/guide.json and its table in the guide. Its model, the one of the quickstart, is trained by
SFT on worked solutions, of which 3 % have the format's tags; then GRPO trains it on the format's four rewards.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.common import put_table
from benchmarks.learn_online import CASES, QUIET, sums_task, train, write
from posttrain.config import TagsConfig
from posttrain.data import arithmetic_problems
from posttrain.quickstart.model import make_model
from posttrain.runs.files import save_json
from posttrain.runs.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
IMAGES, PAGE, RESULTS = ROOT / "docs/images", ROOT / "docs/guide.md", ROOT / "benchmarks/results/guide.json"
BASE = dict(CASES["grpo"].training) | {"warmup_steps": 0}
METHOD = dict(CASES["grpo"].method) | {"beta": 0.001}  # so that the plots show the KL


def equal(completions: list[str], **_columns: Any) -> list[float]:
    """A broken reward: 0 for every completion."""
    return [0.0] * len(completions)


SUMS: dict[str, dict[str, Any]] = {
    "healthy": {},
    "flat": {"rewards": [{"type": "python", "function": "benchmarks.guide:equal", "name": "reward"}]},
    "collapsed": {"training": BASE | {"learning_rate": 5 * BASE["learning_rate"]}},
    "truncated": {"rollout": {"max_completion_length": 1}},
}

# --- the tagged rewards -----------------------------------------------------------------------------------------------

TAGS = TagsConfig()
TAGGED_SHARE = 0.03  # share of demonstrations with tags; base models whose prompt names the tags use them as rarely
TAGGED = {
    "demonstrations": 14_000,
    "sft": {"batch_size": 20, "tokens_per_pack": 2048, "learning_rate": 2.5e-3, "adam_beta2": 0.95, "max_steps": 1400},
    "grpo": {"batch_size": 32, "tokens_per_pack": 4096, "learning_rate": 3e-4, "max_steps": 100},
    "method": {"type": "grpo", "num_generations": 8, "beta": 0.02},
    "rewards": ["match_format_exactly", "match_format_approximately", "check_answer", "check_numbers"],
    "eval_steps": 10,
}
COLUMNS = {
    "reward": "eval_reward",
    "format": "eval_format_accuracy",
    "answer": "eval_answer_accuracy",
    **{name: f"eval_rewards/{name}/mean" for name in TAGGED["rewards"]},
}


def tagged(folder: Path) -> list[dict[str, float]]:
    """Train the model by SFT, then by GRPO. Returns GRPO's evaluations on held-out prompts, one per `eval_steps`."""
    make_model(folder / "model", 0)
    demonstrations(folder, random.Random(0))
    quiet = {"output_dir": str(folder), "seed": 0, **QUIET}
    data = {"template": "tags", "max_length": 128}
    train(
        quiet
        | {
            "name": "sft",
            "model": str(folder / "model"),
            "method": "sft",
            "data": {"source": str(folder / "train.jsonl"), **data},
            "training": TAGGED["sft"],
            "evaluation": {"eval_steps": -1},
        }
    )
    train(
        quiet
        | {
            "name": "tagged",
            "model": str(folder / "sft/final"),
            "method": TAGGED["method"],
            "rewards": [{"type": name} for name in TAGGED["rewards"]],
            "data": {
                "source": "builtin:arithmetic",
                "max_rows": 4000,
                "validation": {"source": "builtin:arithmetic", "split": "test", "max_rows": 400},
                **data,
            },
            "rollout": {"max_completion_length": 56},
            "training": TAGGED["grpo"],
            "evaluation": {"eval_steps": TAGGED["eval_steps"]},
        }
    )
    lines = [line for line in read_metrics(folder / "tagged") if "eval_reward" in line]
    return [{"step": line["step"]} | {name: line[key] for name, key in COLUMNS.items()} for line in lines]


def demonstrations(folder: Path, rng: random.Random) -> None:
    """Write worked solutions, a few of them with the tags, to `train.jsonl`."""
    rows = []
    for row in arithmetic_problems("train", TAGGED["demonstrations"], 0):
        reply = TAGS.reasoning_start + row["solution"]
        if rng.random() < TAGGED_SHARE:
            reply += f"{TAGS.reasoning_end}{TAGS.solution_start}{row['answer']}{TAGS.solution_end}"
        rows.append({"prompt": row["problem"], "completion": reply})
    write(folder, rows, 1)


def table(lines: list[dict[str, float]]) -> str:
    heads = ["step", "reward", "format right", "answer right", *(f"`{name}`" for name in TAGGED["rewards"])]
    out = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for line in lines:
        parts = [f"{line[name]:+.2f}" for name in TAGGED["rewards"]]
        cells = [f"{line['step']}", f"{line['reward']:+.2f}", f"{line['format']:.0%}", f"{line['answer']:.0%}", *parts]
        out.append(f"| {' | '.join(cells)} |")
    return "\n".join(out)


def on_sums(folder: Path, name: str, task: Mapping[str, Any]) -> None:
    settings = {
        "name": name,
        "output_dir": str(folder),
        "method": METHOD,
        "training": BASE,
        "evaluation": {"eval_steps": 20},
        **task,
        **QUIET,
    }
    results = train(settings | SUMS[name])
    print(f"{name}: reward {results['start']['eval_reward']:.3f} -> {results['final']['eval_reward']:.3f}")


def main(names: list[str]) -> None:
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        task = sums_task(folder / "task", 0) if set(names) & set(SUMS) else {}
        for name in names:
            if name == "tagged":
                lines = tagged(folder)
                print(table(lines))
                save_json(RESULTS, {"settings": TAGGED | {"tagged_share": TAGGED_SHARE}, "evaluations": lines})
                put_table(PAGE, table(lines), "tagged")
            else:
                on_sums(folder, name, task)
            shutil.copy(folder / name / "curves.png", IMAGES / f"guide-{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:] or [*SUMS, "tagged"])
