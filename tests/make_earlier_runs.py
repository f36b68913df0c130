"""Runs that were interrupted, and their uninterrupted metrics: `python make_earlier_runs.py FOLDER`.

`earlier_runs.tar.xz` is what the version before `behavior_version` made of this. Paths are relative to FOLDER, where
the runs lie in `runs/NAME`, each as after a power cut, and `expected.json` has all metrics by run.
"""

import json
import os
import random
import shutil
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import yaml
from data_tokenizer import byte_tokenizer

from benchmarks.models import write_model
from posttrain.cli import main
from posttrain.training.loop import Loop
from posttrain.training.saving import Saver

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
REWARD = '''"""A reward that a random model earns."""


def early_letters(completions, **_):
    return [sum(32 < ord(c) < 80 for c in text) / max(len(text), 1) - 0.02 * len(text) for text in completions]
'''
STEP = 3  # of six: where runs were interrupted
RUNS = {
    "sft": {"method": "sft", "data": {"source": "chats.parquet", "validation": {"rows": 6}}},
    "dpo": {
        "method": "dpo",
        "model": {"path": "model", "lora": {"r": 4}},
        "data": {"source": "pairs.jsonl", "validation": {"rows": 6}},
    },
    "dpo-no-reference": {
        "method": {"type": "dpo", "use_ref_model": False},
        "model": {"path": "model", "lora": {"r": 4}},
        "data": {"source": "pairs.jsonl"},
    },
    "grpo": {
        "method": {"type": "grpo", "num_generations": 4, "beta": 0.05},
        "data": {"source": "prompts.jsonl", "validation": {"rows": 4}, "template": "r1_zero"},
        "rewards": [{"type": "python", "function": "own_rewards:early_letters"}],
        "rollout": {"max_completion_length": 12},
    },
    "experts": {"method": "sft", "model": "experts", "data": {"source": "chats.parquet"}},
    "stages": {
        "data": {"source": "pairs.jsonl", "validation": {"rows": 6}},
        "model": {"path": "model", "lora": {"r": 4}},
        "stages": {
            "sft": {"method": "sft"},
            "dpo": {"init_from": "sft", "method": "dpo"},
            "kto": {"init_from": "dpo", "method": "kto", "data": {"source": "labels.jsonl", "validation": None}},
        },
    },
}
INTERRUPTED = {name: name for name in RUNS} | {"stages": "stages/dpo"}  # the folder of the run in progress


def make_data() -> None:
    rng = random.Random(0)

    def words(least: int, most: int) -> str:
        return "".join(rng.choice("abcdefgh XYZ") for _ in range(rng.randint(least, most)))

    pairs = [{"prompt": words(3, 30), "chosen": words(3, 20), "rejected": words(3, 20)} for _ in range(40)]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    labels = [{"prompt": words(3, 20), "completion": words(3, 20), "label": index % 2 == 0} for index in range(26)]
    Path("labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in labels))
    prompts = [{"problem": words(3, 60), "answer": str(index)} for index in range(30)]
    Path("prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    chats = []
    for index in range(40):
        arguments = {"city": words(2, 5)} if index % 2 else {"count": index}  # Parquet gives both keys to every row
        call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
        chats.append(
            [
                {"role": "user", "content": words(3, 20), "tool_calls": None},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": words(2, 5), "tool_calls": None},
                {"role": "assistant", "content": words(3, 20), "tool_calls": None},
            ]
        )
    pyarrow.parquet.write_table(pyarrow.table({"messages": chats}), "chats.parquet")
    Path("own_rewards.py").write_text(REWARD)


def make_models() -> None:
    byte_tokenizer(TEMPLATE).save_pretrained("tokenizer")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 1024, "tie_word_embeddings": True}
    write_model(Path("model"), Path("tokenizer"), initializer_range=0.1, **sizes)
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "mlp_only_layers": []}
    write_model(Path("experts"), Path("tokenizer"), "qwen3_moe", initializer_range=0.1, **sizes)


def settings(name: str) -> dict:
    common = {"name": name, "model": "model", "devices": {"type": "cpu"}, "checkpoint": {"save_steps": STEP}}
    common |= {"training": {"max_steps": 2 * STEP, "batch_size": 4, "tokens_per_pack": 2048, "learning_rate": 1.0e-3}}
    common |= {"evaluation": {"eval_steps": 2}, "tracking": {"logging_steps": 1}}
    given = RUNS[name]
    return {**common, **given, "data": {"max_length": 512, **given["data"]}}


def train(name: str, *more: str) -> int:
    return main(["train", f"{name}.yaml", *more])


def metrics(folder: Path) -> dict[str, list[dict]]:
    """The metrics of every run in a folder, by the run's name."""
    found = sorted(folder.rglob("metrics.jsonl"))
    return {file.parent.name: [json.loads(line) for line in file.read_text().splitlines()] for file in found}


def interrupt(name: str) -> None:
    after_step = Loop._after_step

    def crash(self):
        after_step(self)
        if self.state.step == STEP and self.job.run.folder.name == Path(INTERRUPTED[name]).name:
            raise RuntimeError("power cut")

    Loop._after_step, Saver.save_after = crash, lambda self, error: None
    try:
        assert train(name) != 0
    finally:
        Loop._after_step = after_step


def make(folder: Path) -> None:
    folder.mkdir()
    os.chdir(folder)
    make_data()
    make_models()
    expected = {}
    for name in RUNS:
        Path(f"{name}.yaml").write_text(yaml.safe_dump(settings(name), sort_keys=False))
        assert train(name) == 0
        expected[name] = metrics(Path("runs") / name)
        shutil.rmtree(Path("runs") / name)
    for name in RUNS:
        interrupt(name)
    Path("expected.json").write_text(json.dumps(expected))
    unneeded = ("report.html", "curves.png", "training.log", ".lock")
    for file in [file for file in Path("runs").rglob("*") if file.name in unneeded]:
        file.unlink()
    for checkpoint in Path("runs/stages/sft").glob("checkpoint-*"):  # of the finished stage
        shutil.rmtree(checkpoint)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    sys.argv = ["posttrain"]  # the runs record the command
    make(where)
