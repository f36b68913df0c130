"""The table and the picture of a sweep."""

import math
import statistics
from collections.abc import Iterator

from rich import box
from rich.table import Table

from posttrain.reports.curves import plain_axes, png_of
from posttrain.reports.design import LIGHT
from posttrain.runner.sweep_records import ENDED, FINISHED, STOPPED, WAITING, Sweep, Trial, mean_of
from posttrain.runner.sweep_space import short_names
from posttrain.runner.sweep_stopping import curve_of
from posttrain.runs.atomic import write_file
from posttrain.runs.metrics import read_metrics
from posttrain.runs.progress import duration

PICTURE = "sweep.png"
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
    """Write sweep.png: the metric over the steps, and at the end by each swept setting."""
    write_file(sweep.root / PICTURE, picture(sweep))


def picture(sweep: Sweep) -> bytes:
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    ended = [trial for trial in sweep.ranked() if trial.state in ENDED]
    names = dict(list(short_names(list(sweep.trials[0].settings)).items())[:PANELS])
    figure = Figure((4.5 * (1 + len(names)), 3.6), dpi=110, facecolor=LIGHT.ground)
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    curves, *panels = figure.subplots(1, 1 + len(names), squeeze=False)[0]
    for place, trial in enumerate(ended):
        points = curve_of(read_metrics(sweep.root / trial.name), sweep.metric)
        points = [point for point in points if point[0] > 0] or points  # before training all are equal
        line = [math.nan if value is None else value for _, value in points]
        colour, width = (LIGHT.series[0], 2.0) if place == 0 else (LIGHT.ink, 0.8)
        style = ":" if trial.state == STOPPED else "-"
        curves.plot(
            [step for step, _ in points],
            line,
            style,
            color=colour,
            lw=width,
            alpha=1 if place == 0 else 0.5,
            marker="o",
            ms=3,
        )
    curves.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True))
    curves.set_xlabel("step", color=LIGHT.ink, fontsize=9)
    curves.set_title(f"{sweep.metric} (best blue, stopped early dotted)", color=LIGHT.ink, fontsize=10, loc="left")
    for axes, (path, name) in zip(panels, names.items(), strict=True):
        _scatter(axes, path, ended)
        axes.set_xlabel(name, color=LIGHT.ink, fontsize=9)
    for axes in (curves, *panels):
        plain_axes(axes)
    return png_of(figure)


def _scatter(axes, path: str, trials: list[Trial]) -> None:
    """The last values by one setting: on a number line where all its values are numbers."""
    known = [trial for trial in trials if trial.value is not None]
    texts = [trial.settings[path] for trial in known]
    numbers = [_float(text) for text in texts]
    whole = [number for number in numbers if number is not None]
    if len(whole) == len(texts) and whole:
        if min(whole) > 0 and max(whole) >= MANY * min(whole):
            axes.set_xscale("log")
        places = whole
        ticks = dict(zip(whole, texts, strict=True))
        if len(ticks) <= MOST_TICKS:
            axes.set_xticks(list(ticks), ticks.values())
            axes.minorticks_off()
    else:
        order = list(dict.fromkeys(texts))
        places = [float(order.index(text)) for text in texts]
        axes.set_xticks(range(len(order)), order)
    for place, trial in zip(places, known, strict=True):
        face = LIGHT.series[0] if trial.state == FINISHED else "none"
        axes.plot(place, trial.value, "o", color=LIGHT.series[0], markerfacecolor=face, ms=5)


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
