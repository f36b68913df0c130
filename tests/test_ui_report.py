"""The report in a browser: no request, no error, values under the pointer and by keys, three sizes, no script."""

import pytest
from browser import PICTURES, a_browser, fits, photograph, watched
from test_report import HOSTILE, make

from posttrain.reports.report import write_report

pytestmark = pytest.mark.ui


def test_the_report_in_a_browser(tmp_path):
    path = write_report(make(tmp_path / "x", hostile=HOSTILE)).as_uri()
    with a_browser() as browser:
        for mode in ("light", "dark", "phone"):
            with watched(browser, mode, file=path) as page:
                page.on("dialog", lambda dialog: pytest.fail("a script of a completion ran"))
                page.goto(path)
                assert fits(page)
                assert page.locator("body").evaluate("e => getComputedStyle(e).backgroundColor") == (
                    "rgb(21, 24, 29)" if mode == "dark" else "rgb(255, 255, 255)"
                )
                _point(page)
                photograph(page, PICTURES / f"report-{mode}.png", whole=True)
        context = browser.new_context(java_script_enabled=False)
        page = context.new_page()
        page.goto(path)
        assert page.locator("svg path.line").count() == 4 and page.get_by_text("Settings").first.is_visible()
        context.close()


def _point(page) -> None:
    """Values under the pointer; then, with the keyboard alone, those two points before."""
    chart = page.locator("figure.chart svg").first
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 14 * box["width"] / 380, box["y"] + box["height"] / 2)
    assert page.locator(".tip").inner_text().split("\n") == ["step 30", "train 0.033333"]
    page.mouse.move(2, 2)
    assert page.locator(".tip").count() == 0
    chart.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.locator(".tip").inner_text().split("\n") == ["step 28", "train 0.035714"]
    assert chart.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
