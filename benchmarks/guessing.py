"""A task of several turns: find a number from 1 to 7, of which is said whether it is higher or lower.

The model is trained on games in which every second guess ignores what was said. So at the start it needs 1.4 to 1.5
times as many guesses as bisection. Reinforcement learning teaches it to keep to what was said and to halve.
"""

import json
import random
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import posttrain
from benchmarks.calculator import make_tokenizer, put_start, write
from posttrain.environments.guess import Guess

HIGH = 7
MOST = 12  # guesses
OPTIMAL = fmean(number.bit_length() for number in range(1, HIGH + 1))  # of bisection: 1 secret takes 1, 2 take 2, …
WITHIN = 1.2  # of the optimal number of guesses


def reward(guesses: float) -> float:
    """The reward of a game that takes this number of guesses."""
    return 1.0 - Guess.COST * (guesses - 1)


def game(source: random.Random) -> list[dict[str, Any]]:
    """A game as messages, in which every second guess is any number."""
    secret, low, high = source.randint(1, HIGH), 1, HIGH
    environment = Guess()
    messages = environment.reset(secret, high=HIGH)
    while True:
        guess = source.randint(low, high) if source.random() < 0.5 else source.randint(1, HIGH)
        messages.append({"role": "assistant", "content": str(guess)})
        step = environment.step(messages[-1])
        if step.done or len(environment.guesses) == MOST:
            return messages
        messages += step.messages
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))


def make(folder: Path, seed: int = 0) -> None:
    """Write `model/`, `train.jsonl` and `test.jsonl`, which has every number four times, to the folder."""
    source = random.Random(f"{seed} games")
    secrets = {"train": [source.randint(1, HIGH) for _ in range(2000)], "test": [*range(1, HIGH + 1)] * 4}
    for name, numbers in secrets.items():
        write(
            folder / f"{name}.jsonl", [{"secret": n, "high": HIGH, "id": f"{name} {i}"} for i, n in enumerate(numbers)]
        )
    with TemporaryDirectory() as temporary:
        taught = teach(Path(temporary), seed, [game(source) for _ in range(6000)])
        AutoModelForCausalLM.from_pretrained(taught, dtype=torch.float32).save_pretrained(folder / "model")
        AutoTokenizer.from_pretrained(taught).save_pretrained(folder / "model")


def teach(folder: Path, seed: int, games: list[list[dict[str, Any]]]) -> Path:
    """Train a small model on games; the folder of the model."""
    write(folder / "games.jsonl", [{"messages": messages} for messages in games])
    tokenizer = make_tokenizer(games[:500], None)
    put_start(folder / "start", tokenizer, seed, positions=256)
    settings = {
        "name": "taught", "output_dir": str(folder), "model": str(folder / "start"), "devices": {"type": "cpu"},
        "method": {"type": "sft", "assistant_only_loss": True}, "seed": seed,
        "data": {"source": str(folder / "games.jsonl"), "max_length": 256, "validation": None},
        "training": {"batch_size": 32, "tokens_per_pack": 4096, "max_steps": 800, "learning_rate": 3e-3},
        "evaluation": {"eval_steps": -1},
    }  # fmt: skip
    (folder / "taught.json").write_text(json.dumps(settings))
    posttrain.train_all(folder / "taught.json")
    return folder / "taught" / "final"
