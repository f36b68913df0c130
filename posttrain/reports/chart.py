"""Curves as inline SVG. The page's script reads `data-points`: values under the pointer, and where a click leads.

Means and differences have their intervals as inline SVG, too.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.reports.design import LIGHT
from posttrain.reports.markup import Markup, el, short
from posttrain.reports.series import smoothed, thinned

HOVER = Path(__file__).with_name("hover.js").read_text(encoding="utf-8")  # for charts inside the variable `element`
COLOURS = len(LIGHT.series)  # classes c0 … of the style sheet
POINTS = 400  # of a line
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))  # of labels from ten of them
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 8, 22
INTERVALS, ROW, EDGE = 380, 38, 8  # pixels: width of the figure, height of a row, margin
LONGEST = 34  # characters of a label


@dataclass(frozen=True, slots=True)
class Line:
    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    colour: int = 0
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


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
    size: tuple[int, int] = (460, 200),
) -> Markup:
    """A figure with its lines, raw ones faint under smoothed ones; dashed lines, which have few points, as they are.

    `go`: an address that a point's x is appended to. `share`: the values lie between 0 and 1. `keys`: name the lines;
    with `ends` also their last values. `most`: points of a line.
    """
    shown = [line for line in lines if any(map(math.isfinite, line.ys))]
    caption = el(
        "figcaption",
        el("span", title, class_="title"),
        _legend(shown, ends) if keys and (ends or len(shown) > 1) else None,
    )
    if not shown:
        return el("figure", caption, el("p", "no values yet", class_="quiet"), class_="chart")
    width, height = size
    smoothed_lines = [(line, smoothed(line.ys, 0.0 if line.dashed else smooth)) for line in shown]
    x = scale_of([value for line in shown for value in line.xs], LEFT, width - RIGHT, pad=0.0)
    values = [_usual([*ys, *_middle(line.ys)] if smooth else ys) for line, ys in smoothed_lines]
    y = scale_of([value for of in values for value in of], height - BOTTOM, TOP, pad=0.06, share=share)
    parts = _axes(x, y, width, height, whole=x_label == "step")
    points = []
    for line, ys in smoothed_lines:
        style = f"line c{line.colour % COLOURS}{' dashed' if line.dashed else ''}"
        if smooth and not line.dashed:
            parts.append(_path(*thinned(line.xs, line.ys, most), x, y, f"{style} raw"))
        xs, ys = thinned(line.xs, ys, most)
        parts.append(_path(xs, ys, x, y, style))
        values = [None if not math.isfinite(value) else float(f"{value:.5g}") for value in ys]
        points.append(
            {"label": line.label, "c": line.colour % COLOURS, "x": [float(f"{v:.7g}") for v in xs], "y": values}
        )
    facts = json.dumps(
        {
            "scale": [x.low, x.high, x.start, x.end],
            "width": width,
            "label": x_label,
            "lines": points,
            "smooth": smooth > 0,
        }
    )
    picture = el(
        "svg", *parts, el("line", class_="cross", y1=TOP, y2=height - BOTTOM, x1=-9, x2=-9),
        viewBox=f"0 0 {width} {height}", role="img", tabindex="0", aria_label=_described(title, shown),
    )  # fmt: skip
    return el("figure", caption, picture, class_="chart", data_points=facts, data_at=go)


def spark(values: Sequence[float], width: int = 96, height: int = 22) -> Markup:
    """A small line without axes; nothing for fewer than two values."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return Markup("")
    x, y = Scale(0, len(finite) - 1, 2, width - 3), scale_of(finite, height - 3, 3, pad=0.0)
    path = _path(range(len(finite)), finite, x, y, "line c0")
    end = el("circle", cx=f"{x(len(finite) - 1):.1f}", cy=f"{y(finite[-1]):.1f}", r=2, class_="end")
    said = f"from {finite[0]:.3g} to {finite[-1]:.3g}"
    return el("svg", path, end, viewBox=f"0 0 {width} {height}", class_="spark", role="img", aria_label=said)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round values between the two, about as many as asked for."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, about)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def scale_of(values: Sequence[float], start: float, end: float, pad: float, share: bool = False) -> Scale:
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if share and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
    margin = pad * (high - low)
    return Scale(low - margin, high + margin, start, end)


def _usual(values: Sequence[float]) -> list[float]:
    """The values without a rare spike that would flatten the rest: it leaves the picture at the top."""
    finite = sorted(value for value in values if math.isfinite(value))
    if len(finite) < 60:
        return finite
    usual = finite[int(0.995 * (len(finite) - 1))]
    if finite[-1] - finite[0] > 4 * (usual - finite[0]) > 0:
        return [value for value in finite if value <= usual] + [usual + 0.3 * (usual - finite[0])]
    return finite


def _middle(values: Sequence[float]) -> list[float]:
    """The values between the 2nd and the 98th percentile: the usual noise around a smoothed line."""
    finite = sorted(value for value in values if math.isfinite(value))
    rare = len(finite) // 50
    return finite[rare : len(finite) - rare]


def _axes(x: Scale, y: Scale, width: int, height: int, whole: bool) -> list[Markup]:
    parts = []
    levels = ticks(y.low, y.high, 4)
    for value, label in zip(levels, labels(levels), strict=True):
        at = f"{y(value):.1f}"
        parts.append(el("line", class_="grid", x1=LEFT, x2=width - RIGHT, y1=at, y2=at))
        parts.append(el("text", label, class_="tick end", x=LEFT - 6, y=f"{y(value) + 3.5:.1f}"))
    places = ticks(x.low, x.high, 5)
    if whole:
        places = [value for value in places if value == int(value)] or [math.ceil(x.low)]
    for value, label in zip(places, labels(places), strict=True):
        parts.append(el("text", label, class_="tick middle", x=f"{x(value):.1f}", y=height - 6))
    return parts


def labels(values: Sequence[float]) -> list[str]:
    """Short labels that tell the values apart."""
    largest = max(map(abs, values), default=0.0)
    size, unit = next(((size, unit) for size, unit in UNITS if largest >= 10 * size), (1.0, ""))
    clean = [0.0 if abs(value) < 1e-9 * largest else value / size for value in values]
    made = [f"{value:.4g}{unit}" if value else "0" for value in clean]
    if 0 < largest < 1e-2:
        for digits in range(4):
            made = [f"{value:.{digits}e}".replace("e-0", "e-") if value else "0" for value in clean]
            if len(set(made)) == len(set(clean)):
                break
    return made


def _path(xs: Sequence[float], ys: Sequence[float], x: Scale, y: Scale, style: str) -> Markup:
    """The line, broken where a value is not finite; a point of its own is a dot."""
    top, bottom = min(y.start, y.end), max(y.start, y.end)
    runs: list[list[str]] = [[]]
    for at, value in zip(xs, ys, strict=True):
        if math.isfinite(value):
            runs[-1].append(f"{x(at):.1f} {min(max(y(value), top), bottom):.1f}")
        elif runs[-1]:
            runs.append([])
    steps = [f"M{'L'.join(run)}" if len(run) > 1 else f"M{run[0]}h.01" for run in runs if run]
    return el("path", d="".join(steps), class_=style)


def _legend(lines: Sequence[Line], ends: bool) -> Markup:
    return el("span", *(_key(line, ends, len(lines) > 1 or line.label != "train") for line in lines), class_="legend")


def _key(line: Line, ends: bool, named: bool) -> Markup:
    last = next((value for value in reversed(line.ys) if math.isfinite(value)), math.nan)
    parts = [line.label] if named else []
    parts += [" " if named else "", el("b", f"{last:.4g}")] if ends else []
    return el("span", *parts, class_=f"key c{line.colour % COLOURS}{' dashed' if line.dashed else ''}")


def _described(title: str, lines: Sequence[Line]) -> str:
    ends = []
    for line in lines:
        finite = [value for value in line.ys if math.isfinite(value)]
        ends.append(f"{line.label} from {finite[0]:.4g} to {finite[-1]:.4g}")
    return f"{title}: {'; '.join(ends)}"


@dataclass(frozen=True, slots=True)
class Interval:
    """A value; `low` and `high` are None without an interval. `colour` None: in the quiet colour."""

    label: str
    value: float
    low: float | None
    high: float | None
    colour: int | None = None
    band: float | None = None  # half the width of a grey band around 0
    dots: Sequence[float] = ()  # of single runs


def intervals(title: str, rows: Sequence[Interval], zero: bool = False, note: str = "") -> Markup:
    """A figure with a line for each value, its label above it and its number at the right; with `zero` a line at 0."""
    reach = [one for row in rows for one in (row.value, row.low, row.high, *row.dots) if one is not None]
    reach += [side * row.band for row in rows if row.band is not None for side in (-1, 1)]
    x = scale_of([*reach, 0.0] if zero else reach, EDGE, INTERVALS - EDGE, pad=0.05)
    bottom = ROW * len(rows) + 6
    parts = _axis(x, bottom, zero)
    for number, row in enumerate(rows):
        parts += _row(row, x, ROW * number)
    said = "; ".join(f"{row.label} {_said(row)}" for row in rows)
    picture = el(
        "svg", *parts, viewBox=f"0 0 {INTERVALS} {bottom + 20}", role="img", aria_label=f"{title}: {said}", tabindex="0"
    )
    caption = el("figcaption", el("span", title, class_="title"), el("span", note, class_="quiet") if note else None)
    return el("figure", caption, picture, class_="chart intervals")


def _axis(x: Scale, bottom: int, zero: bool) -> list[Markup]:
    places = ticks(x.low, x.high, 5)
    parts = []
    for value, label in zip(places, labels(places), strict=True):
        at = f"{x(value):.1f}"
        parts.append(el("line", class_="grid", x1=at, x2=at, y1=0, y2=bottom))
        parts.append(el("text", label, class_="tick middle", x=at, y=bottom + 15))
    if zero:
        parts.append(el("line", class_="zero", x1=f"{x(0):.1f}", x2=f"{x(0):.1f}", y1=0, y2=bottom))
    return parts


def _row(row: Interval, x: Scale, top: int) -> list[Markup]:
    middle, key = top + 26, "quiet" if row.colour is None else f"c{row.colour}"
    parts = [
        el("text", short(row.label, LONGEST), class_="name", x=EDGE, y=top + 14),
        el("text", _said(row), class_="tick end", x=INTERVALS - EDGE, y=top + 14),
    ]
    if row.band is not None:
        left, right = x(-row.band), x(row.band)
        parts.append(el("rect", class_="band", x=f"{left:.1f}", y=middle - 6, width=f"{right - left:.1f}", height=12))
    if row.low is not None and row.high is not None:
        parts.append(el("path", d=f"M{x(row.low):.1f} {middle}H{x(row.high):.1f}", class_=f"line {key}"))
    parts += [el("path", d=f"M{x(dot):.1f} {middle - 5}v10", class_=f"line {key} raw") for dot in row.dots]
    return [*parts, el("circle", cx=f"{x(row.value):.1f}", cy=middle, r=4, class_=f"dot {key}")]


def _said(row: Interval) -> str:
    between = "" if row.low is None or row.high is None else f" ({row.low:.3f} to {row.high:.3f})"
    return f"{row.value:.3f}{between}"
