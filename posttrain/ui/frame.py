"""The frame of every page: its head, the bar of links, style and script, and the policy that allows these alone."""

from pathlib import Path

from posttrain.reports import design
from posttrain.reports.chart import HOVER
from posttrain.reports.markup import Markup, el, join
from posttrain.reports.page import digest, document, script_in

HERE = Path(__file__).parent
FAVICON = HERE / "favicon.svg"
STYLE = design.TOKENS + design.PARTS + (HERE / "style.css").read_text(encoding="utf-8")
SCRIPT = script_in("document.querySelector('main')", HOVER, (HERE / "view.js").read_text(encoding="utf-8"))
HEAD = Markup('<link rel="icon" href="/favicon.ico" type="image/svg+xml">')
POLICY = (
    f"default-src 'none'; script-src {digest(SCRIPT)}; style-src {digest(STYLE)}; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
BAR = {
    "/": "Runs",
    "/rollouts": "Rollouts",
    "/evaluations": "Evaluations",
    "/data": "Data",
    "/chat": "Chat",
    "/new": "New run",
}


def bar(path: str) -> Markup:
    """Links to the pages; the one at `path` is marked."""
    links = (el("a", title, href=at, aria_current="page" if at == path else None) for at, title in BAR.items())
    return el("nav", *links, class_="pages", aria_label="pages")


def framed(path: str, shown: Markup, seconds: int) -> str:
    """The page at `path` around what it shows, which its script renews every `seconds`."""
    main = el("main", shown, class_="view", data_seconds=seconds)
    return document("posttrain", join([bar(path), main]), STYLE, SCRIPT, HEAD, "page")
