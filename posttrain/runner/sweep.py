"""Runs the trials of a sweep one after another, each in a run folder of its own, and stops the hopeless ones."""

import logging
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from posttrain import runner
from posttrain.base.console import PlainConsole
from posttrain.base.errors import PosttrainError, RunError, is_out_of_memory, message_of
from posttrain.base.words import counted
from posttrain.config import RunConfig, load
from posttrain.evaluation.comparing.differences import compare
from posttrain.evaluation.comparing.page import show, write
from posttrain.evaluation.comparing.sources import make_sides, read_source
from posttrain.runner.sweep_records import (
    ENDED,
    FAILED,
    FINISHED,
    INTERRUPTED,
    NAME,
    RUNNING,
    STOPPED,
    Sweep,
    Trial,
    joined,
    read_sweep,
)
from posttrain.runner.sweep_show import PICTURE, table, write_picture
from posttrain.runner.sweep_space import Settings, short_names
from posttrain.runner.sweep_stopping import Curve, curve_of, is_hopeless
from posttrain.runs.files import load_json
from posttrain.runs.finding import remove_run
from posttrain.runs.folder import LOCK, FolderLock
from posttrain.runs.metrics import read_metrics
from posttrain.runs.rollouts import NAME as ROLLOUTS
from posttrain.runs.summary import read_run
from posttrain.training.state import as_started, refuse_changes

log = logging.getLogger("posttrain")

ALIKE = 2  # failures for the same reason, from the first trial on, that end a sweep
COMPARISON = "comparison"  # folder of the trials' comparison, item by item
COMPARED = 8  # settings: the best one with the next ones


class MetricMissing(RunError):
    """The runs do not measure the metric of the sweep: no trial can be ranked."""


class Watcher:
    """Ends a trial whose metric is hopeless beside those of the earlier ones."""

    def __init__(self, sweep: Sweep, trial: Trial, earlier: Sequence[Curve]):
        self._sweep, self._trial, self._earlier = sweep, trial, earlier
        self.stop_at = trial.stop_at

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises MetricMissing if the evaluation lacks the sweep's metric."""
        metric, lower = self._sweep.metric, self._sweep.lower_is_better
        if metric not in metrics:
            measured = ", ".join(sorted(name for name in metrics if name.startswith("eval_")))
            raise MetricMissing(f"--metric {metric}: the evaluation of this run measures only {measured}")
        value = metrics[metric] if math.isfinite(metrics[metric]) else None
        before = curve_of(read_metrics(self._sweep.root / self._trial.name), metric)
        curve = [*(one for one in before if one[0] < step), (step, value)]
        if self._sweep.stopping == "median" and is_hopeless(curve, self._earlier, lower):
            self.stop_at = self._trial.stop_at = step
            self._trial.reason = f"{metric} is worse than the median of earlier trials at step {step}"
            self._sweep.save()
            log.info("%s: stopped early: %s", self._trial.name, self._trial.reason)


def run_sweep(
    sweep: Sweep,
    settings: Sequence[Settings],
    config_of: Callable[[Trial], RunConfig],
    resume: bool = False,
    overwrite: bool = False,
) -> None:
    """Train every trial that has not ended, and show the table after the last one.

    A failed trial is recorded, and the next one runs. Raises PosttrainError at the end if any failed; a signal ends the
    sweep after saving the trial's checkpoint.
    """
    with _folder(sweep.root, resume, overwrite):
        if resume and (sweep.root / NAME).is_file():
            sweep = joined(read_sweep(sweep.root), sweep, settings)
        sweep.save()
        try:
            for number, trial in enumerate(sweep.trials, start=1):
                shown = ", ".join(f"{path}={value}" for path, value in trial.settings.items())
                log.info("trial %d of %d: %s", number, len(sweep.trials), shown or "as the settings are")
                _run(sweep, trial, config_of(trial))
                _refuse_the_same_failure(sweep, number)
        finally:
            _report(sweep)
    failed = [trial.number for trial in sweep.trials if trial.state == FAILED]
    if failed:
        raise PosttrainError(
            f"{len(failed)} of {counted(len(sweep.trials), 'trial')} failed: {', '.join(failed)} (see the messages "
            "above); with --resume they are tried again"
        )


def _refuse_the_same_failure(sweep: Sweep, done: int) -> None:
    """Raise PosttrainError if every trial so far has failed, several, and for one reason: so would the others."""
    reasons = {trial.reason for trial in sweep.trials[:done] if trial.state == FAILED}
    if done == ALIKE and len(reasons) == 1 and all(trial.state == FAILED for trial in sweep.trials[:done]):
        raise PosttrainError(f"the first {done} trials failed alike, so the sweep ends: {reasons.pop()}")


def _run(sweep: Sweep, trial: Trial, config: RunConfig) -> None:
    folder = sweep.root / trial.name
    exists = (folder / "run.json").is_file()
    config = as_started(config, sweep.root / sweep.trials[0].name)  # all trials by the same rules
    if exists and _is_finished(folder, config):
        log.info("%s is finished already", trial.name)
        _collect(sweep, trial)
        return
    trial.state, trial.reason = RUNNING, trial.reason if trial.stop_at is not None else None
    sweep.save()
    earlier = [curve_of(read_metrics(sweep.root / one.name), sweep.metric) for one in _before(sweep, trial)]
    try:
        runner.train(config, resume=exists, watch=Watcher(sweep, trial, earlier))
    except MetricMissing:
        raise
    except (KeyboardInterrupt, SystemExit):
        trial.state = INTERRUPTED
        sweep.save()
        raise
    except Exception as error:
        trial.state, trial.reason = FAILED, " ".join(message_of(error).split())
        sweep.save()
        expected = isinstance(error, PosttrainError) or is_out_of_memory(error)
        log.error("%s failed: %s", trial.name, message_of(error), exc_info=not expected)
    else:
        _collect(sweep, trial)


def _is_finished(folder: Path, config: RunConfig) -> bool:
    """Whether the run has ended with these settings. Raises RunError for others; a longer training continues."""
    if read_run(folder).state != "finished":
        return False
    refuse_changes(folder, config)
    saved, given = load(folder / "config.yaml").config.training, config.training
    return (saved.max_steps, saved.num_train_epochs) == (given.max_steps, given.num_train_epochs)


def _before(sweep: Sweep, trial: Trial) -> list[Trial]:
    """The earlier trials that have ended."""
    return [one for one in sweep.trials[: sweep.trials.index(trial)] if one.state in ENDED]


def _collect(sweep: Sweep, trial: Trial) -> None:
    """Record the results of a run that has ended."""
    folder = sweep.root / trial.name
    curve = curve_of(read_metrics(folder), sweep.metric)
    if not curve:
        raise MetricMissing(f"--metric {sweep.metric}: {folder} has no evaluation with it")
    results = load_json(folder / "results.json")
    trial.state = FINISHED if trial.stop_at is None else STOPPED
    trial.value, trial.steps, trial.seconds = curve[-1][1], results["steps"], results["train_runtime"]
    known = [(value, step) for step, value in curve if value is not None]
    if known:
        trial.best, trial.best_step = (min if sweep.lower_is_better else max)(known, key=lambda one: one[0])
    sweep.save()


@contextmanager
def _folder(root: Path, resume: bool, overwrite: bool) -> Iterator[None]:
    """The sweep's folder, locked. Raises RunError if it has something else, or a sweep without one of the options."""
    if (root / "run.json").is_file():
        raise RunError(f"{root} is a run, not a sweep: choose another name")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make the folder {root}: {error.strerror}") from error
    lock = FolderLock(root)
    try:
        if (root / NAME).is_file():
            if overwrite:
                _empty(root)
            elif not resume:
                raise RunError(
                    f"{root} has a sweep already: resume it (--resume), replace it (--overwrite), or choose "
                    "another name"
                )
        elif any(path.name != LOCK for path in root.iterdir()):
            raise RunError(f"{root} is not empty and has no {NAME}: choose another name")
        yield
    finally:
        lock.release()


def _empty(root: Path) -> None:
    """Delete the trials, and the sweep's own files last."""
    for trial in read_sweep(root).trials:
        if (root / trial.name / "run.json").is_file():
            remove_run(root / trial.name)
    shutil.rmtree(root / COMPARISON, ignore_errors=True)
    for name in (PICTURE, NAME):
        (root / name).unlink(missing_ok=True)


def _report(sweep: Sweep) -> None:
    """The table and the picture of the trials that have ended, and the comparison of the finished ones."""
    ended = [trial for trial in sweep.ranked() if trial.state in ENDED]
    console = PlainConsole()
    if not ended:
        return
    for shown in table(sweep):
        console.print(shown)
    write_picture(sweep)
    _compare(sweep, console)
    if sweep.best is not None:
        console.print(f"best: {sweep.root / sweep.best.name}", soft_wrap=True)


def _compare(sweep: Sweep, console: PlainConsole) -> None:
    """The best settings with the next ones, as `posttrain compare` does, where the runs have rewarded completions.

    Runs that differ by their seed alone are one side, unless only the seed was swept.
    """
    groups = sweep.groups()
    if len(groups) == 1:
        groups = [(trial.settings, [trial]) for trial in groups[0][1]]
    sides = [
        (", ".join(settings.values()), str(sweep.root / trial.name))
        for settings, trials in groups[:COMPARED]
        for trial in trials
    ]
    if len({name for name, _ in sides}) < 2 or not all((Path(path) / ROLLOUTS).is_file() for _, path in sides):
        return
    try:
        found = compare(make_sides([(name, read_source(path)) for name, path in sides]))
        write(found, sweep.root / COMPARISON)
    except PosttrainError as error:  # the ranking stands without it
        log.warning("the trials are not compared item by item: %s", error)
        return
    console.print(f"by {', '.join(short_names(list(groups[0][0])).values())}, the best settings first:\n")
    show(found, console)
    console.print(f"written: {sweep.root / COMPARISON / 'compare.html'}", soft_wrap=True)
