"""The parts of every page: its address, the controls that change the address, and the frame around the content.

An address says what a page shows: `/rollouts?run=NAME&step=3`. Every value in it is untrusted. The controls above a
table or a plot are a form whose values become the address.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from posttrain.base.words import counted
from posttrain.reports import design
from posttrain.reports.chart import HOVER
from posttrain.reports.markup import Child, Markup, el, join, link, message
from posttrain.reports.page import digest, document, script_in
from posttrain.ui.commands import Output

LONGEST, MOST = 8_000, 200  # maximum characters and values read from an address
BIG = 1 << 53
HERE = Path(__file__).parent
FAVICON = HERE / "favicon.svg"
STYLE = design.TOKENS + design.PARTS + (HERE / "style.css").read_text(encoding="utf-8")
SCRIPT = script_in("document.querySelector('main')", HOVER, (HERE / "view.js").read_text(encoding="utf-8"))
HEAD = Markup('<link rel="icon" href="/favicon.ico" type="image/svg+xml">')
POLICY = (
    f"default-src 'none'; script-src {digest(SCRIPT)}; style-src {digest(STYLE)}; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
BAR = {"/": "Runs", "/rollouts": "Rollouts", "/evaluations": "Evaluations", "/data": "Data", "/chat": "Chat",
       "/new": "New run"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Query:
    """The parameters of an address, in order."""

    pairs: Sequence[tuple[str, str]] = field(default_factory=tuple)

    def one(self, name: str) -> str:
        return next((value for key, value in self.pairs if key == name), "")

    def many(self, name: str) -> list[str]:
        return list(dict.fromkeys(value for key, value in self.pairs if key == name))

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """The value if it is one of the choices, otherwise the first choice."""
        value = self.one(name)
        return value if value in choices else choices[0]

    def integer(self, name: str) -> int | None:
        """The value as a number; None if it is missing or not a non-negative integer."""
        value = self.one(name).strip()
        return int(value) if value.isascii() and value.isdigit() and len(value) < 16 else None

    def number(self, name: str) -> float | None:
        try:
            value = float(self.one(name))
        except ValueError:
            return None
        return value if math.isfinite(value) and abs(value) < BIG else None

    @property
    def page(self) -> int:
        return self.integer("page") or 0

    def but(self, path: str = "", **changes: object) -> str:
        """The address with changed parameters; None removes a parameter, a list sets several values."""
        pairs = [(key, value) for key, value in self.pairs if key not in changes]
        changed = [(name, change) for name, change in changes.items() if change is not None]
        return f"{path}?{urlencode([*pairs, *changed], doseq=True)}"


def parse(address: str) -> Query:
    """The parameters of an address, which may be only the part after the `?`; empty if they cannot be read."""
    _, mark, rest = address.partition("?")
    try:
        pairs = parse_qsl((rest if mark else address).partition("#")[0][:LONGEST], max_num_fields=MOST)
    except ValueError:
        return Query()
    return Query(tuple(pairs))


def address(path: str, **values: object) -> str:
    return Query().but(path, **values)


# The first button of a form: pressing Enter activates it. It is visible only if JavaScript is off.
SHOW = el("button", "Show", class_="show")


def form(path: str, *fields: Child) -> Markup:
    return el("form", SHOW, *fields, action=path, method="get", class_="controls")


def act(name: str, label: str, form: str, **attributes: object) -> Markup:
    """A button that posts the form with the id `form` and performs the action `name`."""
    return el("button", label, form=form, formmethod="post", name="act", value=name, **attributes)


def unfinished(
    output: Output | None, button: Callable[[str], Markup], label: str, about: str, running: str, what: str
) -> Markup | None:
    """What a page shows of a command before it has run (None), while it runs, and if it has failed: a button with this
    label and its explanation, a note, the error with a button to try again. None if it has succeeded."""
    if output is None:
        return el("p", button(label), el("span", about, class_="quiet"))
    if output.code is None:
        return message(running)
    again = el("p", button(f"{label.partition(' ')[0]} again"))
    return join([message(output.text or f"{what} failed without a message.", "error"), again]) if output.code else None


def hidden(query: Query, *names: str) -> list[Markup]:
    """Hidden inputs that pass on parameters of the address set by other controls."""
    return [el("input", type="hidden", name=name, value=value) for name in names for value in query.many(name)]


def search(name: str, label: str, value: str, hint: str = "", wide: bool = False) -> Markup:
    entry = el("input", type="search", name=name, value=value, placeholder=hint, autocomplete="off", maxlength=400)
    return _labelled(label, entry, "wide-field" if wide else "")


def entry(name: str, label: str, value: str, hint: str = "") -> Markup:
    """A short field for a number."""
    box = el("input", type="text", inputmode="decimal", name=name, value=value, placeholder=hint, size=6, maxlength=40)
    return _labelled(label, box)


def choice(
    name: str, label: str, choices: Sequence[str], value: str, empty: str = "", labels: Mapping[str, str] | None = None
) -> Markup:
    labels = labels or {}
    options = [el("option", labels.get(each, each or empty), value=each, selected=each == value) for each in choices]
    return _labelled(label, el("select", *options, name=name))


def slider(name: str, label: str, choices: Sequence[str], value: str) -> Markup:
    """A few choices as radio buttons, which work with the keyboard and are readable at a glance."""
    options = [
        el("label", el("input", type="radio", name=name, value=each, checked=each == value), el("span", each))
        for each in choices
    ]
    return el("fieldset", el("legend", label), el("span", *options, class_="steps"))


def seen(text: str) -> str:
    """The text of a token with visible line breaks and tabs; if the text is blank, also with visible spaces."""
    lines = text.replace("\n", "⏎\n").replace("\t", "⇥\t")
    return lines if text.strip() else lines.replace(" ", "␣") or "∅"


def contains(find: str, *texts: object) -> bool:
    """Whether every word of the search `find` occurs in at least one of the texts."""
    text = " ".join(map(str, texts)).casefold() if find else ""
    return all(word in text for word in find.casefold().split())


def pager(query: Query, path: str, size: int, total: int, what: str) -> Markup:
    """The number of items, which of them are shown, and links to the previous and the next page."""
    page, last = query.page, min(total, size * (query.page + 1))
    text = (f"{size * page + 1:,} to {last:,} of " if total > size else "") + f"{counted(total, what)} "
    before = link("← previous", query.but(path, page=page - 1)) if page else None
    after = link("next →", query.but(path, page=page + 1)) if last < total else None
    return el("p", text, before, " ", after, class_="quiet")


def _labelled(label: str, control: Markup, class_: str = "") -> Markup:
    return el("label", el("span", label, class_="label"), control, class_=f"field {class_}".strip())


def bar(path: str) -> Markup:
    """The product's name and links to the pages; the page at `path` is marked."""
    links = (el("a", title, href=at, aria_current="page" if at == path else None) for at, title in BAR.items())
    return el("nav", el("b", "posttrain"), *links, class_="pages", aria_label="pages")


def framed(path: str, shown: Markup, seconds: int) -> str:
    """The complete page at `path` with the content `shown`, which the page's script refreshes every `seconds`."""
    main = el("main", shown, class_="view", data_seconds=seconds)
    return document("posttrain", join([bar(path), main]), STYLE, SCRIPT, HEAD, "page")
