"""Which model, method and length fit on which GPU, by posttrain's own estimate: `python -m benchmarks.gpu.fits`.

Writes the table into docs/gpu.md. No weights are created, because the estimate depends only on shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from benchmarks.common import put_table
from benchmarks.gpu.shapes import CONFIGS
from benchmarks.gpu.train import example
from posttrain.batch import pack
from posttrain.config import load
from posttrain.planning.activations import empty_model
from posttrain.planning.estimate import SAFE, Estimate, estimate, generation

PAGE = Path(__file__).resolve().parents[2] / "docs/gpu.md"
MODELS = ("0.5B", "1.5B", "4B", "7B", "14B", "32B")
LORA = ["model.lora=true"]
METHODS = {
    "SFT, all weights": ("sft", []),
    "SFT, LoRA": ("sft", LORA),
    "SFT, QLoRA": ("sft", [*LORA, "model.load_in_4bit=true"]),
    "DPO, LoRA": ("dpo", LORA),
    "GRPO, LoRA": ("grpo", LORA),
    "GRPO, all weights": ("grpo", []),
}
CUDA = torch.device("cuda", 0)
CARDS = (8, 16, 24, 48, 80)  # GiB
CONTEXT, USABLE = 1 << 30, 0.95  # bytes used by CUDA and its libraries; share of the rest left by fragmentation
POINTS = (1024, 2048, 8192, 32_768)  # tokens per pack for which memory is estimated; interpolated in between
STEP = 1024


def peaks(model: str, method: str, card: int) -> list[int]:
    """Bytes at the peak of a step, for each of POINTS, with one row that fills the pack; `card` is in GiB."""
    return [on_card(card << 30).peak for on_card in _steps(model, method)]


@cache
def _steps(model: str, method: str) -> list[Callable[[int], Estimate]]:
    """For each of POINTS, the estimate as a function of a GPU's bytes, on which only generation depends."""
    kind, settings = METHODS[method]
    with TemporaryDirectory() as folder:
        CONFIGS[model].save_pretrained(folder)
        return [_step(folder, kind, settings, tokens) for tokens in POINTS]


def _step(folder: str, kind: str, settings: list[str], tokens: int) -> Callable[[int], Estimate]:
    online = ["rewards=[{type: length, target: 20}]", f"rollout.max_completion_length={tokens // 16}"]
    given = [
        f"model.path={folder}",
        f"method.type={kind}",
        *settings,
        *(online if kind == "grpo" else []),
        "data.source=none.jsonl",
        "data.template=none",
        f"data.max_length={tokens // 2}",
        f"training.tokens_per_pack={tokens}",
        "training.gradient_checkpointing=true",
        "model.dtype=bfloat16",
    ]
    config = load(None, given).config
    packs = pack([example(kind, tokens, 1000)], tokens)
    [model] = config.models
    found = estimate(config, model, empty_model(config, model), packs, CUDA, card=max(CARDS) << 30, captured=False)
    engines = {card << 30: generation(config, model, packs, CUDA, card << 30) for card in CARDS}

    def on_card(size: int) -> Estimate:
        engine = engines[size]
        return replace(found, engine=engine, keeps_engine=found.resting + found.updating + engine <= SAFE * size)

    return on_card


def longest(model: str, method: str, card: int) -> int:
    """The maximum tokens of a pack that fits, as a multiple of STEP; 0 if no pack fits."""
    room = USABLE * ((card << 30) - CONTEXT)
    tokens = np.arange(STEP, POINTS[-1] + 1, STEP)
    fitting = tokens[np.interp(tokens, POINTS, peaks(model, method, card)) <= room]
    return int(fitting[-1]) if len(fitting) else 0


def row(model: str, method: str) -> str:
    lengths = [longest(model, method, card) for card in CARDS]
    cells = ["–" if not length else f"{length // 1024}k" for length in lengths]
    return f"| {model} | {method} | {' | '.join(cells)} |"


def table() -> str:
    head = f"| model | method | {' | '.join(f'{card} GB' for card in CARDS)} |"
    rows = [row(model, method) for model in MODELS for method in METHODS]
    return "\n".join([head, "|---" * (2 + len(CARDS)) + "|", *rows])


if __name__ == "__main__":
    put_table(PAGE, table(), "fits")
