"""SVG drawings, for pages, reports and image files; scales and axis labels."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from posttrain.reports.design import FONT, LIGHT
from posttrain.reports.markup import Markup, el, join, short
from posttrain.runs.atomic import write_file

UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))  # units of axis labels, used from ten units on
MARGIN, HEAD, LINE = 14, 24, 16  # pixels in an image file: margin of drawings, height of a title and of a legend line
CHARACTER = 6.4  # mean width of a legend's characters in pixels

# Image files must work in any viewer, so their colours are literal; pages use custom properties.
_SERIES = "".join(
    f".line.c{n} {{ stroke: {colour} }} .dot.c{n} {{ fill: {colour} }} " for n, colour in enumerate(LIGHT.series)
)
STYLE = f"""
text {{ font: 11.5px {FONT}; fill: {LIGHT.quiet} }} .title {{ font-size: 13px; font-weight: 600; fill: {LIGHT.ink} }}
.name {{ font-size: 12.5px; fill: {LIGHT.ink} }} .end {{ text-anchor: end }} .middle {{ text-anchor: middle }}
.line {{ fill: none; stroke-width: 1.6; stroke-linejoin: round; stroke-linecap: round }} {_SERIES}
.line.quiet {{ stroke: {LIGHT.quiet} }} .dot.quiet {{ fill: {LIGHT.quiet} }} .raw {{ opacity: 0.28; stroke-width: 1 }}
.dashed {{ stroke-dasharray: 5 4 }} .grid {{ stroke: {LIGHT.line} }} .band {{ fill: {LIGHT.quiet}; opacity: 0.15 }}
.zero {{ stroke: {LIGHT.quiet}; stroke-dasharray: 2 3 }}
"""


@dataclass(frozen=True, slots=True)
class Key:
    """An entry of a legend: a line's name, its last value and the number of its colour."""

    name: str
    value: str
    colour: int
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Drawing:
    """A drawing with its title and legend: a figure on a page, or part of an image file.
    `parts` are SVG elements in a box of `size` pixels; `described` is their content in words."""

    title: str
    size: tuple[int, int]
    parts: Sequence[Markup]
    described: str
    keys: Sequence[Key] = ()
    hover: Sequence[Markup] = ()  # additional parts for the pages' script
    attributes: Mapping[str, object] = field(default_factory=dict)  # HTML attributes of the figure

    def __html__(self) -> Markup:
        def shown(key: Key) -> Markup:
            value = [" " if key.name else "", el("b", key.value)] if key.value else None
            return el("span", key.name, value, class_=f"key c{key.colour}{' dashed' if key.dashed else ''}")

        legend = el("span", *map(shown, self.keys), class_="legend") if self.keys else None
        caption = el("figcaption", el("span", self.title, class_="title"), legend)
        if not self.parts:
            return el("figure", caption, el("p", "no values yet", class_="quiet"), class_="chart")
        width, height = self.size
        picture = el(
            "svg", *self.parts, *self.hover, viewBox=f"0 0 {width} {height}", role="img", tabindex="0",
            aria_label=f"{self.title}: {self.described}",
        )  # fmt: skip
        return el("figure", caption, picture, class_="chart", **self.attributes)


def write_drawings(path: Path, drawings: Sequence[Drawing], columns: int = 2) -> None:
    """Write the drawings in `columns` columns, their titles and legends above them, to an SVG file, atomically."""
    parts, top, whole = [], MARGIN, 0.0
    for start in range(0, len(drawings), columns):
        row = drawings[start : start + columns]
        heads = [list(_keys_of(drawing)) for drawing in row]
        above = HEAD + LINE * max(len(lines) for lines in heads)
        left = MARGIN
        for drawing, lines in zip(row, heads, strict=True):
            width, height = drawing.size
            parts.append(el("text", short(drawing.title, width // 7), class_="title", x=left, y=top + 14))
            for number, line in enumerate(lines):
                parts.append(el("g", *line, transform=f"translate({left} {top + HEAD + LINE * number + 8})"))
            inner = drawing.parts or [el("text", "no values yet", x=0, y=20)]
            box = {"x": left, "y": top + above, "width": width, "height": height, "viewBox": f"0 0 {width} {height}"}
            parts.append(el("svg", *inner, **box))
            left += width + 2 * MARGIN
        whole = max(whole, left - MARGIN)
        top += above + max(drawing.size[1] for drawing in row) + MARGIN
    ground = el("rect", width=whole, height=top, fill=LIGHT.ground)
    described = "; ".join(f"{drawing.title}: {drawing.described}" for drawing in drawings)
    svg = el(
        "svg", el("style", Markup(STYLE)), ground, join(parts, "\n"), xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {whole:g} {top}", width=f"{whole:g}", height=top, role="img", aria_label=described,
    )  # fmt: skip
    write_file(path, svg.encode(errors="backslashreplace"))


def _keys_of(drawing: Drawing) -> Iterator[list[Markup]]:
    """The legend of a drawing in an image file, in lines as wide as the drawing."""
    line, x = [], 0.0
    for key in drawing.keys:
        text = f"{short(key.name, 40)} {key.value}".strip()
        width = 24 + CHARACTER * len(text) + 14
        if line and x + width > drawing.size[0]:
            yield line
            line, x = [], 0.0
        look = f"line c{key.colour}{' dashed' if key.dashed else ''}"
        line += [el("path", d=f"M{x:.0f} -4h18", class_=look), el("text", text, x=f"{x + 24:.0f}", y=0)]
        x += width
    if line:
        yield line


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def ticks(low: float, high: float, about: int) -> list[float]:
    """About `about` round numbers from `low` to `high`."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, about)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def scale_of(values: Sequence[float], start: float, end: float, pad: float, share: bool = False) -> Scale:
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if share and low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)
    margin = pad * (high - low)
    return Scale(low - margin, high + margin, start, end)


def labels(values: Sequence[float]) -> list[str]:
    """Short labels that distinguish the values."""
    largest = max(map(abs, values), default=0.0)
    size, unit = next(((size, unit) for size, unit in UNITS if largest >= 10 * size), (1.0, ""))
    clean = [0.0 if abs(value) < 1e-9 * largest else value / size for value in values]
    texts = [f"{value:.4g}{unit}" if value else "0" for value in clean]
    if 0 < largest < 1e-2:
        for digits in range(4):
            texts = [f"{value:.{digits}e}".replace("e-0", "e-") if value else "0" for value in clean]
            if len(set(texts)) == len(set(clean)):
                break
    return texts
