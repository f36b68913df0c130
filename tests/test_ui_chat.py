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
            page.get_by_text("Both replies are the same").wait_for()
    assert not (runs / "votes.jsonl").exists()


def test_votes_of_two_replies_are_written_and_taken_back(browser, address, runs, shared):
    story = shared / "models/stories260K"
    with watched(browser) as page:
        page.goto(f"{address}/chat?a={story}&b={story}/")
        for name in (f"{story}", f"{story}/"):
            page.locator("label", has_text=name).filter(visible=True).first.wait_for()
        ask(page, "Once upon a time")
        page.get_by_text("seed ").wait_for(timeout=90_000)
        reply = page.locator(".bot").last
        reply.hover()
        page.get_by_role("button", name="Edit").last.click()
        page.locator(".bot textarea").last.fill("Another reply.")
        page.get_by_role("button", name="Submit").last.click()
        for vote in ("B is better", "Tie", "Both bad"):
            page.get_by_role("button", name=vote, exact=True).click()
            page.get_by_text("Written to").wait_for()
            page.wait_for_timeout(300)
        page.get_by_role("button", name="Undo vote").click()
        page.get_by_text("Removed from").wait_for()
    rows = [json.loads(line) for line in (runs / "votes.jsonl").read_text().splitlines()]
    assert [row.get("tie", False) for row in rows] == [False, True]


def test_without_a_model_the_page_asks_for_one(browser, address):
    with watched(browser) as page:
        page.goto(f"{address}/chat")
        page.get_by_text("Choose model A: the model of a run").wait_for()
        page.get_by_text("1 run: 1 finished").wait_for()


def test_no_key_in_a_field_is_an_error_of_the_page(browser, address):
    keys = ("a", "1", "-", "e", "ArrowUp", "ArrowLeft", "Home", "PageUp", "Backspace", "Escape", "Enter")
    for path in ("/chat", "/run?run=saved", "/rollouts?run=saved", "/new?method.type=grpo&rewards.0.type=length"):
        with watched(browser) as page:
            page.goto(f"{address}{path}")
            page.wait_for_timeout(4_000 if path == "/chat" else 500)
            if path == "/chat":
                page.get_by_role("button", name="Settings").click()
            page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
            fields = page.locator("input:visible, textarea:visible, select:visible")
            for number in range(min(fields.count(), 14)):
                for key in keys:
                    fields.nth(number).press(key)
