"""The pages in a real browser (`make test-ui`): opened, used, photographed in light, dark and 390 px."""

import os
import shutil
from pathlib import Path

import pytest
from browser import SIZES, a_browser, fits, photograph, watched
from pages import served

pytestmark = pytest.mark.ui
SAVED = Path(__file__).parent / "saved_run/run"
PICTURES = Path(os.environ.get("UI_PICTURES", Path(__file__).parent.parent / "build/ui"))


@pytest.fixture(scope="module")
def browser():
    with a_browser() as found:
        yield found


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    runs = tmp_path_factory.mktemp("ui") / "runs"
    shutil.copytree(SAVED, runs / "saved")
    with served("ui", runs, "--no-browser") as (found, _):
        yield found


PAGES = {"runs": "/", "run": "/run?run=saved", "compare": "/?chosen=saved", "rollouts": "/rollouts?run=saved"}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_in_light_dark_and_on_a_phone(browser, address, name):
    for mode in SIZES:
        with watched(browser, mode) as page:
            page.goto(address + PAGES[name])
            page.wait_for_selector(".shown > *")
            assert fits(page), f"{name} is wider than {mode}"
            photograph(page, PICTURES / f"{name}-{mode}.png")


def test_runs_are_filtered_sorted_and_compared(browser, address):
    with watched(browser) as page:
        page.goto(address)
        page.get_by_role("link", name="saved", exact=True).wait_for()
        page.get_by_label("Find").fill("nothing like this")
        page.get_by_text("0 of 1 run").wait_for()
        assert "find=nothing" in page.url
        page.go_back()
        page.get_by_role("link", name="choose saved").click()
        page.get_by_role("heading", name="1 run over step").wait_for()
        page.get_by_label("Over").select_option("tokens")
        page.get_by_role("heading", name="1 run over tokens").wait_for()
