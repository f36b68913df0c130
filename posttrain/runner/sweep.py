"""Runs the trials of a sweep one after another, each in its own run folder, and shows their results."""

import math
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.table import Table

from posttrain import runner
from posttrain.base.console import PlainConsole, text_table
from posttrain.base.errors import PosttrainError, RunError, is_out_of_memory, message_of
from posttrain.base.log import log
from posttrain.base.redaction import redact
from posttrain.base.words import counted
from posttrain.config import RunConfig
from posttrain.evaluation.comparing.differences import compare
from posttrain.evaluation.comparing.page import show, write
from posttrain.evaluation.comparing.sources import make_sides, read_source
from posttrain.reports.chart import Line, chart, scatter
from posttrain.reports.drawing import Drawing, write_drawings
from posttrain.runner import trials
from posttrain.runner.pipeline import is_as_long
from posttrain.runner.trials import Sweep, Trial
from posttrain.runs.files import load_json, make_folder
from posttrain.runs.finding import held
from posttrain.runs.folder import LOCK
from posttrain.runs.managing.removing import delete
from posttrain.runs.metrics import read_metrics
from posttrain.runs.progress import duration
from posttrain.runs.rollouts import NAME as ROLLOUTS
from posttrain.runs.summary import read_run
from posttrain.training.state import as_started, refuse_changes

ALIKE = 2  # a sweep ends if this many first trials all fail for the same reason
COMPARISON = "comparison"  # folder of the trials' comparison, item by item
COMPARED = 8  # maximum number of combinations of settings to compare, best first


class MetricMissing(RunError):
    """The runs do not measure the metric of the sweep, so no trial can be ranked."""


class Watcher:
    """Ends a trial whose metric is hopeless compared with earlier trials."""

    def __init__(self, sweep: Sweep, trial: Trial, earlier: Sequence[trials.Curve]):
        self._sweep, self._trial, self._earlier = sweep, trial, earlier
        self.stop_at = trial.stop_at

    def look(self, step: int, metrics: Mapping[str, float]) -> None:
        """Decide whether to stop the trial. Raises MetricMissing if the evaluation lacks the sweep's metric."""
        metric, lower = self._sweep.metric, self._sweep.lower_is_better
        if metric not in metrics:
            measured = ", ".join(sorted(name for name in metrics if name.startswith("eval_")))
            raise MetricMissing(f"--metric {metric}: the evaluation of this run measures only {measured}")
        value = metrics[metric] if math.isfinite(metrics[metric]) else None
        before = trials.curve_of(read_metrics(self._sweep.root / self._trial.name), metric)
        curve = [*(point for point in before if point[0] < step), (step, value)]
        if self._sweep.stopping == "median" and trials.is_hopeless(curve, self._earlier, lower):
            self.stop_at = self._trial.stop_at = step
            self._trial.reason = f"{metric} is worse than the median of earlier trials at step {step}"
            self._sweep.save()
            log.info("%s: stopped early: %s", self._trial.name, self._trial.reason)


def run_sweep(sweep: Sweep, config_of: Callable[[Trial], RunConfig], resume: bool, overwrite: bool) -> None:
    """Train every trial that has not ended, and show the table after the last one.

    A failed trial is recorded, and the next one runs. Raises PosttrainError at the end if any trial failed. A signal
    ends the sweep once the current trial's checkpoint is saved.
    """
    with _folder(sweep.root, resume, overwrite):
        if resume and (sweep.root / trials.NAME).is_file():
            sweep = trials.joined(trials.read_sweep(sweep.root), sweep)
        sweep.save()
        try:
            for number, trial in enumerate(sweep.trials, start=1):
                shown = ", ".join(f"{path}={value}" for path, value in trial.settings.items())
                log.info("trial %d of %d: %s", number, len(sweep.trials), shown or "settings unchanged")
                _run(sweep, trial, config_of(trial))
                outcomes = {(each.state, each.reason) for each in sweep.trials[:number]}
                if number == ALIKE and len(outcomes) == 1 and trial.state == trials.FAILED:  # the others would fail too
                    raise PosttrainError(
                        f"the first {number} trials failed for the same reason, so the sweep ends: {trial.reason}"
                    )
        finally:
            _report(sweep)
    failed = [trial.number for trial in sweep.trials if trial.state == trials.FAILED]
    if failed:
        raise PosttrainError(
            f"{len(failed)} of {counted(len(sweep.trials), 'trial')} failed: {', '.join(failed)} (see the messages "
            "above); use --resume to try them again"
        )


def _run(sweep: Sweep, trial: Trial, config: RunConfig) -> None:
    folder = sweep.root / trial.name
    exists = (folder / "run.json").is_file()
    config = as_started(config, sweep.root / sweep.trials[0].name)  # same rules for all trials
    if exists and read_run(folder).state == "finished":
        refuse_changes(folder, config)
        if is_as_long(folder, config):
            log.info("%s has already finished", trial.name)
            _collect(sweep, trial)
            return
    trial.state, trial.reason = trials.RUNNING, trial.reason if trial.stop_at is not None else None
    sweep.save()
    before = [other for other in sweep.trials[: sweep.trials.index(trial)] if other.state in trials.ENDED]
    earlier = [trials.curve_of(read_metrics(sweep.root / other.name), sweep.metric) for other in before]
    try:
        runner.train(config, resume=exists, watch=Watcher(sweep, trial, earlier))
    except MetricMissing:
        raise
    except (KeyboardInterrupt, SystemExit):
        trial.state = trials.INTERRUPTED
        sweep.save()
        raise
    except Exception as error:
        trial.state, trial.reason = trials.FAILED, redact(" ".join(message_of(error).split()))
        sweep.save()
        expected = isinstance(error, PosttrainError) or is_out_of_memory(error)
        log.error("%s failed: %s", trial.name, message_of(error), exc_info=not expected)
    else:
        _collect(sweep, trial)


def _collect(sweep: Sweep, trial: Trial) -> None:
    """Record the results of a run that has ended."""
    folder = sweep.root / trial.name
    curve = trials.curve_of(read_metrics(folder), sweep.metric)
    if not curve:
        raise MetricMissing(f"--metric {sweep.metric}: {folder} has no evaluation with it")
    results = load_json(folder / "results.json")
    trial.state = trials.FINISHED if trial.stop_at is None else trials.STOPPED
    trial.value, trial.steps, trial.seconds = curve[-1][1], results["steps"], results["train_runtime"]
    known = [(value, step) for step, value in curve if value is not None]
    if known:
        trial.best, trial.best_step = (min if sweep.lower_is_better else max)(known, key=lambda point: point[0])
    sweep.save()


@contextmanager
def _folder(root: Path, resume: bool, overwrite: bool) -> Iterator[None]:
    """Lock the sweep's folder. Raises RunError if it contains other files, or a sweep that should not be continued."""
    if (root / "run.json").is_file():
        raise RunError(f"{root} is a run, not a sweep: choose another name")
    make_folder(root)
    with held([root]):
        if (root / trials.NAME).is_file():
            if overwrite:  # deletes the trials, then the sweep's own files
                for trial in trials.read_sweep(root).trials:
                    if (root / trial.name / "run.json").is_file():
                        delete(root / trial.name, force=True)
                shutil.rmtree(root / COMPARISON, ignore_errors=True)
                for name in (PICTURE, trials.NAME):
                    (root / name).unlink(missing_ok=True)
            elif not resume:
                raise RunError(
                    f"{root} already has a sweep: resume it (--resume), replace it (--overwrite), or choose "
                    "another name"
                )
        elif any(path.name != LOCK for path in root.iterdir()):
            raise RunError(f"{root} is not empty and has no {trials.NAME}: choose another name")
        yield


def _report(sweep: Sweep) -> None:
    """Print the table and write the plot of all trials that have ended, and compare those that finished."""
    ended = [trial for trial in sweep.ranked() if trial.state in trials.ENDED]
    console = PlainConsole()
    if not ended:
        return
    console.print(table(sweep))
    if "seed" in sweep.trials[0].settings:
        console.print(over_seeds(sweep))
    write_picture(sweep, ended)
    _compare(sweep, console)
    if sweep.best is not None:
        console.print(f"best: {sweep.root / sweep.best.name}", soft_wrap=True)


def _compare(sweep: Sweep, console: PlainConsole) -> None:
    """Compare the best settings with the next best, as `posttrain compare` does, if every run has stored rollouts.
    Runs that differ only in their seed form one side, unless only the seed was swept."""
    groups = sweep.groups()
    if len(groups) == 1:
        groups = [(trial.settings, [trial]) for trial in groups[0][1]]
    sides = [
        (", ".join(settings.values()), str(sweep.root / trial.name))
        for settings, members in groups[:COMPARED]
        for trial in members
    ]
    if len({name for name, _ in sides}) < 2 or not all((Path(path) / ROLLOUTS).is_file() for _, path in sides):
        return
    try:
        comparison = compare(make_sides([(name, read_source(path)) for name, path in sides]))
        write(comparison, sweep.root / COMPARISON)
    except PosttrainError as error:  # the ranking does not need the comparison
        log.warning("the trials are not compared item by item: %s", error)
        return
    console.print(f"by {', '.join(trials.short_names(list(groups[0][0])).values())}, the best settings first:\n")
    show(comparison, console)
    console.print(f"written: {sweep.root / COMPARISON / 'compare.html'}", soft_wrap=True)


PICTURE = "sweep.svg"
PANELS = 3  # maximum number of swept settings with a panel
MOST_TICKS = 6
LOGARITHMIC = 10  # an axis is logarithmic if its largest value is at least this many times the smallest


def table(sweep: Sweep) -> Table:
    """The table of trials, best first."""
    names = trials.short_names(list(sweep.trials[0].settings))
    shown = text_table("trial", *names.values(), "value", "steps", "time", "", left=trials.TEXTS)
    shown.title, shown.title_justify = f"value: {sweep.metric} at the last evaluation", "left"
    for trial in sweep.ranked():
        took = "" if trial.seconds is None else duration(trial.seconds)
        state = "" if trial.state == trials.FINISHED else trial.state
        steps = "" if trial.steps is None else str(trial.steps)
        value = "not finite" if trial.value is None else f"{trial.value:.4g}"
        value = value if trial.state in trials.ENDED else ""
        shown.add_row(trial.number, *trial.settings.values(), value, steps, took, state)
    return shown


def over_seeds(sweep: Sweep) -> Table:
    """Mean and standard deviation of the finished trials that differ only in their seed, best first."""
    names = [name for path, name in trials.short_names(list(sweep.trials[0].settings)).items() if path != "seed"]
    shown = text_table(*names, "mean", "std", "seeds", left=trials.TEXTS)
    for settings, members in sweep.groups():
        values = [trial.value for trial in members if trial.value is not None]
        spread = f"{statistics.stdev(values):.2g}" if len(values) > 1 else "-"
        shown.add_row(*settings.values(), f"{trials.mean_of(members):.4g}", spread, str(len(values)))
    return shown


def write_picture(sweep: Sweep, ended: Sequence[Trial]) -> None:
    """Write sweep.svg: the metric over the steps, and its last value plotted over each of the first swept settings."""
    names = list(trials.short_names(list(sweep.trials[0].settings)).items())[:PANELS]
    title = f"{sweep.metric} over the steps (best: blue, stopped early: dashed)"
    drawings = [chart(list(_curves(sweep, ended)), title, keys=False)]
    drawings += [_by_setting(sweep, path, name, ended) for path, name in names]
    write_drawings(sweep.root / PICTURE, drawings)


def _curves(sweep: Sweep, ended: Sequence[Trial]) -> Iterator[Line]:
    """The curve of each trial's metric. The best trial is drawn last, above the others."""
    for rank, trial in reversed(list(enumerate(ended))):
        points = trials.curve_of(read_metrics(sweep.root / trial.name), sweep.metric)
        points = [point for point in points if point[0] > 0] or points  # all trials start equal
        values = [math.nan if value is None else value for _, value in points]
        yield Line(trial.name, [step for step, _ in points], values, min(rank, 1), trial.state == trials.STOPPED)


def _by_setting(sweep: Sweep, path: str, name: str, ended: Sequence[Trial]) -> Drawing:
    """Plot the last values over one setting, on a number line if all its values are numbers. Hollow: stopped early."""
    known = [trial for trial in ended if trial.value is not None]
    texts = [trial.settings[path] for trial in known]
    try:
        x = [float(text) for text in texts]
    except ValueError:
        x = [float(list(dict.fromkeys(texts)).index(text)) for text in texts]
    else:
        if x and min(x) > 0 and max(x) >= LOGARITHMIC * min(x):
            x, name = [math.log10(number) for number in x], f"{name} (logarithmic)"
    labels = dict(sorted(zip(x, texts, strict=True)))
    while len(labels) > MOST_TICKS:
        labels = dict(list(labels.items())[::2])
    points = [(at, trial.value or 0.0, trial.state == trials.FINISHED) for at, trial in zip(x, known, strict=True)]
    return scatter(points, f"{sweep.metric} by {name}", labels)
