"""The cost of an evaluation beyond generation: `python -m benchmarks.evaluate`.

    overhead   an evaluation of the random model of 31.7M parameters on GSM8K (64 questions × 4 samples of 64 tokens,
               graded and stored), compared with only `generate` on the same prompts and seeds, in turn, in one process
    recorded   grading and summarising 4,000 recorded solutions of GSM8K, including starting workers and writing files
    compare    `posttrain compare` of two evaluations of 5,000 items, after its imports

Prints the table and writes results/evaluate.json. Leave the machine alone meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.common import SHARED, THREADS, add_results, make_models, processors, put_table
from posttrain.cli import main as posttrain
from posttrain.config import ModelConfig
from posttrain.config.options import EvalOptions
from posttrain.engines import EmbeddedEngine, Sampling
from posttrain.evaluation.answering import Generated, ask
from posttrain.evaluation.evaluate import evaluate_recorded
from posttrain.evaluation.items import load_items
from posttrain.evaluation.records import EvaluationStore, read_answers, write_files
from posttrain.evaluation.running import Judge, run
from posttrain.evaluation.suite import find_suite, with_settings
from posttrain.models.load import load_model, load_tokenizer
from posttrain.runs.files import save_json, save_rows

RESULTS, PAGE = Path(__file__).parent / "results/evaluate.json", Path(__file__).parent / "README.md"
GOALS = {"overhead": 0.05, "recorded": 30.0, "compare": 2.0}
QUESTIONS, SAMPLES, TOKENS, ANSWERS, PAIRS = 64, 4, 64, 4000, 5000
GSM8K = SHARED / "data/gsm8k"


def overhead(folder: Path, rounds: int) -> list[float]:
    """For each round, the time of the evaluation divided by the time of generation, minus 1."""
    suite = with_settings(find_suite("gsm8k"), {"source": str(GSM8K / "test.jsonl")})
    items = load_items(suite, QUESTIONS)
    model = ModelConfig(path=str(make_models(folder)["policy"]))
    policy, tokenizer = load_model(model, "lm", torch.float32, torch.device("cpu")), load_tokenizer(model)
    sampling = Sampling(temperature=1.0, max_completion_length=TOKENS, num_generations=SAMPLES)
    prompts = ask(suite, items.items, tokenizer, policy)
    answers = Generated(EmbeddedEngine(policy, tokenizer), sampling, tokenizer, prompts)
    answers(items.items[:8], lambda *_: None)
    found = []
    for number in range(rounds):
        began = time.perf_counter()
        answers(items.items, lambda *_: None)
        alone = time.perf_counter() - began
        with Judge(suite) as judge, EvaluationStore(folder / f"evaluation-{number}") as store:
            began = time.perf_counter()
            run(items, answers, judge, SAMPLES, store=store, key="gsm8k", facts={}, sampling={})
            write_files(folder / f"evaluation-{number}", store, {})
            found.append((time.perf_counter() - began) / alone - 1)
        print(f"generate {alone:.2f} s, evaluation {found[-1]:+.1%}", flush=True)
    return found


def recorded(folder: Path, rounds: int) -> list[float]:
    """Seconds for 1,000 items with four recorded solutions each."""
    rows = [json.loads(line) for line in (GSM8K / "example_model_solutions.jsonl").open(encoding="utf-8")]
    count = ANSWERS // 4
    four = [
        {"question": row["question"], "answer": row["ground_truth"], "completions": [one["solution"] for one in solved]}
        for row in rows[:count]
        if (solved := [value for value in row.values() if isinstance(value, dict)])
    ]
    save_rows(folder / "four.jsonl", four)
    items = load_items(with_settings(find_suite("gsm8k"), {"source": str(folder / "four.jsonl")}))
    seconds = []
    for number in range(rounds):
        began = time.perf_counter()
        evaluate_recorded(folder / "four.jsonl", [items], EvalOptions(), folder / f"recorded-{number}")
        seconds.append(time.perf_counter() - began)
        assert len(read_answers(folder / f"recorded-{number}")) == ANSWERS
    return seconds


def compared(folder: Path, rounds: int) -> list[float]:
    """Seconds of `posttrain compare` for two evaluations of 5,000 items, made from the recorded answers."""
    base = [answer for answer in read_answers(folder / "recorded-0") if answer.sample < 2]
    for number in (0, 1):
        mine = [answer for answer in base if answer.sample == number]
        repeated = ((i, mine[i % len(mine)]) for i in range(PAIRS))
        many = [replace(answer, item=str(i), sample=0, prompt=f"{i}: {answer.prompt}") for i, answer in repeated]
        place = folder / f"side-{number}"
        save_rows(place / "answers.jsonl", map(asdict, many))
        summary = json.loads((folder / "recorded-0/summary.json").read_text())
        summary["model"]["name"] = f"side-{number}"
        for suite in summary["suites"].values():
            suite |= {"items": PAIRS, "answers": PAIRS, "graded": PAIRS, "samples": 1}
        save_json(place / "summary.json", summary)
    seconds = []
    for number in range(rounds + 1):  # the first call also imports
        began = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            arguments = [
                "compare",
                str(folder / "side-0"),
                str(folder / "side-1"),
                "--output",
                str(folder / f"c{number}"),
            ]
            assert posttrain(arguments) == 0
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(THREADS)
    with TemporaryDirectory() as place:
        folder = Path(place)
        found = {
            "overhead": overhead(folder, rounds),
            "recorded": recorded(folder, rounds),
            "compare": compared(folder, rounds),
        }
    results = add_results(RESULTS, {name: {"goal": GOALS[name], "rounds": values} for name, values in found.items()})
    lines = ["| | median | goal |", "|---|---|---|"]
    names = {
        "overhead": f"evaluation beside `generate` alone, {QUESTIONS} × {SAMPLES} × {TOKENS} tokens",
        "recorded": f"{ANSWERS:,} recorded answers graded and summarised",
        "compare": f"`compare` of 2 × {PAIRS:,} items",
    }
    for name, values in found.items():
        shown = f"{statistics.median(values):+.1%}" if name == "overhead" else f"{statistics.median(values):.2f} s"
        goal = f"≤ {GOALS[name]:.0%}" if name == "overhead" else f"< {GOALS[name]:g} s"
        lines.append(f"| {names[name]} | {shown} | {goal} |")
    table = "\n".join(lines)
    put_table(PAGE, f"{table}\n\n{processors(results)}", "evaluate")
    print(table)
    missed = [name for name, values in found.items() if statistics.median(values) > GOALS[name]]
    print(f"missed: {', '.join(missed)}" if missed else "every goal is met")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
