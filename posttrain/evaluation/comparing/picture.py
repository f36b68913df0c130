"""A comparison as a picture: means and differences with their intervals."""

from collections.abc import Sequence
from typing import Any

from posttrain.base.terminal import visible
from posttrain.evaluation.comparing.differences import Comparison, Suite
from posttrain.reports.curves import plain_axes, png_of
from posttrain.reports.design import LIGHT

NAME_SHOWN = 28  # characters of a name


def picture(comparison: Comparison) -> bytes:
    """A PNG: for each suite the means and the differences, with their intervals."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    suites = comparison.suites
    rows = [max(len(suite.values), len(suite.differences)) for suite in suites]
    height = sum(0.42 * count + 1.0 for count in rows) + 0.2
    figure = Figure((11, max(2.4, height)), dpi=110, facecolor=LIGHT.ground)
    figure.set_layout_engine(ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
    grid = figure.subplots(len(suites), 2, squeeze=False, height_ratios=[count + 1.5 for count in rows])
    for (means, differences), suite in zip(grid, suites, strict=True):
        _draw_means(means, suite)
        _draw_differences(differences, suite)
        for axes in (means, differences):
            plain_axes(axes)
    return png_of(figure)


def _draw_means(axes: Any, suite: Suite) -> None:
    for at, value in enumerate(suite.values.values()):
        colour = LIGHT.series[at % len(LIGHT.series)]
        if len(value.by_run) > 1:
            axes.plot(value.by_run, [-at + 0.2] * len(value.by_run), "|", color=colour, ms=8)
        if value.estimate:
            interval_bar(axes, at, value.estimate.value, value.estimate.low, value.estimate.high, colour)
    _names(axes, list(suite.values))
    axes.set_title(_plain(f"{suite.key}: {suite.metric}"), color=LIGHT.ink, fontsize=11, loc="left")


def _draw_differences(axes: Any, suite: Suite) -> None:
    axes.axvline(0, color=LIGHT.ink, lw=1, ls=":")
    for at, one in enumerate(suite.differences):
        if one.floor is not None:
            axes.fill_betweenx([-at - 0.3, -at + 0.3], -one.floor, one.floor, color=LIGHT.ink, alpha=0.12, lw=0)
        interval_bar(
            axes, at, one.paired.value, one.paired.low, one.paired.high, LIGHT.series[1] if one.shown else LIGHT.ink
        )
    _names(axes, [f"{one.b} − {one.a}" for one in suite.differences])
    axes.set_title("Difference; coloured: shown; grey band: seeds", color=LIGHT.ink, fontsize=10, loc="left")


def interval_bar(axes: Any, at: int, value: float, low: float | None, high: float | None, colour: str) -> None:
    """A value with its interval on line `at`, counted from the top."""
    error = None if low is None or high is None else [[max(0.0, value - low)], [max(0.0, high - value)]]
    axes.errorbar(value, -at, xerr=error, fmt="o", color=colour, capsize=4, lw=1.6)


def _names(axes: Any, names: Sequence[str]) -> None:
    axes.set_yticks([-at for at in range(len(names))], [_plain(name) for name in names])
    axes.set_ylim(-len(names) + 0.4, 0.6)


def _plain(text: str) -> str:
    """A name for the picture: no control characters, no mathematics between dollar signs, not long."""
    short = visible(text.replace("\n", " ")).replace("$", r"\$")
    return short if len(short) <= 2 * NAME_SHOWN else f"{short[:NAME_SHOWN]}…{short[-NAME_SHOWN:]}"
