"""Shared by both sides of a benchmark: the model folder and the rows, so that weights, text and order are the same."""

import gzip
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.models import write_model
from posttrain.base.memory import peak_of_process  # uses only the standard library, because TRL is measured with it too

SHARED = Path(__file__).resolve().parents[1].parent / "shared"

BATCH_SIZE = 8
# posttrain's defaults; higher for the adapter, so that its losses change.
LEARNING_RATES = {"dpo": 1e-6, "dpo-lora": 1e-4, "kto": 1e-6, "orpo": 1e-6, "reward": 1e-5, "sft": 2e-5}
PAIRS = (
    96  # number of first pairs of HH harmless; the longest has 589 tokens, so a max_length of 1024 truncates nothing
)
MAX_LENGTH = 1024
THREADS = 2

# TRL's settings in every benchmark: float32 on the CPU, no gradient checkpointing, nothing but the steps.
TRL_SETTINGS = {
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "bf16": False,
    "use_cpu": True,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}

ALPACA_PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_PROMPT_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


def make_models(folder: Path, seed: int = 0) -> dict[str, Path]:
    """Folders of the random model and its tokenizer: `policy` (causal LM), `reward` (scalar head); created if missing.

    Qwen3 architecture, 31.7M parameters, float32, all random numbers from `seed`. Both have the same backbone weights.
    """
    folders = {"policy": folder / "policy", "reward": folder / "reward"}
    if all((path / "model.safetensors").exists() for path in folders.values()):
        return folders
    tokenizer = SHARED / "tokenizers/minimind6400"
    policy = write_model(
        folders["policy"], tokenizer, seed=seed, hidden_size=512, num_hidden_layers=8, intermediate_size=1536,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, max_position_embeddings=4096,
        tie_word_embeddings=False,
    )  # fmt: skip
    policy.config.num_labels = 1
    reward = AutoModelForSequenceClassification.from_config(policy.config)
    reward.model.load_state_dict(policy.base_model.state_dict())
    torch.nn.init.normal_(reward.score.weight, std=0.02)
    reward.save_pretrained(folders["reward"])
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folders["reward"])
    return folders


def preference_rows(count: int = PAIRS) -> list[dict[str, str]]:
    """The first `count` pairs of HH harmless as prompt, chosen, rejected; the prompt ends in the last `Assistant:`."""
    rows = []
    with gzip.open(SHARED / "data" / "hh-harmless" / "train.jsonl.gz", "rt", encoding="utf-8") as lines:
        for number, line in zip(range(count), lines, strict=False):
            row = json.loads(line)
            prompt, chosen, rejected = split_transcripts(row["chosen"], row["rejected"])
            if not (chosen and rejected and prompt):
                raise ValueError(f"hh-harmless, row {number}: the two transcripts do not share their prompt")
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return rows


def labelled_rows(count: int = PAIRS) -> list[dict[str, object]]:
    """The same pairs in KTO's form: each completion is a separate row with a label, chosen and rejected in turn."""
    rows: list[dict[str, object]] = []
    for row in preference_rows(count):
        for name, label in (("chosen", True), ("rejected", False)):
            rows.append({"prompt": row["prompt"], "completion": row[name], "label": label})
    return rows


def rows_of(method: str) -> list[dict]:
    """The rows that a method is measured on."""
    if method == "sft":
        return sft_rows()
    return labelled_rows() if method == "kto" else preference_rows()


def split_transcripts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Prompt, chosen and rejected reply of two transcripts; empty strings if they differ before the last reply."""
    marker = "\n\nAssistant:"
    end, other_end = (text.rindex(marker) + len(marker) for text in (chosen, rejected))
    if chosen[:end] != rejected[:other_end]:
        return "", "", ""
    return chosen[:end], chosen[end:], rejected[other_end:]


def sft_rows() -> list[dict[str, str]]:
    """The 999 rows of the Alpaca demo as prompt (Alpaca's template) and completion."""
    rows = json.loads((SHARED / "data" / "sft-demo" / "alpaca_en_demo.json").read_text(encoding="utf-8"))
    return [
        {"prompt": (ALPACA_PROMPT_INPUT if row["input"] else ALPACA_PROMPT).format(**row), "completion": row["output"]}
        for row in rows
    ]


def write_rows(path: Path, rows: list[dict]) -> Path:
    """Write the rows as JSONL, for the side that reads files. Returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def in_own_process(module: str, *arguments: str, python: str | Path = sys.executable, **environment: str) -> dict:
    """Run `python -m benchmarks.MODULE ARGUMENTS` on THREADS threads. Returns the JSON in its last line of output."""
    done = subprocess.run(
        [str(python), "-m", f"benchmarks.{module}", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": str(THREADS)} | environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{module} {' '.join(arguments)} failed:\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def peak_memory_gb() -> float:
    """The peak resident memory of this process so far, in GB (1e9 bytes)."""
    return peak_of_process() / 1e9


def machine() -> dict[str, str | int | None]:
    """The machine that a number was measured on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {"processor": name, "cpus": os.cpu_count(), "platform": platform.platform(), "torch": torch.__version__}


def add_results(path: Path, results: dict[str, dict]) -> dict[str, dict]:
    """Write results by name into a JSON file, replacing earlier ones of the same names. Returns all its results."""
    from posttrain.runs.files import load_json, save_json  # not imported where TRL is measured

    here = {name: {"machine": machine()} | result for name, result in results.items()}
    whole = (load_json(path) if path.exists() else {}) | here
    save_json(path, whole)
    return whole


def processors(results: dict[str, dict]) -> str:
    """A line for the page of results that names the processor of each result."""
    names: dict[str, list[str]] = {}
    for name, result in results.items():
        names.setdefault(result["machine"]["processor"], []).append(name)
    return "Processor: " + "; ".join(
        processor if len(names) == 1 else f"{processor} ({', '.join(of)})" for processor, of in names.items()
    )


def put_table(page: Path, table: str, name: str = "table") -> None:
    """Write the table into a page of the docs, between the marker of that name and the next end marker."""
    head, begin, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    _, end, tail = rest.partition("<!-- end -->")
    if not (begin and end):
        raise SystemExit(f"{page} has no place for the table: <!-- {name} -->, <!-- end -->")
    page.write_text(f"{head}{begin}{table}\n{end}{tail}", encoding="utf-8")
