"""posttrain's side of the benchmark: `python -m benchmarks.posttrain_side dpo --models DIR --steps 12 --output o.json`.

The ordinary recipe through ordinary settings: float32 on the CPU, constant learning rate, the file's order, one log a
step. The JSON has what TRL's side has.
"""

import argparse
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

import posttrain
from benchmarks.common import (
    BATCH_SIZE,
    LEARNING_RATES,
    MAX_LENGTH,
    THREADS,
    make_models,
    peak_memory_gb,
    preference_rows,
    sft_rows,
    write_rows,
)
from posttrain import recipes
from posttrain.batch import pack
from posttrain.config import RunConfig, load
from posttrain.data import prepare_run
from posttrain.models.load import load_tokenizer

# Tokens a pack holds, the memory knob: most batches of pairs fit in one. SFT shares nothing between rows, and packs of
# half a batch are as fast as whole ones.
TOKENS_PER_PACK = {"dpo": 3072, "reward": 3072, "sft": 1536}


def settings(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """The run's settings as overrides, the form a user types."""
    method = arguments.method
    rows = sft_rows() if method == "sft" else preference_rows()
    source = write_rows(folder / "rows.jsonl", rows)
    return [
        "name=bench",
        f"output_dir={folder}",
        f"model.path={make_models(arguments.models)['reward' if method == 'reward' else 'policy']}",
        "model.dtype=float32",
        f"method.type={method}",
        f"data.source={source}",
        "data.template=none",
        "data.shuffle=false",
        f"data.max_length={MAX_LENGTH}",
        "data.overlong=truncate",
        f"training.batch_size={BATCH_SIZE}",
        f"training.tokens_per_pack={arguments.tokens_per_pack}",
        f"training.learning_rate={arguments.learning_rate or LEARNING_RATES[method]}",
        "training.lr_scheduler_type=constant",
        f"training.max_steps={arguments.steps}",
        "tracking.logging_steps=1",
        "devices.type=cpu",
    ]


def measure(arguments: argparse.Namespace) -> dict:
    """Train and return the measurements."""
    after_imports = peak_memory_gb()
    with TemporaryDirectory() as folder:
        config = load(None, settings(arguments, Path(folder))).config
        recipes.train(config)
        run = Path(folder) / "bench"
        results = json.loads((run / "results.json").read_text())
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        work = count_work(config)
    return {
        "side": f"posttrain {posttrain.__version__}",
        "method": arguments.method,
        "tokens_per_pack": arguments.tokens_per_pack,
        "steps": len(lines),
        "learning_rate": config.training.learning_rate,
        "threads": torch.get_num_threads(),
        "losses": [line["loss"] for line in lines],
        "grad_norms": [line["grad_norm"] for line in lines],
        "tokens": results["num_tokens"],
        "work": work,
        "seconds": results["train_runtime"],
        "memory_after_imports_gb": after_imports,
        "memory_peak_gb": peak_memory_gb(),
    }


def count_work(config: RunConfig) -> dict[str, int]:
    """What the run had to compute: physical tokens, scored tokens, and (query, key) pairs that attention looks at."""
    data = prepare_run(config, load_tokenizer(config.models[0])).train
    work = {"tokens": 0, "scored": 0, "visible": 0}
    for step in range(config.training.max_steps or 0):
        examples = [data[i] for i in range(step * BATCH_SIZE, min((step + 1) * BATCH_SIZE, len(data)))]
        for one in pack(examples, config.training.tokens_per_pack, keep_last=config.method.type == "reward"):
            work["tokens"] += one.num_tokens
            work["scored"] += len(one.target_N)
            work["visible"] += int((one.position_T + 1).sum())  # a token sees what is above it in its tree, and itself
    return work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=LEARNING_RATES)
    parser.add_argument("--models", type=Path, required=True, help="folder of the random models; made when missing")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, help="default: posttrain's for the method")
    parser.add_argument("--tokens-per-pack", type=int, help="default: by method")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.tokens_per_pack = arguments.tokens_per_pack or TOKENS_PER_PACK[arguments.method]
    torch.set_num_threads(THREADS)
    result = measure(arguments)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['side']} {result['method']}: {result['seconds']:.1f} s, {result['memory_peak_gb']:.2f} GB")


if __name__ == "__main__":
    main()
