"""The page New run in a real browser (`make test-ui`): filled in, wrong values, planned, and a run started on it."""

import json
import re
import shutil
from pathlib import Path

import pytest
from browser import PICTURES, SAVED, SIZES, fits, photograph, watched
from pages import served

pytestmark = pytest.mark.ui


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("new") / "runs"
    folder.mkdir()
    rows = [{"prompt": f"Once there were {n} cats.", "completion": " They slept all day."} for n in range(8)]
    (folder.parent / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def address(runs):
    with served("ui", "runs", "--no-browser", folder=runs.parent) as (found, _):
        yield found


def fill(page, setting: str, value: str) -> None:
    field = page.locator(f'input[name="{setting}"]')
    field.click()
    page.keyboard.type(value, delay=25)


def test_a_run_is_filled_in_planned_and_started(browser, address, runs, shared):
    with watched(browser) as page:
        page.goto(f"{address}/new")
        page.get_by_text("Still needed: model.path, data.source.").wait_for()
        fill(page, "model.path", str(shared / "models/stories260K"))
        fill(page, "data.source", "rows.jsonl")
        fill(page, "training.max_steps", "two")
        page.get_by_text("training.max_steps is 'two'; it must be a whole number of 1 or more or null").first.wait_for()
        assert page.get_by_role("button", name="Start").count() == 0
        page.locator('input[name="training.max_steps"]').fill("2")
        page.get_by_role("button", name="Start").wait_for()
        fill(page, "name", "first")
        page.locator("aside pre", has_text="name: first").wait_for()
        page.get_by_role("button", name="Plan").click()
        page.get_by_text("the tokenizer has no chat template").wait_for(timeout=60_000)
        page.locator("summary", has_text=re.compile("^Data$")).click()
        fill(page, "data.template", "none")
        page.locator("aside pre", has_text="template: none").wait_for()
        page.get_by_role("button", name="Plan").click()
        page.get_by_text("total tokens").wait_for(timeout=60_000)
        photograph(page, PICTURES / "new-planned.png")
        page.get_by_role("button", name="Start").click()
        page.get_by_role("link", name="first", exact=True).click()  # at once: the run need not exist yet
        page.get_by_role("heading", name=re.compile("^first")).wait_for()
        page.locator(".badge.finished").wait_for(timeout=60_000)
    assert (runs / "configs/first.yaml").read_text().startswith("name: first\n")
    with watched(browser) as page:  # a second tab: the name is taken now
        page.goto(f"{address}/new?model.path=a/b&data.source=gsm8k&name=first")
        page.get_by_text("A run named first already exists").wait_for()
        assert page.get_by_role("button", name="Start").count() == 0


def test_the_rows_of_settings_and_of_a_run(browser, address, runs, shared):
    """From a form to its rows; the run's page has them too. Light, dark and on a phone."""
    with watched(browser) as page:
        model = shared / "models/stories260K"
        page.goto(f"{address}/new?model.path={model}&data.source=rows.jsonl&data.template=none&training.max_steps=2")
        page.get_by_role("link", name="The data").click()
        page.get_by_role("button", name="Read the data").click()
        page.get_by_role("heading", name="Rows", exact=True).wait_for(timeout=60_000)
        assert page.locator(".tokens.masked").count() == 8 and page.locator(".tokens .trained").count() > 40
        page.locator('select[name="sort"]').select_option("longest")
        page.wait_for_url("**sort=longest**")
        page.get_by_role("heading", name="Rows", exact=True).wait_for(timeout=60_000)  # read without being asked again
        page.get_by_role("button", name="Check", exact=True).click(timeout=60_000)
        page.get_by_text("row, exact duplicate").wait_for(timeout=60_000)
    shutil.copytree(SAVED, runs / "saved")
    (runs / "saved/config.yaml").write_text(
        f"model: {model}\nmethod: sft\nname: saved\ndata: {{source: rows.jsonl, template: none}}\n"
        "training: {max_steps: 1}\n"
    )
    for mode in SIZES:
        with watched(browser, mode) as page:
            page.goto(f"{address}/run?run=saved")
            page.locator(".view").get_by_role("link", name="Data", exact=True).click()
            page.wait_for_url("**/data?run=saved")
            page.get_by_text("8 examples", exact=True).first.wait_for(timeout=60_000)
            assert fits(page)
            photograph(page, PICTURES / f"data-{mode}.png")


def test_a_run_that_fails_says_why(browser, address):
    with watched(browser) as page:
        page.goto(f"{address}/new?model.path=/no/such/model&data.source=nowhere.jsonl&name=lost")
        page.get_by_role("button", name="Start").click()
        page.get_by_text("lost is failed").wait_for(timeout=60_000)
        page.get_by_text("model /no/such/model: no such folder").first.wait_for()


def metrics_of(run: Path) -> int:
    """The number of lines of a run's metrics."""
    file = run / "metrics.jsonl"
    return file.read_text().count("\n") if file.is_file() else 0


def test_a_run_is_stopped_and_resumed_on_its_page(browser, address, runs, shared):
    """Its process finishes the step and saves, as after Ctrl-C; resumed, it goes on from there."""
    given = "data.source=rows.jsonl&data.template=none&training.max_steps=5000&training.batch_size=2&name=long"
    with watched(browser) as page:
        page.goto(f"{address}/new?model.path={shared / 'models/stories260K'}&{given}")
        page.get_by_role("button", name="Start").click()
        page.get_by_role("link", name="long", exact=True).click()
        logged = 0
        for number in range(3):
            page.get_by_role("button", name="Stop").wait_for(timeout=60_000)
            while (lines := metrics_of(runs / "long")) <= logged:  # before a step there is nothing to resume from
                page.wait_for_timeout(100)
            logged = lines
            page.get_by_role("button", name="Stop").click()
            # On a fast machine it has ended before the page says that it is stopping.
            page.get_by_text("Stopping").or_(page.get_by_role("button", name="Resume")).first.wait_for()
            page.get_by_role("button", name="Resume").wait_for(timeout=60_000)
            page.locator(".badge.interrupted").wait_for()
            if number < 2:
                page.get_by_role("button", name="Resume").click()
    assert "resumed from checkpoint-" in (runs / "configs/long.log").read_text()


def test_what_is_typed_while_the_page_answers_is_kept(browser, address):
    """Slow fingers: the page is replaced several times within the word."""
    with watched(browser) as page:
        page.goto(f"{address}/new")
        page.locator('input[name="name"]').click()
        page.keyboard.type("a name in pieces", delay=230)
        page.keyboard.type(" and more", delay=480)
        page.wait_for_url("**name=a+name+in+pieces+and+more**")
        assert page.locator('input[name="name"]').input_value() == "a name in pieces and more"


def test_another_method_has_its_own_choices(browser, address):
    """Elements are changed in place: a choice of one setting must not become one of its successor."""
    with watched(browser) as page:
        page.goto(f"{address}/new?method.type=dpo")
        page.locator('select[name="model.lora"]').select_option("true")
        page.wait_for_url("**model.lora=true**")
        page.locator('select[name="method.type"]').select_option("grpo")
        page.locator('[name="method.scale_rewards"]').wait_for()
        chosen = page.locator("form select").evaluate_all("all => all.filter(one => one.value).map(one => one.name)")
        assert chosen == ["method.type", "model.lora"]
        page.go_back()
        page.locator('select[name="method.type"] option[value="dpo"]:checked').wait_for(state="attached")


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_the_form_in_light_dark_and_on_a_phone(browser, address, method):
    for mode in SIZES:
        with watched(browser, mode) as page:
            page.goto(f"{address}/new?method.type={method}&model.path=a%2Fb&data.source=gsm8k&data.max_length=none")
            page.get_by_text("data.max_length is 'none'").first.wait_for()
            assert fits(page)
            photograph(page, PICTURES / f"new-{method}-{mode}.png", whole=mode == "phone")
