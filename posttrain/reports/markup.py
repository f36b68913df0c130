"""HTML elements; every string in them (from models, rows, names, notes) is escaped, except `Markup`."""

import html
import math
from collections.abc import Iterable, Mapping, Sequence

from posttrain.base.terminal import harmless

LONGEST = 20_000  # maximum characters of one string on a page


class Markup(str):
    """A string of HTML."""

    __slots__ = ()


Child = object  # Markup, any other value (escaped), None (nothing), or an iterable of these
VOID = ("input", "br")


def text(value: object) -> Markup:
    """A value as HTML: markup escaped, control characters visible, secrets hidden, long strings cut, with a count."""
    if isinstance(value, Markup):
        return value
    if not isinstance(value, str) and (html_of := getattr(value, "__html__", None)):  # a drawing
        return html_of()
    whole = str(value)
    more = len(whole) - LONGEST
    shown = html.escape(harmless(whole[:LONGEST]))
    return Markup(f"{shown} … ({more:,} more characters)" if more > 0 else shown)


def join(children: Iterable[Child], between: str = "") -> Markup:
    return Markup(between.join(_child(child) for child in children))


def el(name: str, /, *children: Child, **attributes: object) -> Markup:
    """An element. `class_` is the attribute class, `data_go` is data-go. True: only a name; None or False: omitted."""
    written = "".join(
        f" {_name(key)}" if value is True else f' {_name(key)}="{html.escape(harmless(str(value)))}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{written}>" if name in VOID else f"<{name}{written}>{join(children)}</{name}>")


def table(
    header: Sequence[Child], rows: Iterable[Sequence[Child]], numbers: Sequence[int] = (), class_: str = ""
) -> Markup:
    """A table that scrolls sideways if it is too wide; the columns with an index in `numbers` are right-aligned."""
    right = ["number" if index in numbers else None for index in range(len(header))]
    head = [el("th", cell, class_=align, scope="col") for cell, align in zip(header, right, strict=True)]
    body = [el("tr", *(el("td", cell, class_=align) for cell, align in zip(row, right, strict=True))) for row in rows]
    shown = el("table", el("thead", el("tr", *head)), el("tbody", *body), class_=class_ or None)
    return el("div", shown, class_="wide", tabindex="0", role="region", aria_label="table")


def cards(facts: Mapping[str, Child]) -> Markup:
    """The most important numbers, each with its name."""
    return el("dl", *(el("div", el("dt", name), el("dd", value)) for name, value in facts.items()), class_="cards")


def number(value: object, digits: int = 4) -> str:
    """A number with a few digits; a dash for None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "–" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.{digits}g}" if math.isfinite(value) else "–"


def short(value: str, most: int = 160) -> str:
    """The string on one line, cut with an ellipsis."""
    flat = " ".join(value[: 4 * most].split())
    return flat if len(flat) <= most and len(value) <= 4 * most else flat[: most - 1] + "…"


def message(text: str, kind: str = "note") -> Markup:
    """A framed paragraph: a note, a warning or an error."""
    return el("p", text, class_=f"message {kind}", role="status")


def link(label: Child, address: str, **attributes: object) -> Markup:
    return el("a", label, href=address, **attributes)


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _child(child: Child) -> str:
    if child is None:
        return ""
    return join(child) if isinstance(child, Iterable) and not isinstance(child, str) else text(child)
