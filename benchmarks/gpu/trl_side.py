"""TRL's side of part `train`, in a separate process (see `beside` there).

TRL 1.16 on exactly the token ids that posttrain has, at a learning rate of 0, with or without gradient checkpointing. A
micro-batch has as many rows as our pack has tokens for; rows are padded, as by default, or joined without padding for
FlashAttention. Prints the seconds of a step (median, without the first steps) and the peak memory as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import trl
from datasets import Dataset
from transformers import AutoConfig, TrainerCallback

from benchmarks.gpu.common import Setup
from benchmarks.gpu.train import WARM_UPS, examples, length_of
from posttrain.base.memory import peak_of_process


class Clock(TrainerCallback):
    """Records the time at which each step ends."""

    def __init__(self, on_card: bool):
        self.on_card, self.marks = on_card, []

    def on_step_end(self, args, state, control, **_unused):
        if self.on_card:
            torch.cuda.synchronize()
        self.marks.append(time.perf_counter())


def rows_of(arguments: argparse.Namespace) -> list[dict[str, list[int]]]:
    """The rows as token ids, in the columns that the method's collator reads."""
    setup = Setup(torch.device(arguments.device), arguments.size, Path())
    vocabulary = AutoConfig.from_pretrained(arguments.model).vocab_size
    found = []
    for one in examples(setup, f"{arguments.method} 0.6B {arguments.rows}", vocabulary):
        prompt, *completions = [node.tokens.tolist() for node in (one.trees[0], *one.trees[0].children)]
        if arguments.method == "dpo":
            found.append(dict(zip(("prompt_ids", "chosen_ids", "rejected_ids"), (prompt, *completions), strict=True)))
        elif completions:
            [answer] = completions
            found.append({"input_ids": prompt + answer, "completion_mask": [0] * len(prompt) + [1] * len(answer)})
        else:
            found.append({"input_ids": prompt})
    return found


def micro_batch(rows: list[dict[str, list[int]]], tokens: int, padded: bool) -> int:
    """The number of rows of a micro-batch that holds as many tokens as our pack: a power of two, at most all rows."""
    sizes = [
        [len(row["input_ids"])] if "input_ids" in row else
        [len(row["prompt_ids"]) + len(row[side]) for side in ("chosen_ids", "rejected_ids")]
        for row in rows
    ]  # fmt: skip
    each = max(map(max, sizes)) * len(sizes[0]) if padded else sum(map(sum, sizes)) / len(sizes)
    fit = max(1, int(tokens // each))
    return min(len(rows), 1 << (fit.bit_length() - 1))


def build(arguments: argparse.Namespace, folder: str, clock: Clock):
    """The method's trainer; the rows replace the text that the trainer was built with."""
    on_card, rows, padded = arguments.device == "cuda", rows_of(arguments), arguments.batches == "padded"
    tokens = length_of(Setup(torch.device(arguments.device), arguments.size, Path()), f"_ _ {arguments.rows}")
    size = micro_batch(rows, tokens, padded)
    settings = {
        "output_dir": folder,
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": len(rows) // size,
        "gradient_checkpointing": arguments.checkpointing,
        "train_sampling_strategy": "sequential",  # so that every step has the same rows
        "max_steps": arguments.steps,
        "learning_rate": 0.0,
        "max_length": None,
        "bf16": True,
        "use_cpu": not on_card,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    if not padded:
        settings |= {"padding_free": True, "model_init_kwargs": {"attn_implementation": "flash_attention_2"}}
    if arguments.method == "sft":
        masked = "completion_mask" in rows[0]
        trainer_class, config = trl.SFTTrainer, trl.SFTConfig(**settings, completion_only_loss=masked)
        text = {"prompt": "a", "completion": " b"} if masked else {"text": "a b"}
    else:
        trainer_class, config = trl.DPOTrainer, trl.DPOConfig(**settings)
        text = {"prompt": "a", "chosen": " b", "rejected": " c"}
    trainer = trainer_class(
        model=str(arguments.model), args=config, train_dataset=Dataset.from_list([text]), callbacks=[clock]
    )
    trainer.train_dataset = Dataset.from_list(rows * arguments.steps)
    return trainer


def measure(arguments: argparse.Namespace) -> dict:
    clock = Clock(arguments.device == "cuda")
    with TemporaryDirectory() as folder:
        build(arguments, folder, clock).train()
    took = [after - before for before, after in pairwise(clock.marks)]
    peak = torch.cuda.max_memory_reserved() if clock.on_card else peak_of_process()
    seconds = statistics.median(took[WARM_UPS - 1 :] or took)
    return {"side": f"trl {trl.__version__}", "seconds": seconds, "step_seconds": took, "memory_gib": peak / 2**30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=["sft", "dpo"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", required=True, help="2k, 8k, 16k or natural")
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    parser.add_argument("--batches", choices=["padded", "padding-free"], default="padded")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
