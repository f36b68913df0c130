"""Whole runs of part `right`: every method, LoRA, every optimizer, a resumed run, CUDA graphs, and the quickstart.

Each makes a few steps on the quickstart's model with settings that a user would write, and is compared with the same
run on the CPU in float32, or with a run without one of the settings.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from benchmarks.gpu.common import FLASH, Case, CheckError, Setup
from posttrain import runner
from posttrain.config import load
from posttrain.data import arithmetic_problems
from posttrain.models import attention, graphs
from posttrain.models.graphs import PackGraphs
from posttrain.quickstart import Size, quickstart
from posttrain.quickstart.model import make_model
from posttrain.runs.metrics import read_metrics

METHODS = {
    "sft": {},
    "dpo": {},
    "reward": {},
    "kto": {},
    "orpo": {},
    "grpo": {"num_generations": 4, "beta": 0.04},
    "ppo": {"num_generations": 2},
}
LORA = {"r": 8, "alpha": 16, "dropout": 0.0, "target_modules": "all-linear"}
# Name -> settings of a DPO run, settings of the run to compare with, largest difference of losses, requirements.
VARIANTS: dict[str, tuple[dict, dict, float, tuple[str, ...]]] = {
    "LoRA": ({"model.lora": LORA}, {"model.lora": LORA, "model.dtype": "float32", "devices.type": "cpu"}, 0.03, ()),
    "QLoRA": ({"model.lora": LORA, "model.load_in_4bit": True}, {"model.lora": LORA}, 0.1, ("bitsandbytes",)),
    "8-bit AdamW": ({"training.optimizer": "adamw_8bit"}, {}, 0.05, ("bitsandbytes",)),
    "offloaded AdamW, pinned copies": ({"training.optimizer": "adamw_cpu_offload"}, {}, 0.01, ("CUDA",)),
    "gradient checkpointing": (
        {"training.gradient_checkpointing": True}, {"training.gradient_checkpointing": False}, 0.01, (),
    ),
}  # fmt: skip

# Runs whose packs are replayed as CUDA graphs: the method, and changes to the settings.
REPLAYED: dict[str, tuple[str, dict[str, Any]]] = {
    **{method: (method, {}) for method in METHODS},
    "LoRA": ("dpo", {"model.lora": LORA}),
    "QLoRA": ("dpo", {"model.lora": LORA, "model.load_in_4bit": True}),
    "gradient checkpointing": ("dpo", {"training.gradient_checkpointing": True}),
    "dropout": ("sft", {"model.lora": LORA | {"dropout": 0.1}}),
    "several packs": ("sft", {"training.tokens_per_pack": 256}),
}

ON_CPU = {"model.dtype": "float32", "devices.type": "cpu"}
# The largest difference of a loss in the first steps from the loss on the CPU in float32.
MOST = {"float32": 1e-3, "bfloat16": 3e-2}


def cases(setup: Setup) -> Iterator[Case]:
    runs = Runs(setup)
    for method in ("sft",) if setup.tiny else METHODS:
        for dtype in ("bfloat16",) if setup.tiny else MOST:
            yield Case(f"run of {method}, {dtype}", partial(run_is_the_cpus, runs, method, dtype))
    for name, (settings, like, most, needs) in VARIANTS.items():
        yield Case(f"run with {name}", partial(compared, runs, "dpo", settings, like, most), needs)
    yield Case("resumed = uninterrupted", partial(resumed, setup))
    if not setup.tiny:
        yield Case("quickstart", whole_quickstart)


def replayed(setup: Setup) -> Iterator[Case]:
    for name, (method, changes) in REPLAYED.items():
        needs = ("CUDA", "bitsandbytes") if changes.get("model.load_in_4bit") else ("CUDA",)
        yield Case(f"replay = eager, {name}", partial(replays_change_nothing, setup, method, changes), needs)
    yield Case(f"replay = eager, {FLASH}", partial(replays_over_paths, setup), ("CUDA", FLASH))


def home(setup: Setup) -> Path:
    """The quickstart's model, and pairs and labelled rows of its task; created if missing."""
    folder = setup.models / "arithmetic"
    if not folder.exists():
        part = folder.with_name("arithmetic.part")
        make_model(part / "model", seed=0)
        pairs = [
            {"prompt": row["problem"], "chosen": f"{row['solution']} {row['answer']}", "rejected": f"{number}?"}
            for number, row in enumerate(arithmetic_problems("train", 64, 0))
        ]
        labelled = [
            {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
            for row in pairs
            for side in ("chosen", "rejected")
        ]
        for name, rows in (("pairs", pairs), ("labelled", labelled)):
            (part / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        part.rename(folder)
    return folder


def run(setup: Setup, folder: Path, method: str, changes: Mapping[str, Any], steps: int = 3, resume: bool = False):
    """Run a few steps, with `changes` to settings such as `training.optimizer`. Returns the losses."""
    source = {"sft": "builtin:arithmetic", "kto": str(home(setup) / "labelled.jsonl")}
    online = method in ("grpo", "ppo")
    settings = {
        "name": "run",
        "output_dir": str(folder),
        "model.path": str(home(setup) / "model"),
        "method.type": method,
        **{f"method.{name}": value for name, value in METHODS[method].items()},
        **({"rewards": [{"type": "length", "target": 8}], "rollout.max_completion_length": 16} if online else {}),
        "data.source": "builtin:arithmetic" if online else source.get(method, str(home(setup) / "pairs.jsonl")),
        "data.template": "tags" if online or method == "sft" else "none",
        "data.max_rows": 64,
        "data.max_length": 256,
        "training.batch_size": 8,
        "training.tokens_per_pack": 1024,
        "training.max_steps": steps,
        "training.learning_rate": 1e-4,
        "training.lr_scheduler_type": "constant",
        "training.warmup_steps": 0,
        "tracking.logging_steps": 1,
        "devices.type": setup.device.type,
        **changes,
    }
    config = load(None, [f"{name}={json.dumps(value)}" for name, value in settings.items()]).config
    runner.train(config, resume=resume)
    return [line["loss"] for line in read_metrics(folder / "run") if "loss" in line]


class Runs:
    """The losses of runs; each run is made only once."""

    def __init__(self, setup: Setup):
        self.setup = setup
        self._losses: dict[str, list[float]] = {}

    def losses(self, method: str, changes: Mapping[str, Any]) -> list[float]:
        key = json.dumps([method, changes], sort_keys=True)
        if key not in self._losses:
            with TemporaryDirectory(prefix="posttrain-") as folder:
                self._losses[key] = run(self.setup, Path(folder), method, changes, 2 if self.setup.tiny else 3)
        return self._losses[key]


def compared(
    runs: Runs, method: str, changes: Mapping[str, Any], like: Mapping[str, Any], most: float
) -> dict[str, float]:
    """The largest difference of a step's loss between two runs."""
    one, two = runs.losses(method, changes), runs.losses(method, like)
    error = max(abs(a - b) for a, b in zip(one, two, strict=True))
    if not error <= most:
        raise CheckError(f"losses {one} and {two} differ by {error:.2e}, at most {most:g}")
    return {"error": error}


def run_is_the_cpus(runs: Runs, method: str, dtype: str) -> dict[str, float]:
    """Compare losses with those on the CPU in float32. Online methods may sample different tokens, so their losses must
    only be finite: the run's own checks cover the rest."""
    own = {"model.dtype": dtype}
    if method not in ("grpo", "ppo"):
        return compared(runs, method, own, ON_CPU, MOST[dtype])
    if not all(map(math.isfinite, losses := runs.losses(method, own))):
        raise CheckError(f"losses {losses}")
    return {}


def resumed(setup: Setup) -> dict[str, Any]:
    """Check that two steps and two resumed steps equal four steps; on a CPU, bit for bit."""
    with TemporaryDirectory(prefix="posttrain-") as scratch:
        one, two = Path(scratch) / "one", Path(scratch) / "two"
        run(setup, one, "dpo", {}, steps=4)
        run(setup, two, "dpo", {}, steps=2)
        run(setup, two, "dpo", {}, steps=4, resume=True)
        sides = [load_file(folder / "run/final/model.safetensors") for folder in (one, two)]
    error = max(float((sides[0][name] - sides[1][name]).abs().max()) for name in sides[0])
    if not error <= (1e-5 if setup.on_card else 0.0):
        raise CheckError(f"weights differ by {error:.2e}")
    return {"error": error, "note": "to the bit" if error == 0 else "not to the bit"}


def replays_change_nothing(
    setup: Setup, method: str, changes: Mapping[str, Any], over_paths: bool = False
) -> dict[str, Any]:
    """Check that a run whose packs are replayed ends with the weights of one without CUDA graphs, bit for bit.
    `over_paths`: whether attention must have been FlashAttention 4's."""
    made: list[PackGraphs] = []
    init, sides, most = PackGraphs.__init__, [], graphs.MOST

    def remembered(self: PackGraphs, *given: Any, **more: Any) -> None:
        init(self, *given, **more)
        made.append(self)

    with patch.object(PackGraphs, "__init__", remembered):
        for limit in (most, 0):
            with TemporaryDirectory(prefix="posttrain-") as folder, patch.object(graphs, "MOST", limit):
                run(setup, Path(folder), method, {"model.dtype": "bfloat16", **changes}, steps=6)
                [file] = (Path(folder) / "run/final").glob("*model.safetensors")
                sides.append(load_file(file))
    if not (replays := sum(each.replays for each in made)) or any(each.is_off for each in made):
        raise CheckError(f"{replays} passes were replayed; the run's log says why")
    if over_paths and not any(key.learns and key.sizes for each in made for key in each._passes):
        raise CheckError("no pass of FlashAttention 4 was captured")
    if different := [name for name in sides[0] if not torch.equal(sides[0][name], sides[1][name])]:
        raise CheckError(f"{len(different)} of {len(sides[0])} tensors differ, such as {different[0]}")
    return {"replays": replays, "note": f"{replays} passes replayed"}


def replays_over_paths(setup: Setup) -> dict[str, Any]:
    """The same for a model with heads of 64, if FlashAttention 4 computes the attention of every pack."""
    folder = home(setup).with_name("arithmetic-64")
    if not folder.exists():
        part = folder.with_name("arithmetic-64.part")
        AutoTokenizer.from_pretrained(home(setup) / "model").save_pretrained(part)
        config = AutoConfig.from_pretrained(home(setup) / "model", head_dim=64)
        AutoModelForCausalLM.from_config(config).save_pretrained(part)
        part.rename(folder)
    with patch.object(attention, "pays", lambda nodes: True):
        return replays_change_nothing(setup, "dpo", {"model.path": str(folder)}, over_paths=True)


def whole_quickstart() -> dict[str, Any]:
    """A shorter quickstart, on the CPU as in its settings: the installed versions must support the whole chain."""
    size = Size(worked=9000, bare=3000, sft_steps=600, problems=600, reward_steps=30, dpo_steps=30, ppo_steps=4,
                grpo_steps=8, held_out=200)  # fmt: skip
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with TemporaryDirectory(prefix="posttrain-") as folder:
            measured = quickstart(Path(folder), size=size, overwrite=True)
    finally:
        torch.set_num_threads(threads)
    right = {name: model.right.value for name, model in measured.items()}
    if not right["GRPO"] > right["untrained"]:
        raise CheckError(f"GRPO's model is right {right['GRPO']:.0%} of the time, as if untrained")
    return {"note": ", ".join(f"{name} {share:.0%} right" for name, share in right.items())}
