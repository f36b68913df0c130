"""The curves of a run: `curves.png`, and the panels, which group the metrics that share a chart on pages and plots."""

import functools
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from posttrain.base.files import table_beside
from posttrain.reports.chart import Line, usual
from posttrain.reports.design import LIGHT
from posttrain.reports.series import Series, smoothed
from posttrain.runs.atomic import write_file

if TYPE_CHECKING:  # listing runs must not import matplotlib
    from matplotlib.axes import Axes

SMOOTH_FROM = 60  # minimum points of a smoothed line; with fewer, the raw line is clear enough
# The size of a panel and its margins, in inches; fixed, because automatic layout is slow.
WIDE, HIGH = 4.2, 2.75
LEFT, RIGHT, ABOVE, BELOW = 0.7, 0.15, 0.35, 0.5


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel: its metrics, and the scale of its y axis."""

    title: str
    metrics: tuple[str, ...]
    share: bool = False  # the values lie between 0 and 1
    small: bool = False  # the values are numbers such as 1e-6
    same: bool = False  # methods log the same quantity under these names


PANELS = tuple(Panel(**panel | {"metrics": tuple(panel["metrics"])}) for panel in table_beside(__file__, "panels.yaml"))
KNOWN = {name for panel in PANELS for name in panel.metrics}


@functools.cache
def single_panels() -> tuple[Panel, ...]:
    """The panels, divided so that each shows one quantity, with a title that names it."""
    single = []
    for panel in PANELS:
        titles = panel.title.split(", ")
        if panel.same or len(panel.metrics) == 1:
            single.append(panel)
        elif len(titles) != len(panel.metrics):
            titles = [f"{panel.title}: {name.rpartition('/')[2].replace('_', ' ')}" for name in panel.metrics]
        if panel not in single:
            pairs = zip(titles, panel.metrics, strict=True)
            single += [replace(panel, title=title[:1].upper() + title[1:], metrics=(name,)) for title, name in pairs]
    return tuple(single)


def lines_of(panel: Panel, series: Series, axis: str) -> Iterator[Line]:
    """Yield the lines of the panel's training metrics, and dashed lines of the same metrics in validation.
    `eval_{name}_{metric}` is the metric on the data set `name`; `eval_{metric}`, on the validation set."""
    names = series.names
    metrics = KNOWN.union(name for name in names if not name.startswith("eval_"))
    several = len([name for name in panel.metrics if name in names]) > 1
    colour = 0
    for name in panel.metrics:
        short = name.rpartition("/")[2].removesuffix("_reward")
        for logged in [name, *(logged for logged in names if _validated(logged, metrics) == name)]:
            if logged in names:
                data = logged.removeprefix("eval_").removesuffix(name).strip("_") or "validation"
                data = "" if logged == name else data
                label = f"{short} {data}".strip() if several else data or "train"
                yield Line(label, *series.points(logged, axis), colour=colour, dashed=logged != name)
                colour += 1


def _validated(logged: str, metrics: Iterable[str]) -> str | None:
    """The metric that a validation name ends with (the longest: nll_loss, not loss); None for a training metric."""
    if not logged.startswith("eval_"):
        return None
    return max((metric for metric in metrics if logged.endswith(f"_{metric}")), key=len, default=None)


def smoothing(lines: Sequence[Line], small: bool = False) -> float:
    """The weight of the past for a moving average over about a fifteenth of the points; 0 for short lines."""
    longest = max((len(line.xs) for line in lines if not line.dashed), default=0)
    return 0.0 if small or longest < SMOOTH_FROM else 1 - 15 / longest


def write_curves(folder: Path, path: Path, title: str) -> None:
    """Plot the metrics of the run in `folder` and write them to `path` as a PNG, atomically.

    The PNG has a grid of curves over the steps: training, smoothed if there are many points; validation, dashed. Null
    values (not finite) leave a gap. If no known metric was logged, the plot says so.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    series = Series(folder).refresh()
    panels = [(panel, lines) for panel in PANELS if (lines := list(lines_of(panel, series, "step")))]
    columns = min(3, max(1, len(panels))) if len(panels) != 4 else 2
    rows = max(1, math.ceil(len(panels) / columns))
    width, height = WIDE * columns, HIGH * rows + 0.45
    figure = Figure(figsize=(width, height), dpi=130, facecolor=LIGHT.ground)
    figure.suptitle(_plain(title), color=LIGHT.ink, fontsize=12, fontweight="bold", y=1 - 0.15 / height, va="top")
    for index, (panel, lines) in enumerate(panels):
        row, column = divmod(index, columns)
        left, bottom = WIDE * column + LEFT, HIGH * (rows - 1 - row) + BELOW
        size = (WIDE - LEFT - RIGHT) / width, (HIGH - BELOW - ABOVE) / height
        axes = figure.add_axes((left / width, bottom / height, *size))
        first, last = min(series.steps), max(series.steps)
        margin = max(1, 0.02 * (last - first))
        axes.set_xlim(first - margin, last + margin)
        _draw(axes, panel, lines)
    if not panels:
        figure.text(0.5, 0.45, "no metrics were logged", color=LIGHT.ink, ha="center", fontsize=11)
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    write_file(path, buffer.getvalue())


def _draw(axes: "Axes", panel: Panel, lines: Sequence[Line]) -> None:
    weight = smoothing(lines, panel.small)
    for line in lines:
        label, steps, values = _plain(line.label), line.xs, line.ys
        colour = LIGHT.series[line.colour % len(LIGHT.series)]
        if line.dashed:
            marker = "o" if len(steps) <= 40 else None
            axes.plot(steps, values, "--", color=colour, lw=1.3, marker=marker, ms=3, label=label)
        elif weight:
            axes.plot(steps, values, color=colour, lw=0.6, alpha=0.3)
            axes.plot(steps, smoothed(values, weight), color=colour, lw=1.3, label=label)
        else:
            single = sum(map(math.isfinite, values)) == 1
            axes.plot(steps, values, color=colour, lw=1.3, marker="o" if single else None, ms=3, label=label)
    axes.set_title(panel.title, color=LIGHT.ink, fontsize=10, loc="left")
    if panel.share:
        axes.set_ylim(-0.03, 1.03)
    elif panel.small:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    values = [value for line in lines for value in line.ys if math.isfinite(value)]
    if (top := max(usual(values), default=0.0)) < max(values, default=0.0):
        axes.set_ylim(top=top)
    _style(axes)
    if len(lines) > 1:
        axes.legend(fontsize=8, frameon=False, labelcolor=LIGHT.ink)


def _style(axes: "Axes") -> None:
    """Apply the project's colours, a faint grid, and spines only on the left and at the bottom."""
    from matplotlib.ticker import MaxNLocator

    axes.set_facecolor(LIGHT.ground)
    axes.set_xlabel("step", color=LIGHT.ink, fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.get_offset_text().set(color=LIGHT.ink, fontsize=8)
    axes.tick_params(colors=LIGHT.ink, labelsize=8, length=3, width=0.6)
    axes.grid(color=LIGHT.ink, alpha=0.15, lw=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set(visible=side in ("left", "bottom"), color=LIGHT.ink, linewidth=0.6, alpha=0.5)


def _plain(text: str) -> str:
    """The text with $ escaped, because matplotlib reads $ as the start of a formula."""
    return text.replace("$", r"\$")
