"""Models of known shapes with random weights, peak rates of GPUs, and published numbers to compare with."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen3Config

from benchmarks.common import SHARED
from benchmarks.gpu.common import Setup
from posttrain.quickstart.model import make_tokenizer

# The config.json of the published models, as far as it determines shapes.
_QWEN3 = {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936, "max_position_embeddings": 40_960}
_QWEN3 |= {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
_QWEN2 = {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, "rope_parameters": _QWEN3["rope_parameters"]}


def _shape(hidden: int, layers: int, heads: int, intermediate: int, tied: bool, **more: Any) -> dict[str, Any]:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "tie_word_embeddings")
    return dict(zip(names, (hidden, layers, heads, intermediate, tied), strict=True)) | more


CONFIGS = {
    "0.6B": Qwen3Config(**_shape(1024, 28, 16, 3072, True), **_QWEN3),
    "1.7B": Qwen3Config(**_shape(2048, 28, 16, 6144, True), **_QWEN3),
    "4B": Qwen3Config(**_shape(2560, 36, 32, 9728, True), **_QWEN3),
    # Shapes of Qwen2.5, for the table of what fits on which GPU (fits.py).
    "0.5B": Qwen2Config(**_shape(896, 24, 14, 4864, True, num_key_value_heads=2, vocab_size=151_936), **_QWEN2),
    "1.5B": Qwen2Config(**_shape(1536, 28, 12, 8960, True, num_key_value_heads=2, vocab_size=151_936), **_QWEN2),
    "7B": Qwen2Config(**_shape(3584, 28, 28, 18_944, False, num_key_value_heads=4, vocab_size=152_064), **_QWEN2),
    "14B": Qwen2Config(**_shape(5120, 48, 40, 13_824, False, num_key_value_heads=8, vocab_size=152_064), **_QWEN2),
    "32B": Qwen2Config(**_shape(5120, 64, 40, 27_648, False, num_key_value_heads=8, vocab_size=152_064), **_QWEN2),
    "tiny": Qwen3Config(
        **_shape(64, 2, 4, 128, True),
        **_QWEN3 | {"head_dim": 16, "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 4096},
    ),
}

# Dense bfloat16 TFLOP/s with float32 accumulation, from NVIDIA's data sheets, by a part of the driver's name of a GPU.
PEAKS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,  # SXM, which the driver calls "H100 80GB HBM3"
    "H200": 989,
    "A100": 312,
    "L40S": 362,
    "RTX 4090": 165,
}


def peak_flops(card: str | None) -> float | None:
    """A GPU's peak in FLOP/s; None if unknown."""
    return next((1e12 * peak for name, peak in PEAKS.items() if card is not None and name in card), None)


@dataclass(frozen=True, slots=True)
class Published:
    """Published measurements, by the name of our case. `memory_share` is the goal for our memory over theirs."""

    tokens_per_second: float
    mfu: float
    memory_gib: float
    memory_share: float
    source: str


_PRIME = "PrimeIntellect-ai/prime-rl, benchmarks, one H100 80 GB"
PUBLISHED = {
    "sft 0.6B 16k": Published(25_486, 0.237, 52.8, 0.5, f"{_PRIME}: SFT, sequence length 16,384"),
    "grpo-one-lora 4B 16k": Published(
        6_229, 0.217, 23.3, 0.6, f"{_PRIME}: RL trainer with LoRA, sequence length 16,384"
    ),
}


def model_folder(setup: Setup, name: str) -> Path:
    """A folder with a bfloat16 model of that shape and a tokenizer; created if missing. With `tiny`, a tiny model."""
    name = "tiny" if setup.tiny else name
    folder = setup.models / name
    if not (folder / "config.json").exists():
        part = folder.with_name(f"{name}.part")
        shutil.rmtree(part, ignore_errors=True)
        torch.manual_seed(0)
        with torch.device(setup.device):
            model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16)
        model.save_pretrained(part)
        published = SHARED / "tokenizers" / "qwen3"
        own = setup.tiny or not published.is_dir()
        (make_tokenizer(0) if own else AutoTokenizer.from_pretrained(published)).save_pretrained(part)
        part.rename(folder)
    return folder
