"""The look of everything we draw: colours, type, spacing, and one style sheet for pages.

Plain constants without imports of other packages: the report, the comparison page, the pictures and the browser pages
read them. `tests/test_design.py` computes the contrasts (WCAG 2.2: 4.5 for text, 3 for lines) and the distances of the
series colours for readers with normal sight, deuteranopia and protanopia.

Calm on purpose: one accent, hairlines instead of boxes, colour for data and states alone, system fonts. Colour never
carries meaning alone: lines also differ by dashes and labels, states by words.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Scheme:
    """Colours for one background. Text colours are readable on `ground`, `raised` and the ground of their own name."""

    ground: str  # the page
    raised: str  # cards, code, hovered rows
    line: str  # hairlines and grids
    ink: str  # text
    quiet: str  # labels and notes
    accent: str  # links, focus
    good: str
    warn: str
    bad: str
    good_ground: str
    warn_ground: str
    bad_ground: str
    mark_ground: str  # the part of a completion that a rule matched
    series: tuple[str, ...]  # lines and dots, in this order; blue, orange, green … after Okabe and Ito


LIGHT = Scheme(
    ground="#ffffff",
    raised="#f5f6f8",
    line="#dfe3e8",
    ink="#1d2229",
    quiet="#5b6472",
    accent="#1560a8",
    good="#146c43",
    warn="#8a5300",
    bad="#b3261e",
    good_ground="#e6f3ec",
    warn_ground="#fbf0dc",
    bad_ground="#fbe9e7",
    mark_ground="#dceafa",
    series=("#2b83d0", "#c36d03", "#1a9b88", "#612440", "#7e4a00", "#0f5592"),
)
DARK = Scheme(
    ground="#15181d",
    raised="#1d2229",
    line="#333b46",
    ink="#dfe3e8",
    quiet="#9aa4b2",
    accent="#7cb8f2",
    good="#6fcf9a",
    warn="#e8b45a",
    bad="#f28b82",
    good_ground="#16301f",
    warn_ground="#352a12",
    bad_ground="#3a1d1b",
    mark_ground="#1f3a57",
    series=("#508ee6", "#d27a10", "#7fe8c8", "#ae6787", "#efb83e", "#72c6fd"),
)
DASHES = ("", "6 3", "2 3")  # of the first six lines, the next six …
# Values from -1 to 1 (cosines, advantages), through white: the ends are as far apart for colour-blind readers.
DIVERGING = ("#0f5592", "#ffffff", "#a85a00")

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
MONO = 'ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace'
# Type scale in rem: the browser's own text size is 1, so that readers can enlarge it.
SIZES = {"small": 0.8, "table": 0.88, "text": 0.95, "section": 1.2, "number": 1.35, "title": 1.8}
SPACES = {"xs": 0.25, "s": 0.5, "m": 1.0, "l": 1.6, "xl": 2.8}  # rem


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb`, from 0 to 1 (WCAG 2.2)."""
    shares = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, from 1 to 21 (WCAG 2.2)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def text_on(ground: str) -> str:
    """Black or white, whichever is more readable on this colour: its contrast is at least 4.58."""
    return max("#000000", "#ffffff", key=lambda ink: contrast(ink, ground))


def _variables(scheme: Scheme) -> str:
    """`--ground: …; --series-0: …`"""
    colours = {one.name: getattr(scheme, one.name) for one in fields(scheme) if one.name != "series"}
    colours |= {f"series-{n}": colour for n, colour in enumerate(scheme.series)}
    return " ".join(f"--{name.replace('_', '-')}: {colour};" for name, colour in colours.items())


_SIZES = " ".join(f"--size-{name}: {size}rem;" for name, size in SIZES.items())
_SPACES = " ".join(f"--space-{name}: {size}rem;" for name, size in SPACES.items())

# Custom properties. Dark follows the system, or the attribute data-theme of the root element (`light`, `dark`), or a
# class `dark` around (Gradio's); paper is light.
TOKENS = f"""
:root {{ color-scheme: light; {_variables(LIGHT)} {_SIZES} {_SPACES} --font: {FONT}; --mono: {MONO}; }}
@media screen and (prefers-color-scheme: dark) {{
  :root:not([data-theme="light"]) {{ color-scheme: dark; {_variables(DARK)} }}
}}
@media screen {{ :root[data-theme="dark"], .dark {{ color-scheme: dark; {_variables(DARK)} }} }}
"""

# Parts, inside an element of class `pt` (the body of a report, a fragment in a browser page).
PARTS = """
.pt { color: var(--ink); font: 400 var(--size-text)/1.55 var(--font); }
.pt *, .pt *::before { box-sizing: border-box; }
.pt a { color: var(--accent); text-decoration: none; }
.pt a:hover { text-decoration: underline; }
.pt :focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; border-radius: 2px; }
.pt .quiet, .pt .note { color: var(--quiet); }
.pt .note { max-width: 46rem; margin: 0 0 var(--space-s); font-size: var(--size-table); white-space: pre-wrap; }
.pt .cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: var(--space-m); }
.pt .cards { margin: var(--space-l) 0 0; }
.pt .cards div { padding-left: 0.8rem; border-left: 2px solid var(--line); }
.pt .cards dt { color: var(--quiet); font-size: var(--size-small); }
.pt .cards dd { margin: 0; font-size: var(--size-number); font-weight: 600; font-variant-numeric: tabular-nums; }
.pt .cards dd { overflow-wrap: anywhere; }
.pt .wide { overflow-x: auto; }
.pt table { width: 100%; border-collapse: collapse; font-size: var(--size-table); }
.pt th, .pt td { padding: 0.4rem 0.8rem 0.4rem 0; text-align: left; vertical-align: top; }
.pt th, .pt td { border-bottom: 1px solid var(--line); }
.pt th { color: var(--quiet); font-weight: 500; }
.pt thead th { white-space: nowrap; }
.pt td { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; }
.pt .number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.pt tbody tr:hover > * { background: var(--raised); }
.pt .facts th { width: 15rem; overflow-wrap: anywhere; }
.pt pre, .pt .mono { font: var(--size-table)/1.5 var(--mono); white-space: pre-wrap; overflow-wrap: anywhere; }
.pt pre { margin: 0; padding: var(--space-m); background: var(--raised); border-radius: 6px; unicode-bidi: isolate; }
.pt .state { padding: 0.1em 0.55em; border-radius: 1em; font-size: var(--size-small); font-weight: 500; }
.pt .good { color: var(--good); background: var(--good-ground); }
.pt .warn { color: var(--warn); background: var(--warn-ground); }
.pt .bad { color: var(--bad); background: var(--bad-ground); }
.pt mark { color: inherit; background: var(--mark-ground); border-radius: 2px; }
.pt img { display: block; width: 100%; height: auto; }
@media screen { :root[data-theme="dark"] .pt img, .dark .pt img { filter: invert(0.91) hue-rotate(180deg); } }
@media screen and (prefers-color-scheme: dark) {
  :root:not([data-theme="light"]) .pt img { filter: invert(0.91) hue-rotate(180deg); }
}
"""

# A page of its own: margins, headings, paper.
PAGE = """
body.pt { margin: 0 auto; padding: 2.5rem 1.5rem 4rem; max-width: 68rem; background: var(--ground); }
h1 { margin: 0; font-size: var(--size-title); line-height: 1.2; letter-spacing: -0.01em; overflow-wrap: anywhere; }
h2 { margin: var(--space-xl) 0 var(--space-s); font-size: var(--size-section); overflow-wrap: anywhere; }
header p { margin: 0.3rem 0 1rem; color: var(--quiet); }
nav { display: flex; flex-wrap: wrap; gap: 0.3rem 1.2rem; padding: 0.6rem 0; border-block: 1px solid var(--line); }
section > p { max-width: 46rem; white-space: pre-wrap; }
@media (max-width: 34rem) {
  body.pt { padding: 1.2rem 1rem 3rem; }
  h1 { font-size: 1.4rem; }
  .pt .facts tr { display: block; padding: 0.35rem 0; border-bottom: 1px solid var(--line); }
  .pt .facts th, .pt .facts td { display: block; width: auto; padding: 0; border: 0; text-align: left; }
}
@media print {
  body.pt { max-width: none; padding: 0; font-size: 10pt; }
  nav { display: none; }
  h2 { break-after: avoid; }
  tr, img, svg, .cards div { break-inside: avoid; }
}
"""
CSS = TOKENS + PARTS + PAGE
