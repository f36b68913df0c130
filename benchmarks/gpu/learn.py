"""Part `learn`: an ordinary run of 50 GRPO steps on sums (benchmarks/sums.py): time by phase, engine against trainer.

The model was trained to add, then weakened until one answer in ten is right. It must be right more often at the end
than at the start, and the log-probabilities of sampled tokens must equal those of the trainer except for rounding.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import sums
from benchmarks.gpu.common import Case, CheckError, Goal, Setup, after_each
from posttrain import runner
from posttrain.config import load
from posttrain.engines import EmbeddedEngine
from posttrain.rewards.compose import Rewards
from posttrain.runs.metrics import read_metrics
from posttrain.training.loop import Loop
from posttrain.training.saving import Saver

STEPS, TINY_STEPS = 50, 2
PART = 5  # the first PART steps' rewards are compared with those of the last PART steps
GAIN = 0.2
PHASES = {
    "generation": (EmbeddedEngine, "generate"),
    "rewards": (Rewards, "__call__"),
    "updates": (Loop, "updates"),
    "saving": (Saver, "save"),
}
RMS_GOAL = Goal("rms", most=0.03)


def cases(setup: Setup) -> Iterator[Case]:
    for dtype in ("bfloat16", "float32"):
        yield Case(f"grpo of sums, {dtype}", partial(measure, setup, dtype), (), (RMS_GOAL,))


def sums_home(setup: Setup) -> Path:
    """The task's model and rows; created if missing."""
    folder = setup.models / "sums"
    if not folder.exists():
        part = folder.with_name("sums.part")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # more threads slow down such a small model
        sums.make(part)
        torch.set_num_threads(threads)
        part.rename(folder)
    return folder


@contextmanager
def phases() -> Iterator[dict[str, list[float]]]:
    """The seconds of each call of the methods in PHASES, during the block."""
    seconds: dict[str, list[float]] = {name: [] for name in PHASES}
    with ExitStack() as stack:
        for name, (owner, method) in PHASES.items():
            stack.enter_context(after_each(owner, method, seconds[name].append))
        yield seconds


def settings(setup: Setup, home: Path, folder: Path, dtype: str, steps: int) -> list[str]:
    return [
        "name=run",
        f"output_dir={folder}",
        f"model.path={home / 'model'}",
        f"model.dtype={dtype}",
        "method.type=grpo",
        f"method.num_generations={2 if setup.tiny else 8}",
        "method.beta=0",
        sums.EXACT_SETTINGS,
        f"data.source={home / 'train.jsonl'}",
        "data.template=none",
        "data.max_length=24",
        "rollout.max_completion_length=6",
        f"training.batch_size={4 if setup.tiny else 32}",
        f"training.max_steps={steps}",
        "training.learning_rate=3e-3",
        "training.lr_scheduler_type=linear",
        "training.warmup_steps=0",
        "tracking.logging_steps=1",
        f"devices.type={setup.device.type}",
    ]


def measure(setup: Setup, dtype: str) -> dict[str, Any]:
    home, steps = sums_home(setup), TINY_STEPS if setup.tiny else STEPS
    with TemporaryDirectory(prefix="posttrain-") as folder:
        config = load(None, settings(setup, home, Path(folder), dtype, steps)).config
        began = time.perf_counter()
        with phases() as seconds:
            runner.train(config)
        whole = time.perf_counter() - began
        lines = [line for line in read_metrics(Path(folder) / "run") if "reward" in line]
    rewards = [line["reward"] for line in lines]
    before, after = (statistics.fmean(part) for part in (rewards[:PART], rewards[-PART:]))
    if not setup.tiny and after - before < GAIN:
        raise CheckError(f"the reward went from {before:.2f} to {after:.2f}, not up by {GAIN}")
    sign = "sampling/sampling_logp_difference/"
    spent = {name: sum(taken) for name, taken in seconds.items()}
    spent["the rest"] = whole - sum(spent.values())
    return {
        "rms": statistics.fmean(line[f"{sign}rms"] for line in lines),
        "largest_difference": max(line[f"{sign}max"] for line in lines),
        "effective_sample_size": min(line["sampling/effective_sample_size"] for line in lines),
        "seconds_a_step": statistics.median(
            map(sum, zip(seconds["generation"][-steps:], seconds["updates"][-steps:], strict=True))
        ),
        "phases": spent,
        "rewards": rewards,
        "note": f"reward {before:.2f} to {after:.2f}; "
        + ", ".join(f"{name} {part / whole:.0%}" for name, part in spent.items()),
    }
