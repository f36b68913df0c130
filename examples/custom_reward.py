"""GRPO with a custom reward function: stories become lively, with sentences that end in an exclamation mark.

The function is called as in TRL, with all completions of a step. Settings name it as `module:function`: here this
file, whose folder Python searches for modules when the file runs as a script. Run it with a small model, a folder or
a hub id:

    python examples/custom_reward.py --model MODEL
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

import posttrain

ANIMALS = ["cat", "dog", "bird", "fish", "frog", "bear", "duck", "mouse"]


def lively(completions: list[str], **columns: object) -> list[float]:
    """The share of a completion's sentences that end in an exclamation mark; 0 without a sentence."""
    ends = [re.findall(r"[.!?]", text) for text in completions]
    return [marks.count("!") / len(marks) if marks else 0.0 for marks in ends]


def main(argv: Sequence[str] | None = None) -> posttrain.TrainedRun:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub id of a small causal model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="1e-3 is for models of a million weights")
    parser.add_argument("--output", type=Path, default=Path("runs"), help="folder of the run")
    given = parser.parse_args(argv)

    prompts = given.output / "prompts.jsonl"
    prompts.parent.mkdir(parents=True, exist_ok=True)
    starts = ("Once upon a time, there was a {}.", "One day, a little {} went to the park.")
    rows = [{"prompt": start.format(animal)} for start in starts for animal in ANIMALS]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))

    run = posttrain.train(
        {
            "name": "custom-reward",
            "output_dir": str(given.output),
            "model": given.model,
            "method": {"type": "grpo", "num_generations": 8},
            "rewards": [{"type": "python", "function": f"{Path(__file__).stem}:lively", "name": "lively"}],
            "data": {"source": str(prompts), "template": "none"},
            "rollout": {"max_completion_length": 32},
            "training": {"batch_size": 4, "max_steps": given.steps, "learning_rate": given.learning_rate},
            "tracking": {"logging_steps": 1},
        },
        overwrite=True,
    )
    steps, rewards = run.metric("reward")
    for step, reward in zip(steps, rewards, strict=True):
        print(f"step {step:3}  reward {reward:.3f}  {'#' * round(40 * reward)}")
    return run


if __name__ == "__main__":
    main()
