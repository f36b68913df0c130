"""Do the methods learn from rewards? Part of `make learn`. Writes results/learn_online.json and a table of the docs.

    sums      a small model trained to add, its output weights mixed with noise and scaled down until about 10 % of the
              answers are right; the losses that differ with one update per rollout, and PPO; also GRPO in bfloat16;
              distillation from a teacher with four times the weights, which must reach GRPO's accuracy with a quarter
              of the sampled tokens
    sort      the trained gpt-nano-sort, with so much noise on every weight that about 10 % of its answers are right
    stories   the trained stories260K, rewarded for stories that name a dog
    calculator  a small model that cannot add, and calls a calculator for one question in twenty; with trees of episodes
              it must reach the same with 67 % of the sampled tokens
    guess     a guessing game of several turns, which must be solved within 1.2 times the guesses of bisection
    replies   the same model on HH prompts, rewarded by a reward model that is trained here on HH pairs

All tasks use the recipes and settings that users have, with three seeds; CASES defines what must hold. Answers are
measured on prompts that no model was trained on.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import random
import re
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["OMP_NUM_THREADS"] = "1"  # the runs share the cores among them

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import calculator, guessing, sums
from benchmarks.common import SHARED, put_table, split_transcripts
from benchmarks.trials import save_trials, verdict
from posttrain import runner
from posttrain.config import load
from posttrain.runs.files import load_json

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/learn_online.json", ROOT / "docs/learning.md"
SEEDS = (0, 1, 2)
STEPS = 80


@dataclass(frozen=True, slots=True)
class Case:
    """A method on a task. `above`: the held-out reward must exceed this; `gain`: it must rise by more than this;
    `kl`: the KL to the start, in nats per token, must be below this; `beside`: the name of a case whose accuracy this
    case must reach, seed by seed but for a `margin`, with this `share` of the sampled tokens."""

    task: str
    method: Mapping[str, Any]
    training: Mapping[str, Any]
    above: float | None = None
    gain: float | None = None
    kl: float | None = None
    beside: str | None = None
    share: float = 0.25
    margin: float = 0.0
    samples: int = 1  # completions of each held-out prompt: rewards from a model need more than right answers do


def _grpo(**method: Any) -> dict[str, Any]:
    return {"type": "grpo", "num_generations": 8, "beta": 0.0} | method


LINEAR = {"lr_scheduler_type": "linear"}
SUMS = {"batch_size": 32, "max_steps": STEPS, "learning_rate": 3e-3, **LINEAR}
CASES = {
    "grpo": Case("sums", _grpo(), SUMS, above=0.9),
    **{
        loss: Case("sums", _grpo(loss_type=loss), SUMS, above=0.8)
        for loss in ("dr_grpo", "dapo", "gspo", "no_baseline")  # the others are one of these while ratios are 1
    },
    "rloo": Case("sums", _grpo(type="rloo"), SUMS, above=0.8),
    "reinforce_plus_plus": Case("sums", _grpo(type="reinforce_plus_plus"), SUMS, above=0.8),
    "ppo": Case(
        "sums",
        {"type": "ppo", "num_generations": 1, "kl_coef": 0.0},
        SUMS | {"batch_size": 256, "learning_rate": 1e-3},
        above=0.8,
    ),
    "distill": Case(
        "sums, teacher",
        {"type": "distill", "num_generations": 1, "teacher": "{folder}/teacher"},
        SUMS | {"max_steps": 150},
        above=0.9,
        beside="grpo",
    ),
    "grpo, bfloat16": Case("sums, bfloat16", _grpo(), SUMS, above=0.9),
    "calculator": Case(
        "calculator", _grpo(), {"batch_size": 16, "max_steps": 40, "learning_rate": 1e-3, **LINEAR}, above=0.9
    ),
    "calculator, trees": Case(
        "calculator",
        _grpo(num_trees=4),
        {"batch_size": 16, "max_steps": 40, "learning_rate": 1e-3, **LINEAR},
        above=0.9,
        beside="calculator",
        share=0.67,
        margin=0.03,  # of 200 answers; two standard errors of the difference are 0.05
    ),
    "guess": Case(
        "guess",
        _grpo(advantage_level="turn", scale_rewards="none"),
        {"batch_size": 32, "max_steps": 80, "learning_rate": 2e-3, **LINEAR},
        above=guessing.reward(guessing.WITHIN * guessing.OPTIMAL),
        samples=16,  # each held-out number stands in the set four times
    ),
    "sort": Case("sort", _grpo(), {"batch_size": 32, "max_steps": STEPS, "learning_rate": 4e-4}, above=0.95),
    "stories": Case(
        "stories", _grpo(beta=0.05), {"batch_size": 8, "max_steps": 40, "learning_rate": 1e-4}, gain=0.3, kl=0.3
    ),
    "replies": Case(
        "replies",
        _grpo(beta=0.03),
        {"batch_size": 16, "max_steps": 120, "learning_rate": 4e-4},
        gain=0.08,
        kl=1.2,
        samples=16,
    ),
}
SETTINGS = {name: asdict(case) for name, case in CASES.items()}


@dataclass(frozen=True, slots=True)
class Trial:
    """One trained model: the mean held-out reward before and after, the KL to the start in nats per token, and the
    number of tokens sampled for training."""

    name: str
    seed: int
    before: float
    after: float
    kl: float | None
    seconds: float
    tokens: int = 0


# --- the tasks ------------------------------------------------------------------------------------------------------


def dog(completions: Sequence[str], **_columns: Any) -> list[float]:
    """1 for a story that names a dog."""
    return [float(re.search(r"\bdogs?\b", text) is not None) for text in completions]


def python(function: str) -> list[dict[str, Any]]:
    return [{"type": "python", "function": function, "name": "reward"}]


def sums_task(folder: Path, seed: int) -> dict[str, Any]:
    sums.make(folder, seed)
    return right_answers(folder, 24)


def teacher_task(folder: Path, seed: int) -> dict[str, Any]:
    sums.make_teacher(folder, seed)
    return sums_task(folder, seed)


def bfloat16_sums_task(folder: Path, seed: int) -> dict[str, Any]:
    settings = sums_task(folder, seed)
    return settings | {"model": {"path": settings["model"], "dtype": "bfloat16"}}


def sort_task(folder: Path, seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    source = SHARED / "models/gpt-nano-sort"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source).eval(), AutoTokenizer.from_pretrained(source)
    letters = ["".join(letters) for letters in itertools.product("ABC", repeat=6)]
    problems = [(text, "".join(sorted(text))) for text in letters]
    random.Random(seed).shuffle(problems)
    sums.weaken(sums.noisy(model), lambda: sums.accuracy(model, tokenizer, problems), 0.1, most=10.0)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write(folder, [{"prompt": problem, "answer": answer} for problem, answer in problems], 129)
    return right_answers(folder, 12)


def right_answers(folder: Path, max_length: int) -> dict[str, Any]:
    """The settings of a weakened model in the folder, rewarded for right answers of up to six tokens."""
    return {
        "model": str(folder / "model"),
        "rewards": python("benchmarks.sums:exact"),
        "data": data(folder, max_length),
        "rollout": {"max_completion_length": 6},
    }


BEGINNINGS = [
    f"{when} {who} {did}"
    for when in ("Once upon a time,", "One day,", "In the morning,", "On a sunny day,")
    for who in ("a little girl", "a boy named Tim", "a cat", "Lily and Ben", "a big bear", "Mom")
    for did in ("went to the park", "wanted to play", "saw something", "was very sad")
]


def stories_task(folder: Path, seed: int) -> dict[str, Any]:
    rows = [{"prompt": text} for text in BEGINNINGS]
    random.Random(seed).shuffle(rows)
    write(folder, rows, 32)
    return {
        "model": str(SHARED / "models/stories260K"),
        "rewards": python("benchmarks.learn_online:dog"),
        "data": data(folder, 160),
        "rollout": {"max_completion_length": 96},
    }


def replies_task(folder: Path, seed: int) -> dict[str, Any]:
    """A reward model trained on HH pairs, and short prompts of other pairs, because the model has 512 positions."""
    pairs = []
    with gzip.open(SHARED / "data/hh-harmless/train.jsonl.gz", "rt", encoding="utf-8") as lines:
        for line in itertools.islice(lines, 4000):
            row = json.loads(line)
            prompt, chosen, rejected = split_transcripts(row["chosen"], row["rejected"])
            if prompt and len(row["chosen"]) < 500 and len(row["rejected"]) < 500:
                pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    random.Random(seed).shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs[:600]))
    short = [{"prompt": row["prompt"]} for row in pairs[600:] if len(row["prompt"]) < 200]
    write(folder, short[:232], 32)
    model = str(SHARED / "models/stories260K")
    train(
        {
            "name": "reward-model",
            "output_dir": str(folder),
            "seed": seed,
            "model": model,
            "method": "reward",
            "data": {"source": str(folder / "pairs.jsonl"), "template": "none", "max_length": 512},
            "training": {"batch_size": 16, "learning_rate": 3e-4, "num_train_epochs": 1},
            **QUIET,
        }
    )
    return {
        "model": model,
        "rewards": [{"type": "model", "path": str(folder / "reward-model/final"), "name": "reward"}],
        "data": data(folder, 256),
        "rollout": {"max_completion_length": 48},
    }


def calculator_task(folder: Path, seed: int) -> dict[str, Any]:
    calculator.make(folder, seed)
    return {
        "model": str(folder / "model"),
        "rewards": [{"type": "gsm8k", "name": "reward"}],
        "environments": [{"name": "calculator", "class": "calculator"}],
        "data": data(folder, 96) | {"template": "chat"},
        "rollout": {"max_completion_length": 48},
    }


def guess_task(folder: Path, seed: int) -> dict[str, Any]:
    guessing.make(folder, seed)
    return {
        "model": str(folder / "model"),
        "environments": [{"name": "guess", "class": "guess", "contract": "messages"}],
        "data": data(folder, 256) | {"template": "chat", "format": "episode"},
        "rollout": {"max_completion_length": 220, "max_turns": guessing.MOST},
    }


TASKS = {
    "guess": guess_task,
    "calculator": calculator_task,
    "sums": sums_task,
    "sums, bfloat16": bfloat16_sums_task,
    "sums, teacher": teacher_task,
    "sort": sort_task,
    "stories": stories_task,
    "replies": replies_task,
}


def write(folder: Path, rows: Sequence[Mapping[str, str]], held_out: int) -> None:
    """Write `train.jsonl` and `test.jsonl`; the latter has the last `held_out` rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", rows[:-held_out]), ("test", rows[-held_out:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def data(folder: Path, max_length: int) -> dict[str, Any]:
    return {
        "source": str(folder / "train.jsonl"),
        "template": "none",
        "max_length": max_length,
        "validation": {"source": str(folder / "test.jsonl")},
    }


# --- a trial ----------------------------------------------------------------------------------------------------------

QUIET = {"devices": {"type": "cpu"}, "checkpoint": {"save_steps": 1_000_000}, "tracking": {"logging_steps": 1}}


def train(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Train with these settings, and return the content of results.json."""
    folder = Path(settings["output_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{settings['name']}.json"
    file.write_text(json.dumps(settings))
    runner.train(load(file).config)
    return load_json(folder / settings["name"] / "results.json")


def trial(folder: Path, name: str, seed: int) -> Trial:
    torch.set_num_threads(1)
    began, case = time.perf_counter(), CASES[name]
    training = {"warmup_steps": 0, "lr_scheduler_type": "constant"} | dict(case.training)
    results = train(
        {
            "name": name,
            "output_dir": str(folder),
            "seed": seed,
            "method": {k: v.format(folder=folder / "task") if k == "teacher" else v for k, v in case.method.items()},
            "training": training,
            "evaluation": {"eval_steps": training["max_steps"], "num_generations": case.samples},
            **TASKS[case.task](folder / "task", seed),
            **QUIET,
        }
    )
    start, final = results["start"], results["final"]
    seconds = time.perf_counter() - began
    metrics = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    a_step = training["batch_size"] * case.method["num_generations"]
    own = [(line.get("completions/mean_length", 0.0), 1 - line.get("trees/shared_ratio", 0.0)) for line in metrics]
    tokens = round(sum(a_step * length * sampled for length, sampled in own))
    return Trial(name, seed, start["eval_reward"], final["eval_reward"], final.get("kl"), seconds, tokens)


def failures(trials: Sequence[Trial]) -> list[str]:
    """The requirements that are not met."""
    out = []
    for t in trials:
        case = CASES[t.name]
        gain = t.after - t.before
        other = next((o for o in trials if o.name == case.beside and o.seed == t.seed), None)
        for holds, what in (
            (case.above is None or t.after > case.above, f"{t.after:.3f}, not above {case.above}"),
            (case.gain is None or gain > case.gain, f"rose by {gain:+.3f}, not {case.gain}"),
            (other is None or t.after >= other.after - case.margin, f"{t.after:.3f}, below {case.beside}'s"),
            (
                other is None or t.tokens <= case.share * other.tokens,
                f"{t.tokens:,} tokens, over {case.share:.0%} of {case.beside}'s",
            ),
            (case.kl is None or (t.kl is not None and t.kl < case.kl), f"KL {t.kl}, not below {case.kl}"),
        ):
            if not holds:
                out.append(f"{t.name}, seed {t.seed}: {what}")
    return out


def table(trials: Sequence[Trial]) -> str:
    """The table, with each value once per seed."""
    lines = [
        "| task | method | held-out reward before | after | must be | KL, nats a token | thousand tokens sampled |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, case in CASES.items():
        mine = sorted((t for t in trials if t.name == name), key=lambda t: t.seed)
        if not mine:
            continue
        form = ".1%" if case.above is not None else "+.2f"
        before, after = (" · ".join(f"{value:{form}}" for value in values) for values in (
            [t.before for t in mine], [t.after for t in mine],
        ))  # fmt: skip
        tokens = " · ".join(f"{t.tokens / 1000:.0f}" for t in mine if t.tokens)
        wanted = f"> {case.above:.0%}" if case.above is not None else f"{case.gain:+g}, KL < {case.kl}"
        kl = " · ".join(f"{t.kl:.3f}" for t in mine if t.kl is not None)
        method = (
            name if case.task.startswith("sums") else case.method["type"] + ", trees" * ("num_trees" in case.method)
        )
        lines.append(f"| {case.task} | {method} | {before} | {after} | {wanted} | {kl} | {tokens} |")
    return "\n".join(lines)


def kept(anew: Sequence[str]) -> list[Trial]:
    """The saved trials of cases that were not run again and whose settings are unchanged."""
    saved = load_json(RESULTS)
    now = json.loads(json.dumps(SETTINGS))  # may have further settings, with their defaults
    same = {name for name in now if (was := saved["settings"].get(name)) and was.items() <= now[name].items()}
    return [Trial(**one) for one in saved["trials"] if one["name"] in same - {*anew}]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="models trained at a time")
    arguments = parser.parse_args()
    began = time.perf_counter()
    todo, seconds = [*itertools.product(arguments.cases, arguments.seeds)], {t.name: t.seconds for t in kept([])}
    with TemporaryDirectory() as folder, ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        running = {
            (name, seed): pool.submit(trial, Path(folder) / name / str(seed), name, seed)
            for name, seed in sorted(todo, key=lambda one: -seconds.get(one[0], 0))  # the longest first
        }
        for done in as_completed(running.values()):
            print(done.result(), flush=True)
        trials = [running[one].result() for one in todo]
    print(f"{len(trials)} trained models in {time.perf_counter() - began:.0f} s")
    if tuple(arguments.seeds) == SEEDS:
        whole = trials + kept(arguments.cases)
        save_trials(RESULTS, SETTINGS, whole)
        put_table(PAGE, table(whole), "online")
    print(table(trials))
    return verdict(failures(trials))


if __name__ == "__main__":
    sys.exit(main())
