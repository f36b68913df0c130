"""The table and the picture of a sweep."""

import math
import statistics
from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from posttrain.reports.chart import Line, chart, scatter
from posttrain.reports.drawing import Drawing, write_drawings
from posttrain.runner.sweep_records import ENDED, FINISHED, STOPPED, WAITING, Sweep, Trial, mean_of
from posttrain.runner.sweep_space import short_names
from posttrain.runner.sweep_stopping import curve_of
from posttrain.runs.metrics import read_metrics
from posttrain.runs.progress import duration

PICTURE = "sweep.svg"
PANELS = 3  # settings with a panel of their own
MOST_TICKS = 6  # values with a tick of their own
MANY = 10  # times from the smallest to the largest value, for a logarithmic axis


def table(sweep: Sweep) -> Iterator[Table]:
    """The trials, best first; and where seeds were swept, the means over them."""
    names = short_names(list(sweep.trials[0].settings))
    shown = _table("trial", *names.values(), "value", "steps", "time", "")
    shown.title, shown.title_justify = f"value: {sweep.metric} at the last evaluation", "left"
    for trial in sweep.ranked():
        took = "" if trial.seconds is None else duration(trial.seconds)
        state = "" if trial.state == FINISHED else trial.state
        steps = "" if trial.steps is None else str(trial.steps)
        shown.add_row(trial.number, *trial.settings.values(), _number(trial), steps, took, state)
    yield shown
    if "seed" in names:
        yield over_seeds(sweep)


def over_seeds(sweep: Sweep) -> Table:
    """Mean and standard deviation of the finished trials that differ in their seed alone, best first."""
    names = [name for path, name in short_names(list(sweep.trials[0].settings)).items() if path != "seed"]
    shown = _table(*names, "mean", "std", "seeds")
    for settings, trials in sweep.groups():
        values = [trial.value for trial in trials if trial.value is not None]
        spread = f"{statistics.stdev(values):.2g}" if len(values) > 1 else "-"
        shown.add_row(*settings.values(), f"{mean_of(trials):.4g}", spread, str(len(values)))
    return shown


def planned(sweep: Sweep) -> Table:
    """The trials before they run; those of an earlier sweep with their state."""
    names = short_names(list(sweep.trials[0].settings))
    shown = _table("folder", *names.values(), "")
    for trial in sweep.trials:
        shown.add_row(trial.name, *trial.settings.values(), "" if trial.state == WAITING else trial.state)
    return shown


def write_picture(sweep: Sweep) -> None:
    """Write sweep.svg: the metric over the steps, and at the end by each of the first swept settings."""
    ended = [trial for trial in sweep.ranked() if trial.state in ENDED]
    names = list(short_names(list(sweep.trials[0].settings)).items())[:PANELS]
    title = f"{sweep.metric} over the steps: the best blue, stopped early dashed"
    drawings = [chart(list(_curves(sweep, ended)), title, keys=False)]
    drawings += [_by_setting(sweep, path, name, ended) for path, name in names]
    write_drawings(sweep.root / PICTURE, drawings)


def _curves(sweep: Sweep, ended: Sequence[Trial]) -> Iterator[Line]:
    """The metric of each trial, the best above the others."""
    for place, trial in reversed(list(enumerate(ended))):
        points = curve_of(read_metrics(sweep.root / trial.name), sweep.metric)
        points = [point for point in points if point[0] > 0] or points  # before training all are equal
        values = [math.nan if value is None else value for _, value in points]
        yield Line(trial.name, [step for step, _ in points], values, min(place, 1), trial.state == STOPPED)


def _by_setting(sweep: Sweep, path: str, name: str, trials: Sequence[Trial]) -> Drawing:
    """The last values by one setting: on a number line where all its values are numbers. Hollow: stopped early."""
    known = [trial for trial in trials if trial.value is not None]
    texts = [trial.settings[path] for trial in known]
    numbers = [number for number in map(_float, texts) if number is not None]
    if len(numbers) < len(texts):
        places = [float(list(dict.fromkeys(texts)).index(text)) for text in texts]
    elif numbers and min(numbers) > 0 and max(numbers) >= MANY * min(numbers):
        places, name = [math.log10(number) for number in numbers], f"{name} (logarithmic)"
    else:
        places = numbers
    labels = dict(sorted(zip(places, texts, strict=True)))
    while len(labels) > MOST_TICKS:
        labels = dict(list(labels.items())[::2])
    points = [
        (place, trial.value, trial.state == FINISHED)
        for place, trial in zip(places, known, strict=True)
        if trial.value is not None
    ]
    return scatter(points, f"{sweep.metric} by {name}", labels)


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _number(trial: Trial) -> str:
    if trial.state not in ENDED:
        return ""
    return "not finite" if trial.value is None else f"{trial.value:.4g}"


def _table(*columns: str) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for name in columns:
        shown.add_column(name, justify="left" if name in ("trial", "folder", "") else "right", overflow="fold")
    return shown
