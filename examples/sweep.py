"""One run per learning rate through the API; the best one has the best validation metric.

`posttrain sweep` does this for any setting, with early stopping and intervals (docs/sweep.md). In a program you
choose the values, the metric and what happens next. Run it with a small model, a folder or a hub id:

    python examples/sweep.py --model MODEL
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

import posttrain

ANIMALS = ["cat", "dog", "bird", "fish", "frog", "bear", "duck", "mouse", "horse", "rabbit", "fox", "pig"]
COLOURS = ["red", "blue", "green"]


def write_rows(file: Path) -> None:
    """Completions of one form for every animal and colour."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": f"The {animal} saw a {colour} ball.", "completion": f" It took the {colour} ball home."}
        for animal in ANIMALS
        for colour in COLOURS
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(argv: Sequence[str] | None = None) -> dict[float, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub id of a small causal model")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-5, 1e-3, 3e-2])
    parser.add_argument("--metric", default="eval_loss", help="metric of the validation, of which less is better")
    parser.add_argument("--output", type=Path, default=Path("runs/sweep"), help="folder of the runs")
    given = parser.parse_args(argv)

    rows = given.output / "rows.jsonl"
    write_rows(rows)
    settings = {
        "output_dir": str(given.output),
        "model": given.model,
        "method": "sft",
        "data": {"source": str(rows), "template": "none", "validation": {"ratio": 0.25}},
        "training": {"batch_size": 8, "max_steps": given.steps},
        "evaluation": {"eval_steps": given.steps},
        "tracking": {"logging_steps": 1},
    }
    runs = {
        rate: posttrain.train(
            settings, overrides=[f"name=rate-{rate:g}", f"training.learning_rate={rate}"], overwrite=True
        )
        for rate in given.rates
    }
    values = {rate: run.metric(given.metric)[1][-1] for rate, run in runs.items()}  # after the last step
    best = min(values, key=values.__getitem__)
    table = Table("learning rate", "loss", given.metric, "")
    for rate in sorted(values, key=values.__getitem__):
        loss = runs[rate].metric("loss")[1][-1]
        table.add_row(f"{rate:g}", f"{loss:.4f}", f"{values[rate]:.4f}", "best" if rate == best else "")
    Console().print(table)
    print(f"best: {runs[best].folder}")
    return values


if __name__ == "__main__":
    main()
