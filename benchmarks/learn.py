"""Does each method learn, and from its labels? `make learn`. Writes results/learn.json and docs/learning.md's table.

The task is the quickstart's: SFT of a small model with random weights on sums, where three of four demonstrations show
their working. Every preference method then learns to always show the working, from pairs of a reply with and a reply
without it. As a control, each method also learns from randomly swapped labels. Everything is measured on problems that
no model was trained on, for three seeds, each with its own model and data.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"  # the runs share the cores among them

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.common import put_table
from benchmarks.trials import save_trials, verdict
from posttrain import functional, runner
from posttrain.config import load
from posttrain.data import arithmetic_problems
from posttrain.quickstart import Size, settings_files, write_bare_demonstrations
from posttrain.quickstart.model import TAGS, make_model, sample_replies, turns
from posttrain.runs.atomic import write_file
from posttrain.runs.files import load_json, save_rows

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/learn.json", ROOT / "docs/learning.md"
SEEDS = (0, 1, 2)
SIZE = Size(worked=10_500, bare=3_500, sft_steps=1400, held_out=400)
PAIRS, HELD_OUT_PAIRS = 960, 200

WORKED = f"{TAGS.reasoning_start}{{solution}}{TAGS.reasoning_end}{TAGS.solution_start}{{answer}}{TAGS.solution_end}"
BARE = WORKED.replace("{solution}", "")

# A method's settings, in addition to the data, the seed and the steps.
METHODS: dict[str, list[str]] = {
    "dpo": ["method.type=dpo", "method.beta=1.0", "training.learning_rate=5e-5"],
    "ipo": ["method.type=ipo", "method.beta=0.5", "training.learning_rate=5e-5"],
    "kto": ["method.type=kto", "method.beta=1.0", "training.learning_rate=5e-5"],
    "orpo": ["method.type=orpo", "method.beta=1.0", "training.learning_rate=5e-5", "method.completion_only_loss=true"],
    "simpo": ["method.type=simpo", "method.beta=2.0", "method.simpo_gamma=1.0", "training.learning_rate=5e-5"],
}
COMMON = [
    "data.template=tags",
    "data.max_length=128",
    "training.batch_size=32",
    "training.tokens_per_pack=2048",
    "training.max_steps=30",
    "evaluation.eval_steps=-1",
    "checkpoint.save_steps=1000000",
    "devices.type=cpu",
]
# SFT is evaluated on worked solutions of problems that no model is trained on.
HELD_OUT = ["data.validation.rows=null", "data.validation.source=builtin:arithmetic", "data.validation.max_rows=200"]
LABELS = ("true", "shuffled")
SETTINGS = {"size": asdict(SIZE), "pairs": PAIRS, "common": COMMON, "methods": METHODS}

# What must hold for every seed. `worked` and `right` are shares of sampled replies, standard error about 0.02.
GAIN = 0.08  # minimum increase of `worked` from the SFT model, for each preference method
NO_GAIN = 0.05  # maximum increase for a control
SFT_RIGHT, SFT_CONTROL_RIGHT = 0.2, 0.04


@dataclass(frozen=True, slots=True)
class Trial:
    """One trained model, measured on held-out data."""

    seed: int
    method: str
    labels: str
    right: float  # share of right answers, sampled at temperature 1
    worked: float  # share of these replies that keep the format and show a working
    margin: float  # mean of log p(with working) - log p(without) over the held-out pairs, nats
    loss: float | None  # SFT: negative log-likelihood per token of held-out solutions
    seconds: float


def prepare(folder: Path, seed: int) -> list[Trial]:
    """Train a random model by SFT and write the pairs and labelled replies. Returns trials before and after SFT."""
    began = time.perf_counter()
    make_model(folder / "model", seed)
    for stage, text in settings_files(folder, seed, SIZE).items():
        write_file(folder / f"{stage}.yaml", text)
    write_bare_demonstrations(folder, SIZE, seed)
    loss = train(folder / "sft.yaml", HELD_OUT)
    write_pairs(folder, seed)
    taught = measured(folder, seed, "sft", "true", folder / "sft/final", loss["final"], began)
    untrained = measured(folder, seed, "untrained", "", folder / "model", loss["start"], time.perf_counter())
    return [untrained, taught]


def write_pairs(folder: Path, seed: int) -> None:
    """Write replies with and without their working, as pairs and singly for KTO, with both kinds of labels."""
    rng = random.Random(seed)
    rows = list(arithmetic_problems("train", PAIRS, seed + 2))
    pairs = [{"prompt": row["problem"], "chosen": WORKED.format(**row), "rejected": BARE.format(**row)} for row in rows]
    turned = [pair | {"chosen": pair["rejected"], "rejected": pair["chosen"]} for pair in pairs]
    coin = [rng.choice(two) for two in zip(pairs, turned, strict=True)]
    for labels, labelled in (("true", pairs), ("shuffled", coin)):
        save_rows(folder / f"{labels}/pairs.jsonl", labelled)
        replies = [
            {"prompt": pair["prompt"], "completion": pair[side], "label": side == "chosen"}
            for pair in labelled
            for side in ("chosen", "rejected")
        ]
        save_rows(folder / f"{labels}/kto.jsonl", rng.sample(replies, len(replies)))


def sft_control(folder: Path, seed: int) -> list[Trial]:
    """SFT on the same problems, each with another problem's solution: the format can be learned, sums cannot."""
    began = time.perf_counter()
    rows = list(arithmetic_problems("train", SIZE.worked, seed))
    others = random.Random(seed).sample(rows, len(rows))
    save_rows(folder / "shuffled.jsonl", [o | {"problem": r["problem"]} for r, o in zip(rows, others, strict=True)])
    source = f"data.source={folder / 'shuffled.jsonl'}"
    loss = train(folder / "sft.yaml", ["name=sft-shuffled", source, *HELD_OUT])
    return [measured(folder, seed, "sft", "shuffled", folder / "sft-shuffled/final", loss["final"], began)]


def prefer(folder: Path, seed: int, method: str, labels: str) -> list[Trial]:
    """Train the SFT model with one preference method on one kind of label."""
    began, name = time.perf_counter(), f"{method}-{labels}"
    data = folder / labels / ("kto.jsonl" if method == "kto" else "pairs.jsonl")
    paths = [f"name={name}", f"output_dir={folder}", f"model.path={folder / 'sft/final'}", f"data.source={data}"]
    train(None, [*COMMON, *METHODS[method], *paths, f"seed={seed}"])
    return [measured(folder, seed, method, labels, folder / name / "final", {}, began)]


def train(file: Path | None, overrides: Sequence[str]) -> Mapping[str, Mapping[str, float]]:
    """Train a configuration. Returns its `results.json`, with the evaluations at the start and at the end."""
    torch.set_num_threads(1)
    config = load(file, overrides).config
    runner.train(config)
    return load_json(Path(config.output_dir) / str(config.name) / "results.json")


def measured(
    folder: Path, seed: int, method: str, labels: str, model: Path, final: Mapping[str, float], began: float
) -> Trial:
    """Measure a model's answers to held-out problems, and how well it tells chosen from rejected in held-out pairs."""
    problems = list(arithmetic_problems("test", SIZE.held_out, seed))
    replies = sample_replies(model, problems, "", seed=seed)
    return Trial(
        seed=seed,
        method=method,
        labels=labels,
        right=sum(reply.right for reply in replies) / len(replies),
        worked=sum(reply.worked for reply in replies) / len(replies),
        margin=margins(model, problems[:HELD_OUT_PAIRS]).mean().item(),
        loss=final.get("eval_loss"),
        seconds=time.perf_counter() - began,
    )


@torch.inference_mode()
def margins(folder: Path, rows: Sequence[Mapping[str, str]]) -> torch.Tensor:
    """log p(with working) - log p(without) for the solution of each problem: (P)."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    prompts = [
        tokenizer.apply_chat_template(turns(row["problem"]), add_generation_prompt=True, tokenize=False) for row in rows
    ]

    def log_prob(reply: str) -> torch.Tensor:
        replies = [reply.format(**row).removeprefix(TAGS.reasoning_start) + tokenizer.eos_token for row in rows]
        batch = functional.tokenize_prompt_and_output(prompts, replies, tokenizer)
        log_probs = functional.get_response_log_probs(model, batch["input_ids"], batch["labels"])["log_probs"]
        return functional.masked_normalize(log_probs, batch["response_mask"], dim=1)

    return log_prob(WORKED) - log_prob(BARE)


# --- all trials, and their requirements -------------------------------------------------------------------------------


def run_all(folder: Path, seeds: Sequence[int], methods: Sequence[str], jobs: int) -> list[Trial]:
    """Run every trial, `jobs` at a time; a seed's preference methods start as soon as its SFT model exists."""
    trials: list[Trial] = []
    running: dict[Future[list[Trial]], Callable[[], None]] = {}
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:

        def later(seed: int) -> None:
            home = folder / str(seed)
            running[pool.submit(sft_control, home, seed)] = lambda: None
            for method in methods:
                for labels in LABELS:
                    running[pool.submit(prefer, home, seed, method, labels)] = lambda: None

        for seed in seeds:
            running[pool.submit(prepare, folder / str(seed), seed)] = lambda seed=seed: later(seed)
        while running:
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                follow = running.pop(done)
                for trial in done.result():
                    trials.append(trial)
                    print(trial, flush=True)
                follow()
    return in_order(trials)


def in_order(trials: Sequence[Trial]) -> list[Trial]:
    order = ["untrained", "sft", *METHODS]
    return sorted(trials, key=lambda t: (order.index(t.method), t.labels != "true", t.labels, t.seed))


def others(seeds: Sequence[int]) -> list[Trial]:
    """The trials of other seeds from an earlier run with the same settings: seeds may be run one by one."""
    if not RESULTS.is_file() or (saved := load_json(RESULTS))["settings"] != SETTINGS:
        return []
    return [Trial(**trial) for trial in saved["trials"] if trial["seed"] not in seeds]


def failures(trials: Sequence[Trial]) -> list[str]:
    """The requirements that a seed does not meet."""
    at = {(t.seed, t.method, t.labels): t for t in trials}
    out = []

    def check(trial: Trial, holds: bool, what: str) -> None:
        if not holds:
            out.append(f"seed {trial.seed}, {trial.method}, {trial.labels} labels: {what}")

    for trial in trials:
        before, start = at[trial.seed, "untrained", ""], at[trial.seed, "sft", "true"]
        worked, margin = trial.worked - start.worked, trial.margin - start.margin
        if trial.method == "sft":
            loss, first = trial.loss or 0.0, before.loss or 0.0
            if trial.labels == "true":
                check(trial, trial.right > SFT_RIGHT, f"{trial.right:.3f} right, not above {SFT_RIGHT}")
                check(trial, loss < first / 10, f"held-out loss {loss:.3f}, not below a tenth of {first:.3f}")
            else:
                check(trial, trial.right < SFT_CONTROL_RIGHT, f"{trial.right:.3f} right, above {SFT_CONTROL_RIGHT}")
                check(
                    trial, loss > 1.5 * (start.loss or 0.0), f"held-out loss {loss:.3f}, hardly above {start.loss:.3f}"
                )
        elif trial.method in METHODS and trial.labels == "true":
            check(trial, worked >= GAIN, f"shows its working {worked:+.3f} more often, not {GAIN}")
            check(trial, margin > 0.5, f"held-out margins changed by {margin:+.2f} nats")
        elif trial.method in METHODS:
            check(trial, worked <= NO_GAIN, f"shows its working {worked:+.3f} more often, above {NO_GAIN}")
            check(trial, margin <= 0.5, f"held-out margins changed by {margin:+.2f} nats")
    return out


def table(trials: Sequence[Trial]) -> str:
    """The page's table, with each value once per seed."""
    rows = [
        "| | labels | right answers | working shown | held-out margin, nats | held-out loss |",
        "|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.method, trial.labels), []).append(trial)
    for (method, labels), of_seeds in groups.items():
        columns = [
            " · ".join("–" if value is None else f"{value:{form}}" for value in values)
            for form, values in (
                (".1%", [t.right for t in of_seeds]),
                (".1%", [t.worked for t in of_seeds]),
                ("+.1f", [t.margin for t in of_seeds]),
                (".3f", [t.loss for t in of_seeds]),
            )
        ]
        columns = ["" if set(column) <= set("– ·") else column for column in columns]
        name = method if method == "untrained" else method.upper().replace("SIMPO", "SimPO")
        rows.append(f"| {name} | {labels} | {' | '.join(columns)} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="models trained at a time")
    arguments = parser.parse_args()
    began = time.perf_counter()
    with TemporaryDirectory() as folder:
        trials = run_all(Path(folder), arguments.seeds, arguments.methods, arguments.jobs)
    seconds = time.perf_counter() - began
    print(f"{len(trials)} trained models in {seconds:.0f} s")
    if arguments.methods == list(METHODS):
        trials = in_order([*others(arguments.seeds), *trials])
        save_trials(RESULTS, SETTINGS, trials)
        put_table(PAGE, table(trials))
    print(table(trials))
    return verdict(failures(trials))


if __name__ == "__main__":
    sys.exit(main())
