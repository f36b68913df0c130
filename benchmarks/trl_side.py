"""TRL's side of the benchmark: `python -m benchmarks.trl_side dpo --models DIR --steps 12`.

TRL 1.16 with its defaults, except: float32 on the CPU, no gradient checkpointing, constant learning rate, the file's
order, one log line per step. It prints JSON with each step's loss and seconds, the seconds from the start of the first
step to the end of the last (without loading and tokenising), tokens fed, and peak memory (including loading).
"""

import argparse
import json
import os
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import trl
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from benchmarks.common import (
    BATCH_SIZE,
    LEARNING_RATES,
    MAX_LENGTH,
    THREADS,
    TRL_SETTINGS,
    make_models,
    peak_memory_gb,
    rows_of,
)

ROWS_A_FORWARD = {"sft": 1}  # other methods use TRL's default, the whole batch

# SFT is compared with TRL at TRL's fastest correct setting. All of these settings are correct on the CPU: on a
# two-layer model with large weights the first batch's loss equals one-by-one evaluation to 1e-6, because transformers
# 5.23 makes a block mask from the position ids if SDPA receives no attention mask; without the block mask, the loss
# would be off by 0.06 or more.
# Seconds of the first three steps of eight rows (7,742 tokens), the best of a few on a busy two-core machine, and peak:
#   plain, 8 rows per forward        34    5.2 GB   half of it is padding
#   padding_free, 8 rows             17    3.5 GB   the dense mask pays for attention between rows
#   padding_free, 4 rows             12    2.7 GB
#   padding_free, 2 rows             10    2.0 GB
#   padding_free or plain, 1 row     10    1.7 GB   the setting used: eight rows accumulated, same losses
#   packed (bfd), 8 packs of 1024    48    7.1 GB   one step of 8,142 tokens, once; different batches and losses
SFT_MODES = {
    "plain": {},
    "padding_free": {"padding_free": True, "max_length": None},
    "packed": {"packing": True, "packing_strategy": "bfd"},
}


LORA = LoraConfig(
    r=16,
    lora_alpha=32,
    lora_dropout=0.0,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
    task_type="CAUSAL_LM",
)


class Clock(TrainerCallback):
    """Seconds of each optimizer step, including data loading and logging between steps."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if not self.marks:
            self.marks.append(time.perf_counter())

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.marks.append(time.perf_counter())


def build(arguments: argparse.Namespace, folder: str, clock: Clock):
    """The TRL trainer for the method, ready to train."""
    method = arguments.method
    trainer_class, config_class = {
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "dpo-lora": (trl.DPOTrainer, trl.DPOConfig),
        "kto": (trl.KTOTrainer, trl.KTOConfig),
        "orpo": (ORPOTrainer, ORPOConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
        "sft": (trl.SFTTrainer, trl.SFTConfig),
    }[method]
    micro_batch = arguments.micro_batch or ROWS_A_FORWARD.get(arguments.method, BATCH_SIZE)
    if BATCH_SIZE % micro_batch:
        raise SystemExit(f"--micro-batch {micro_batch} does not divide the batch of {BATCH_SIZE}")
    settings = {"max_length": MAX_LENGTH} | (SFT_MODES[arguments.sft_mode] if method == "sft" else {})
    if method != "orpo":
        settings["model_init_kwargs"] = {"dtype": arguments.dtype}
    config = config_class(
        output_dir=folder,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=BATCH_SIZE // micro_batch,
        max_steps=arguments.steps,
        learning_rate=arguments.learning_rate or LEARNING_RATES[arguments.method],
        train_sampling_strategy="sequential",
        **TRL_SETTINGS,
        **settings,
    )
    path = str(make_models(arguments.models)["reward" if method == "reward" else "policy"])
    data = {"args": config, "train_dataset": Dataset.from_list(rows_of(method)), "callbacks": [clock]}
    if method == "orpo":  # takes no path, and would put a BOS token before the prompt, which posttrain does not
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokenizer.bos_token = None
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return trainer_class(model=model, processing_class=tokenizer, **data)
    if method == "dpo-lora":
        trainer = trainer_class(model=path, peft_config=LORA, **data)
        start_like_posttrain(trainer.model, path)
        return trainer
    return trainer_class(model=path, **data)


def start_like_posttrain(model: torch.nn.Module, path: str) -> None:
    """Set new adapters to posttrain's random numbers for seed 0."""
    torch.manual_seed(0)
    same = get_peft_model(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), LORA)
    sampled = {name: p for name, p in same.named_parameters() if "lora_A" in name}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in sampled:
                parameter.copy_(sampled.pop(name))
    if sampled:
        raise SystemExit(f"adapters without a counterpart: {', '.join(sorted(sampled))}")


def measure(arguments: argparse.Namespace) -> dict:
    """Train and return the measurements."""
    clock = Clock()
    with TemporaryDirectory() as folder:
        trainer = build(arguments, folder, clock)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "side": f"trl {trl.__version__}",
        "method": arguments.method,
        "sft_mode": arguments.sft_mode if arguments.method == "sft" else None,
        "micro_batch": trainer.args.per_device_train_batch_size,
        "attention": trainer.model.config._attn_implementation,
        "steps": len(logs),
        "learning_rate": trainer.args.learning_rate,
        "threads": torch.get_num_threads(),
        "losses": [entry["loss"] for entry in logs],
        "grad_norms": [entry["grad_norm"] for entry in logs],
        "tokens": int(logs[-1].get("num_tokens", 0)) or None,  # ORPO does not count them
        "seconds": clock.marks[-1] - clock.marks[0],
        "step_seconds": [after - before for before, after in pairwise(clock.marks)],
        "memory_peak_gb": peak_memory_gb(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=LEARNING_RATES)
    parser.add_argument("--models", type=Path, required=True, help="folder of the random models; created if missing")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, help="default: posttrain's for the method")
    parser.add_argument("--sft-mode", choices=SFT_MODES, default="padding_free")
    parser.add_argument(
        "--micro-batch", type=int, help="rows per forward, a divisor of the batch; the rest is accumulated"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="not for orpo and dpo-lora")
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    print(json.dumps(measure(arguments)))


if __name__ == "__main__":
    main()
