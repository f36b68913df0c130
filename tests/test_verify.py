"""`posttrain verify-resume`: it kills and resumes, finds both runs equal, and finds what is not."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from test_resume import settings

from posttrain import runner
from posttrain.base.errors import RunError
from posttrain.cli import main
from posttrain.config import load
from posttrain.optim.adamw import AdamW
from posttrain.runner.verify import planned, prepared, verify_resume
from posttrain.runs.files import save_json, save_tensors
from posttrain.runs.managing.facts import compare_runs, first_difference
from posttrain.runs.run import Run


def write_config(folder: Path, sections: dict) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(sections | {"output_dir": str(folder / "runs")}))
    return file


# Two runs compared


def make(folder: Path, lines: list[dict], weight: torch.Tensor, state: dict) -> Path:
    def write(into: Path) -> None:
        save_tensors(into / "model.safetensors", {"a": torch.zeros(3), "b": weight})
        save_json(into / "state.json", state)

    with Run.create(folder, "name: x\n", {}) as run:
        for line in lines:
            run.log(line["step"], line)
        run.save_checkpoint(4, write, limit=None)
        run.save_model(run.final, 4, write)
    return folder


LINES = [{"step": 1, "loss": 0.1}, {"step": 2, "loss": float("nan")}, {"step": 4, "loss": 0.3}]
STATE = {"loop": {"step": 4, "seconds": 1.0, "order": 77}}


def test_equal_runs_are_equal(tmp_path):
    weight = torch.tensor([[1.0, float("nan")], [-0.0, 2.0]])
    one = make(tmp_path / "one", LINES, weight, STATE)
    other = make(tmp_path / "other", LINES, weight, {"loop": STATE["loop"] | {"seconds": 9.0}})
    seen = compare_runs(one, other)
    assert seen.differences == []
    assert (seen.lines, seen.tensors, seen.values, seen.folders) == (3, 4, 14, ["final", "checkpoint-4"])


@pytest.mark.parametrize(
    ("lines", "weight", "state", "expected"),
    [
        ([LINES[0], LINES[1], LINES[2] | {"loss": 0.30000000000000004}], None, None,
         "step 4, metrics.jsonl line 3: loss is 0.3 and 0.30000000000000004"),
        (LINES[:2], None, None, "step 4, metrics.jsonl line 3: exists in the first run, is missing in the second"),
        (None, [[0.0, 0.0], [0.0, -0.0]], None,
         r"step 4, checkpoint-4/model.safetensors: b[1, 1] is 0.0 and -0.0 (1 of 4 values differ)"),
        (None, [0.0, 0.0, 0.0, 0.0], None,
         "step 4, checkpoint-4/model.safetensors: b is (2, 2) torch.float32 and (4,) torch.float32"),
        (None, None, {"loop": {"step": 4, "seconds": 1.0, "order": 78}},
         "step 4, checkpoint-4/state.json: loop.order is 77 and 78"),
    ],
)  # fmt: skip
def test_every_difference_is_named(tmp_path, lines, weight, state, expected):
    one = make(tmp_path / "one", LINES, torch.zeros(2, 2), STATE)
    other = make(tmp_path / "other", lines or LINES, torch.tensor(weight or [[0.0] * 2] * 2), state or STATE)
    found = [str(difference) for difference in compare_runs(one, other).differences]
    assert expected in found, found


def test_a_missing_and_a_damaged_folder_are_differences(tmp_path):
    one, other = (make(tmp_path / name, LINES, torch.zeros(2, 2), STATE) for name in ("one", "other"))
    (other / "checkpoint-4" / "model.safetensors").write_bytes(b"")
    (other / "final").rename(other / "elsewhere")
    found = [str(difference) for difference in compare_runs(one, other).differences]
    assert any("checkpoint-4" in text and "truncated to 0" in text for text in found), found
    assert any("final" in text and "the folder is missing" in text for text in found), found


def test_a_model_kept_at_another_step_differs_from_the_later_step_on(tmp_path):
    one = make(tmp_path / "one", LINES, torch.zeros(2, 2), STATE)
    other = make(tmp_path / "other", [*LINES[:2], LINES[2] | {"loss": 0.2}], torch.zeros(2, 2), STATE)
    with Run.open(other) as run:
        run.save_model(run.final, 9, lambda into: save_tensors(into / "model.safetensors", {"a": torch.zeros(3)}))
    found = [str(difference) for difference in compare_runs(one, other).differences]
    assert found[0] == "step 4, metrics.jsonl line 3: loss is 0.3 and 0.2"
    assert found[1] == "step 9, final: made at step 4 and at step 9"


def test_the_first_difference_of_any_dtype():
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        x = torch.zeros(3, 4, 5).to(dtype)
        y = x.clone()
        y[1, 2, 3] = y[2, 0, 0] = 1
        assert (first_difference(x, y) or "").startswith("[1, 2, 3] is ")
        assert "2 of 60" in (first_difference(x, y) or "") and first_difference(x, x.clone()) is None
    assert first_difference(torch.tensor(1.0), torch.tensor(2.0)) == "[] is 1.0 and 2.0 (1 of 1 values differ)"


# Kills


def test_kills_are_spread_over_the_run():
    kills = planned(100, 40, random.Random(0))
    assert [kill.progress for kill in kills] == sorted(kill.progress for kill in kills)
    assert kills[0].progress < 4 and kills[-1].progress > 36
    moments = [kill.moment for kill in kills]
    assert {moment: moments.count(moment) for moment in set(moments)} == {"saving": 50, "starting": 15, "anywhere": 35}
    assert [kill.moment for kill in planned(1, 40, random.Random(0))] == ["saving"]


def measured(outcome, figure) -> None:
    print("\n".join(outcome.lines()))
    figure("kills of a run", outcome.kills)
    figure("of these inside a save", outcome.inside_a_save)
    figure("differences after the last resume", sum(len(seen.differences) for seen in outcome.comparisons.values()))


def check(tmp_path, shared, scratch_model, method: str, kills: int, figure, **training):
    """15 rows in batches of 4 over several epochs."""
    sections = settings(shared, scratch_model, method, **training)
    stages = prepared(load(write_config(tmp_path, sections)).stages)
    outcome = verify_resume(stages, tmp_path, kills)
    measured(outcome, figure)
    assert outcome.identical and outcome.kills == kills
    (seen,) = outcome.comparisons.values()
    assert seen.lines >= stages[0].config.training.max_steps and {"best", "final"} <= set(seen.folders)
    return outcome


@pytest.mark.slow
def test_a_killed_and_resumed_run_is_the_uninterrupted_one(tmp_path, shared, scratch_model, figure):
    check(tmp_path, shared, scratch_model, "sft", 3, figure, max_steps=8)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "reward", "dpo", "kto"])
def test_thirty_five_kills(tmp_path, shared, scratch_model, method, figure):
    """With the other methods' more than 100 kills in all, 30 of them inside a save."""
    outcome = check(tmp_path, shared, scratch_model, method, 35, figure, max_steps=30)
    assert outcome.inside_a_save >= 10


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_thirty_kills_while_completions_are_sampled(tmp_path, sums_home, method, figure):
    """50 prompts in batches of 12, two minibatches each, rewarded and evaluated, on the sums of benchmarks/sums.py."""
    data = {"source": str(sums_home / "train.jsonl"), "template": "none", "max_length": 24, "max_rows": 60}
    sections = {
        "name": "run",
        "model": str(sums_home / "model"),
        "method": {"type": method, "num_generations": 4, "num_minibatches": 2},
        "rewards": [{"type": "python", "function": "benchmarks.sums:exact"}],
        "data": data | {"validation": {"rows": 10}},
        "rollout": {"max_completion_length": 6},
        "training": {"batch_size": 12, "max_steps": 40, "learning_rate": 1e-3},
        "evaluation": {"eval_steps": 7},
        "checkpoint": {"save_steps": 3, "best_metric": "eval_reward"},
        "tracking": {"logging_steps": 1},
        "devices": {"type": "cpu"},
    }
    outcome = verify_resume(prepared(load(write_config(tmp_path, sections)).stages), tmp_path, 30)
    measured(outcome, figure)
    assert outcome.identical and outcome.kills == 30 and outcome.inside_a_save >= 10


@pytest.mark.slow
def test_stages_are_killed_and_resumed_too(tmp_path, shared, scratch_model):
    sft, dpo = (settings(shared, scratch_model, method, max_steps=6) for method in ("sft", "dpo"))
    common = {name: section for name, section in sft.items() if name not in ("method", "data")}
    both = {
        "sft": {"method": "sft", "data": sft["data"]},
        "dpo": {"method": "dpo", "data": dpo["data"], "init_from": "sft"},
    }
    stages = prepared(load(write_config(tmp_path, common | {"stages": both})).stages)
    outcome = verify_resume(stages, tmp_path, 8)
    print("\n".join(outcome.lines()))
    assert outcome.identical and set(outcome.comparisons) == {"run/sft", "run/dpo"}


def forgetful(stages, resume=False):
    """Training that does not take the optimizer's moments back when it goes on."""
    AdamW.load_state = lambda self, tensors: None
    return runner.train(stages, resume=resume)


def failing(stages, resume=False):
    raise RunError("row 3 is empty")


@pytest.mark.slow
def test_what_is_lost_on_resume_is_found(tmp_path, shared, scratch_model, capsys):
    sections = settings(shared, scratch_model, "dpo", max_steps=12)
    stages = prepared(load(write_config(tmp_path, sections)).stages)
    outcome = verify_resume(stages, tmp_path, 3, train=forgetful)
    print("\n".join(outcome.lines()))
    assert not outcome.identical
    (seen,) = outcome.comparisons.values()
    # The update after a kill is wrong, not its loss: what differs first is what was saved of it, or the line after it.
    assert re.match(r"step \d+, (metrics.jsonl line \d+|checkpoint-\d+/\S+): ", str(seen.differences[0]))
    assert any("optimizer.safetensors: " in str(d) and "|exp_avg" in str(d) for d in seen.differences)


def test_a_run_that_fails_by_itself_says_why(tmp_path, shared, scratch_model):
    sections = settings(shared, scratch_model, "dpo", max_steps=4)
    stages = prepared(load(write_config(tmp_path, sections)).stages)
    with pytest.raises(RunError, match=r"training failed without a kill.*row 3 is empty.*whole\.log"):
        verify_resume(stages, tmp_path, 1, train=failing)


def test_settings_as_they_are_verified(tmp_path, shared, scratch_model):
    sections = settings(shared, scratch_model, "dpo")
    small = prepared(load(write_config(tmp_path, sections)).stages)[0].config
    assert small.training.max_steps == 40 and small.checkpoint.save_steps == 2 and small.tracking.logging_steps == 1
    longer = load(tmp_path / "config.json", ["training.max_steps=100", "checkpoint.save_steps=500"])
    long = prepared(longer.stages)[0].config
    assert long.training.max_steps == 100 and long.checkpoint.save_steps == 10


@pytest.mark.slow
def test_the_command(tmp_path, shared, scratch_model, capsys):
    file = write_config(tmp_path, settings(shared, scratch_model, "dpo", max_steps=6))
    assert main(["verify-resume", str(file), "--kills", "2"]) == 0
    shown = capsys.readouterr().out
    assert "kill 2 of 2" in shown and "run: identical, bit for bit" in shown
    assert list((tmp_path / "runs").iterdir()) == []
    assert main(["verify-resume", str(file), "--kills", "1", "--keep", "--max-steps=3"]) == 0
    (kept,) = (tmp_path / "runs").iterdir()
    assert (kept / "whole/run/final").is_dir() and (kept / "killed.log").is_file()
    assert main(["verify-resume", str(file), "data.source=missing.jsonl"]) == 1
    error = capsys.readouterr().err
    assert "training failed without a kill" in error and "missing.jsonl does not exist" in error
