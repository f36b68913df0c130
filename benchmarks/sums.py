"""A task that takes seconds, for methods that sample completions: sums of two numbers below 20, known to a small model.

The model is trained on every sum. Then its output weights are mixed with an equal amount of noise and scaled down,
which makes the model less certain of each token, until about one answer in ten is right. Reinforcement learning trains
on four fifths of the problems; the others are held out.

`python -m benchmarks.sums FOLDER` writes the tasks that the tests use (tests/sums; that of benchmarks/calculator.py,
too), with the hash of every file.
"""

import hashlib
import json
import math
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from posttrain.engines import EmbeddedEngine, Sampling
from posttrain.models.attention import NAME as PACKED
from posttrain.models.lean import lean

PROBLEMS = [(f"{a}+{b}=", str(a + b)) for a in range(20) for b in range(20)]
STOP, START = "$", "^"
SAVED = {"half": 0.5, "tenth": 0.1}  # tasks saved as files, with their share of right answers at the start
HASHES = "SHA256SUMS"
TIMES = 8  # answers per problem; sampling makes a share of 90 % uncertain by 3 points for 80 answers, by 1 for 640
EXACT_SETTINGS = 'rewards=[{"type": "python", "function": "benchmarks.sums:exact", "name": "exact"}]'


def exact(completions, answer, **_columns):
    """The reward: 1 for the right sum, otherwise 0."""
    return [float(text.strip() == str(right)) for text, right in zip(completions, answer, strict=True)]


def make(folder: Path, seed: int = 0, right: float = 0.1) -> None:
    """Write `model/`, `train.jsonl` and `test.jsonl` to the folder; `test.jsonl` repeats each held-out sum."""
    model, tokenizer = taught(seed)
    weaken(unsure(model.lm_head.weight), lambda: accuracy(model, tokenizer, PROBLEMS), right, most=1.0)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    rows = [{"prompt": problem, "answer": answer} for problem, answer in PROBLEMS]
    random.Random(seed).shuffle(rows)
    for name, part in (("train", rows[80:]), ("test", rows[:80] * TIMES)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def make_teacher(folder: Path, seed: int = 0) -> None:
    """Write `teacher/`: a model with four times the weights that was trained on every sum and is not weakened."""
    model, tokenizer = taught(seed, hidden=128)
    model.save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")


def taught(seed: int, hidden: int = 64) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A model that was trained on every sum, and its tokenizer."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden,
            intermediate_size=2 * hidden,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=32,
            initializer_range=0.05,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    teach(model, tokenizer)
    return model, tokenizer


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character."""
    vocabulary = {character: index for index, character in enumerate(f"{START}{STOP}0123456789+=")}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token=START))
    plain.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    plain.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=plain, bos_token=START, eos_token=STOP)


def teach(model: PreTrainedModel, tokenizer, steps: int = 600) -> None:
    """Train on every sum, written as `7+8=15$`, with the loss on what follows the equals sign."""
    asked = [len(tokenizer(problem).input_ids) for problem, _ in PROBLEMS]
    ids = [tokenizer(problem + answer + STOP).input_ids for problem, answer in PROBLEMS]
    longest = max(map(len, ids))
    tokens = torch.tensor([row + [0] * (longest - len(row)) for row in ids])
    place, first = torch.arange(longest)[None], torch.tensor(asked)[:, None]
    outside = (place < first) | (place >= torch.tensor([len(row) for row in ids])[:, None])
    target = tokens.masked_fill(outside, -100)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    for _ in range(steps):
        some = torch.randint(len(tokens), (100,))
        model(input_ids=tokens[some], labels=target[some]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


def weaken(change: Callable[[float], None], measure: Callable[[], float], right: float, most: float) -> None:
    """Change a model so that this share of its answers is right. The amount, 0 to `most`, is found by bisection."""
    low, high = 0.0, most
    for _ in range(10):
        middle = (low + high) / 2
        change(middle)
        low, high = (middle, high) if measure() > right else (low, middle)


def unsure(weight: torch.Tensor) -> Callable[[float], None]:
    """`change(amount)` sets the weight to a mix of weight and noise in equal parts, times 1 - amount.

    With noise on all weights, a model would forget each sum in a different way. With more noise on this weight, some
    seeds, which differ in how much noise they tolerate, could no longer find the sums.
    """
    weight = weight.detach()
    mixed = (weight + torch.randn_like(weight) * weight.std()) / math.sqrt(2)
    return lambda amount: weight.copy_(mixed * (1 - amount))


def noisy(model: PreTrainedModel) -> Callable[[float], None]:
    """`change(amount)` adds noise to every weight: `amount` times the weight's standard deviation."""
    weights = [p.detach() for p in model.parameters()]
    taught = [weight.clone() for weight in weights]
    noise = [torch.randn_like(weight) * weight.std() for weight in weights]

    def change(amount: float) -> None:
        for weight, before, added in zip(weights, taught, noise, strict=True):
            weight.copy_(before + amount * added)

    return change


def accuracy(model: PreTrainedModel, tokenizer, problems, longest: int = 6, seed: int = 0) -> float:
    """The share of right answers, sampled at temperature 1."""
    model.set_attn_implementation(PACKED)
    lean(model)
    stops = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    sampling = Sampling(max_completion_length=longest, stop_token_ids=stops, seed=seed)
    prompts = [tokenizer(problem).input_ids for problem, _ in problems]
    sampled = EmbeddedEngine(model, tokenizer).generate(prompts, sampling)
    texts = [tokenizer.decode(group[0].tokens, skip_special_tokens=True) for group in sampled]
    model.set_attn_implementation("sdpa")
    return sum(exact(texts, [answer for _, answer in problems])) / len(problems)


def hashes_of(folder: Path) -> str:
    """The SHA-256 of every file of the tasks in a folder, as `sha256sum` writes them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != HASHES)
    return "".join(f"{hashlib.sha256(f.read_bytes()).hexdigest()}  {f.relative_to(folder)}\n" for f in files)


def check_saved(folder: Path) -> None:
    """Raise ValueError if a file of the saved tasks has changed since it was written."""
    if hashes_of(folder) != (folder / HASHES).read_text():
        raise ValueError(f"{folder} is damaged: restore it, or write it again with `make sums`")


def main(folder: Path) -> None:
    from benchmarks import calculator

    for name, right in SAVED.items():
        make(folder / name, right=right)
    calculator.make(folder / "calculator")
    (folder / HASHES).write_text(hashes_of(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
