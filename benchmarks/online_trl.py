"""TRL's side of the benchmark of methods that sample (benchmarks/online.py): the same prompts, lengths and models."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LogitsProcessor

from benchmarks.common import TRL_SETTINGS
from benchmarks.online_work import LIMIT, MAX_LENGTH, STEPS, WORK, characters, prompts_of

TRL_WITH_PPO = Path(__file__).resolve().parents[1] / "build/trl-1.12"  # pip install --target, by the Makefile
ROWS = 8  # number of sequences that TRL processes at a time


class Lengths(LogitsProcessor):
    """Forces the stop token at each row's length, and forbids it before."""

    def __init__(self, start: int, lengths: torch.Tensor, stop: int):
        self.start, self.lengths, self.stop = start, lengths, stop

    def __call__(self, input_ids, scores):
        last = input_ids.shape[1] - self.start + 1 >= self.lengths
        scores[:, self.stop] = -torch.inf
        scores[last] = -torch.inf
        scores[last, self.stop] = 0.0
        return scores


class Timed:
    """Passes the lengths of the next step to a model's `generate`, and times the call."""

    def __init__(self, model, lengths: list[list[list[int]]], stop: int):
        self.began, self.seconds, self.sampled = 0.0, 0.0, 0
        generate, coming = model.generate, iter(lengths)

        def at_lengths(*args, **given):
            now = time.perf_counter()
            self.began = self.began or now
            of_rows = torch.tensor([length for group in next(coming) for length in group])
            assert len(of_rows) == len(given["input_ids"])
            processor = Lengths(given["input_ids"].shape[1], of_rows, stop)
            result = generate(*args, **given, logits_processor=[processor])
            self.seconds += time.perf_counter() - now
            self.sampled += int(of_rows.sum())
            return result

        model.generate = at_lengths


def run_trl_grpo(models: dict[str, Path], lengths: list[list[list[int]]], folder: Path, dtype: str) -> dict:
    import trl
    from datasets import Dataset

    prompts, n = WORK["grpo"]
    config = trl.GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=prompts * n // ROWS,
        num_generations=n,
        max_completion_length=LIMIT,
        max_steps=STEPS["grpo"],
        learning_rate=1e-6,
        shuffle_dataset=False,
        **TRL_SETTINGS,
        model_init_kwargs={"dtype": dtype},
    )
    rows = Dataset.from_list([{"prompt": text} for text in prompts_of("grpo")])
    trainer = trl.GRPOTrainer(str(models["policy"]), characters, args=config, train_dataset=rows)
    tokenizer = AutoTokenizer.from_pretrained(models["policy"])
    sampling_time = Timed(trainer.model, lengths, tokenizer.eos_token_id)
    trainer.train()
    seconds = time.perf_counter() - sampling_time.began
    mean = statistics.fmean(x["completions/mean_length"] for x in trainer.state.log_history if "loss" in x)
    return {"seconds": seconds, "sampling_seconds": sampling_time.seconds, "mean_length": mean}


def run_trl_ppo(models: dict[str, Path], lengths: list[list[list[int]]], folder: Path, dtype: str) -> dict:
    assert dtype == "float32", "measured for GRPO alone"
    sys.path.insert(0, str(TRL_WITH_PPO))
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    prompts, n = WORK["ppo"]
    config = PPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=prompts * n // ROWS,
        total_episodes=prompts * n * STEPS["ppo"],
        num_ppo_epochs=4,
        num_mini_batches=1,
        local_rollout_forward_batch_size=prompts * n,
        response_length=LIMIT,
        stop_token="eos",
        temperature=1.0,
        learning_rate=3e-6,
        num_sample_generations=0,
        **TRL_SETTINGS,
    )
    tokenizer = AutoTokenizer.from_pretrained(models["policy"], padding_side="left")

    def policy():
        return AutoModelForCausalLM.from_pretrained(models["policy"], dtype=torch.float32)

    def scorer():
        return AutoModelForSequenceClassification.from_pretrained(models["reward"], dtype=torch.float32)

    ids = [{"input_ids": tokenizer(text).input_ids} for text in prompts_of("ppo")]
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy(),
        ref_model=policy(),
        reward_model=scorer(),
        value_model=scorer(),
        train_dataset=Dataset.from_list(ids),
        eval_dataset=Dataset.from_list(ids[:1]),
    )
    # The trainer shuffles prompts. Which prompt has which length does not matter, as long as all lengths are used.
    sampling_time = Timed(trainer.policy_model, lengths, tokenizer.eos_token_id)
    trainer.train()
    seconds = time.perf_counter() - sampling_time.began
    mean = sampling_time.sampled / (prompts * n * STEPS["ppo"])
    return {"seconds": seconds, "sampling_seconds": sampling_time.seconds, "mean_length": mean}


def run_trl_distill(models: dict[str, Path], lengths: list[list[list[int]]], folder: Path, dtype: str) -> dict:
    """GKD as on-policy distillation: the student writes every completion (lmbda 1); the loss is reverse KL (beta 1)."""
    from datasets import Dataset
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    prompts, n = WORK["distill"]
    config = GKDConfig(
        output_dir=str(folder),
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=prompts * n // ROWS,
        lmbda=1.0,
        beta=1.0,
        temperature=1.0,
        max_new_tokens=LIMIT,
        max_length=MAX_LENGTH,
        max_steps=STEPS["distill"],
        learning_rate=1e-6,
        **TRL_SETTINGS,
        model_init_kwargs={"dtype": dtype},
    )
    rows = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "-"}]}
        for text in prompts_of("distill")
        for _ in range(n)
    ]
    tokenizer = AutoTokenizer.from_pretrained(models["policy"])
    trainer = GKDTrainer(
        model=str(models["policy"]),
        teacher_model=AutoModelForCausalLM.from_pretrained(models["teacher"], dtype=dtype),
        args=config,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    flat = [[length] for step in lengths for group in step for length in group]
    at_a_time = [flat[start : start + ROWS] for start in range(0, len(flat), ROWS)]
    sampling_time = Timed(trainer.model, at_a_time, tokenizer.eos_token_id)
    trainer.train()
    seconds = time.perf_counter() - sampling_time.began
    mean = sampling_time.sampled / (prompts * n * STEPS["distill"])
    return {"seconds": seconds, "sampling_seconds": sampling_time.seconds, "mean_length": mean}


RUN = {"grpo": run_trl_grpo, "ppo": run_trl_ppo, "distill": run_trl_distill}
