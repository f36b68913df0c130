"""Models with random weights for benchmarks and tests: one family, any size, a folder that transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel


def write_model(folder: Path, tokenizer: Path, family: str = "qwen3", seed: int = 0, **sizes: Any) -> PreTrainedModel:
    """Write a model and the tokenizer of another folder to `folder`. Returns the model, float32.

    `sizes` are settings of the family's transformers configuration; vocabulary and special tokens come from the
    tokenizer.
    """
    made = AutoTokenizer.from_pretrained(tokenizer)
    ids = {name: getattr(made, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](vocab_size=len(made), **ids, **sizes))
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    return model
