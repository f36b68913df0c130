"""Self-contained HTML files, built from sections.

A page works without network and scripts: its curves are inline SVG. A small script, whose hash the page's policy
allows, adds the values under the pointer. All strings are escaped; control characters are shown, secrets are hidden.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from string import Template
from typing import Any

from posttrain.reports.chart import HOVER
from posttrain.reports.design import CSS
from posttrain.reports.markup import Child, Markup, cards, el, join, number, table
from posttrain.runs.atomic import write_file
from posttrain.runs.files import flat, make_folder

MOST_BYTES = 2_000_000
# Maximum characters of a string; tables have at most a tenth as many rows. A page above MOST_BYTES uses the next limit.
LIMITS = (20_000, 5_000, 1_000, 200)
NUMBER = re.compile(r"[-+−]?\d[\d,.]*(e[-+]?\d+)?( ?%|k|M)?")  # a number as written in a cell


def script_in(element: str, *sources: str) -> str:
    """Join the sources into one script without global names; the expression `element` gives its constant `element`."""
    return f"(() => {{\nconst element = {element};\n{''.join(sources)}}})();\n"


def digest(source: str) -> str:
    """The hash of a script or style sheet for a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


DOCUMENT = Template(Path(__file__).with_name("page.html").read_text(encoding="utf-8"))
SCRIPT = script_in("document.body", HOVER)
POLICY = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {digest(SCRIPT)}"


@dataclass(frozen=True, slots=True)
class Facts:
    """Names and values; nested mappings become dotted names. `folded`: initially only the title is shown."""

    title: str
    facts: Mapping[str, Any]
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of strings and numbers; a string may have several lines."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph, or with `code` a preformatted block."""

    title: str
    text: str
    code: bool = False
    folded: bool = False


@dataclass(frozen=True, slots=True)
class Html:
    """HTML: charts, completions, messages."""

    title: str
    body: Markup
    note: str = ""
    folded: bool = False


Section = Facts | Table | Text | Html
CONTENT = {Facts: "facts", Table: "rows", Text: "text", Html: "body"}


def charts(title: str, figures: Iterable[Child], note: str = "") -> Html:
    """Figures side by side; the pointer marks the same step in all of them."""
    return Html(title, el("div", *figures, class_="charts") if (figures := list(figures)) else Markup(""), note)


def messages(title: str, warnings: Iterable[str]) -> Html:
    return Html(title, join(el("p", warning, class_="message warning") for warning in warnings))


def write_page(path: Path, title: str, sections: Iterable[Section], numbers: Mapping[str, str] | None = None) -> None:
    """Write a page atomically; sections without content are omitted.

    `numbers`: the most important values, shown at the top. Long strings and tables are cut, with a count, to keep the
    page under 2 MB. Raises RunError if the file cannot be written.
    """
    shown = [section for section in sections if getattr(section, CONTENT[type(section)])]
    html = ""
    for limit in LIMITS:
        html = _page(title, numbers or {}, shown, limit)
        if len(html.encode(errors="backslashreplace")) < MOST_BYTES:
            break
    make_folder(path.parent, path)
    write_file(path, html.encode(errors="backslashreplace"))


def cut(text: str, limit: int) -> str | list[Markup | str]:
    """The string; if it is too long, its beginning and end, with the number of characters cut between them."""
    more = len(text) - limit
    if more <= 0:
        return text
    end = limit // 4
    return [text[: limit - end], el("span", f" … {more:,} characters cut … ", class_="cut"), text[len(text) - end :]]


def _page(title: str, numbers: Mapping[str, str], sections: Sequence[Section], limit: int) -> str:
    links = [el("a", section.title, href=f"#s{number}") for number, section in enumerate(sections)]
    written = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    head = el("header", el("h1", title), el("p", f"posttrain report, {written}"))
    less = f"To keep this page small, strings are cut to {limit:,} characters and tables to {limit // 10:,} rows."
    body = [
        head,
        el("p", less, class_="note") if limit < LIMITS[0] else None,
        cards(numbers) if numbers else None,
        el("nav", *links) if len(links) > 1 else None,
        *(_section(f"s{number}", section, limit) for number, section in enumerate(sections)),
    ]
    policy = Markup(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">')
    return document(title, join(body, "\n"), CSS, SCRIPT, policy, "view")


def document(title: str, body: Markup, style: str, script: str, head: Markup, class_: str = "") -> str:
    """A complete HTML page with its style sheet and script."""
    shown = {"title": el("title", title), "head": head, "style": style, "script": script, "look": class_}
    return DOCUMENT.substitute(shown, body=body)


def _section(name: str, section: Section, limit: int) -> Markup:
    heading, note = el("h2", section.title), getattr(section, "note", "")
    body = [el("p", cut(note, limit), class_="note") if note else None, _body(section, limit)]
    if section.folded:
        return el("section", el("details", el("summary", heading), *body), id=name)
    return el("section", heading, *body, id=name)


def _body(section: Section, limit: int) -> Markup:
    match section:
        case Facts():
            facts = list(flat(section.facts).items())
            rows = [[el("dt", name), el("dd", _cell(value, limit))] for name, value in facts[: limit // 10]]
            return join([el("dl", *rows, class_="facts"), _more(len(facts), limit)])
        case Table():
            rows = section.rows[: limit // 10]
            numbers = [at for at, column in enumerate(zip(*rows, strict=True)) if _are_numbers(column)]
            cells = ([_cell(value, limit) for value in row] for row in rows)
            return join([table(section.header, cells, numbers), _more(len(section.rows), limit)])
        case Text():
            name, look = ("pre", None) if section.code else ("p", "prose")
            return el(name, cut(section.text, limit), class_=look)
        case Html():
            return section.body


def _more(count: int, limit: int) -> Markup | None:
    more = count - limit // 10
    return el("p", f"{more:,} more rows are not shown.", class_="note") if more > 0 else None


def _cell(value: Any, limit: int) -> object:
    if isinstance(value, Markup):
        return value
    if isinstance(value, int | float):
        return number(value)
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value))
    return cut("" if value is None else str(value), limit)


def _are_numbers(column: Iterable[object]) -> bool:
    """Whether all non-empty cells of a column are numbers or formatted numbers."""
    cells = [cell for cell in column if cell not in ("", "-", None)]
    numeric = (NUMBER.fullmatch(cell) if isinstance(cell, str) else isinstance(cell, int | float) for cell in cells)
    return bool(cells) and all(numeric)
