"""Means and differences with their intervals as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.reports.chart import Scale, labels, scale_of, ticks
from posttrain.reports.markup import Markup, el, short

WIDTH, ROW, EDGE = 380, 38, 8
LONGEST = 34  # characters of a label


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
    x = scale_of([*reach, 0.0] if zero else reach, EDGE, WIDTH - EDGE, pad=0.05)
    bottom = ROW * len(rows) + 6
    parts = _axis(x, bottom, zero)
    for number, row in enumerate(rows):
        parts += _row(row, x, ROW * number)
    said = "; ".join(f"{row.label} {_said(row)}" for row in rows)
    picture = el(
        "svg", *parts, viewBox=f"0 0 {WIDTH} {bottom + 20}", role="img", aria_label=f"{title}: {said}", tabindex="0"
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
        el("text", _said(row), class_="tick end", x=WIDTH - EDGE, y=top + 14),
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
