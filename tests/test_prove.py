"""`make prove`: the promises of docs/reliability.md have their tests and figures; proofs that no other file has."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import proofs
import pytest
from test_launched_ranks import ENVIRONMENT, rank_of, until
from test_resume import start

from benchmarks.models import write_model
from posttrain import sampler
from posttrain.base.memory import memory_in_use
from posttrain.recipes import grpo, online
from posttrain.rewards.compose import Rewards
from posttrain.runs import rollouts
from posttrain.runs.managing.facts import compare_runs
from posttrain.runs.metrics import read_metrics
from posttrain.runs.stored_rollouts import StoredRun
from posttrain.training import loop, saving
from posttrain.training.checks import MovedWeights

TESTS = Path(__file__).parent

# --- the page -------------------------------------------------------------------------------------------------------


def test_every_promise_has_its_tests_and_its_line_of_the_page():
    page = proofs.PAGE.read_text(encoding="utf-8")
    for promise in proofs.PROMISES:
        for test in promise.tests:
            file, _, function = test.partition("::")
            code = (TESTS / file).read_text(encoding="utf-8")
            assert not function or f"def {function.partition('[')[0]}(" in code, test
        assert f"| **{promise.name}**: {promise.text} |" in page, f"`make prove` writes {promise.name} to the page"
        for name, goal in (promise.at_most | promise.at_least).items():
            assert re.search(rf"\| {re.escape(name)} \| [\d.e+-]+ \| [≤≥] {goal:g} \|", page), name
    assert "not met" not in page


def report(test: str, *figures: tuple[str, float], outcome: str = "passed", when: str = "call"):
    properties = [("figure", list(figure)) for figure in figures]
    states = {state: state == outcome for state in ("passed", "failed", "skipped")}
    return SimpleNamespace(
        nodeid=f"tests/{test}", when=when, user_properties=properties, longrepr=("", 0, "Skipped: why"), **states
    )


def outcome_of(name: str, *reports) -> proofs.Outcome:
    return next(outcome for outcome in proofs.outcomes(reports) if outcome.promise.name == name)


def test_a_promise_is_met_by_its_tests_and_figures_alone():
    kills, every = f"{proofs.STORE}two_hundred_random_kills", f"{proofs.STORE}a_kill_at_every_system_call_of_a_save"
    some = report(kills, ("kills of a save", 120), ("checkpoints lost", 0))
    assert outcome_of("kills inside a save", some, some, report(every)).met
    assert not outcome_of("kills inside a save", some, report(every)).met, "120 kills are too few"
    lost = report(kills, ("kills of a save", 120), ("checkpoints lost", 1))
    assert not outcome_of("kills inside a save", some, lost, report(every)).met
    assert not outcome_of("kills inside a save", some, some, report(every, outcome="failed", when="setup")).met
    assert not outcome_of("known pairs").met, "no test has run"
    skipped = outcome_of("full disk", report(f"{proofs.STORE}a_full_disk_at_ten_points", outcome="skipped"))
    assert not skipped.met and skipped.skipped == [f"{proofs.STORE}a_full_disk_at_ten_points: why"]


def test_a_figure_above_its_goal_fails_its_test(figure):
    figure("longest standstill, s", 0.25)
    with pytest.raises(AssertionError, match=r"longest standstill, s: 0\.3, the goal is at most 0\.25"):
        figure("longest standstill, s", 0.3)
    with pytest.raises(AssertionError, match="of no promise"):
        figure("longest standstil, s", 0.1)


# --- runs of GRPO on the sums of benchmarks/sums.py -------------------------------------------------------------------


def sums_run(sums_home: Path, steps: int, **sections) -> dict:
    data = {"source": str(sums_home / "train.jsonl"), "template": "none", "max_length": 24}
    return {
        "name": "run",
        "model": str(sums_home / "model"),
        "method": {"type": "grpo", "num_generations": 4, "num_minibatches": 2},
        "rewards": [{"type": "python", "function": "benchmarks.sums:exact"}],
        "data": data,
        "rollout": {"max_completion_length": 6},
        "training": {"batch_size": 4, "max_steps": steps, "learning_rate": 1e-3},
        "evaluation": {"eval_steps": -1},
        "tracking": {"logging_steps": 1},
        "devices": {"type": "cpu"},
    } | sections


@pytest.mark.slow
def test_killed_ranks_end_and_resume_to_the_same_run(sums_home, tmp_path, request, figure):
    """Two processes; one of them is killed again and again, at its start too, and the run resumed each time."""
    kills, luck = request.config.getoption("--rank-kills"), random.Random(0)
    sections = sums_run(sums_home, 5 * kills, checkpoint={"save_steps": 3})
    file, environment = tmp_path / "run.json", os.environ | ENVIRONMENT

    def launch(folder: str, *more: str) -> subprocess.Popen:
        file.write_text(json.dumps(sections | {"output_dir": str(tmp_path / folder)}))
        command = [sys.executable, "-m", "posttrain", "launch", str(file), "--nproc", "2", *more]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    assert launch("whole").wait(600) == 0
    killed = tmp_path / "killed/run"
    for kill in range(kills):
        run = launch("killed", *(["--resume"] if (killed / "run.json").exists() else []))
        victim = luck.randrange(2)
        found: list[int] = []
        until(lambda run=run, victim=victim, found=found: found.extend(maybe(rank_of, run.pid, victim)) or found)
        in_a_step = kill % 5 != 4  # each fifth while it starts
        if in_a_step:
            goal = min(5 * (kill + 1), 5 * kills - 2)
            until(lambda goal=goal: steps_of(killed) >= goal or run.poll() is not None)  # noqa: B023
        time.sleep(luck.uniform(0, 0.4) if in_a_step else luck.uniform(0, 4))
        os.kill(found[0], signal.SIGKILL)
        began = time.monotonic()
        said = run.communicate(timeout=60)[1]
        figure("longest end after a rank's death, s", time.monotonic() - began)
        figure("kills of random ranks", 1)
        assert run.returncode == 1 and f"rank {victim}" in said and "Traceback" not in said, said
    assert launch("killed", "--resume").wait(600) == 0
    seen = compare_runs(tmp_path / "whole/run", killed)
    figure("tensors that differ after the last resume", len(seen.differences))
    with StoredRun(tmp_path / "whole/run") as whole, StoredRun(killed) as again:
        assert whole.steps() == again.steps() == list(range(1, 5 * kills + 1))
        for step in whole.steps():
            texts = [[row["completion"] for row in stored.rollouts(step)] for stored in (whole, again)]
            assert texts[0] == texts[1] and len(texts[0]) == 16, step


def maybe(function: Callable, *given) -> list:
    try:
        return [function(*given)]
    except AssertionError:
        return []


def steps_of(run: Path) -> int:
    return max((line["step"] for line in read_metrics(run)), default=0) if (run / "metrics.jsonl").exists() else 0


@pytest.mark.slow
def test_memory_is_flat_over_two_thousand_steps_of_grpo(sums_home, tmp_path, monkeypatch, figure):
    """The line through the memory of the second thousand: the first fills caches."""
    steps, every = 2_000, 10
    measured: list[tuple[int, int]] = []
    after_step = loop.Loop._after_step

    def measure(self) -> None:
        after_step(self)
        if self.state.step % every == 0:
            measured.append((self.state.step, memory_in_use()))

    monkeypatch.setattr(loop.Loop, "_after_step", measure)
    start(tmp_path, sums_run(sums_home, steps, checkpoint={"save_steps": 100, "save_total_limit": 2}))
    at, used = np.array(measured[len(measured) // 2 :]).T
    slope = float(np.polyfit(at / 1e3, used / 1e6, 1)[0])
    print(f"{used[0] / 1e6:.0f} MB at step {at[0]}, {used[-1] / 1e6:.0f} MB at step {at[-1]}")
    figure("steps of GRPO", steps)
    figure("growth over the second half of the run, MB per 1,000 steps", slope)


# What happens in the training process for each: the names under which the functions are called.
TIMED = {
    "checks": [
        (online, "check_packing"), (grpo, "check_ratio"), (grpo, "check_margins"), (online, "measure_mismatch"),
        (saving, "check_finite"), (saving, "check_same_weights"), (MovedWeights, "__init__"), (MovedWeights, "check"),
    ],
    "store": [(online.Step, "stored"), (rollouts.RolloutStore, "add"), (rollouts, "_insert")],
    "grading": [(Rewards, "__call__")],
}  # fmt: skip


@pytest.mark.slow
def test_checks_store_and_grading_take_little_of_a_step(shared, tmp_path, monkeypatch, figure):
    """Of GRPO on GSM8K by a model of 12 M parameters, which says what recorded solutions say: those are graded.

    The checks of the first step are counted too, and what the store's thread does beside the training.
    """
    write_model(
        tmp_path / "model", shared / "tokenizers/minimind6400", hidden_size=384, num_hidden_layers=6,
        intermediate_size=1024, num_attention_heads=6, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    lines = (shared / "data/gsm8k/example_model_solutions.jsonl").read_text(encoding="utf-8").splitlines()
    recorded = [value["solution"] for line in lines for value in json.loads(line).values() if isinstance(value, dict)]
    texts = iter(recorded)
    monkeypatch.setattr(sampler, "text_of", lambda *_: next(texts))
    spent = dict.fromkeys(TIMED, 0.0)

    def timed(kind: str, function: Callable) -> Callable:
        def run(*given, **named):
            began = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                spent[kind] += time.perf_counter() - began

        return run

    for kind, places in TIMED.items():
        for owner, name in places:
            monkeypatch.setattr(owner, name, timed(kind, getattr(owner, name)))
    sections = sums_run(shared, 10) | {"model": str(tmp_path / "model"), "rewards": [{"type": "math"}]}
    sections |= {"data": {"source": str(shared / "data/gsm8k/train.jsonl"), "max_rows": 200, "max_length": 300}}
    sections |= {"method": {"type": "grpo", "num_generations": 4, "beta": 0.01}}
    sections |= {"rollout": {"max_completion_length": 96}, "training": {"batch_size": 4, "max_steps": 10}}
    start(tmp_path, sections)
    seconds = json.loads((tmp_path / "run/results.json").read_text())["train_runtime"]
    shares = {kind: 100 * value / seconds for kind, value in spent.items()}
    print({kind: f"{share:.2f} %" for kind, share in shares.items()}, f"of {seconds:.1f} s in 10 steps")
    figure("checks, store and grading, % of a step", sum(shares.values()))
