"""`curves.png`: plots of a run's metrics."""

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.reports.design import LIGHT
from posttrain.reports.panels import KNOWN, ORDER, PANELS, Panel
from posttrain.runs.atomic import write_file

if TYPE_CHECKING:  # listing runs must not import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTH_FROM = 60  # points; with fewer the raw line is clear


# Inches: a panel and its margins, fixed since an automatic layout takes time.
WIDE, HIGH = 4.2, 2.75
LEFT, RIGHT, ABOVE, BELOW = 0.7, 0.15, 0.35, 0.5


def write_curves(metrics: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Plot the metrics of a run (lines of `metrics.jsonl`) and write them to `path` as a PNG, atomically."""
    write_file(path, curves_png(metrics, title))


def curves_png(metrics: Sequence[dict[str, Any]], title: str) -> bytes:
    """A grid of curves over the steps: training lines thin, smoothed where there are many points; validation dotted.

    Steps whose value is null (not finite) leave a gap. Without any known metric the picture says so.
    """
    from matplotlib.figure import Figure

    series = _series(metrics)
    panels = [panel for panel in PANELS if any(name in series for name in panel.metrics)]
    columns = min(3, max(1, len(panels))) if len(panels) != 4 else 2
    rows = max(1, math.ceil(len(panels) / columns))
    width, height = WIDE * columns, HIGH * rows + (0.45 if title else 0.1)
    figure = Figure(figsize=(width, height), dpi=130, facecolor=LIGHT.ground)
    if title:
        figure.suptitle(_plain(title), color=LIGHT.ink, fontsize=12, fontweight="bold", y=1 - 0.15 / height, va="top")
    steps = [line["step"] for line in metrics]
    for index, panel in enumerate(panels):
        row, column = divmod(index, columns)
        left, bottom = WIDE * column + LEFT, HIGH * (rows - 1 - row) + BELOW
        place = left / width, bottom / height, (WIDE - LEFT - RIGHT) / width, (HIGH - BELOW - ABOVE) / height
        axes = figure.add_axes(place)
        margin = max(1, 0.02 * (max(steps) - min(steps)))
        axes.set_xlim(min(steps) - margin, max(steps) + margin)
        _draw(axes, panel, series)
    if not panels:
        _say(figure, "no metrics were logged")
    return png_of(figure)


def png_of(figure: "Figure") -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer)
    return buffer.getvalue()


# A series: known metric -> label of the line ("train", "validation", …) -> steps and values.
Series = dict[str, dict[str, tuple[list[int], list[float]]]]


def _series(metrics: Sequence[dict[str, Any]]) -> Series:
    """Sort the lines of `metrics.jsonl` into curves; `eval_{name}_{metric}` is that metric on the dataset `name`."""
    series: Series = {}
    logged = {key for line in metrics for key in line if not key.startswith("eval_")}
    for line in metrics:
        for key, value in line.items():
            found = _split(key, logged)
            if found and (value is None or isinstance(value, int | float)):
                steps, values = series.setdefault(found[0], {}).setdefault(found[1], ([], []))
                steps.append(line["step"])
                values.append(math.nan if value is None else float(value))
    return series


def _split(key: str, logged: set[str]) -> tuple[str, str] | None:
    """A logged name as (metric, data set): ("loss", "train"), ("loss", "validation"), ("loss", "helpful").

    `logged` are the names of all training metrics: the longest match counts, `nll_loss` before `loss`.
    """
    if key in KNOWN:
        return key, "train"
    if not key.startswith("eval_"):
        return None
    rest = key.removeprefix("eval_")
    fitting = [name for name in logged.union(KNOWN) if f"_{rest}".endswith(f"_{name}")]
    name = max(fitting, key=len, default=None)
    if name not in KNOWN:
        return None
    return name, rest.removesuffix(name).removesuffix("_") or "validation"


def _draw(axes: "Axes", panel: Panel, series: Series) -> None:
    names = [name for name in panel.metrics if name in series]
    owners = {name: sorted(series[name], key=lambda whose: ORDER.get(whose, len(ORDER))) for name in names}
    lines = [(name, whose, *series[name][whose]) for name in names for whose in owners[name]]
    for index, (name, whose, steps, values) in enumerate(lines):
        short = name.rpartition("/")[2].removesuffix("_reward")
        label = whose if len(names) == 1 else short if whose == "train" else f"{short}, {whose}"
        colour = LIGHT.series[index % len(LIGHT.series)]
        if whose != "train":
            few = len(steps) <= 40
            axes.plot(steps, values, "--", color=colour, lw=1.3, marker="o" if few else None, ms=3, label=_plain(label))
        elif len(steps) >= SMOOTH_FROM and not panel.small:
            axes.plot(steps, values, color=colour, lw=0.6, alpha=0.3)
            axes.plot(steps, _smooth(values), color=colour, lw=1.3, label=_plain(label))
        else:
            single = sum(map(math.isfinite, values)) == 1
            axes.plot(steps, values, color=colour, lw=1.3, marker="o" if single else None, ms=3, label=_plain(label))
    axes.set_title(panel.title, color=LIGHT.ink, fontsize=10, loc="left")
    if panel.share:
        axes.set_ylim(-0.03, 1.03)
    elif panel.small:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    _keep_outliers_out(axes, [value for *_, values in lines for value in values])
    _style(axes)
    if len(lines) > 1:
        axes.legend(fontsize=8, frameon=False, labelcolor=LIGHT.ink)


def _style(axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_facecolor(LIGHT.ground)
    axes.set_xlabel("step", color=LIGHT.ink, fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.get_offset_text().set(color=LIGHT.ink, fontsize=8)
    plain_axes(axes)
    axes.tick_params(labelsize=8, width=0.6)


def plain_axes(axes: "Axes") -> None:
    """Axes in the project's ink: a faint grid, and lines on the left and below alone."""
    axes.tick_params(colors=LIGHT.ink, labelsize=9, length=3)
    axes.grid(color=LIGHT.ink, alpha=0.15, lw=0.6)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set(visible=side in ("left", "bottom"), color=LIGHT.ink, linewidth=0.6, alpha=0.5)


def _keep_outliers_out(axes: "Axes", values: list[float]) -> None:
    """One spike of a gradient norm must not flatten the rest: the axis then ends above the 99.5th percentile."""
    finite = sorted(value for value in values if math.isfinite(value))
    if len(finite) < SMOOTH_FROM:
        return
    usual, least = finite[int(0.995 * (len(finite) - 1))], finite[0]
    if finite[-1] - least > 4 * (usual - least) > 0:
        axes.set_ylim(top=usual + 0.5 * (usual - least))


def _smooth(values: list[float]) -> list[float]:
    """A centred mean over about a twentieth of the points, without the highest and lowest tenth."""
    reach = max(2, len(values) // 40)
    smooth = []
    for index, value in enumerate(values):
        window = sorted(v for v in values[max(0, index - reach) : index + reach + 1] if math.isfinite(v))
        trim = max(1, len(window) // 10) if len(window) >= 5 else 0
        usual = window[trim : len(window) - trim]
        smooth.append(sum(usual) / len(usual) if math.isfinite(value) else math.nan)
    return smooth


def _plain(text: str) -> str:
    """Names may hold a $, which matplotlib would read as the start of a formula."""
    return text.replace("$", r"\$")


def _say(figure: "Figure", text: str) -> None:
    figure.text(0.5, 0.45, text, color=LIGHT.ink, ha="center", fontsize=11)
