"""Verifies exact resume of any configuration: a run that is killed many times equals an uninterrupted one bit for bit.

The configuration is trained twice in a scratch folder: once uninterrupted, once in processes that are killed (SIGKILL)
at random moments, some of them during a save, and resumed each time. Then all saved files and metrics are compared.

Each process is forked from a server that has imported torch but computed nothing, so that no kill costs an import.
"""

import math
import multiprocessing
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import fmean
from typing import Literal

from rich.console import Console

from posttrain import runner
from posttrain.base.console import PlainConsole
from posttrain.base.errors import PosttrainError, RunError
from posttrain.base.words import counted
from posttrain.config import RunConfig, Stage, TrackingConfig
from posttrain.runs.checkpoint import list_checkpoints, step_of
from posttrain.runs.finding import find_runs
from posttrain.runs.logs import ConsoleLog
from posttrain.runs.managing.facts import BitComparison, compare_runs
from posttrain.runs.metrics import last_metrics
from posttrain.runs.progress import duration

POLL_S = 0.001
SAVES = 10  # minimum number of checkpoints in the run, so that a resume seldom starts from the beginning
INSIDE_A_SAVE, WHILE_STARTING = 0.5, 0.15  # shares of the kills; the remaining kills happen at any moment
HALF_WRITTEN = re.compile(r"(checkpoint-\d+|best|final)\.(tmp|old)-\d+")
PRELOADED = ["posttrain.runner", "matplotlib.backends.backend_agg", "pandas"]  # imported by every run
SHOWN = 10  # maximum number of differences shown
Train = Callable[..., int]
Moment = Literal["starting", "anywhere", "saving"]


@dataclass(frozen=True, slots=True)
class Kill:
    """The moment to kill a process."""

    moment: Moment
    progress: float  # number of steps before the kill; not used for `starting`
    share: float  # waiting time as a share of the duration of a start, step or save


@dataclass(slots=True)
class Outcome:
    """Counts of the kills, and the comparison of the two runs by run folder (one per model)."""

    kills: int = 0
    inside_a_save: int = 0  # killed with an unfinished folder on the disk
    while_starting: int = 0  # before the first step after a start
    steps_made_again: int = 0
    seconds: float = 0.0
    comparisons: dict[str, BitComparison] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        return not any(comparison.differences for comparison in self.comparisons.values())

    def lines(self) -> list[str]:
        """The outcome in words, with the first differences."""
        lines = [
            f"killed {self.kills} times in {duration(self.seconds)}: {self.inside_a_save} inside a save, "
            f"{self.while_starting} while starting; {counted(self.steps_made_again, 'step')} repeated"
        ]
        for name, compared in self.comparisons.items():
            if compared.differences:
                lines.append(f"{name}: {len(compared.differences)} differences (uninterrupted, resumed); the first:")
                lines += [f"  {difference}" for difference in compared.differences[:SHOWN]]
                continue
            what = f"{counted(compared.lines, 'line')} of metrics, {counted(compared.tensors, 'tensor')} of "
            what += f"{counted(compared.values, 'value')} in {counted(len(compared.folders), 'saved folder')}, "
            lines.append(f"{name}: identical, bit for bit: {what}the last {compared.folders[-1]}")
        return lines


def prepared(stages: Sequence[Stage], default_steps: int = 40) -> tuple[Stage, ...]:
    """The stages with settings for the verification: every step logged, frequent checkpoints, no tracker."""

    def changed(config: RunConfig) -> RunConfig:
        steps = config.training.max_steps or default_steps
        save_steps = min(config.checkpoint.save_steps, max(1, steps // SAVES))
        training = config.training.model_copy(update={"max_steps": steps})
        checkpoint = config.checkpoint.model_copy(update={"save_steps": save_steps})
        tracking = TrackingConfig(logging_steps=1)
        return config.model_copy(update={"training": training, "checkpoint": checkpoint, "tracking": tracking})

    return tuple(replace(stage, config=changed(stage.config)) for stage in stages)


def verify_resume(
    stages: Sequence[Stage], folder: Path, kills: int, console: Console | None = None, train: Train = runner.train
) -> Outcome:
    """Train the stages in `folder/whole`, and with `kills` kills in `folder/killed`; compare the two.

    Each process calls `train(stages, resume=…)`; `train` must be a module-level function, so that a process can import
    it. Raises RunError if a process fails without being killed.
    """
    console = console or PlainConsole(stderr=True)
    whole, began = Training(stages, folder / "whole", train), time.monotonic()
    whole.run()
    console.print(f"uninterrupted: {counted(whole.steps, 'step')} in {duration(time.monotonic() - began)}")

    killed, outcome, began = Training(stages, folder / "killed", train, whole), Outcome(), time.monotonic()
    plan = planned(kills, whole.steps, random.Random(stages[0].config.seed))
    while outcome.kills < kills:
        if not killed.run(plan[outcome.kills]):
            continue  # finished before the kill; a finished run can also be resumed and killed
        outcome.kills += 1
        saving, starting = killed.saving(), not killed.moved
        outcome.inside_a_save += saving
        outcome.while_starting += starting
        outcome.steps_made_again += killed.steps - killed.saved_steps()
        where = "inside a save" if saving else "while starting" if starting else "in training"
        console.print(f"kill {outcome.kills} of {kills}: {where}, at step {killed.steps}")
    killed.run()
    outcome.seconds = time.monotonic() - began
    for run in find_runs(whole.root):
        name = str(run.relative_to(whole.root))
        outcome.comparisons[name] = compare_runs(run, killed.root / name)
    return outcome


def planned(kills: int, steps: int, rng: random.Random) -> list[Kill]:
    """Kills spread over the whole run, in the order of their progress."""
    saving, starting = math.ceil(kills * INSIDE_A_SAVE), int(kills * WHILE_STARTING)
    counts: dict[Moment, int] = {"saving": saving, "starting": starting, "anywhere": kills - saving - starting}
    moments: list[Moment] = [moment for moment, count in counts.items() for _ in range(count)]
    rng.shuffle(moments)
    progress = sorted(rng.uniform(0, steps) for _ in range(kills))
    return [Kill(moment, at, rng.random()) for moment, at in zip(moments, progress, strict=True)]


class Training:
    """Trains the stages below `root` in processes, and observes them. `whole`: the training that measures how long a
    start, a step and a save take; by default this one."""

    def __init__(self, stages: Sequence[Stage], root: Path, train: Train, whole: "Training | None" = None):
        folder = {"output_dir": str(root), "name": "run"}
        self._stages = [replace(stage, config=stage.config.model_copy(update=folder)) for stage in stages]
        self.root, self._train, self._whole = root, train, whole or self
        self.steps = 0  # steps of all runs, according to their metrics
        self.moved = False  # whether a new step was logged since the process started
        self.start_s = self.step_s = 0.0
        self.saves_s = [0.0]
        self._runs: list[Path] = []
        self._known: dict[Path, tuple[int, int]] = {}
        self._search_at = 0.0  # when to search for new runs
        self._base = 0  # steps of earlier processes that this one does not repeat

    def run(self, kill: Kill | None = None) -> bool:
        """Train, or resume the runs, in a new process to the end, or until `kill`.
        Returns whether the process was killed. Raises RunError if it fails."""
        self._runs, self._search_at, self.moved = find_runs(self.root), 0.0, False
        self._known = {run: _identity(run) for run in self._runs}
        self._base = self.saved_steps()
        context = multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")
        if hasattr(os, "fork"):
            context.set_forkserver_preload(PRELOADED)
        log = self.root.with_name(f"{self.root.name}.log")
        arguments = self._train, self._stages, bool(self._runs), log
        process = context.Process(target=_train, args=arguments)  # pyright: ignore[reportAttributeAccessIssue]
        process.start()
        try:
            was_killed = self._watch(process, kill)
            process.join()
        finally:
            process.kill()
            process.join()
        if process.exitcode and not was_killed:
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"]
            last = lines[-1].removeprefix("error: ")
            raise RunError(f"training failed without a kill, so nothing can be compared: {last} (log: {log})")
        return was_killed

    def _watch(self, process: BaseProcess, kill: Kill | None) -> bool:
        """Wait for the end and measure durations, or kill the process as `kill` says. Returns whether it was killed."""
        began, saving_since = time.monotonic(), 0.0
        first, first_at = self.steps, 0.0
        due = math.inf
        while not wait([process.sentinel], timeout=POLL_S):
            self._update()
            now, saving = time.monotonic(), self.saving()
            if kill is None and self.moved and not first_at:
                first, first_at, self.start_s = self.steps, now, now - began
            if kill is None and saving and not saving_since:
                saving_since = now
            elif not saving and saving_since:
                self.saves_s.append(now - saving_since)
                saving_since = 0.0
            if kill is not None and due == math.inf and self._is_moment(kill, saving):
                whole = self._whole
                lengths = {"starting": whole.start_s, "anywhere": whole.step_s, "saving": fmean(whole.saves_s)}
                due = now + kill.share * lengths[kill.moment]
            if now >= due:
                process.kill()
                process.join()
                self._update()
                return True
        self._update()
        if kill is None and self.steps > first:
            self.step_s = (time.monotonic() - first_at) / (self.steps - first)
        return False

    def _update(self) -> None:
        """Update `steps` and `moved`."""
        if time.monotonic() > self._search_at:
            self._runs, self._search_at = find_runs(self.root), time.monotonic() + 0.1
        known = {run: _identity(run) for run in self._runs}
        if known != self._known:
            self._known = known
            with suppress(FileNotFoundError):  # a run that starts again
                self.steps = sum(last_metrics(run).get("step", 0) for run in self._runs)
            self.moved |= self.steps > self._base

    def _is_moment(self, kill: Kill, saving: bool) -> bool:
        at_the_end = self.steps >= self._whole.steps  # a finished run that is resumed makes no step
        reached = self.steps >= kill.progress - 1 and (self.moved or at_the_end)
        return kill.moment == "starting" or (saving if kill.moment == "saving" and reached else reached)

    def saving(self) -> bool:
        """Whether a checkpoint or a model is being saved."""
        return any(HALF_WRITTEN.fullmatch(name) for run in self._runs for name in os.listdir(run))

    def saved_steps(self) -> int:
        """The number of steps that a resume does not repeat."""
        return sum(step_of(path) for run in find_runs(self.root) for path in list_checkpoints(run)[-1:])


def _identity(run: Path) -> tuple[int, int]:
    """A value that changes whenever lines of the run's metrics are added or removed."""
    try:
        facts = os.stat(run / "metrics.jsonl")
    except FileNotFoundError:
        return 0, 0
    return facts.st_ino, facts.st_size


def _train(train: Train, stages: Sequence[Stage], resume: bool, log: Path) -> None:
    """The body of a process: train, and append all messages to `log`."""
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    multiprocessing.set_start_method(None, force=True)  # as in a new process
    if (parent := multiprocessing.parent_process()) is not None:  # this process ends with it
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    ConsoleLog()
    try:
        sys.exit(train(stages, resume=resume))
    except PosttrainError as error:
        sys.exit(f"error: {error}")
