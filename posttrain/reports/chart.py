"""Charts: curves, dots, and means with their intervals.
The pages' script (`hover.js`) reads the attribute `data-points` to show the values under the pointer."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from posttrain.reports.design import LIGHT
from posttrain.reports.drawing import Drawing, Key, Scale, labels, scale_of, ticks
from posttrain.reports.markup import Markup, el, short
from posttrain.reports.series import smoothed, thinned

HOVER = Path(__file__).with_name("hover.js").read_text(encoding="utf-8")  # for the charts in the constant `element`
COLOURS = len(LIGHT.series)  # number of the classes c0, c1 … in the style sheet
POINTS = 400  # maximum points of a line
SIZE = (460, 200)  # pixels
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 8, 22
INTERVALS, ROW, EDGE = 380, 38, 8  # pixels: width of the figure, height of a row, margin
LONGEST = 34  # maximum characters of a label


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    dashed: bool = False
    bars: Sequence[tuple[float, float]] = ()  # the interval (low, high) of each value


def chart(
    lines: Sequence[Line],
    title: str,
    *,
    x_label: str = "step",
    smooth: float = 0.0,
    go: str | None = None,
    share: bool = False,
    keys: bool = True,
    ends: bool = False,
    most: int = POINTS,
    size: tuple[int, int] = SIZE,
    zero: Sequence[float] = (),
) -> Drawing:
    """A line chart: smoothed lines in front of faint raw ones. Dashed lines, which have few points, are not smoothed.

    `go`: the address that a click opens, with the point's x appended. `share`: the values lie between 0 and 1. `keys`:
    show a legend; `ends`: with last values. `most`: maximum points of a line. `zero`: values that the y axis includes.
    """
    shown = [line for line in lines if any(map(math.isfinite, line.ys))]
    if not shown:
        return Drawing(title, size, [], "no values yet")
    width, height = size
    smoothed_lines = [(line, smoothed(line.ys, 0.0 if line.dashed else smooth)) for line in shown]
    x = scale_of([value for line in shown for value in line.xs], LEFT, width - RIGHT, pad=0.0)
    values = [usual([*ys, *_middle(line.ys)] if smooth else ys) for line, ys in smoothed_lines]
    reach = [*chain(*values), *(end for line in shown for bar in line.bars for end in bar), *zero]
    y = scale_of(reach, height - BOTTOM, TOP, pad=0.06, share=share)
    marks = ticks(x.low, x.high, 5)
    if x_label == "step":
        marks = [value for value in marks if value == int(value)] or [math.ceil(x.low)]
    parts = [*_axes(x, y, size, marks)]
    points, named, described = [], [], []
    for line, ys in smoothed_lines:
        style = f"line c{line.colour % COLOURS}{' dashed' if line.dashed else ''}"
        if smooth and not line.dashed:
            parts.append(_path(*thinned(line.xs, line.ys, most), x, y, f"{style} raw"))
        xs, ys = thinned(line.xs, ys, most)
        parts.append(_path(xs, ys, x, y, style))
        parts += [
            el("path", d=f"M{x(at) - 3:.1f} {y(low):.1f}h6m-3 0V{y(high):.1f}m-3 0h6", class_=style)
            for at, (low, high) in zip(line.xs, line.bars, strict=False)
        ]
        at = [float(f"{value:.7g}") for value in xs]
        values = [None if not math.isfinite(value) else float(f"{value:.5g}") for value in ys]
        points.append({"label": line.label, "c": line.colour % COLOURS, "x": at, "y": values})
        first, last = (next(filter(math.isfinite, values)) for values in (line.ys, reversed(line.ys)))
        described.append(f"{line.label} from {first:.4g} to {last:.4g}")
        if keys and (ends or len(shown) > 1):
            label = line.label if len(shown) > 1 or line.label != "train" else ""
            named.append(Key(label, f"{last:.4g}" if ends else "", line.colour % COLOURS, line.dashed))
    facts = {"scale": [x.low, x.high, x.start, x.end], "width": width, "label": x_label, "lines": points}
    cross = el("line", class_="cross", y1=TOP, y2=height - BOTTOM, x1=-9, x2=-9)
    return Drawing(
        title, size, parts, "; ".join(described), named, hover=[cross],
        attributes={"data_points": json.dumps(facts | {"smooth": smooth > 0}), "data_at": go},
    )  # fmt: skip


def scatter(points: Sequence[tuple[float, float, bool]], title: str, marks: Mapping[float, str]) -> Drawing:
    """Dots at (x, y), hollow if the third value is false. `marks`: the labels of the x axis, by x."""
    if not points:
        return Drawing(title, SIZE, [], "no values yet")
    width, height = SIZE
    x = scale_of([*marks, *(point[0] for point in points)], LEFT, width - RIGHT, pad=0.06)
    y = scale_of([point[1] for point in points], height - BOTTOM, TOP, pad=0.08)
    dots = [
        el("circle", cx=f"{x(at):.1f}", cy=f"{y(value):.1f}", r=3.5, class_="dot c0" if full else "line c0")
        for at, value, full in points
    ]
    described = "; ".join(f"{value:.4g} at {at:.4g}" for at, value, _ in points)
    return Drawing(title, SIZE, [*_axes(x, y, SIZE, marks), *dots], described)


def spark(values: Sequence[float], width: int = 96, height: int = 22) -> Markup:
    """A small line without axes; empty for fewer than two finite values."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return Markup("")
    x, y = Scale(0, len(finite) - 1, 2, width - 3), scale_of(finite, height - 3, 3, pad=0.0)
    path = _path(range(len(finite)), finite, x, y, "line c0")
    end = el("circle", cx=f"{x(len(finite) - 1):.1f}", cy=f"{y(finite[-1]):.1f}", r=2, class_="end")
    label = f"from {finite[0]:.3g} to {finite[-1]:.3g}"
    return el("svg", path, end, viewBox=f"0 0 {width} {height}", class_="spark", role="img", aria_label=label)


def usual(values: Sequence[float]) -> list[float]:
    """The finite values, sorted. Rare high spikes, which would flatten the rest of a plot, become one lower value."""
    finite = sorted(filter(math.isfinite, values))
    if len(finite) < 60:
        return finite
    top = finite[int(0.995 * (len(finite) - 1))]
    if finite[-1] - finite[0] > 4 * (top - finite[0]) > 0:
        return [value for value in finite if value <= top] + [top + 0.3 * (top - finite[0])]
    return finite


def _middle(values: Sequence[float]) -> list[float]:
    """The values between the 2nd and 98th percentiles: the usual noise around a smoothed line."""
    finite = sorted(filter(math.isfinite, values))
    rare = len(finite) // 50
    return finite[rare : len(finite) - rare]


def _axes(x: Scale, y: Scale, size: tuple[int, int], marks: Sequence[float] | Mapping[float, str]) -> Iterator[Markup]:
    """Grid lines with their values, and x-axis labels at `marks`; a mapping also gives the text of the labels."""
    levels, (width, height) = ticks(y.low, y.high, 4), size
    for value, label in zip(levels, labels(levels), strict=True):
        at = f"{y(value):.1f}"
        yield el("line", class_="grid", x1=LEFT, x2=width - RIGHT, y1=at, y2=at)
        yield el("text", label, class_="tick end", x=LEFT - 6, y=f"{y(value) + 3.5:.1f}")
    named = marks if isinstance(marks, Mapping) else dict(zip(marks, labels(marks), strict=True))
    for value, label in named.items():
        yield el("text", label, class_="tick middle", x=f"{x(value):.1f}", y=height - 6)


def _path(xs: Sequence[float], ys: Sequence[float], x: Scale, y: Scale, style: str) -> Markup:
    """The line, broken where a value is not finite; a single point is a dot."""
    top, bottom = min(y.start, y.end), max(y.start, y.end)
    stretches: list[list[str]] = [[]]
    for at, value in zip(xs, ys, strict=True):
        if math.isfinite(value):
            stretches[-1].append(f"{x(at):.1f} {min(max(y(value), top), bottom):.1f}")
        elif stretches[-1]:
            stretches.append([])
    drawn = [f"M{'L'.join(points)}" if len(points) > 1 else f"M{points[0]}h.01" for points in stretches if points]
    return el("path", d="".join(drawn), class_=style)


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its interval, if any. `colour` None: the colour of labels and notes."""

    label: str
    value: float
    low: float | None
    high: float | None
    colour: int | None = None
    band: float | None = None  # half the width of a grey band around 0
    dots: Sequence[float] = ()  # the values of single runs


def intervals(title: str, rows: Sequence[Interval], zero: bool = False) -> Drawing:
    """A figure with a row for each value: label, number and interval. `zero`: draw a line at 0."""
    reach = [value for row in rows for value in (row.value, row.low, row.high, *row.dots) if value is not None]
    reach += [side * row.band for row in rows if row.band is not None for side in (-1, 1)]
    x = scale_of([*reach, 0.0] if zero else reach, EDGE, INTERVALS - EDGE, pad=0.05)
    bottom, marks, parts = ROW * len(rows) + 6, ticks(x.low, x.high, 5), []
    for value, label in zip(marks, labels(marks), strict=True):
        at = f"{x(value):.1f}"
        parts.append(el("line", class_="grid", x1=at, x2=at, y1=0, y2=bottom))
        parts.append(el("text", label, class_="tick middle", x=at, y=bottom + 15))
    if zero:
        parts.append(el("line", class_="zero", x1=f"{x(0):.1f}", x2=f"{x(0):.1f}", y1=0, y2=bottom))
    parts += [part for number, row in enumerate(rows) for part in _row(row, x, ROW * number)]
    return Drawing(title, (INTERVALS, bottom + 20), parts, "; ".join(f"{row.label} {_written(row)}" for row in rows))


def _row(row: Interval, x: Scale, top: int) -> Iterator[Markup]:
    middle, key = top + 26, "quiet" if row.colour is None else f"c{row.colour}"
    yield el("text", short(row.label, LONGEST), class_="name", x=EDGE, y=top + 14)
    yield el("text", _written(row), class_="tick end", x=INTERVALS - EDGE, y=top + 14)
    if row.band is not None:
        left, right = x(-row.band), x(row.band)
        yield el("rect", class_="band", x=f"{left:.1f}", y=middle - 6, width=f"{right - left:.1f}", height=12)
    if row.low is not None and row.high is not None:
        yield el("path", d=f"M{x(row.low):.1f} {middle}H{x(row.high):.1f}", class_=f"line {key}")
    yield from (el("path", d=f"M{x(dot):.1f} {middle - 5}v10", class_=f"line {key} raw") for dot in row.dots)
    yield el("circle", cx=f"{x(row.value):.1f}", cy=middle, r=4, class_=f"dot {key}")


def _written(row: Interval) -> str:
    between = "" if row.low is None or row.high is None else f" ({row.low:.3f} to {row.high:.3f})"
    return f"{row.value:.3f}{between}"
