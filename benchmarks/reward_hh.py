"""A reward model on HH harmless, three seeds: `python -m benchmarks.reward_hh`. Writes results/reward_hh.json.

1,600 training pairs, 300 test pairs, and the pretrained model stories260K; no pair is dropped or truncated. There is
one epoch, and the last model is measured, so nothing is selected on the test set. The seed changes the initial head and
the order of the data.
"""

import json
import math
import os
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks.common import SHARED
from posttrain import runner
from posttrain.config import load

SEEDS = (0, 1, 2)
SETTINGS = [
    f"model.path={SHARED / 'models' / 'stories260K'}",
    "method.type=reward",
    f"data.source={SHARED / 'data' / 'hh-harmless' / 'train.jsonl.gz'}",
    "data.format=hh",
    "data.template=none",
    "data.max_length=4096",
    "data.overlong=error",
    f"data.validation.source={SHARED / 'data' / 'hh-harmless' / 'test.jsonl.gz'}",
    "training.batch_size=16",
    "training.learning_rate=1e-3",
    "training.num_train_epochs=1",
    "evaluation.eval_steps=100",
]


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share of `count` trials (Wilson 1927)."""
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return middle - half, middle + half


def main() -> None:
    results = []
    for seed in SEEDS:
        with TemporaryDirectory() as folder:
            overrides = [*SETTINGS, f"seed={seed}", "name=run", f"output_dir={folder}"]
            runner.train(load(None, overrides).config)
            measured = json.loads((Path(folder) / "run" / "results.json").read_text())
        accuracy = measured["final"]["eval_accuracy"]
        results.append(
            {
                "seed": seed,
                "start": measured["start"]["eval_accuracy"],
                "accuracy": accuracy,
                "interval": wilson(accuracy, 300),
                "train_accuracy": measured["final"]["accuracy"],
                "seconds": measured["train_runtime"],
            }
        )
    mean = statistics.mean(r["accuracy"] for r in results)
    summary = {"mean": mean, "deviation": statistics.stdev(r["accuracy"] for r in results), "runs": results}
    path = Path(__file__).parent / "results" / "reward_hh.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(summary, indent=1) + "\n")
    print("| seed | before | after | 95 % interval | training pairs |\n|---|---|---|---|---|")
    for r in results:
        low, high = r["interval"]
        print(f"| {r['seed']} | {r['start']:.3f} | {r['accuracy']:.3f} | {low:.3f} to {high:.3f} ", end="")
        print(f"| {r['train_accuracy']:.3f} |")
    print(f"mean {mean:.3f}, standard deviation over seeds {summary['deviation']:.3f}")


if __name__ == "__main__":
    main()
