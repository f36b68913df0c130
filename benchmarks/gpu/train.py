"""Part `train`: an update of SFT, DPO and GRPO at the shapes of Qwen3-0.6B, 1.7B and 4B and at 2k, 8k and 16k tokens.

The policy, its optimizer, reference and packs are those of a run with ordinary settings (bfloat16; 4B: LoRA). Token ids
are random, and every scored token has a gradient; rewards and data are not included. The tokens of a step are one
sequence in SFT; one pair in DPO, of which the prompt is half; and in GRPO one prompt, an eighth of the tokens, with
eight completions, or with one completion where published numbers have one. `natural` are 64 rows of natural lengths in
packs of 8k tokens (rows.py).

Beside TRL, both sides train on the same rows, and both or neither recompute activations (gradient checkpointing).

The time of a step is that of forward, backward and optimizer, the median of several steps after warm-up. Memory is the
maximum that PyTorch has reserved on the GPU. MFU counts useful work as benchmarks/run.py does: with attention, without
recomputation. `eager_seconds_a_step` is the time without CUDA graphs, if passes were replayed. At 8k another step is
profiled: the share of its time that each kind of kernel takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from benchmarks.common import in_own_process
from benchmarks.gpu import rows
from benchmarks.gpu.common import Case, Goal, Setup
from benchmarks.gpu.kernels import kinds
from benchmarks.gpu.shapes import PUBLISHED, model_folder, peak_flops
from benchmarks.posttrain_side import counting
from benchmarks.run import Sizes, useful_flops
from posttrain.base.memory import peak_memory, release_memory, reset_peak_memory
from posttrain.batch import Example, Node, Pack
from posttrain.config import dump, load
from posttrain.optim.update import Objective, shares_of, update
from posttrain.planning.estimate import start_job
from posttrain.planning.largest import Step
from posttrain.runs.run import Run
from posttrain.training.job import Job

LENGTHS = {"2k": 2048, "8k": 8192, "16k": 16_384, "natural": 8192}  # tokens of a pack
TINY_LENGTH = 256
COMPLETIONS = 8
WARM_UPS, STEPS = 3, 5
# The most informative cases come first, because time may run out before the last.
ORDER = [
    ("sft", "0.6B", "8k"), ("sft", "0.6B", "16k"), ("dpo", "0.6B", "8k"), ("grpo-lora", "4B", "8k"),
    ("grpo-one-lora", "4B", "16k"), ("grpo", "0.6B", "8k"), ("grpo", "0.6B", "natural"), ("sft-lora", "4B", "8k"),
    ("dpo-lora", "4B", "8k"), ("sft", "1.7B", "8k"), ("dpo", "1.7B", "8k"), ("grpo", "1.7B", "8k"),
    ("dpo", "0.6B", "16k"), ("grpo", "0.6B", "16k"), ("sft", "0.6B", "2k"), ("dpo", "0.6B", "2k"),
    ("grpo", "0.6B", "2k"), ("sft", "1.7B", "16k"), ("sft-lora", "4B", "16k"), ("dpo-lora", "4B", "16k"),
    ("grpo-lora", "4B", "16k"), ("dpo", "1.7B", "16k"), ("grpo", "1.7B", "16k"), ("sft", "1.7B", "2k"),
    ("dpo", "1.7B", "2k"), ("grpo", "1.7B", "2k"), ("sft-lora", "4B", "2k"), ("dpo-lora", "4B", "2k"),
    ("grpo-lora", "4B", "2k"),
]  # fmt: skip
TINY = [("sft", "0.6B", "8k"), ("dpo", "0.6B", "8k"), ("grpo", "0.6B", "natural"), ("grpo-one-lora", "4B", "16k")]
# Beside TRL: the method, the rows, and TRL's batches: padded, its default, or padding-free with FlashAttention (SFT).
BESIDE = [
    ("sft", "natural", "padded"), ("dpo", "natural", "padded"), ("sft", "8k", "padded"), ("dpo", "8k", "padded"),
    ("sft", "natural", "padding-free"),
]  # fmt: skip
GOALS = {
    "sft 0.6B 2k": (Goal("pass_ms", most=36), Goal("tokens_per_second", least=45_000)),
    "dpo 0.6B 2k": (Goal("pass_ms", most=42),),
    "grpo-lora 4B 2k": (Goal("pass_ms", most=95),),
    "sft 0.6B 8k": (Goal("mfu", least=0.39), Goal("tokens_per_second", least=60_000)),
    "sft-lora 4B 8k": (Goal("mfu", least=0.42),),
}
SPEED_GOAL = Goal("speed_ratio", least=2.0)
TRL_SPEED_GOALS = {"sft": Goal("trl_ratio", least=3.0), "dpo": Goal("trl_ratio", least=4.0)}  # natural rows, padded
# One row of 8k tokens, by whether activations are recomputed.
TRL_MEMORY_GOALS = {
    ("sft", False): Goal("trl_memory_ratio", most=0.6),
    ("dpo", False): Goal("trl_memory_ratio", most=0.45),
    ("sft", True): Goal("trl_memory_ratio", most=1.0),
    ("dpo", True): Goal("trl_memory_ratio", most=1.0),
}


def cases(setup: Setup) -> Iterator[Case]:
    order, compared = (TINY, BESIDE[1:2]) if setup.tiny else (ORDER, BESIDE)
    alone = [Case(name, partial(measure, setup, name), (), goals_of(name)) for name in map(" ".join, order)]
    yield from (*alone[:3], *_beside_cases(setup, compared), *alone[3:])


def _beside_cases(setup: Setup, rows: Sequence[tuple[str, str, str]]) -> Iterator[Case]:
    for (method, length, batches), recomputed in product(rows, (False, True)):
        checkpointing = f"{'with' if recomputed else 'without'} checkpointing"
        goals = [TRL_SPEED_GOALS[method]] if (length, batches) == ("natural", "padded") else []
        goals += [TRL_MEMORY_GOALS[method, recomputed]] if length == "8k" else []
        needs = ("TRL", "flash_attn") if batches == "padding-free" else ("TRL",)
        name = f"{method} 0.6B {length} beside TRL, {batches}, {checkpointing}"
        yield Case(name, partial(beside, setup, name, batches, recomputed), needs, tuple(goals))


def goals_of(name: str) -> tuple[Goal, ...]:
    published = PUBLISHED.get(name)
    return GOALS.get(name, ()) if published is None else (SPEED_GOAL, Goal("memory_ratio", most=published.memory_share))


def settings(setup: Setup, name: str, folder: Path) -> list[str]:
    """The run's settings as a user would type them."""
    method, size = name.split()[:2]
    length, kind = length_of(setup, name), method.partition("-")[0]
    lora = ["model.lora.r=16", "model.lora.alpha=32", "model.lora.dropout=0"] if method.endswith("-lora") else []
    online = ["method.beta=0", "rewards=[{type: length, target: 20}]", f"rollout.max_completion_length={length // 2}"]
    return [
        *lora,
        f"output_dir={folder}",
        f"model.path={model_folder(setup, size)}",
        "model.dtype=bfloat16",
        f"method.type={kind}",
        *(online if kind == "grpo" else []),
        "data.source=none.jsonl",
        "data.template=none",
        f"data.max_length={length // 2 if kind == 'dpo' else length}",
        f"training.tokens_per_pack={length}",
        f"devices.type={setup.device.type}",
    ]


def length_of(setup: Setup, name: str) -> int:
    """The number of tokens of a pack."""
    return TINY_LENGTH if setup.tiny else LENGTHS[name.split()[2]]


def examples(setup: Setup, name: str, vocabulary: int) -> list[Example]:
    """The rows of a step. At the tiny size, natural rows are four, with a tenth of the tokens."""
    method, _, length = name.split()[:3]
    if length != "natural":
        return [example(method, length_of(setup, name), vocabulary)]
    counts = rows.natural(rows.SET_OF[method])
    if setup.tiny:
        counts = [(1 + prompt // 10, [1 + size // 10 for size in sizes]) for prompt, sizes in counts[:4]]
    return [rows.example(number, *sizes, vocabulary) for number, sizes in enumerate(counts)]


def example(method: str, length: int, vocabulary: int) -> Example:
    """One row of random tokens that fills a pack of `length` tokens."""
    rng = np.random.default_rng(0)

    def ids(count: int) -> np.ndarray:
        return rng.integers(vocabulary, size=count)

    def leaf(count: int) -> Node:
        return Node(ids(count + 1), trained=True)  # the last token is not fed

    if method.startswith("sft"):
        return Example((leaf(length),), 0)
    prompt, leaves = (length // 2, 2) if method.startswith("dpo") else (length // 8, COMPLETIONS)
    leaves = 1 if "one" in method else leaves
    each = (length - prompt) // leaves
    return Example((Node(ids(prompt), children=tuple(leaf(each) for _ in range(leaves))),), 0)


class Update:
    """A run's model, optimizer and packs; calling it makes a step."""

    def __init__(self, setup: Setup, job: Job, name: str):
        self.device, self.step = setup.device, Step(job)
        self.config = AutoConfig.from_pretrained(job.model.path)
        self.frozen = job.model.lora is not None
        self.packs: Sequence[Pack] = job.pack(examples(setup, name, self.config.vocab_size))

    def share(self, pack: Pack):
        pack = pack.to(self.device)
        if self.step.reference is not None:
            with torch.no_grad():
                self.step.reference(pack)
        return -self.step.scorer(pack).logprob_N.mean(), {}

    def __call__(self) -> None:
        """Forward, backward and the optimizer's step at a learning rate of 0. Returns when the device has finished."""
        update(self.packs, Objective(self.share, 1), self.step.optimizer, 0.0)
        self.wait()

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def an_update(setup: Setup, name: str, *more: str) -> Iterator[Update]:
    """The update of a case, with `more` settings."""
    with TemporaryDirectory(prefix="posttrain-") as folder:
        config = load(None, [*settings(setup, name, Path(folder)), *more]).config
        with Run.create(Path(folder) / "run", dump(config), {}) as run:
            yield Update(setup, replace(start_job(config, config.models[0], run), cuda_graphs=True), name)


def measure(setup: Setup, name: str, *more: str) -> dict[str, Any]:
    """The numbers of a step."""
    with an_update(setup, name, *more) as step:
        with counting() as work:
            step()
        for _ in range(0 if setup.tiny else WARM_UPS):
            step()
        reset_peak_memory(setup.device)
        seconds = []
        for _ in range(1 if setup.tiny else STEPS):
            began = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - began)
        peak = torch.cuda.max_memory_reserved(setup.device) if setup.on_card else peak_memory(setup.device)
        flops = useful_flops(work, step.frozen, Sizes.of(step.config))
        passes, updates = parts_of(step)
        profiled = kinds(step, setup.on_card) if name.endswith(" 8k") else None
        replays, eager = replays_and_eager(step)
    took, tokens = statistics.median(seconds), sum(pack.num_tokens for pack in step.packs)
    card = torch.cuda.get_device_name(setup.device) if setup.on_card else None
    peak_rate = peak_flops(card)
    numbers = {
        "tokens": tokens,
        "tokens_per_second": tokens / took,
        "seconds_a_step": took,
        "step_seconds": seconds,
        "pass_ms": passes,
        "update_ms": updates,
        "replays": replays,
        "eager_seconds_a_step": eager,
        "useful_tflops_per_second": flops / took / 1e12,
        "mfu": None if peak_rate is None else flops / took / peak_rate,
        "memory_gib": peak / 2**30,
        "kernels": profiled,
        "note": profiled and ", ".join(f"{kind} {share:.0%}" for kind, share in profiled.items()),
    }
    published = PUBLISHED.get(name)
    if published is not None and setup.on_card:
        numbers["speed_ratio"] = numbers["tokens_per_second"] / published.tokens_per_second
        numbers["memory_ratio"] = numbers["memory_gib"] / published.memory_gib
    return numbers


def parts_of(step: Update) -> tuple[float, float]:
    """Milliseconds of all forward and backward passes of a step, and of the optimizer's update."""
    passes, updates, optimizer = list[float](), list[float](), step.step.optimizer
    for _ in range(3):
        began = time.perf_counter()
        shares_of(step.packs, Objective(step.share, 1))
        step.wait()
        passed = time.perf_counter()
        optimizer.step(0.0)
        step.wait()
        passes.append(passed - began)
        updates.append(time.perf_counter() - passed)
    return 1e3 * statistics.median(passes), 1e3 * statistics.median(updates)


def replays_and_eager(step: Update) -> tuple[int, float | None]:
    """How many passes were replayed as CUDA graphs, and the seconds of a step without them, from here on."""
    graphs = step.step.optimizer.graphs
    if graphs is None or not graphs.replays:
        return 0, None
    replays, seconds = graphs.replays, list[float]()
    graphs.release()
    step.step.optimizer.graphs = None
    for scorer in filter(None, (step.step.scorer, step.step.reference)):
        scorer.model.__dict__.pop(graphs.NAME, None)
    step.step.optimizer.forget()
    for _ in range(3):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return replays, statistics.median(seconds)


def beside(setup: Setup, name: str, batches: str, recomputed: bool) -> dict[str, Any]:
    """Our numbers and, as `trl`, those of TRL on the same rows in a separate process; the ratios of both."""
    method, size, length = name.split()[:3]
    ours = measure(setup, name, f"training.gradient_checkpointing={str(recomputed).lower()}")
    release_memory()
    given = [method, "--model", str(model_folder(setup, size)), "--rows", length, "--device", setup.device.type]
    given += ["--steps", "2" if setup.tiny else str(WARM_UPS + STEPS), "--batches", batches, "--size", setup.size]
    theirs = in_own_process("gpu.trl_side", *given, *(["--checkpointing"] if recomputed else []))
    return {
        **ours,
        "trl": theirs,
        "trl_ratio": theirs["seconds"] / ours["seconds_a_step"],
        "trl_memory_ratio": ours["memory_gib"] / theirs["memory_gib"],
        "note": f"TRL: {theirs['seconds']:.3f} s, {theirs['memory_gib']:.2f} GiB",
    }
