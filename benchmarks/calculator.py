"""A task for models that call tools: sums of two numbers of three digits, which a small model cannot add by itself.

The model is trained on conversations: some call the calculator and repeat its result, most guess. So at the
start it knows how to call and rarely does. Reinforcement learning teaches it when.
"""

import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import posttrain
from posttrain.environments.calculator import Calculator

TEMPLATE = (
    "{%- if tools %}[{% for tool in tools %}{{ tool.function.name + ' ' }}{% endfor %}]{% endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{ '<call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '</call>' }}"
    "{%- endfor %}{{ '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
MARKS = ("<|im_start|>", "<|im_end|>", "<call>", "</call>")
CALLS = 0.05  # share of questions that the model calls the tool for at the start


def tools() -> list[dict[str, Any]]:
    """The schemas of the calculator's tools."""
    from transformers.utils import get_json_schema

    return [get_json_schema(Calculator.calculate)]


def problems(count: int, seed: str) -> list[tuple[int, int]]:
    source = random.Random(seed)
    return [(source.randint(100, 999), source.randint(100, 999)) for _ in range(count)]


def question(a: int, b: int) -> dict[str, Any]:
    return {"role": "user", "content": f"{a}+{b}=?"}


def conversation(a: int, b: int, guess: int | None = None) -> list[dict[str, Any]]:
    """A question with a guess, or with a call of the tool and its result."""
    if guess is not None:
        return [question(a, b), {"role": "assistant", "content": str(guess)}]
    call = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": f"{a}+{b}"}}}
    return [
        question(a, b),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculate", "content": str(a + b)},
        {"role": "assistant", "content": str(a + b)},
    ]


def make(folder: Path, seed: int = 0) -> None:
    """Write `model/`, which calls the tool for one question in twenty, `train.jsonl` and `test.jsonl` to the folder."""
    for name, count in (("train", 2000), ("test", 200)):
        asked = problems(count, f"{seed} {name}")
        rows = [{"prompt": [question(a, b)], "answer": str(a + b)} for a, b in asked]
        write(folder / f"{name}.jsonl", rows)
    with TemporaryDirectory() as temporary:
        teach(Path(temporary), seed)
        taught = Path(temporary) / "taught/guess/final"
        AutoModelForCausalLM.from_pretrained(taught, dtype=torch.bfloat16).save_pretrained(folder / "model")
        AutoTokenizer.from_pretrained(taught).save_pretrained(folder / "model")


def teach(folder: Path, seed: int) -> None:
    """Train a small model in the folder: first on calls, then on guesses."""
    source = random.Random(seed)
    calls = [conversation(a, b) for a, b in problems(8000, f"{seed} calls")]
    guesses = [
        conversation(a, b, None if source.random() < CALLS else source.randint(200, 1998))
        for a, b in problems(3000, f"{seed} guesses")
    ]
    for name, talks in (("calls", calls), ("guess", guesses)):
        write(folder / f"{name}.jsonl", [{"messages": talk, "tools": tools()} for talk in talks])
    tokenizer = make_tokenizer(calls[:2000], tools())
    put_start(folder / "start", tokenizer, seed, positions=128)
    sources = {name: {"source": str(folder / f"{name}.jsonl")} for name in ("calls", "guess")}
    stages = {
        "calls": {"data": sources["calls"], "training": {"max_steps": 400, "learning_rate": 4e-3}},
        "guess": {"init_from": "calls", "data": sources["guess"], "training": {"max_steps": 60, "learning_rate": 1e-3}},
    }
    settings = {
        "name": "taught", "output_dir": str(folder), "model": str(folder / "start"), "devices": {"type": "cpu"},
        "method": {"type": "sft", "assistant_only_loss": True}, "data": {"max_length": 128}, "seed": seed,
        "training": {"batch_size": 32, "tokens_per_pack": 4096}, "stages": stages,
    }  # fmt: skip
    (folder / "taught.json").write_text(json.dumps(settings))
    posttrain.train_all(folder / "taught.json")


def put_start(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int, positions: int) -> None:
    """Write a small model with random weights, and its tokenizer."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=positions, initializer_range=0.05, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def make_tokenizer(talks: list[list[dict[str, Any]]], shown: list[dict[str, Any]] | None) -> PreTrainedTokenizerFast:
    """Pairs of bytes that occur together are tokens, each digit is one."""
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    plain.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=list(MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    texts = [tokenizer.apply_chat_template(talk, tools=shown, tokenize=False) for talk in talks]
    plain.train_from_iterator(texts, trainer)
    done = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|im_end|>")
    done.chat_template = TEMPLATE
    return done


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
