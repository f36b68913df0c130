"""What people see: progress, curves."""

import io
import json
import re
import struct
import warnings
from pathlib import Path

import pytest
from rich.console import Console

from posttrain.base.console import progress
from posttrain.base.words import counted, model_name
from posttrain.reports.curves import PANELS, lines_of, write_curves
from posttrain.reports.series import Series
from posttrain.runs.metrics import headlines
from posttrain.runs.progress import TrainingProgress, duration

# Progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    monkeypatch.setattr("time.monotonic", made := Clock())
    return made


def console(terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=120, legacy_windows=False), out


def test_lines_without_a_terminal(clock):
    shown, out = console(False)
    names = ("loss", "rewards/margins")
    with TrainingProgress(40, start_step=20, logging_steps=10, shown=names, console=shown) as bar:
        for step in range(21, 41):
            clock.now += 2.0
            bar.step(step, 3000, {"loss": 1 / step, "rewards/margins": 0.25, "secret": 1} if step % 5 == 0 else {})
        bar.validation(40, {"eval_loss": 0.125, "eval_accuracy": None})
    # 3000 tokens in 2 s; at step 30, ten more steps of 2 s
    assert out.getvalue().splitlines() == [
        "step 30/40  loss 0.03333  margins 0.25  1.5k tokens/s  ETA 20s",
        "step 40/40  loss 0.025  margins 0.25  1.5k tokens/s  ETA 0s",
        "validation at step 40  eval_loss 0.125  eval_accuracy none",
    ]


def test_validation_keeps_to_the_width_of_the_console():
    out = io.StringIO()
    metrics = {f"eval_rewards/metric_{n}": 0.123456 for n in range(9)}
    TrainingProgress(9, console=Console(file=out, width=80)).validation(9, metrics)
    lines = out.getvalue().splitlines()
    assert len(lines) > 3 and all(len(line) <= 80 for line in lines) and all(line[:4] == "    " for line in lines[1:])
    assert " ".join(out.getvalue().split()) == "validation at step 9 " + " ".join(f"{m} 0.1235" for m in metrics)


def test_a_validation_begins_with_the_main_metrics_and_shows_what_changed(caplog):
    """Before, it printed all numbers in the order of measurement, zeros too; the log still has them."""
    caplog.set_level("INFO", logger="posttrain.progress")
    shown, out = console(False)
    bar = TrainingProgress(9, console=shown)
    first = {
        "epoch": 0.5, "eval_completions/mean_length": 12.0, "eval_reward": 0.25, "eval_rewards/math/correct": 3.0,
        "eval_rewards/math/timeout": 0.0, "eval_rewards/left_out": 0.0, "eval_hard_reward": 0.1,
        "eval_answer_accuracy": 0.5, "eval_format_accuracy": 0.75,
    }  # fmt: skip
    bar.validation(4, first)
    bar.validation(
        8, first | {"epoch": 1.0, "eval_reward": 0.5, "eval_hard_reward": 0.0, "eval_rewards/math/timeout": 2.0}
    )
    assert " ".join(out.getvalue().split()) == (
        "validation at step 4 eval_reward 0.25 eval_hard_reward 0.1 eval_format_accuracy 0.75 eval_answer_accuracy 0.5 "
        "epoch 0.5 eval_completions/mean_length 12 eval_rewards/math/correct 3 "
        "validation at step 8 eval_reward 0.5 (+0.25) eval_hard_reward 0 (-0.1) eval_format_accuracy 0.75 "
        "eval_answer_accuracy 0.5 epoch 1 eval_rewards/math/timeout 2"
    )
    assert "eval_rewards/math/timeout 0  eval_rewards/left_out 0" in caplog.messages[0]


def test_speed_is_that_of_the_last_minute(clock):
    bar = TrainingProgress(10_000, console=console(False)[0])
    assert bar.tokens_per_second == 0 and bar.seconds_left is None
    for step in range(1, 201):
        clock.now += 10.0 if step <= 100 else 1.0  # slow at first: compiling, a cold disk
        bar.step(step, 500, {})
    assert bar.tokens_per_second == pytest.approx(500) and bar.seconds_left == pytest.approx(9800)


def test_a_bar_on_a_terminal():
    shown, out = console(True)
    with TrainingProgress(20, console=shown) as bar:
        for step in range(1, 21):
            bar.step(step, 10, {"loss": 0.5})
        bar.validation(20, {"eval_loss": 0.25})
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())
    assert "20/20" in text and "loss 0.5" in text and "validation at step 20  eval_loss 0.25" in text
    assert "step 10/20" not in text  # no lines beside the bar


def test_short_work_shows_nothing_and_long_work_does(clock):
    def work(count: int, seconds: float):
        for item in range(count):
            clock.now += seconds
            yield item

    shown, out = console(False)
    assert list(progress(work(10, 0.1), "quick", console=shown)) == list(range(10))
    assert out.getvalue() == ""
    assert sum(progress(work(200, 0.5), "hashing", total=200, console=shown)) == sum(range(200))
    lines = out.getvalue().splitlines()
    assert len(lines) == 4 and lines[0] == "hashing: 4 of 200 (2%)", lines
    shown, out = console(True)
    list(progress([1, 2, 3], "quick", console=shown))
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.6, "1m 00s"), (200, "3m 20s"), (7500, "2h 05m"), (273600, "3d 04h")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text


# Curves


def measured(steps: int) -> list[dict]:
    lines: list[dict] = [{"step": 0, "eval_loss": 0.7, "eval_rewards/accuracies": 0.5}]
    for step in range(1, steps + 1):
        line = {"step": step, "epoch": step / steps, "time": 1.0, "loss": 1 / step, "grad_norm": 2.0}
        lines.append(line | {"learning_rate": 1e-6, "rewards/accuracies": 0.5, "rewards/margins": step / steps})
    return [*lines, {"step": steps, "eval_loss": 0.6, "eval_helpful_loss": 0.5, "eval_rewards/accuracies": 0.75}]


def logged(folder: Path, metrics: list[dict]) -> Series:
    """The curves of a run that logged these lines."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return Series(folder).refresh()


def size_of(png: bytes) -> tuple[int, int]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])


@pytest.mark.parametrize(
    "metrics",
    [
        [],
        [{"step": 1, "loss": 2.0}],
        [{"step": 1, "loss": None}, {"step": 2, "loss": None}],
        [{"step": 1, "num_tokens": 3}],
        measured(500),
    ],
    ids=["nothing", "one point", "never finite", "nothing known", "many"],
)
def test_curves_of_any_run(tmp_path, metrics):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logged(tmp_path, metrics)
        write_curves(tmp_path, tmp_path / "curves.png", "toy $\\frac$ <b>")
    drawn = (tmp_path / "curves.png").read_bytes()
    assert size_of(drawn)[0] >= 500
    if len(metrics) > 100:
        assert size_of(drawn)[0] > 1500  # three panels wide
    assert write_curves(tmp_path, tmp_path / "again.png", "toy $\\frac$ <b>") is None
    assert (tmp_path / "again.png").read_bytes() == drawn


def test_curves_put_every_name_where_it_belongs(tmp_path):
    series = logged(
        tmp_path,
        [
            {"step": 1, "loss": 1.0, "mean_token_accuracy": 0.1, "eval_mean_token_accuracy": 0.2, "accuracy": 0.3},
            {"step": 1, "eval_my_data_rewards/margins": 0.4, "eval_accuracy": 0.5, "eval_runtime": 9.0, "odd": 1.0},
            {"step": 1, "nll_loss": 2.0, "eval_nll_loss": 2.0, "eval_my_data_nll_loss": 2.0},
        ],
    )
    lines = {panel.title: list(lines_of(panel, series, "step")) for panel in PANELS}
    assert {title: {line.label: line.ys for line in of} for title, of in lines.items() if of} == {
        "Loss": {"train": [1.0]},
        "Token accuracy": {"train": [0.1], "validation": [0.2]},
        "Accuracy: chosen above rejected": {"train": [0.3], "validation": [0.5]},
        "Margin: chosen − rejected": {"my_data": [0.4]},
    }


def test_each_method_is_judged_by_its_own_number():
    metrics = {"loss": 0.5, "eval_loss": 0.6, "reward": 1.5, "eval_accuracy": 0.7, "rewards/accuracies": 0.8}
    assert headlines("sft", metrics) == {"validation loss": 0.6}
    assert next(iter(headlines("grpo", metrics).items())) == ("reward", 1.5)
    assert next(iter(headlines("reward", metrics).items())) == ("validation accuracy", 0.7)
    assert headlines("dpo", metrics) == {"accuracy": 0.8, "validation loss": 0.6}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("runs/hh/final", "hh"),
        ("runs/x/grpo/checkpoint-500/", "grpo"),
        ("/data/runs/hh/best", "hh"),
        ("final", "final"),
        ("../final", "final"),
        ("owner/name", "name"),
        ("models/finalist", "finalist"),
    ],
)
def test_a_model_that_a_run_saved_is_called_by_the_run(path, name):
    assert model_name(path) == name


def test_counts_have_their_noun_in_the_right_number():
    assert [counted(n, "step") for n in (0, 1, 1_200)] == ["0 steps", "1 step", "1,200 steps"]
