"""What do the variants of methods change? `make learn-variants`. Writes results/learn_variants.json and a docs table.

    sums, 4 updates   the sums of benchmarks/sums.py; four updates per rollout, so that ratios differ from 1
    sums, stale       one update per rollout, but the engine has the weights of some steps ago (benchmarks/mismatch.py)
    sums, 8 bits      the engine has the weights of layers rounded to 8 bits; also 4 bits
    SFT               600 more demonstrations, each seen five times, for a model that SFT has taught some sums

Budgets are small, because variants that all reach 95 % in the end cannot be distinguished: the measure of the sums is
the mean of the held-out accuracies during the run. Every variant is compared with the first case of its task, seed by
seed, with a 95 % interval by Student's t. Finished trials are saved at once and not run again while their settings are
the same; `--only` selects cases.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks import learn, mismatch, sums
from benchmarks.common import put_table
from benchmarks.learn_online import LINEAR, QUIET, right_answers, train
from benchmarks.trials import save_trials
from posttrain.data import arithmetic_problems
from posttrain.evaluation.statistics import paired_difference
from posttrain.quickstart import Size, settings_files, write_bare_demonstrations
from posttrain.quickstart.model import make_model
from posttrain.runs.atomic import write_file
from posttrain.runs.files import load_json, save_rows

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks/results/learn_variants.json", ROOT / "docs/learning.md"
SEEDS = (0, 1, 2)
SIZE = Size(worked=6000, bare=2000, sft_steps=800, held_out=400)  # the SFT that the cases of SFT begin from
FEW = 600
STALE = 4


@dataclass(frozen=True, slots=True)
class Case:
    """A variant. `method`, `training` and `model` are settings; `beside` names the case that it is compared with."""

    task: str
    label: str
    method: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    beside: str | None = None


UPDATES = {"batch_size": 16, "max_steps": 24, "learning_rate": 2e-3, **LINEAR}
ONE = {"batch_size": 32, "max_steps": 48, "learning_rate": 3e-3, **LINEAR}
TUNED = {"max_steps": 5 * FEW // 20, "learning_rate": 5e-4}  # batches of 20, as in the SFT before
ADAPTED = {"learning_rate": 2e-3}
LORA = {"lora.r": 16, "lora.target_modules": "all-linear"}


def _updates(label: str, beside: str | None = "grpo", **method: Any) -> Case:
    return Case("sums, 4 updates", label, {"num_iterations": 4} | method, UPDATES, beside=beside)


def _sampled(task: str, label: str, sampling: Mapping[str, Any] | None = None, **method: Any) -> Case:
    beside = None if label == "no correction" else f"{task}: no correction"
    return Case(f"sums, {task}", label, {"importance_sampling": sampling} | method, ONE, beside=beside)


ICEPOP = {"mode": "token_mask", "clip_max": 5.0, "clip_min": 0.5}
CASES = {
    "grpo": _updates("GRPO", None),
    **{
        loss: _updates(f"`{loss}`", loss_type=loss)
        for loss in ("dr_grpo", "dapo", "gspo", "luspo", "cispo", "sapo", "vespo", "grpo_clip")
    },
    "delta": _updates("`delta: 2`", delta=2.0),
    "top_entropy_quantile": _updates("`top_entropy_quantile: 0.2`", top_entropy_quantile=0.2),
    "use_adaptive_entropy": _updates(
        "`use_adaptive_entropy`", use_adaptive_entropy=True, entropy_target=0.3, entropy_coef_delta=0.005
    ),
    "kl": _updates("GRPO, `beta: 0.05`", beta=0.05),
    "use_bias_correction_kl": _updates(
        "`use_bias_correction_kl`, `beta: 0.05`", "kl", beta=0.05, use_bias_correction_kl=True
    ),
    "sync_ref_model": _updates(
        "`sync_ref_model` every 16 updates, `beta: 0.05`", "kl", beta=0.05, sync_ref_model=True, ref_model_sync_steps=16
    ),
    **{
        f"{task}: {case.label}": case
        for task in ("stale", "8 bits", "4 bits")
        for case in (
            _sampled(task, "no correction"),
            _sampled(task, "token_truncate", {"mode": "token_truncate"}),
            _sampled(task, "token_mask", {"mode": "token_mask"}),
            _sampled(task, "sequence_truncate", {"mode": "sequence_truncate"}),
            _sampled(task, "sequence_mask", {"mode": "sequence_mask"}),
            _sampled(task, "geometric_mask", {"mode": "geometric_mask", "clip_max": 2.0, "clip_min": 0.5}),
            _sampled(task, "IcePop", ICEPOP),
            _sampled(task, "off_policy_mask", off_policy_mask_threshold=0.1),
            _sampled(task, "vespo", {"mode": "token_truncate"}, loss_type="vespo"),
        )
        if task == "stale" or case.label in ("no correction", "token_truncate", "IcePop")
    },
    "sft": Case("SFT", "AdamW, NLL", training=TUNED),
    "dft": Case("SFT", "`loss_type: dft`", {"loss_type": "dft"}, TUNED, beside="sft"),
    "eaft": Case("SFT", "`loss_type: eaft`", {"loss_type": "eaft"}, TUNED, beside="sft"),
    "label_smoothing": Case(
        "SFT", "`label_smoothing_factor: 0.1`", {"label_smoothing_factor": 0.1}, TUNED, beside="sft"
    ),
    "neftune": Case("SFT", "`neftune_noise_alpha: 5`", {"neftune_noise_alpha": 5.0}, TUNED, beside="sft"),
    "muon": Case("SFT", "`optimizer: muon`", training=TUNED | {"optimizer": "muon"}, beside="sft"),
    "lora": Case("SFT", "`lora.r: 16`", training=TUNED | ADAPTED, model=LORA, beside="sft"),
    "loraplus": Case(
        "SFT", "`loraplus_lr_ratio: 4`", {}, TUNED | ADAPTED | {"loraplus_lr_ratio": 4.0}, LORA, beside="lora"
    ),
    "pissa": Case("SFT", "`lora.init: pissa`", {}, TUNED | ADAPTED, LORA | {"lora.init": "pissa"}, beside="lora"),
}  # fmt: skip
ENGINES = {
    "sums, stale": (mismatch.old, STALE),
    "sums, 8 bits": (mismatch.rounded, 8),
    "sums, 4 bits": (mismatch.rounded, 4),
}


def _settings(case: Case) -> dict[str, Any]:
    """What a case's results depend on, as JSON has it."""
    more = {**asdict(SIZE), "few": FEW} if case.task == "SFT" else ENGINES.get(case.task, (None, None))[1]
    return {key: value for key, value in asdict(case).items() if key not in ("label", "beside")} | {"more": more}


SETTINGS = {name: json.loads(json.dumps(_settings(case))) for name, case in CASES.items()}


@dataclass(frozen=True, slots=True)
class Trial:
    """One trained model, measured on held-out problems."""

    name: str
    seed: int
    during: float | None  # sums: the mean of the accuracies of the evaluations after the start
    final: float  # share of right answers of the trained model, sampled at temperature 1
    sample_size: float | None  # sums: the effective share of the sampled tokens, mean over steps; 1: no mismatch
    seconds: float


# --- a trial ----------------------------------------------------------------------------------------------------------


def make_sums(home: Path, seed: int) -> None:
    """Write what the trials of sums start from: the model that adds badly, and the problems."""
    torch.set_num_threads(1)
    sums.make(home / "sums", seed)


def make_sft(home: Path, seed: int) -> None:
    """Write what the trials of SFT start from: the model that SFT has taught some sums, and more demonstrations."""
    make_model(home / "model", seed)
    write_bare_demonstrations(home, SIZE, seed)
    write_file(home / "sft.yaml", settings_files(home, seed, SIZE)["sft"])
    save_rows(home / "few.jsonl", list(arithmetic_problems("train", FEW, seed + 3)))
    learn.train(home / "sft.yaml", ["name=base", *UNMEASURED])


UNMEASURED = ["data.validation=null", "evaluation.eval_steps=-1"]


def trial(home: Path, folder: Path, name: str, seed: int, steps: int | None = None) -> Trial:
    """Train and measure a case, in a folder of `home`, which has the files to start from. `steps`: not the case's."""
    torch.set_num_threads(1)
    run = _sft if CASES[name].task == "SFT" else _sums
    return run(home, folder, name, seed, steps)


def _sums(home: Path, folder: Path, name: str, seed: int, steps: int | None) -> Trial:
    began, case = time.perf_counter(), CASES[name]
    training = {"warmup_steps": 0} | dict(case.training) | ({"max_steps": steps} if steps else {})
    with _engine(case.task):
        results = train(
            {
                "name": "run",
                "output_dir": str(folder),
                "seed": seed,
                "method": {"type": "grpo", "num_generations": 8, "beta": 0.0} | dict(case.method),
                "training": training,
                "evaluation": {"eval_steps": max(1, training["max_steps"] // 8)},
                **right_answers(home / "sums", 24),
                **QUIET,
            }
        )
    metrics = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    during = [line["eval_reward"] for line in metrics if "eval_reward" in line and line["step"] > 0]
    sizes = [line["sampling/effective_sample_size"] for line in metrics if "sampling/effective_sample_size" in line]
    seconds = time.perf_counter() - began
    return Trial(name, seed, fmean(during), results["final"]["eval_reward"], fmean(sizes), seconds)


def _engine(task: str) -> AbstractContextManager[None]:
    if task not in ENGINES:
        return nullcontext()
    kind, amount = ENGINES[task]
    return mismatch.mismatched(kind(amount))


def _sft(home: Path, folder: Path, name: str, seed: int, steps: int | None) -> Trial:
    began, case = time.perf_counter(), CASES[name]
    settings = [
        f"{section}.{key}={json.dumps(value)}"
        for section in ("method", "training", "model")
        for key, value in getattr(case, section).items()
    ]
    settings += [f"name={folder.name}", f"model.path={home / 'base/final'}", f"data.source={home / 'few.jsonl'}"]
    settings += [f"training.max_steps={steps}"] if steps else []
    learn.train(home / "sft.yaml", [*UNMEASURED, *settings])
    found = learn.measured(home, seed, name, "true", folder / "final", {}, began)
    return Trial(name, seed, None, found.right, None, found.seconds)


# --- all trials -------------------------------------------------------------------------------------------------------


def kept() -> list[Trial]:
    """The saved trials of cases whose settings are unchanged."""
    if not RESULTS.is_file():
        return []
    saved = load_json(RESULTS)
    same = {name for name, settings in SETTINGS.items() if saved["settings"].get(name) == settings}
    return [Trial(**one) for one in saved["trials"] if one["name"] in same]


def run_all(folder: Path, todo: Sequence[tuple[str, int]], done: list[Trial], jobs: int) -> list[Trial]:
    """Run the trials that are to do, and save all after each."""
    needed = dict.fromkeys((seed, make_sft if CASES[name].task == "SFT" else make_sums) for name, seed in todo)
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        made = [pool.submit(make, folder / str(seed), seed) for seed, make in needed]
        for one in made:
            one.result()
        running = [
            pool.submit(trial, folder / str(seed), folder / str(seed) / f"trial-{number}", name, seed)
            for number, (name, seed) in enumerate(todo)
        ]
        for each in as_completed(running):
            done.append(each.result())
            print(done[-1], flush=True)
            done = in_order(done)
            save_trials(RESULTS, SETTINGS, done)
    return done


def in_order(trials: Sequence[Trial]) -> list[Trial]:
    order = list(CASES)
    return sorted(trials, key=lambda trial: (order.index(trial.name), trial.seed))


def table(trials: Sequence[Trial]) -> str:
    """The page's table: each case's measure by seed, and its difference to the case that it is compared with."""
    lines = [
        "| task | variant | measure, by seed | difference in points (95 %) | | at the end | effective sample size |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, case in CASES.items():
        mine = [trial for trial in trials if trial.name == name]
        if not mine:
            lines.append(f"| {case.task} | {case.label} | not run | | | | |")
            continue
        by_seed = " · ".join(f"{measure(trial):.1%}" for trial in mine)
        few = "" if len(mine) == len(SEEDS) else f" ({len(mine)} of {len(SEEDS)} seeds)"
        sizes = [trial.sample_size for trial in mine if trial.sample_size is not None]
        size = f"{fmean(sizes):.3f}" if sizes else ""
        final = f"{fmean(trial.final for trial in mine):.1%}"
        difference = " | ".join(compared(name, trials))
        lines.append(f"| {case.task} | {case.label} | {by_seed}{few} | {difference} | {final} | {size} |")
    return "\n".join(lines)


def measure(trial: Trial) -> float:
    return trial.final if trial.during is None else trial.during


def compared(name: str, trials: Sequence[Trial]) -> tuple[str, str]:
    """A case's mean difference in points with its interval, paired by seed, and what it shows."""
    beside = CASES[name].beside
    mine, other = ({trial.seed: measure(trial) for trial in trials if trial.name == of} for of in (name, beside))
    both = sorted(mine.keys() & other.keys())
    if beside is None or not both:
        return "", ""
    if all(mine[seed] == other[seed] for seed in both):
        return "+0.0", "equal"
    found = paired_difference([other[seed] for seed in both], [mine[seed] for seed in both])
    if found.low is None or found.high is None:
        return f"{100 * found.value:+.1f}", ""
    shown = "better" if found.low > 0 else "worse" if found.high < 0 else ""
    return f"{100 * found.value:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})", shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=CASES, metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="models trained at a time")
    arguments = parser.parse_args()
    began, trials = time.perf_counter(), in_order(kept())
    known = {(trial.name, trial.seed) for trial in trials}
    todo = [(name, seed) for seed in arguments.seeds for name in arguments.only if (name, seed) not in known]
    if todo:
        with TemporaryDirectory() as folder:
            trials = run_all(Path(folder), todo, trials, arguments.jobs)
    print(f"{len(todo)} trained models in {time.perf_counter() - began:.0f} s")
    put_table(PAGE, table(trials), "variants")
    print(table(trials))


if __name__ == "__main__":
    sys.exit(main())
