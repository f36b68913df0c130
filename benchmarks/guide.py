"""The pictures of docs/guide.md: a healthy GRPO run and three sick ones, on sums. `python -m benchmarks.guide`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.learn_online import CASES, QUIET, sums_task, train

IMAGES = Path(__file__).resolve().parents[1] / "docs/images"
BASE = dict(CASES["grpo"].training) | {"warmup_steps": 0}
METHOD = dict(CASES["grpo"].method) | {"beta": 0.001}  # so that the KL is there to be seen


def equal(completions: list[str], **_columns: Any) -> list[float]:
    """A broken reward."""
    return [0.0] * len(completions)


RUNS: dict[str, dict[str, Any]] = {
    "healthy": {},
    "flat": {"rewards": [{"type": "python", "function": "benchmarks.guide:equal", "name": "reward"}]},
    "collapsed": {"training": BASE | {"learning_rate": 5 * BASE["learning_rate"]}},
    "truncated": {"rollout": {"max_completion_length": 1}},
}


def main() -> None:
    with TemporaryDirectory() as folder:
        task = sums_task(Path(folder) / "task", 0)
        for name, changes in RUNS.items():
            settings = {
                "name": name,
                "output_dir": folder,
                "method": METHOD,
                "training": BASE,
                "evaluation": {"eval_steps": 20},
                **task,
                **QUIET,
            }
            results = train(settings | changes)
            shutil.copy(Path(folder) / name / "curves.png", IMAGES / f"guide-{name}.png")
            print(f"{name}: reward {results['start']['eval_reward']:.3f} -> {results['final']['eval_reward']:.3f}")


if __name__ == "__main__":
    main()
