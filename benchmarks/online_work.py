"""The work of both sides of benchmarks/online.py: prompts, lengths of completions, and the reward."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from benchmarks.common import SHARED, preference_rows

LIMIT = 256  # maximum tokens of a completion
MAX_LENGTH = 1024
STEPS = {"grpo": 3, "ppo": 2, "distill": 3}
WORK = {"grpo": (8, 8), "ppo": (16, 1), "distill": (8, 4)}  # prompts per step, completions per prompt


def draw_lengths(method: str, model: Path, seed: int = 0) -> list[list[list[int]]]:
    """The length of every completion of every prompt of every step."""
    path = SHARED / "data/gsm8k/example_model_solutions.jsonl"
    rows = [json.loads(line) for line in path.open(encoding="utf-8")]
    texts = [value["solution"] for row in rows for value in row.values() if isinstance(value, dict)]
    tokenizer, rng = AutoTokenizer.from_pretrained(model), random.Random(seed)
    prompts, n = WORK[method]

    def length() -> int:
        return min(LIMIT, len(tokenizer(rng.choice(texts), add_special_tokens=False).input_ids) + 1)

    return [[[length() for _ in range(n)] for _ in range(prompts)] for _ in range(STEPS[method])]


def prompts_of(method: str) -> list[str]:
    """The prompts of all steps, in order."""
    return [row["prompt"] for row in preference_rows(WORK[method][0] * STEPS[method])]


def characters(completions: Sequence[str], **_columns: object) -> list[float]:
    """A reward that takes almost no time: the share of the letter e."""
    return [text.count("e") / max(1, len(text)) for text in completions]
