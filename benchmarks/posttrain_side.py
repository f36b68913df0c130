"""posttrain's side of the benchmark: `python -m benchmarks.posttrain_side dpo --models DIR --steps 12`.

The ordinary recipe with ordinary settings: float32 on the CPU, constant learning rate, the file's order, one log line
per step. It prints JSON with the same values as TRL's side.
"""

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from torch.nn.modules.module import register_module_forward_hook

import posttrain
from benchmarks.common import (
    BATCH_SIZE,
    LEARNING_RATES,
    MAX_LENGTH,
    THREADS,
    make_models,
    peak_memory_gb,
    rows_of,
    write_rows,
)
from posttrain import runner
from posttrain.config import load
from posttrain.scoring import RewardScorer, Scorer

# Tokens per pack, which determine memory: most batches of pairs fit in one pack. SFT shares nothing between rows, and
# packs of the longest allowed row are as fast as whole batches.
TOKENS_PER_PACK = {"sft": MAX_LENGTH} | dict.fromkeys(("dpo", "dpo-lora", "kto", "orpo", "reward"), 3072)


def settings(
    method: str,
    folder: Path,
    models: Path,
    steps: int,
    tokens_per_pack: int | None = None,
    learning_rate: float | None = None,
    dtype: str = "float32",
) -> list[str]:
    """The run's settings as overrides, as a user would type them; None stands for the method's default."""
    source = write_rows(folder / "rows.jsonl", rows_of(method))
    lora = ["model.lora.r=16", "model.lora.alpha=32", "model.lora.dropout=0"] if method == "dpo-lora" else []
    return [
        *lora,
        "name=bench",
        f"output_dir={folder}",
        f"model.path={make_models(models)['reward' if method == 'reward' else 'policy']}",
        f"model.dtype={dtype}",
        f"method.type={method.removesuffix('-lora')}",
        f"data.source={source}",
        "data.template=none",
        "data.shuffle=false",
        f"data.max_length={MAX_LENGTH}",
        "data.overlong=truncate",
        f"training.batch_size={BATCH_SIZE}",
        f"training.tokens_per_pack={tokens_per_pack or TOKENS_PER_PACK[method]}",
        f"training.learning_rate={learning_rate or LEARNING_RATES[method]}",
        "training.lr_scheduler_type=constant",
        f"training.max_steps={steps}",
        "tracking.logging_steps=1",
        "devices.type=cpu",
    ]


def measure(arguments: argparse.Namespace) -> dict:
    """Train and return the measurements."""
    with TemporaryDirectory() as folder:
        given = settings(folder=Path(folder), **vars(arguments))
        config = load(None, given).config
        with counting() as work:
            runner.train(config)
        run = Path(folder) / "bench"
        results = json.loads((run / "results.json").read_text())
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "side": f"posttrain {posttrain.__version__}",
        "method": arguments.method,
        "tokens_per_pack": config.training.tokens_per_pack,
        "steps": len(lines),
        "learning_rate": config.training.learning_rate,
        "threads": torch.get_num_threads(),
        "losses": [line["loss"] for line in lines],
        "grad_norms": [line["grad_norm"] for line in lines],
        "tokens": results["num_tokens"],
        "work": work,
        "seconds": results["train_runtime"],
        "memory_peak_gb": peak_memory_gb(),
    }


@contextmanager
def counting() -> Iterator[list[dict]]:
    """Record what has to be computed for each pack that is scored (see run.useful_flops)."""
    work: list[dict] = []

    def note(module: torch.nn.Module, inputs: tuple, _) -> None:
        if isinstance(module, Scorer | RewardScorer):
            [pack, *_] = inputs
            causal = isinstance(module, Scorer)
            work.append(
                {
                    "tokens": pack.num_tokens,
                    "read": len(pack.source_N.unique()) if causal else pack.num_sequences,
                    "scored": len(pack.target_N) if causal else 0,
                    "visible": int(
                        (pack.position_T + 1).sum()
                    ),  # each token sees itself and the tokens above it in its tree
                    "backward": torch.is_grad_enabled(),
                }
            )

    handle = register_module_forward_hook(note)
    try:
        yield work
    finally:
        handle.remove()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=LEARNING_RATES)
    parser.add_argument("--models", type=Path, required=True, help="folder of the random models; created if missing")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, help="default: posttrain's for the method")
    parser.add_argument("--tokens-per-pack", type=int, help="default: by method")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    arguments = parser.parse_args()
    torch.set_num_threads(THREADS)
    print(json.dumps(measure(arguments)))


if __name__ == "__main__":
    main()
