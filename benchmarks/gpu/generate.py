"""Part `generate`: generation speed at Qwen3-0.6B's shape in bfloat16, compared with the time to read the bytes.

The embedded engine samples 8 completions of each prompt; none ends before its limit, so every step has all rows. The
byte floor: for each token, the weights are read once, and so are the keys and values of every completion and of every
prompt, at the rate at which this device copies 1 GiB (bytes read and written). The time is that of a whole call, after
an identical first call, minus that of a call for one token, which includes the prompts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.common import Case, Goal, Setup
from benchmarks.gpu.shapes import model_folder
from posttrain.base.memory import peak_memory, reset_peak_memory
from posttrain.config import ModelConfig
from posttrain.engines import EmbeddedEngine, Sampling
from posttrain.engines.cache import token_bytes
from posttrain.models.load import load_model

ROWS = (256, 64, 512)  # the number of rows with a goal comes first
EACH = 8
FLOOR_GOAL = Goal("floor_ratio", most=1.6)  # for 256 rows


def cases(setup: Setup) -> Iterator[Case]:
    yield Case("copy", partial(copying, setup))
    for rows in (16,) if setup.tiny else ROWS:
        yield Case(f"{rows} rows", partial(measure, setup, rows), (), (FLOOR_GOAL,) if rows == 256 else ())


def copying(setup: Setup) -> dict[str, Any]:
    rate = bandwidth(setup)
    return {"bytes_per_second": rate, "note": f"{rate / 1e9:,.0f} GB/s read and written"}


def bandwidth(setup: Setup) -> float:
    """Bytes per second, read and written, of a copy on the device; the best of several."""
    source = torch.zeros(1 << (24 if setup.tiny else 30), dtype=torch.uint8, device=setup.device)
    target = torch.empty_like(source)
    return 2 * len(source) / min(seconds_of(setup, partial(target.copy_, source)) for _ in range(5))


def seconds_of(setup: Setup, work) -> float:
    began = time.perf_counter()
    work()
    if setup.on_card:
        torch.cuda.synchronize(setup.device)
    return time.perf_counter() - began


def floor_bytes(weights: int, token: int, rows: int, groups: int, prompt: int, length: int) -> int:
    """The bytes that must be read for tokens 2 to `length` of every row; the first token comes with the prompt."""
    own = rows * token * sum(range(1, length))
    return (length - 1) * (weights + groups * prompt * token) + own


def measure(setup: Setup, rows: int) -> dict[str, Any]:
    prompt, length = (16, 8) if setup.tiny else (256, 512)
    config = ModelConfig(path=str(model_folder(setup, "0.6B")), dtype="bfloat16")
    policy = load_model(config, "lm", setup.dtype, setup.device)
    vocabulary, rng = policy.config.vocab_size, np.random.default_rng(0)
    prompts = [rng.integers(vocabulary, size=prompt).tolist() for _ in range(rows // EACH)]
    engine = EmbeddedEngine(policy, max_rows=rows)
    sampling = Sampling(num_generations=EACH, max_completion_length=length)

    def run(limit: int) -> None:
        sampled = engine.generate(prompts, sampling, limits=[[limit] * EACH for _ in prompts])
        assert all(len(completion.tokens) == limit for group in sampled for completion in group)

    run(length)  # compiles, and captures the CUDA graphs
    reset_peak_memory(setup.device)
    first, whole = seconds_of(setup, partial(run, 1)), seconds_of(setup, partial(run, length))
    peak = peak_memory(setup.device)
    engine.close()
    weights = sum(p.numel() * p.element_size() for p in policy.parameters())  # tied: the embedding is also the head
    token = token_bytes(policy.config, setup.dtype, setup.device)
    floor = floor_bytes(weights, token, rows, rows // EACH, prompt, length) / bandwidth(setup)
    return {
        "tokens_per_second": rows * length / whole,
        "seconds_a_step": (whole - first) / (length - 1),
        "first_token_seconds": first,
        "floor_seconds_a_step": floor / (length - 1),
        "floor_ratio": (whole - first) / floor,
        "memory_gib": peak / 2**30,
    }
