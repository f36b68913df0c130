"""Part `soak`: 300 steps of SFT and of GRPO at Qwen3-0.6B's shape, with rows of varying lengths; memory must not grow.

After each step, the GPU memory reserved by PyTorch and the main memory of the process are recorded. Growth is the
maximum of the last third divided by the maximum of the middle third.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu.common import Case, Goal, Setup, after_each
from benchmarks.gpu.shapes import model_folder
from posttrain import runner
from posttrain.base.memory import memory_in_use
from posttrain.config import load
from posttrain.training.loop import Loop

STEPS, TINY_STEPS = 300, 6
ROWS = 512
FLAT = Goal("growth", most=1.02)


def cases(setup: Setup) -> Iterator[Case]:
    for method in ("sft", "grpo"):
        yield Case(
            f"{method}, {TINY_STEPS if setup.tiny else STEPS} steps", partial(measure, setup, method), (), (FLAT,)
        )


def rows(longest: int) -> Iterator[dict[str, str]]:
    """Prompts and completions of varying lengths, in words."""
    rng = random.Random(0)
    for _ in range(ROWS):
        asked, said = (" ".join(rng.choices("0123456789", k=rng.randint(4, longest))) for _ in range(2))
        yield {"prompt": asked, "completion": said}


def settings(setup: Setup, method: str, folder: Path) -> list[str]:
    words, sampled = (8, 4) if setup.tiny else (400, 128)
    source = folder / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows(words)))
    online = ["method.beta=0", "rewards=[{type: length, target: 20}]", f"rollout.max_completion_length={sampled}"]
    return [
        "name=run",
        f"output_dir={folder}",
        f"model.path={model_folder(setup, '0.6B')}",
        "model.dtype=bfloat16",
        f"method.type={method}",
        *(online if method == "grpo" else []),
        f"data.source={source}",
        "data.template=none",
        "data.max_length=2048",
        "data.overlong=truncate",
        f"training.batch_size={2 if setup.tiny else 8}",
        f"training.max_steps={TINY_STEPS if setup.tiny else STEPS}",
        "training.learning_rate=1e-6",
        "checkpoint.save_steps=1000000",
        "tracking.logging_steps=10",
        f"devices.type={setup.device.type}",
    ]


def growth(held: list[int]) -> float:
    """The maximum of the last third divided by the maximum of the middle third."""
    third = len(held) // 3
    return max(held[-third:]) / max(held[-2 * third : -third])


def measure(setup: Setup, method: str) -> dict[str, Any]:
    host: list[int] = []
    card: list[int] = []
    seconds: list[float] = []

    def note(took: float) -> None:
        seconds.append(took)
        host.append(memory_in_use())
        if setup.on_card:
            card.append(torch.cuda.memory_reserved(setup.device))

    with TemporaryDirectory(prefix="posttrain-") as folder:
        config = load(None, settings(setup, method, Path(folder))).config
        with after_each(Loop, "updates", note):
            runner.train(config)
    return {
        "growth": max(growth(held) for held in (host, card) if held),
        "memory_gib": max(card or host) / 2**30,
        "seconds_a_step": statistics.median(seconds),
        "host_bytes": host,
        "card_bytes": card,
    }
