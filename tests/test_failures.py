"""Runs that fail by themselves save what they have done; resumed, they end as if they had not failed, to the bit."""

import asyncio
import errno
import json
import os
import shlex
import signal
import sqlite3
import sys

import pytest
import test_online
from test_resume import assert_same_run, settings, start

from benchmarks import sums
from posttrain.base.errors import EngineError, RewardError, RunError, Stopped, message_of
from posttrain.base.signals import handling
from posttrain.cli import main
from posttrain.config import load
from posttrain.engines import EmbeddedEngine
from posttrain.optim.adamw import AdamW
from posttrain.recipes import ppo, sft
from posttrain.runs import rollouts
from posttrain.runs.atomic import writing
from posttrain.runs.checkpoint import list_checkpoints
from posttrain.runs.files import load_json
from posttrain.runs.run import Run
from posttrain.runs.summary import read_run
from posttrain.training.loop import Loop
from posttrain.training.saving import Saver
from posttrain.training.state import smaller_packs


def names(folder) -> list[str]:
    return [path.name for path in list_checkpoints(folder)]


def at_call(monkeypatch, owner, name: str, number: int, error: BaseException):
    """The n-th call of a function raises."""
    function, calls = getattr(owner, name), []

    def fails(*args, **more):
        calls.append(name)
        if len(calls) == number:
            raise error
        return function(*args, **more)

    monkeypatch.setattr(owner, name, fails)


# --- methods that sample nothing -----------------------------------------------------------------------------------


def sft_sections(shared, scratch_model) -> dict:
    """Two or more packs a step, adapters with dropout, an evaluation at every third step."""
    sections = settings(shared, scratch_model, "sft", max_steps=5, tokens_per_pack=600)
    return sections | {"checkpoint": {"best_metric": "eval_loss"}, "tracking": {"logging_steps": 2}}


FAILURES = {  # what fails at which of its calls, with what; the step that is saved, the state's reason
    "backward": (sft, "nll", 12, RuntimeError("no kernel"), RuntimeError, 3, "RuntimeError: no kernel (test_failures"),
    "exit": (sft, "nll", 12, SystemExit(1), RunError, 3, "sys.exit(1) was called (test_failures.py line"),
    "line": (Run, "log", 4, RunError("disk full"), RunError, 4, "disk full"),
    "evaluation": (Saver, "_write_model", 2, RunError("disk full"), RunError, 3, "disk full"),
    "rows": (Loop, "_batch_of", 5, OSError("gone"), OSError, 4, "OSError: gone (test_failures.py line"),
}


@pytest.fixture(scope="module")
def whole(shared, scratch_model, tmp_path_factory):
    """The run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    start(folder, sft_sections(shared, scratch_model))
    return folder / "run"


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.slow) if what in ("exit", "rows") else what for what in FAILURES]
)
def test_a_run_that_fails_saves_its_last_finished_step(tmp_path, shared, scratch_model, whole, monkeypatch, what):
    sections = sft_sections(shared, scratch_model)
    *place, error, kind, step, reason = FAILURES[what]
    with monkeypatch.context() as patch:
        at_call(patch, *place, error)
        with pytest.raises(kind):
            start(tmp_path, sections)
    run = tmp_path / "run"
    assert names(run) == [f"checkpoint-{step}"]
    info = read_run(run)
    assert info.state == "failed" and reason in info.reason
    start(tmp_path, sections, resume=True)
    assert_same_run(whole, run)


# --- methods that sample completions -------------------------------------------------------------------------------


def stored(folder) -> dict[str, list]:
    """Everything in rollouts.sqlite, in order."""
    with sqlite3.connect(folder / rollouts.NAME) as connection:
        return {
            "prompts": connection.execute("SELECT * FROM prompts ORDER BY step, prompt_index").fetchall(),
            "rollouts": connection.execute(
                "SELECT * FROM rollouts ORDER BY step, prompt_index, rollout_index"
            ).fetchall(),
            "evaluations": connection.execute("SELECT * FROM evaluations ORDER BY step, dataset, row").fetchall(),
        }


def online(sums_home, folder, method, resume=False, **sections):
    """Four steps with an evaluation at the second, saved at the end alone."""
    data = {"source": str(sums_home / "train.jsonl"), "template": "none", "max_length": 24, "validation": {"rows": 4}}
    training = {"max_steps": 4, "batch_size": 4}
    evaluation = {"eval_steps": 2, "at_start": False}
    return test_online.train(
        sums_home, folder, method, resume=resume, data=data, training=training, evaluation=evaluation, **sections
    )


@pytest.fixture(scope="module")
def whole_online(sums_home, tmp_path_factory):
    """Runs that nothing happens to, by the name of the method, each made once."""
    made = {}

    def of(name: str):
        if name not in made:
            made[name] = online(sums_home, tmp_path_factory.mktemp(name), METHODS[name])
        return made[name]

    return of


METHODS = {"grpo": {"beta": 0.05}, "ppo": {"type": "ppo", "num_ppo_epochs": 2, "num_minibatches": 2, "target_kl": 1.0}}
ONLINE = {  # the method; what fails at which of its calls, with what; what is raised; the step that is saved
    "reward": ("grpo", sums, "exact", 4, ValueError("no"), RewardError, 2),  # steps 1 and 2, the evaluation, step 3
    "engine": ("grpo", EmbeddedEngine, "load", 5, EngineError("dead"), EngineError, 3),  # made, at the start, 1 to 3
    "update": ("ppo", ppo, "value_loss", 11, RuntimeError("no kernel"), RuntimeError, 2),  # the third of step 3
    "optimizer": ("ppo", AdamW, "_publish", 10, MemoryError(), MemoryError, 2),  # the second of step 3, masters moved
}


@pytest.mark.parametrize("what", ONLINE)
def test_an_online_run_that_fails_saves_its_last_finished_step(sums_home, tmp_path, whole_online, monkeypatch, what):
    name, *place, error, kind, step = ONLINE[what]
    with monkeypatch.context() as patch:
        at_call(patch, *place, error)
        with pytest.raises(kind):
            online(sums_home, tmp_path, METHODS[name])
    assert names(tmp_path / "run") == [f"checkpoint-{step}"]
    online(sums_home, tmp_path, METHODS[name], resume=True)
    assert_same_run(whole_online(name), tmp_path / "run")
    assert stored(whole_online(name)) == stored(tmp_path / "run")


# --- saving fails too; memory runs out ------------------------------------------------------------------------------


def test_a_save_that_fails_does_not_hide_why_the_run_failed(tmp_path, shared, scratch_model, monkeypatch, capsys):
    sections = sft_sections(shared, scratch_model)
    at_call(monkeypatch, sft, "nll", 12, ValueError("the first"))
    at_call(monkeypatch, Saver, "_write", 1, RunError("no space"))
    with pytest.raises(ValueError, match="the first") as failed:
        start(tmp_path, sections)
    assert failed.value.__notes__ == ["the steps since the last checkpoint are not saved: no space"]
    assert read_run(tmp_path / "run").reason.startswith("ValueError: the first (")
    assert "are not saved: no space" in (tmp_path / "run/training.log").read_text()


def test_a_full_disk_is_told_once(tmp_path, shared, scratch_model, monkeypatch, capsys):
    """Though the save after the failure fails for the same reason, and in another temporary folder."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write(self, folder):
        (folder / "begun").write_text("")
        with writing(folder / "optimizer.safetensors"):
            raise full

    monkeypatch.setattr(Saver, "_write_optimizer", write)
    with pytest.raises(RunError, match="no space to write") as failed:
        start(tmp_path, sft_sections(shared, scratch_model))
    assert failed.value.__notes__ == ["the steps since the last checkpoint are not saved"]
    shown = message_of(failed.value)
    assert shown.count("no space") == 1 and "/run/checkpoint-" in shown and ".tmp-" not in shown
    assert "no space" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("what", "number", "kind"), [("backward", signal.SIGINT, KeyboardInterrupt), ("rows", signal.SIGTERM, Stopped)]
)
def test_a_signal_while_a_failed_run_is_saved_waits_for_that(
    tmp_path, shared, scratch_model, monkeypatch, caplog, what, number, kind
):
    """It does not cost the steps, and it is not forgotten: no further run of a chain begins."""
    *place, error, _, step, reason = FAILURES[what]
    write = Saver._write

    def interrupted(self, *args):
        signal.raise_signal(number)
        write(self, *args)

    at_call(monkeypatch, *place, error)
    monkeypatch.setattr(Saver, "_write", interrupted)
    with pytest.raises(kind):
        start(tmp_path, sft_sections(shared, scratch_model))
    assert names(tmp_path / "run") == [f"checkpoint-{step}"]
    info = read_run(tmp_path / "run")
    assert info.state == "failed" and reason in info.reason
    assert f"the run failed: {error}" in caplog.text


def test_a_save_that_fails_after_early_stopping(tmp_path, shared, scratch_model, monkeypatch):
    """The line that the last step leaves is there once, as in the run that nothing happens to."""
    sections = sft_sections(shared, scratch_model)
    sections["data"]["validation"] = {"rows": 2}
    sections["training"] |= {"learning_rate": 0.5, "max_steps": 9}
    sections |= {"evaluation": {"eval_steps": 1}, "tracking": {"logging_steps": 100}}
    sections["checkpoint"] = {"best_metric": "eval_loss", "early_stopping_patience": 2, "save_steps": 100}
    start(tmp_path / "whole", sections)
    with monkeypatch.context() as patch, pytest.raises(RunError, match="disk full"):
        at_call(patch, Saver, "_write", 1, RunError("disk full"))
        start(tmp_path, sections)
    start(tmp_path, sections, resume=True)
    assert_same_run(tmp_path / "whole/run", tmp_path / "run")


def test_weights_that_have_moved_are_not_saved(tmp_path, shared, scratch_model, monkeypatch):
    """There is no copy of them where a step has one update: the last checkpoint stands, if there is one."""
    sections = sft_sections(shared, scratch_model)
    at_call(monkeypatch, AdamW, "forget", 3, ValueError("late"))
    with pytest.raises(ValueError, match="late"):
        start(tmp_path, sections)
    assert names(tmp_path / "run") == []
    assert "step 3 was interrupted after changing the weights" in (tmp_path / "run/training.log").read_text()


def test_out_of_memory_ends_with_the_command_that_resumes(tmp_path, shared, scratch_model, monkeypatch, capsys):
    """The command is taken at its word; packs are no larger than it says, and the run ends with all its steps."""
    sections = sft_sections(shared, scratch_model)
    sections["training"]["tokens_per_pack"] = 1400
    file = tmp_path / "config.json"
    file.write_text(json.dumps(sections | {"output_dir": str(tmp_path)}))
    with monkeypatch.context() as patch:
        at_call(patch, AdamW, "step", 4, MemoryError())
        assert main(["train", str(file)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-3].startswith("error: out of memory")
    assert said[-2].startswith("Lower training.tokens_per_pack (1,400)")
    command = said[-1].removeprefix("To resume with less memory: ")
    assert command == f"posttrain train --resume {tmp_path}/run --tokens-per-pack 700"
    assert names(tmp_path / "run") == ["checkpoint-3"]
    assert main(shlex.split(command)[1:]) == 0
    assert "resumed from checkpoint-3 at step 3 of 5" in (tmp_path / "run/training.log").read_text()
    assert load_json(tmp_path / "run/results.json")["steps"] == 5
    config = load(tmp_path / "run/config.yaml").config
    assert config.training.tokens_per_pack == 700
    least = config.model_copy(update={"training": config.training.model_copy(update={"tokens_per_pack": 600})})
    assert smaller_packs(least, tmp_path).endswith("--gradient-checkpointing true")


# --- signals in a reward, closed pipes and terminals, a folder without a step ----------------------------------------


@pytest.mark.parametrize("kept", [Exception, BaseException])
def test_ctrl_c_in_a_reward_that_catches_what_it_can(sums_home, tmp_path, whole_online, monkeypatch, kept):
    """The code of a reward may catch every exception: the run ends all the same, with all its finished steps."""
    exact, calls = sums.exact, []

    def catching(completions, answer, **columns):
        calls.append(1)
        try:
            if len(calls) == 4:  # at the third step, after the evaluation
                asyncio.run(interrupted())
        except kept:
            pass
        return exact(completions, answer, **columns)

    async def interrupted():
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        await asyncio.sleep(0.01)

    with monkeypatch.context() as patch:
        patch.setattr(sums, "exact", catching)
        with pytest.raises(KeyboardInterrupt, match="continue with --resume"):
            online(sums_home, tmp_path, METHODS["grpo"])
    info = read_run(tmp_path / "run")
    assert (info.state, info.reason) == ("interrupted", "stopped by Ctrl-C")
    assert names(tmp_path / "run") == ["checkpoint-2"]
    online(sums_home, tmp_path, METHODS["grpo"], resume=True)
    assert_same_run(whole_online("grpo"), tmp_path / "run")


def test_a_closed_pipe_and_a_closed_terminal_end_nothing(tmp_path, shared, scratch_model, monkeypatch):
    """The reader of both streams goes after the first lines; then the terminal."""
    sections = sft_sections(shared, scratch_model)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(sections | {"output_dir": str(tmp_path)}))
    reader, writer = os.pipe()
    update = Loop.update

    def closing(self, packs, objective):
        update(self, packs, objective)
        if self.state.step == 2:
            os.close(reader)
        elif self.state.step == 3:
            signal.raise_signal(signal.SIGHUP)
            print("a reward's own words", flush=True)

    monkeypatch.setattr(Loop, "update", closing)
    default = handling(signal.SIG_DFL, signal.SIGHUP)  # the suite itself may run under nohup
    with default, os.fdopen(writer, "w", buffering=1) as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        assert main(["train", str(file)]) == 0
        assert sys.stdout is stream
        stream.write("and nothing is left to fail at the end")
    assert read_run(tmp_path / "run").state == "finished"
    log = (tmp_path / "run/training.log").read_text()
    assert "the terminal was closed: continuing without it" in log and "step 5/5" in log and "done, 5 steps in" in log


def test_a_command_that_only_shows_ends_with_its_reader(tmp_path, monkeypatch):
    """As others do by SIGPIPE: at once and without a word."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", buffering=1) as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        with pytest.raises(SystemExit) as left:
            main(["config", "list"])
    assert left.value.code == 141


def test_a_failure_before_the_first_step_leaves_the_folder_free(sums_home, tmp_path, monkeypatch):
    """What the run had started to write, its rollouts among it, does not count."""
    with monkeypatch.context() as patch:
        at_call(patch, sums, "exact", 1, ValueError("no"))
        with pytest.raises(RewardError):
            online(sums_home, tmp_path, METHODS["grpo"])
    assert (tmp_path / "run" / rollouts.NAME).exists()
    online(sums_home, tmp_path, METHODS["grpo"])
    assert "ended before its first step" in (tmp_path / "run/training.log").read_text()
