"""The colours: readable on every ground, and distinguishable for colour-blind readers."""

import math
from itertools import combinations

import pytest

from posttrain.reports.design import CSS, DARK, DIVERGING, LIGHT, contrast, text_on

SCHEMES = pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
# Machado, Oliveira & Fernandes (2009): full deuteranopia and protanopia, on linear RGB.
SIGHTS = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
}
OKABE_ITO = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def seen(colour: str, sight: str) -> tuple[float, float, float]:
    """A colour in OKLab as this reader sees it."""
    shares = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    rgb = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    red, green, blue = (min(1.0, max(0.0, sum(a * b for a, b in zip(row, rgb, strict=True)))) for row in SIGHTS[sight])
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    middle = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


def nearest(colours: tuple[str, ...], sight: str) -> float:
    return min(math.dist(seen(one, sight), seen(other, sight)) for one, other in combinations(colours, 2))


def test_contrast_is_that_of_wcag():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)  # the well-known grey that just fails


@SCHEMES
def test_text_and_lines_are_readable(scheme):
    for ground in (scheme.ground, scheme.raised):
        for name in ("ink", "quiet", "accent", "good", "warn", "bad"):
            ratio = contrast(getattr(scheme, name), ground)
            assert ratio >= 4.5, f"{name} on {ground}: {ratio:.2f}"
        for line in scheme.series:
            assert contrast(line, ground) >= 3, f"{line} on {ground}: {contrast(line, ground):.2f}"
    for name in ("good", "warn", "bad"):
        assert contrast(getattr(scheme, name), getattr(scheme, f"{name}_ground")) >= 4.5
        assert contrast(scheme.ink, getattr(scheme, f"{name}_ground")) >= 4.5
    assert contrast(scheme.ink, scheme.mark_ground) >= 4.5


@SCHEMES
@pytest.mark.parametrize("sight", SIGHTS)
def test_series_are_distinguishable(scheme, sight):
    """Our eight are further apart than Okabe and Ito's six (0.076), three of which are too pale for white."""
    worst = min(nearest(OKABE_ITO, sight) for sight in SIGHTS)
    assert nearest(scheme.series, sight) > 0.12 > 1.5 * worst


def test_values_in_a_heat_map_are_readable():
    greys = [f"#{level:02x}{level:02x}{level:02x}" for level in range(256)]
    for shade in (*DIVERGING, *greys):
        assert contrast(text_on(shade), shade) >= 4.5
    for sight in SIGHTS:
        assert math.dist(seen(DIVERGING[0], sight), seen(DIVERGING[2], sight)) > 0.2


def test_the_style_sheet_requests_nothing_and_is_dark_on_screens_only():
    assert "url(" not in CSS and "@import" not in CSS and "http" not in CSS
    assert CSS.count("{") == CSS.count("}")
    before, _, after = CSS.partition("@media screen and (prefers-color-scheme: dark)")
    assert DARK.ground not in before and DARK.ground in after
    for block in ("@media print", ":focus-visible", '[data-theme="dark"]', ".dark"):
        assert block in CSS
