"""TRL's side of part `train`, in a separate process (see `beside` there).

TRL 1.16 with its defaults, except for a learning rate of 0, on exactly the token ids that posttrain has. Prints the
seconds of a step (median, without the first steps) and the peak memory as JSON.
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

from benchmarks.gpu.train import WARM_UPS, example
from posttrain.base.memory import peak_of_process


class Clock(TrainerCallback):
    """Records the time at which each step ends."""

    def __init__(self, on_card: bool):
        self.on_card, self.marks = on_card, []

    def on_step_end(self, args, state, control, **_unused):
        if self.on_card:
            torch.cuda.synchronize()
        self.marks.append(time.perf_counter())


def build(arguments: argparse.Namespace, folder: str, clock: Clock):
    """The method's trainer; the row replaces the text that the trainer was built with."""
    on_card = arguments.device == "cuda"
    settings = {
        "output_dir": folder,
        "per_device_train_batch_size": 1,
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
    [tree] = example(arguments.method, arguments.length, AutoConfig.from_pretrained(arguments.model).vocab_size).trees
    if arguments.method == "sft":
        trainer_class, config = trl.SFTTrainer, trl.SFTConfig(**settings)
        text, row = {"text": "a b"}, {"input_ids": tree.tokens.tolist()}
    else:
        trainer_class, config = trl.DPOTrainer, trl.DPOConfig(**settings)
        text = {"prompt": "a", "chosen": " b", "rejected": " c"}
        leaves = dict(
            zip(("chosen_ids", "rejected_ids"), (leaf.tokens.tolist() for leaf in tree.children), strict=True)
        )
        row = {"prompt_ids": tree.tokens.tolist(), **leaves}
    trainer = trainer_class(
        model=str(arguments.model), args=config, train_dataset=Dataset.from_list([text]), callbacks=[clock]
    )
    trainer.train_dataset = Dataset.from_list([row] * arguments.steps)
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
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    print(json.dumps(measure(parser.parse_args())))


if __name__ == "__main__":
    main()
