"""The pages in a real browser (`make test-ui`): opened, used, photographed in light, dark and 390 px."""

import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from browser import PICTURES, SAVED, SIZES, fits, photograph, watched
from pages import served
from test_compare import answered, evaluation

pytestmark = pytest.mark.ui
OWN = "document.title='owned'"
HOSTILE = f'<img src=x onerror="{OWN}"><script>{OWN}</script>\x1b[2J ${{{OWN}}} {{{{value}}}}'


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ui") / "runs"
    shutil.copytree(SAVED, folder / "saved")
    shutil.copytree(SAVED, folder / "other")
    classes = {"classes": {"11": 3, "10": 1, "01": 0, "00": 2}, "value": 0.5, "low": 0.2, "high": 0.8, "graded": 6}
    for name, scores in (("a", [1, 1, 0, 0, 1, 0]), ("b", [1, 0, 1, 1, 1, 0])):
        answers = [replace(one, completion=f"{one.completion} {HOSTILE}") for one in answered(scores)]
        evaluation(folder / f"saved/evaluation/{name}", answers, name=name, **classes)
    return folder


@pytest.fixture(scope="module")
def address(runs):
    with served("ui", runs, "--no-browser") as (found, _):
        yield found


PAGES = {
    "runs": "/",
    "compare": "/?chosen=saved&chosen=other",
    "run": "/run?run=saved",
    "rollouts": "/rollouts?run=saved",
    "step": "/rollouts?run=saved&step=2",
    "tokens": "/rollouts?run=saved&step=2&prompt=0&rollout=0",
    "evaluations": "/evaluations?of=saved/a&of=saved/b",
}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_in_light_dark_and_on_a_phone(browser, address, name):
    for mode in SIZES:
        with watched(browser, mode) as page:
            page.goto(address + PAGES[name])
            page.wait_for_selector(".shown > *")
            assert page.locator(".message.error").count() == 0
            assert fits(page), f"{name} is wider than {mode}"
            photograph(page, PICTURES / f"{name}-{mode}.png")


def test_runs_are_filtered_sorted_and_compared(browser, address):
    with watched(browser) as page:
        page.goto(address)
        page.get_by_role("link", name="saved", exact=True).wait_for()
        page.get_by_label("Find").press_sequentially("oth", delay=30)
        page.get_by_text("1 of 2 runs").wait_for()
        assert "find=oth" in page.url and page.get_by_label("Find").evaluate("one => one === document.activeElement")
        page.go_back()
        page.get_by_role("link", name="choose saved").click()
        page.get_by_role("link", name="remove saved").first.wait_for()
        page.get_by_role("link", name="choose other").click()
        page.get_by_role("heading", name="2 runs over step").wait_for()
        page.get_by_label("Over").select_option("tokens")
        page.get_by_role("heading", name="2 runs over tokens").wait_for()
        page.get_by_text("0.9", exact=True).click()
        page.wait_for_url("**smooth=0.9**")
        chart = page.locator("figure.chart svg").first
        tip = page.locator(".tip").get_by_text("saved")
        for x in range(100, 160):  # the page may replace the chart under the mouse once more
            chart.hover(position={"x": x, "y": 60})
            if tip.is_visible():
                break
            page.wait_for_timeout(100)
        tip.wait_for()


def test_a_phone_shows_what_matters_first(browser, address):
    """Name, state and result are in the window, no page link is cut off, and the hint of the search field is whole."""
    with watched(browser, "phone") as page:
        page.goto(f"{address}/?chosen=saved&chosen=other")
        for header in ("name", "state", "result"):
            box = page.locator("th", has_text=header).bounding_box()
            assert box is not None and box["x"] + box["width"] <= 390, header
        for link in page.get_by_role("navigation", name="pages").get_by_role("link").all():
            box = link.bounding_box()
            assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 390, link.inner_text()
        assert page.get_by_label("Find").evaluate("""(one) => {
          const pen = document.createElement('canvas').getContext('2d');
          pen.font = getComputedStyle(one).font;
          return pen.measureText(one.placeholder).width + 20 < one.clientWidth;
        }""")
        box = page.get_by_role("heading", name="2 runs over step").bounding_box()
        assert box is not None and box["y"] < 844, "the table takes less than a screen"


def test_a_table_stays_where_it_was_scrolled_to(browser, address):
    """When a run is chosen further down, the table does not jump back to its first row."""
    with watched(browser, "phone") as page:
        page.goto(f"{address}/?chosen=saved")
        page.locator(".above .wide").evaluate("(one) => one.scrollTo(60, 0)")
        page.get_by_role("link", name="choose other").evaluate(
            "(one) => one.click()"
        )  # a real click would scroll to it
        page.get_by_role("heading", name="2 runs over step").wait_for()
        assert page.locator(".above .wide").evaluate("(one) => one.scrollLeft") == 60


def test_a_run_is_described_renamed_and_deleted(browser, address, runs):
    shutil.copytree(SAVED, runs / "short")
    with watched(browser) as page:
        page.goto(f"{address}/run?run=short")
        page.get_by_text("Name, tags, note").click()
        page.get_by_label("Note").fill("first line")
        page.get_by_label("Tags").fill("keep")
        page.wait_for_timeout(3_500)  # the page is refreshed meanwhile
        assert page.get_by_label("Note").input_value() == "first line" and "tags" not in page.url
        page.get_by_label("Name").fill("longer")
        page.get_by_role("button", name="Save").click()
        page.get_by_role("heading", name="longer").wait_for()
        page.get_by_text("#keep").wait_for()
        assert page.url.endswith("/run?run=longer")
        page.get_by_role("link", name="Delete …").click()
        page.get_by_text("Permanently delete longer").wait_for()
        page.get_by_role("button", name="Delete").click()
        page.get_by_role("link", name="saved", exact=True).wait_for()
        assert page.url == f"{address}/" and not (runs / "longer").exists()


def test_from_a_falling_reward_to_the_tokens_in_at_most_four_clicks(browser, address):
    with watched(browser) as page:
        page.goto(f"{address}/run?run=saved")
        reward = page.locator("figure.chart", has_text="Reward").first.locator("svg")
        reward.wait_for()
        box = reward.bounding_box()
        assert box is not None
        reward.click(position={"x": box["width"] - 12, "y": box["height"] / 2})  # the last step
        page.wait_for_url("**step=2**")
        page.get_by_role("link", name=re.compile("^prompt ")).first.click()
        page.get_by_role("link", name=re.compile("^completion ")).first.click()
        page.locator(".tokens").wait_for()
        page.locator(".tokens a.most").first.click()
        page.wait_for_url("**token=**")
        page.get_by_text("The tokens with the largest push").wait_for()
        page.get_by_role("link", name="ratio", exact=True).click()
        page.get_by_text("ratio: from").wait_for()
        page.go_back()
        page.get_by_text("push: from").wait_for()


def test_rollouts_are_searched_by_keyboard(browser, address):
    with watched(browser) as page:
        page.goto(f"{address}/rollouts?run=saved")
        page.get_by_text("32 completions").wait_for()
        page.get_by_label("Tokens from").fill("6")
        page.keyboard.press("Enter")
        page.wait_for_url("**shortest=6**")
        page.get_by_label("Order").select_option("largest push")
        page.wait_for_url("**sort=largest**")
        assert int(page.locator(".results tbody tr").count()) > 0


def test_answers_side_by_side_and_hostile_text_is_inert(browser, address):
    with watched(browser) as page:
        page.goto(f"{address}/evaluations")
        page.get_by_role("link", name="choose saved/a").click()
        page.get_by_text("format right").wait_for()
        page.get_by_role("link", name="choose saved/b").click()
        page.get_by_role("heading", name="saved/a and saved/b").wait_for()
        assert page.locator("article").count() == 3 and page.locator("article .side").count() == 6
        page.get_by_label("Items").select_option("all")
        page.locator("article").nth(5).wait_for()
        assert page.locator("article img, article script").count() == 0 and page.title() == "posttrain"
        page.get_by_text("onerror").first.wait_for()


def test_without_a_script_forms_and_links_load_whole_pages(browser, address):
    context = browser.new_context(java_script_enabled=False)
    context.set_default_timeout(15_000)
    page = context.new_page()
    page.goto(address)
    page.get_by_label("Find").fill("oth")
    page.get_by_role("button", name="Show").click()
    page.get_by_text("1 of 2 runs").wait_for()
    page.get_by_role("link", name="choose other").click()
    page.get_by_label("Over").select_option("tokens")
    page.locator("section").get_by_role("button", name="Show").click()
    page.get_by_role("heading", name="1 run over tokens").wait_for()
    assert "find=oth" in page.url and "x=tokens" in page.url, "what other controls chose is kept"
    page.get_by_role("navigation", name="pages").get_by_role("link", name="New run").click()
    page.locator('input[name="model.path"]').fill("/no/such/model")
    page.locator('input[name="data.source"]').fill("nowhere.jsonl")
    page.get_by_role("button", name="Show").click()
    page.get_by_role("button", name="Start").wait_for()
    page.locator('input[name="name"]').fill("typed-last")
    page.get_by_role("button", name="Plan").click()
    assert "name=typed-last" in page.url, "an action takes what is typed, and its page can be loaded again"
    while page.get_by_text("Planning:").count():
        page.wait_for_timeout(300)
        page.reload()
    page.get_by_text("no such folder").first.wait_for()
    context.close()


def test_a_run_is_followed_and_its_end_is_said(browser, address, runs):
    """A run that is written by a process which is killed; a second tab sees the same."""
    live = runs / "live"
    shutil.copytree(SAVED, live)
    facts = json.loads((live / "run.json").read_text()) | {"state": "running", "ended": None, "reason": None}
    (live / "run.json").write_text(json.dumps(facts))
    (live / ".lock").touch()
    import fcntl

    with (live / ".lock").open() as held, watched(browser) as page, watched(browser) as second:
        fcntl.flock(held, fcntl.LOCK_EX)
        for one in (page, second):
            one.goto(f"{address}/run?run=live")
            one.locator(".badge.running").wait_for()
        last = json.loads((live / "metrics.jsonl").read_text().splitlines()[-1])
        with (live / "metrics.jsonl").open("a") as more:
            for step in (3, 4, 5):
                more.write(json.dumps(last | {"step": step, "alarms/no_spread": 3.0}) + "\n")
            more.write('{"step": 6, "lo')  # it is being written
        (live / "rollouts.sqlite").write_bytes(b"damaged" * 100)
        for one in (page, second):
            one.get_by_text("the task is too hard or too easy").wait_for()
        fcntl.flock(held, fcntl.LOCK_UN)
        for one in (page, second):
            one.get_by_text("was killed, or the machine was switched off").wait_for()
        page.goto(f"{address}/rollouts?run=live&step=1")
        page.locator(".message.error").wait_for()
        shutil.rmtree(live)
        page.goto(f"{address}/run?run=live")
        time.sleep(1.1)
        page.reload()
        page.get_by_text("There is no run live").wait_for()


def test_a_token_is_asked_for_once(browser, runs):
    with (
        served("ui", runs, "--no-browser", "--token", "a long secret") as (found, _),
        watched(browser, forgiven=["401"]) as page,
    ):
        page.goto(found)
        page.get_by_label("Token").fill("wrong")
        page.keyboard.press("Enter")
        page.get_by_text("This is not the token").wait_for()
        page.get_by_label("Token").fill("a long secret")
        page.keyboard.press("Enter")
        page.get_by_role("link", name="saved", exact=True).wait_for()
        assert "secret" not in page.url
