"""Whole runs under faults: a full disk, damaged checkpoints, numbers that are not finite, signals.

What happens to single files and folders is in test_store_checkpoint.py, kills of whole runs are in test_verify.py.
"""

import errno
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_resume import assert_same_run, numbers, settings, start

from posttrain import runner
from posttrain.base.errors import RunError, VitalSignError
from posttrain.cli import main
from posttrain.config import load
from posttrain.recipes import sft
from posttrain.runs import atomic, checkpoint
from posttrain.runs.checkpoint import list_checkpoints, newest_complete, verify
from posttrain.training import saving
from posttrain.training.loop import Loop, State


def run_facts(folder: Path) -> dict:
    return json.loads((folder / "run/run.json").read_text())


# --- a full disk ----------------------------------------------------------------------------------------------------


def full_disk(tmp_path, shared, scratch_model, monkeypatch, figure, points: list[int]) -> None:
    """The disk is full from the n-th file on that a run forces to it; then there is room again."""
    sections = settings(shared, scratch_model, "dpo", max_steps=5)
    sections["evaluation"] = {"eval_steps": -1}
    sections["checkpoint"] = {"save_steps": 1, "save_total_limit": 2}
    start(tmp_path / "whole", sections)
    fsync = os.fsync
    reached = []
    for point in points:
        calls = 0

        def full(descriptor: int, point: int = point) -> None:
            nonlocal calls
            calls += 1
            if calls >= point:
                raise OSError(errno.ENOSPC, "No space left on device")
            fsync(descriptor)

        folder = tmp_path / f"full-{point}"
        with monkeypatch.context() as patch:
            patch.setattr(atomic.os, "fsync", full)
            with pytest.raises(RunError, match="no space to write"):
                start(folder, sections)
        saved = list_checkpoints(folder / "run")
        assert not any(map(verify, saved)), point
        reached.append(len(saved))
        start(folder, sections, resume=bool(saved))
        assert_same_run(tmp_path / "whole/run", folder / "run")
        shutil.rmtree(folder)
    print("checkpoints when the disk was full:", reached)
    figure("points of a run at which the disk is full", len(points))
    assert max(reached) == 2


@pytest.mark.slow
def test_a_full_disk_and_then_room_again(tmp_path, shared, scratch_model, monkeypatch, figure):
    full_disk(tmp_path, shared, scratch_model, monkeypatch, figure, [62])


@pytest.mark.slow
def test_a_full_disk_at_ten_points_of_a_run(tmp_path, shared, scratch_model, monkeypatch, figure):
    full_disk(tmp_path, shared, scratch_model, monkeypatch, figure, [1, 2, 7, 12, 19, 25, 33, 41, 58, 66])


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_damage_to_a_real_checkpoint_is_always_seen(tmp_path, shared, scratch_model, figure):
    """300 flipped bits, 100 truncations, each file deleted: named, and the checkpoint before is taken."""
    start(tmp_path, settings(shared, scratch_model, "dpo", max_steps=4))
    run, newest = tmp_path / "run", tmp_path / "run/checkpoint-4"
    assert newest_complete(run) == (newest, [])
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    generator, missed = random.Random(0), 0
    for attempt in range(400 + len(files)):
        path = files[attempt - 400] if attempt >= 400 else generator.choice(files)
        whole = path.read_bytes()
        if attempt >= 400:
            path.unlink()
        elif attempt >= 300:
            path.write_bytes(whole[: generator.randrange(len(whole))])
        else:
            bit = generator.randrange(8 * len(whole))
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
        taken, skipped = newest_complete(run)
        named = [text for text in skipped if "checkpoint-4" in text and path.name in text]
        missed += not (taken.name == "checkpoint-2" and named == skipped and len(named) == 1)
        path.write_bytes(whole)
    assert newest_complete(run) == (newest, [])
    figure("flipped bits", 300)
    figure("truncations", 100)
    figure("files deleted", len(files))
    figure("damage not found", missed)


def signed_again(folder: Path) -> None:
    """A manifest for the files as they are now: their bytes are no longer what gives the damage away."""
    manifest = json.loads((folder / "manifest.json").read_text())
    files = {name: checkpoint._fingerprint(folder / name) for name in checkpoint._files(folder)}
    (folder / "manifest.json").write_text(checkpoint._render(manifest["step"], files))


def tensors_changed(file: Path, change) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def wrong_step(folder: Path) -> None:
    shutil.copy(folder.parent / "checkpoint-1/state.json", folder)


def moment_lost(folder: Path) -> None:
    def lose(tensors):
        del tensors[next(name for name in tensors if name.endswith("|exp_avg_sq"))]

    tensors_changed(folder / "optimizer.safetensors", lose)


def all_moments_lost(folder: Path) -> None:
    def lose(tensors):
        for name in [name for name in tensors if name.startswith(min(tensors).split("|")[0])]:
            del tensors[name]

    tensors_changed(folder / "optimizer.safetensors", lose)


def moments_of_one_value(folder: Path) -> None:
    """They would fit: torch's arithmetic repeats a single value as often as is needed."""

    def shrink(tensors):
        tensors |= {name: torch.zeros(1) for name in tensors if name.endswith(("|exp_avg", "|exp_avg_sq"))}

    tensors_changed(folder / "optimizer.safetensors", shrink)


def generator_lost(folder: Path) -> None:
    tensors_changed(folder / "rng.safetensors", lambda tensors: tensors.pop("rng.torch"))


def weights_lost(folder: Path) -> None:
    file = next(folder.glob("*model.safetensors"))
    tensors_changed(file, lambda tensors: tensors.pop(max(tensors)))


def weights_of_another_shape(folder: Path) -> None:
    file = next(folder.glob("*model.safetensors"))
    tensors_changed(file, lambda tensors: tensors.update({max(tensors): torch.zeros(3, 5)}))


DAMAGES = {
    wrong_step: r"state\.json: it is the state of step 1, not of step",
    moment_lost: r"optimizer\.safetensors: it has \d+ tensors, but \d+ were saved",
    all_moments_lost: r"optimizer\.safetensors: it has \d+ tensors, but \d+ were saved",
    moments_of_one_value: r"optimizer\.safetensors: \S+\|exp_avg has the shape \[1\], expected \[",
    generator_lost: r"the random state lacks rng\.torch",
    weights_lost: r"lacks? \S+",
    weights_of_another_shape: r"shapes differ|different shapes",
}


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")  # PEFT would train on with new ones
@pytest.mark.parametrize(
    ("method", "damages"), [("sft", list(DAMAGES)), ("dpo", [weights_lost, weights_of_another_shape])]
)
def test_what_does_not_belong_together_is_fallen_back_from(tmp_path, shared, scratch_model, method, damages):
    """Each checkpoint but the first is damaged in a way of its own, under a manifest that says nothing of it.

    SFT trains adapters, DPO all weights.
    """
    last = len(damages) + 1
    sections = settings(shared, scratch_model, method, max_steps=last)
    sections["evaluation"] = {"eval_steps": -1}
    sections["checkpoint"] = {"save_steps": 1, "save_total_limit": None}
    start(tmp_path, sections)
    run = tmp_path / "run"
    shutil.copytree(run, tmp_path / "whole")
    for step, damage in enumerate(damages, start=2):
        damage(run / f"checkpoint-{step}")
        signed_again(run / f"checkpoint-{step}")
        assert verify(run / f"checkpoint-{step}") == []
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and ".log" not in path.name}
    with pytest.raises(RunError, match=rf"checkpoint-{last} is damaged .*in .* there are checkpoint-1, checkpoint-2"):
        runner.train(load(run / "config.yaml").config, resume=run / f"checkpoint-{last}")
    del before[run / "run.json"]  # it has the failure
    assert {path: path.read_bytes() for path in before} == before

    start(tmp_path, sections, resume=True)
    log = (run / "training.log").read_text()
    for step, damage in enumerate(damages, start=2):
        said = rf"checkpoint-{step} is damaged \(.*({DAMAGES[damage]}).*\): falling back to checkpoint-1"
        assert re.search(said, log), damage.__name__
    assert "resumed from checkpoint-1" in log
    assert_same_run(tmp_path / "whole", run)


# --- numbers that are not finite ------------------------------------------------------------------------------------


class Poison(torch.autograd.Function):
    """The identity, with a gradient that is not finite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * float("nan")


BAD = {
    "nan loss": lambda loss_N: loss_N * float("nan"),
    "inf loss, finite gradient": lambda loss_N: loss_N + float("inf"),
    "finite loss, nan gradient": Poison.apply,
}


def poisoned(monkeypatch, steps: set[int], kind: str) -> None:
    """The loss of these steps of SFT is not finite (evaluations come before the first step, or not at all)."""
    nll, seen = sft.nll, 0

    def bad_nll(logprob_N):
        nonlocal seen
        seen += 1
        return BAD[kind](nll(logprob_N)) if seen in steps else nll(logprob_N)

    monkeypatch.setattr(sft, "nll", bad_nll)


def sft_sections(shared, scratch_model, **training) -> dict:
    sections = settings(shared, scratch_model, "sft", **training)
    return sections | {"evaluation": {"eval_steps": -1}, "checkpoint": {"save_steps": 1, "save_total_limit": None}}


@pytest.mark.parametrize("kind", BAD)
def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path, shared, scratch_model, monkeypatch, kind):
    sections = sft_sections(shared, scratch_model, max_steps=6)
    poisoned(monkeypatch, {3}, kind)
    start(tmp_path, sections)
    run = tmp_path / "run"
    weights = {step: load_file(run / f"checkpoint-{step}/adapter_model.safetensors") for step in (2, 3, 4)}
    moments = {step: load_file(run / f"checkpoint-{step}/optimizer.safetensors") for step in (2, 3)}
    assert all(torch.equal(weights[2][name], weights[3][name]) for name in weights[2])
    assert all(torch.equal(moments[2][name], moments[3][name]) for name in moments[2])
    assert any(not torch.equal(weights[3][name], weights[4][name]) for name in weights[3])
    assert json.loads((run / "results.json").read_text())["skipped_steps"] == 1
    assert run_facts(tmp_path)["counters"]["skipped_steps"] == 1
    assert "step 3 skipped, weights unchanged; non-finite values:" in (run / "training.log").read_text()
    assert [line.get("skipped_steps") for line in numbers(run)] == [None, 1, 1]


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind != "nan loss" else kind for kind in BAD]
)
def test_five_in_a_row_end_the_run_and_a_resume_goes_on(tmp_path, shared, scratch_model, monkeypatch, kind):
    sections = sft_sections(shared, scratch_model, max_steps=10)
    with monkeypatch.context() as patch:
        poisoned(patch, {2, 4, 5, 6, 7, 8, 9, 10}, kind)
        with pytest.raises(VitalSignError, match=r"5 steps in a row were not finite \(\w+\), the last of them step 8"):
            start(tmp_path, sections)
    run = tmp_path / "run"
    assert run_facts(tmp_path)["state"] == "failed" and not (run / "final").exists()
    newest, skipped = newest_complete(run)
    assert (newest.name, skipped) == ("checkpoint-7", [])
    for file in newest.glob("*.safetensors"):
        assert all(bool(t.isfinite().all()) for t in load_file(file).values() if t.is_floating_point())
    start(tmp_path, sections, resume=True)
    assert json.loads((run / "results.json").read_text())["skipped_steps"] == 5  # steps 2 and 4 to 7


def test_weights_that_are_not_finite_are_never_saved(tmp_path, shared, scratch_model, monkeypatch):
    sections = sft_sections(shared, scratch_model, max_steps=6)
    update = Loop.update

    def broken(self, packs, objective):
        update(self, packs, objective)
        if self.state.step == 3:
            next(iter(self.optimizer.masters.values())).data[0, 0] = float("inf")

    monkeypatch.setattr(Loop, "update", broken)
    with pytest.raises(VitalSignError, match=r"weights are not finite at step 3, so they are not saved: .*lora"):
        start(tmp_path, sections)
    assert newest_complete(tmp_path / "run")[0].name == "checkpoint-2"


def test_a_metric_that_is_not_finite_does_no_harm(tmp_path, shared, scratch_model, monkeypatch):
    """It stands as null, also when a resume falls between the step and its log line."""
    window = {"loss": 1.5, "entropy": float("nan")}
    again = State.from_json(json.loads(json.dumps(State(step=3, window=window).as_json(), allow_nan=False)))
    assert again.window["loss"] == 1.5 and again.window["entropy"] != again.window["entropy"]
    sections = sft_sections(shared, scratch_model, max_steps=4)
    global_mean = sft.global_mean
    calls = 0

    def bad_metric(value_N, count, *more):
        nonlocal calls
        calls += 1
        return global_mean(value_N, count, *more) * (float("nan") if calls == 2 else 1.0)  # the entropy of step 1

    monkeypatch.setattr(sft, "global_mean", bad_metric)
    start(tmp_path, sections)
    lines = numbers(tmp_path / "run")
    assert [line["entropy"] is None for line in lines] == [True, False]
    assert all(line["loss"] is not None and "skipped_steps" not in line for line in lines)


# --- signals --------------------------------------------------------------------------------------------------------


def test_a_second_ctrl_c_leaves_at_once(tmp_path, shared, scratch_model, monkeypatch):
    after = []

    def interrupted(self, packs, objective):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        after.append("went on")

    monkeypatch.setattr(Loop, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, settings(shared, scratch_model, "dpo"))
    assert not after and not list_checkpoints(tmp_path / "run")
    assert run_facts(tmp_path)["state"] == "interrupted"


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_long_step_is_given_up_for_a_signal(tmp_path, shared, scratch_model, monkeypatch, step):
    """As if it had never started: generators too. Before the first step there is nothing to save."""
    sections = settings(shared, scratch_model, "sft", max_steps=5)
    sections |= {"evaluation": {"eval_steps": -1}, "checkpoint": {"save_steps": 10, "save_total_limit": None}}
    sections["training"]["tokens_per_pack"] = sections["data"]["max_length"] = 200
    start(tmp_path / "whole", sections)
    nll, seen = sft.nll, []
    with monkeypatch.context() as patch:
        patch.setattr(saving, "PATIENCE_S", -1.0)

        def stop_within(logprob_N):
            seen.append(logprob_N)
            if state and state[-1].state.step == step - 1:
                signal.raise_signal(signal.SIGTERM)
            return nll(logprob_N)

        state: list[Loop] = []
        steps = Loop.steps
        patch.setattr(Loop, "steps", lambda self: (state.append(self), steps(self))[1])
        patch.setattr(sft, "nll", stop_within)
        with pytest.raises(SystemExit) as left:
            start(tmp_path / "cut", sections)
    assert left.value.code == 143
    names = [path.name for path in list_checkpoints(tmp_path / "cut/run")]
    assert names == ([f"checkpoint-{step - 1}"] if step > 1 else [])
    assert f"step {step} takes too long" in (tmp_path / "cut/run/training.log").read_text()
    start(tmp_path / "cut", sections, resume=True)
    assert_same_run(tmp_path / "whole/run", tmp_path / "cut/run")


def command(arguments: list[str], log: str, started: str) -> None:
    """A process that runs posttrain, as the shell would."""
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    Path(started).touch()
    raise SystemExit(main(arguments))


def steps_made(run: Path) -> int:
    file = run / "metrics.jsonl"
    found = (
        [json.loads(line)["step"] for line in file.read_text().splitlines() if line.endswith("}")]
        if file.exists()
        else []
    )
    return max(found, default=0)


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for child processes in /proc")
def test_signals_in_any_phase(tmp_path, shared, scratch_model, figure):
    """SIGINT and SIGTERM at random moments of a run's life: status 130 or 143 within 10 s, no process left behind,
    and what is resumed in the end is the uninterrupted run."""
    sections = settings(shared, scratch_model, "dpo", max_steps=16)
    start(tmp_path / "whole", sections)
    folder = tmp_path / "cut"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(sections | {"output_dir": str(folder)}))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["posttrain.runner"])
    generator, ended = random.Random(0), []
    while len(ended) < 16:
        arguments = ["train", str(folder / "config.json")]
        arguments += ["--resume"] if (folder / "run/run.json").exists() else []
        started = folder / f"started-{len(ended)}"
        process = context.Process(target=command, args=(arguments, str(folder / "log"), str(started)))
        process.start()
        while not started.exists() and process.is_alive():  # what comes before is not posttrain's
            time.sleep(0.01)
        most = 3.0
        if len(ended) % 2:  # every second signal comes in or after a step, however slow the machine is
            at, most = steps_made(folder / "run"), 0.5
            while steps_made(folder / "run") == at and process.is_alive():
                time.sleep(0.01)
        process.join(generator.uniform(0.1, most))
        if process.exitcode is not None:
            assert process.exitcode == 0, (folder / "log").read_text()[-500:]
            ended.append(0)
            continue
        number = generator.choice([signal.SIGINT, signal.SIGTERM])
        before = children(process.pid)
        os.kill(process.pid, number)
        began = time.monotonic()
        steps = steps_made(folder / "run")  # read before the signal, it might be outdated on a busy machine
        process.join(10)
        took = time.monotonic() - began
        early = -number  # a SIGTERM before there is a run: the system's own end, which the shell calls 143 too
        said = (folder / "log").read_text()[-500:]
        done = {0} if steps >= 14 else set()  # it had its last step to finish, or less
        assert process.exitcode in {128 + number, early} | done, (process.exitcode, number, said)
        figure("longest exit after a signal, s", took)
        figure("processes left behind", sum(Path(f"/proc/{child}").exists() for child in before))
        figure("signals", 1)
        ended.append(process.exitcode)
        print(f"{signal.Signals(number).name}: status {process.exitcode} after {took:.2f} s")
    assert main(["train", str(folder / "config.json"), "--resume"]) == 0
    assert_same_run(tmp_path / "whole/run", folder / "run")


def test_saving_is_timed(tmp_path, shared, scratch_model):
    start(tmp_path, settings(shared, scratch_model, "dpo", max_steps=4))
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert 0 < results["save_seconds"] < 10
    assert (tmp_path / "run/training.log").read_text().count("saved checkpoint-") == 2


def test_a_damaged_best_model_is_set_aside(tmp_path, shared, scratch_model):
    sections = settings(shared, scratch_model, "dpo", max_steps=2)
    start(tmp_path, sections)
    (tmp_path / "run/best/manifest.json").write_text("{")
    start(tmp_path, sections, "training.max_steps=3", resume=True)
    assert (tmp_path / "run/best.set-aside").is_dir() and not verify(tmp_path / "run/best")
