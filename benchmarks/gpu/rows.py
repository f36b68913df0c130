"""Rows of natural lengths: the first 64 of Alpaca, HH harmless and GSM8K, as token counts with Qwen3's tokenizer.

`python -m benchmarks.gpu.rows` counts them into lengths.json, so that the kit needs neither data nor tokenizer; its
token ids are random. A row is the counts of its prompt and of its completions: one of Alpaca, the chosen and the
rejected of HH, and for GSM8K, whose completions would be sampled, the solutions of the row and of the seven after it.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from benchmarks.common import SHARED, preference_rows, sft_rows
from posttrain.batch import Example, Node

FILE = Path(__file__).with_name("lengths.json")
ROWS, GROUP = 64, 8
SET_OF = {"sft": "alpaca", "dpo": "hh", "grpo": "gsm8k"}  # by method

Counts = list[tuple[int, list[int]]]  # of each row: its prompt's tokens, and its completions' tokens


def natural(name: str) -> Counts:
    """The token counts of a set's rows: `alpaca`, `hh` or `gsm8k`."""
    return [(prompt, completions) for prompt, *completions in json.loads(FILE.read_text())[name]]


def example(row: int, prompt: int, completions: list[int], vocabulary: int) -> Example:
    """A row of random token ids."""
    rng = np.random.default_rng(row)
    leaves = tuple(Node(rng.integers(vocabulary, size=count), trained=True) for count in completions)
    return Example((Node(rng.integers(vocabulary, size=prompt), children=leaves),), row)


def count() -> dict[str, list[list[int]]]:
    """The token counts of every set, from the data beside the project."""
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / "qwen3")

    def tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    with (SHARED / "data" / "gsm8k" / "train.jsonl").open(encoding="utf-8") as lines:
        problems = [json.loads(line) for line in islice(lines, ROWS)]
    solutions = [tokens(row["answer"]) for row in problems]
    groups = [[solutions[(row + number) % ROWS] for number in range(GROUP)] for row in range(ROWS)]
    return {
        "alpaca": [[tokens(row["prompt"]), tokens(row["completion"]) + 1] for row in sft_rows()[:ROWS]],
        "hh": [[tokens(row[part]) + (part != "prompt") for part in ("prompt", "chosen", "rejected")]
               for row in preference_rows(ROWS)],
        "gsm8k": [[tokens(row["question"]), *(size + 1 for size in group)]
                  for row, group in zip(problems, groups, strict=True)],
    }  # fmt: skip


if __name__ == "__main__":
    sets = count()
    rows = (f'"{name}": [\n' + ",\n".join(json.dumps(row) for row in counts) + "\n]" for name, counts in sets.items())
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    for name, counts in sets.items():
        print(f"{name}: {len(counts)} rows, {sum(map(sum, counts)):,} tokens, longest {max(map(sum, counts)):,}")
