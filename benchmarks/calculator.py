"""A task for models that call tools: sums of two numbers of three digits, which a small model cannot add by itself.

The model is trained on conversations: a share calls the tool `add` and repeats its result, the others guess. So at the
start it knows how to call and rarely does. Reinforcement learning teaches it when.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{%- if tools %}{{ '[' }}{%- for tool in tools %}{{ tool.function.name }}{{ ' ' }}{%- endfor %}{{ ']' }}{%- endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{ '<call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '</call>' }}"
    "{%- endfor %}{{ '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
MARKS = ("<|im_start|>", "<|im_end|>", "<call>", "</call>")


class Calculator:
    """An environment with TRL's contract."""

    def reset(self, **row: Any) -> None:
        self.calls = 0

    def add(self, a: int, b: int) -> int:
        """
        Add two numbers.

        Args:
            a: the first number
            b: the second number
        """
        self.calls += 1
        return a + b


def exact(completions, answer, **_columns):
    """The reward: 1 if the last reply is the sum, otherwise 0."""
    return [float(talk[-1]["content"].strip() == str(right)) for talk, right in zip(completions, answer, strict=True)]


def tools() -> list[dict[str, Any]]:
    """The schemas of the calculator's tools."""
    from transformers.utils import get_json_schema

    return [get_json_schema(Calculator.add)]


def problems(count: int, seed: int) -> list[tuple[int, int]]:
    source = random.Random(seed)
    return [(source.randint(100, 999), source.randint(100, 999)) for _ in range(count)]


def conversation(a: int, b: int, calls: bool, guess: int) -> list[dict[str, Any]]:
    question = {"role": "user", "content": f"{a}+{b}=?"}
    if not calls:
        return [question, {"role": "assistant", "content": str(guess)}]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
    return [
        question,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": str(a + b)},
        {"role": "assistant", "content": str(a + b)},
    ]


def make(folder: Path, seed: int = 0, share: float = 0.08, rows: int = 20_000) -> None:
    """Write `start/` (a model without training), `sft.jsonl`, `train.jsonl` and `test.jsonl` to the folder."""
    source = random.Random(seed)
    some = [conversation(a, b, source.random() < share, source.randint(200, 1998)) for a, b in problems(rows, seed)]
    write(folder / "sft.jsonl", [{"messages": talk, "tools": tools()} for talk in some])
    for name, count, other in (("train", 2000, seed + 1), ("test", 200, seed + 2)):
        asked = problems(count, other)
        write(
            folder / f"{name}.jsonl",
            [{"prompt": [{"role": "user", "content": f"{a}+{b}=?"}], "answer": str(a + b)} for a, b in asked],
        )
    tokenizer = make_tokenizer(some[:2000])
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=160, initializer_range=0.05, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "start")
    tokenizer.save_pretrained(folder / "start")


def make_tokenizer(talks: list[list[dict[str, Any]]]) -> PreTrainedTokenizerFast:
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
    texts = [tokenizer.apply_chat_template(talk, tools=tools(), tokenize=False) for talk in talks]
    plain.train_from_iterator(texts, trainer)
    done = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|im_end|>")
    done.chat_template = TEMPLATE
    return done


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
