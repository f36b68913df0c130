"""The chat page in a real browser (`make test-ui`): asked, stopped, compared, voted, its tokens looked at."""

import json
import shutil
from pathlib import Path

import pytest
from browser import PICTURES, SAVED, SIZES, fits, photograph, watched
from pages import served

pytestmark = pytest.mark.ui


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "runs"
    shutil.copytree(SAVED, folder / "saved")
    return folder


@pytest.fixture(scope="module")
def address(runs):
    with served("ui", runs, "--no-browser") as (found, _):
        yield found


def ask(page, said: str) -> None:
    page.wait_for_function("document.querySelector('input[aria-label=\"Model A\"]')?.value")
    page.get_by_placeholder("Ask something").fill(said)
    page.get_by_role("button", name="Send").click()


def first_token(page, said: str) -> float:
    """Seconds from Send to the first character of the reply on the page; the reply is waited for."""
    page.get_by_placeholder("Ask something").fill(said)
    page.evaluate("""() => {
      const size = () => [...document.querySelectorAll('.bot')].map((one) => one.innerText.trim()).join('').length;
      const before = size();
      let start = null;
      window.first = null;
      document.addEventListener('click', () => { start ??= performance.now(); }, true);
      const look = () => {
        if (start !== null && size() > before) window.first = performance.now() - start;
        else requestAnimationFrame(look);
      };
      look();
    }""")
    page.get_by_role("button", name="Send").click()
    page.wait_for_function("window.first !== null")
    page.wait_for_timeout(2_000)
    seconds = page.evaluate("window.first") / 1000
    print(f"the first token is on the page after {seconds:.3f} s")
    return seconds


def test_one_model(browser, address, shared):
    story = shared / "models/stories260K"
    with watched(browser) as page:
        page.goto(f"{address}/chat?a={story}")
        ask(page, "<b>Once</b> upon a time")
        page.get_by_text("seed ").wait_for(timeout=90_000)
        assert page.locator(".message b").count() == 0, "HTML is shown, not rendered"
        assert page.get_by_text("<\u2060b>Once<\u2060/b> upon a time").count()
        assert first_token(page, "One day") < 1.0, "seconds, on a busy machine"
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Longest reply (tokens)").fill("480")
        ask(page, "A cat")
        page.wait_for_timeout(700)
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("Stopped.").wait_for()
        page.locator("button.sm", has_text="Clear").click()
        page.get_by_role("button", name="Again").click()
        page.get_by_text("Type a question first.").wait_for()


def test_a_model_that_does_not_load(browser, address):
    with watched(browser) as page:
        page.goto(f"{address}/chat?a=/no/such/model")
        ask(page, "hi")
        page.get_by_text("no such folder").wait_for(timeout=60_000)
        assert page.get_by_placeholder("Ask something").input_value() == "hi", "the question is not lost"


def test_two_models_and_a_vote(browser, address, runs, shared):
    story = shared / "models/stories260K"
    for mode in SIZES:
        with watched(browser, mode) as page:
            page.goto(f"{address}/chat?a={story}&b={story}/")
            ask(page, "Once upon a time")
            page.get_by_text("seed ").wait_for(timeout=90_000)
            page.get_by_role("button", name="Tokens of the last reply").click()
            page.get_by_role("button", name="Show tokens").click()
            page.locator(".piece").nth(3).focus()
            assert page.locator(".piece").nth(3).locator(".card").is_visible()
            page.get_by_role("button", name="What the model reads").click()
            page.get_by_role("button", name="Show the prompt").click()
            page.locator(".sides pre").first.wait_for()
            assert fits(page)
            photograph(page, PICTURES / f"chat-{mode}.png", whole=True)
            page.get_by_role("button", name="B is better").click()
            page.get_by_text("Written to").wait_for()
    rows = [json.loads(line) for line in (runs / "votes.jsonl").read_text().splitlines()]
    assert len(rows) == len(SIZES)
    assert all(row["chosen"] == row["rejected"] for row in rows), "the same model with the same seed says the same"
