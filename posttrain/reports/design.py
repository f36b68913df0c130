"""The design of all pages and plots: colours, type, spacing, and one style sheet for pages.

Constants for the report, the comparison page, the plots and the browser pages; the colours are in `palette.yaml`, the
rules in `parts.css` and `page.css`. `tests/test_design.py` computes the contrasts (WCAG 2.2: 4.5 for text, 3 for lines)
and the distances of the series colours for readers with normal sight, deuteranopia and protanopia.

The design is calm on purpose: one accent colour, hairlines instead of boxes, colour only for data and states, system
fonts. Colour never carries meaning by itself: lines also differ in dashes and labels, states in words.
"""

from pathlib import Path
from types import SimpleNamespace

from posttrain.base.files import table_beside

# Name -> the colour on a light and on a dark background.
PALETTE = table_beside(__file__, "palette.yaml")
LIGHT, DARK = (SimpleNamespace(**{name: pair[at] for name, pair in PALETTE.items()}) for at in (0, 1))
# For values from -1 to 1 (cosines, advantages), through white; colour-blind readers tell the ends apart equally well.
DIVERGING = ("#0f5592", "#ffffff", "#a85a00")

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
MONO = 'ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace'
# Type sizes in rem: multiples of the browser's text size, which readers can enlarge.
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


def diverging(value: float) -> str:
    """The colour of a value from -1 to 1 (`DIVERGING`)."""
    low, middle, high = ([int(colour[at : at + 2], 16) for at in (1, 3, 5)] for colour in DIVERGING)
    share = min(1.0, abs(value))
    mixed = (round(m + share * (e - m)) for m, e in zip(middle, high if value > 0 else low, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def _variables(scheme: SimpleNamespace) -> str:
    """`--ground: …; --c0: …`"""
    colours = {name: colour for name, colour in vars(scheme).items() if name != "series"}
    colours |= {f"c{n}": colour for n, colour in enumerate(scheme.series)}
    return " ".join(f"--{name.replace('_', '-')}: {colour};" for name, colour in colours.items())


_SIZES = " ".join(f"--size-{name}: {size}rem;" for name, size in SIZES.items())
_SPACES = " ".join(f"--space-{name}: {size}rem;" for name, size in SPACES.items())

# Custom properties. Dark colours follow the system, the attribute data-theme of the root element (`light`, `dark`), or
# an enclosing element of class `dark` (Gradio's); print is always light.
TOKENS = f"""
:root {{ color-scheme: light; {_variables(LIGHT)} {_SIZES} {_SPACES} --font: {FONT}; --mono: {MONO};
  --for: var(--c0); --against: var(--c1); }}
@media screen and (prefers-color-scheme: dark) {{
  :root:not([data-theme="light"]) {{ color-scheme: dark; {_variables(DARK)} }}
}}
@media screen {{ :root[data-theme="dark"], .dark {{ color-scheme: dark; {_variables(DARK)} }} }}
"""

# Rules for the parts that reports and browser pages share (tables, charts …), inside an element of class `view`.
PARTS = Path(__file__).with_name("parts.css").read_text(encoding="utf-8")
# Rules for a complete page: margins, headings, print.
PAGE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
CSS = TOKENS + PARTS + PAGE
