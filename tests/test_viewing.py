"""What the pages show: functions of folders and addresses. Hostile text is inert, damage is said, numbers are right."""

import json
import math
import os
import re
import shutil
import sqlite3
from collections import Counter
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest
import torch
from test_compare import answered, evaluation

from posttrain.cli import main
from posttrain.reports.chart import Line, chart
from posttrain.reports.drawing import labels, ticks
from posttrain.reports.markup import Markup, el, text
from posttrain.reports.series import Series, smoothed, sparkline, thinned
from posttrain.runs import stored_rollouts
from posttrain.runs.folder import Notes, write_notes
from posttrain.runs.metrics import NAME as METRICS
from posttrain.runs.receipt import TokenNumbers, decoder_of, token_texts
from posttrain.runs.rollouts import GIB, RolloutStore, StoredPrompt, StoredRollout
from posttrain.ui.evaluations_page import evaluations_page
from posttrain.ui.parts import Query, parse
from posttrain.ui.rollouts_page import falls, marked, rollouts_page
from posttrain.ui.run_page import replay_command, run_page
from posttrain.ui.runs_page import arranged, runs_page
from posttrain.ui.search import Index
from posttrain.ui.viewer import Runs, Viewer, attempt, where

SAVED = Path(__file__).parent / "saved_run/run"
HOSTILE = "<script>alert(1)</script>\x1b[2J\u202e'\" onload=x"


@pytest.fixture
def viewer(tmp_path) -> Viewer:
    shutil.copytree(SAVED, tmp_path / "runs/saved")
    return Viewer(tmp_path / "runs", tmp_path / "cache")


def links(page: str) -> list[str]:
    return [unescape(found) for found in re.findall(r'<a [^>]*?href="([^"]+)"', page)]


# --- markup and addresses ---------------------------------------------------------------------------------------------


def test_strings_are_inert_and_markup_is_kept():
    made = el("p", HOSTILE, Markup("<b>"), None, ["x", 1], title=HOSTILE, hidden=True, data_go=False)
    assert "<script" not in made and "\x1b" not in made and "\u202e" not in made and r"\x1b[2J" in made
    assert made.count('"') == 2 and "<b>x1" in made and " hidden" in made and "data-go" not in made
    assert "(5 more characters)" in text("a" * 20_005)


def test_addresses_are_read_as_they_were_made_and_nonsense_is_nothing():
    query = parse("/x?run=a%2Fb&step=3&chosen=a&chosen=b&least=-1.5&bad=nan#there")
    assert (query.one("run"), query.integer("step"), query.many("chosen")) == ("a/b", 3, ["a", "b"])
    assert query.number("least") == -1.5 and query.number("bad") is None
    assert parse(query.but("/y", step=None, run=["a&b", "ü"])).many("run") == ["a&b", "ü"]
    assert parse("?step=-1&step=9").integer("step") is None and parse("?step=٣").integer("step") is None
    for nonsense in ("", "?" + "a=1&" * 500, "?" + "x" * 10**6):
        assert isinstance(parse(nonsense), Query)


# --- curves -----------------------------------------------------------------------------------------------------------


def line(step: int, **values: object) -> str:
    return json.dumps({"step": step, "time": 3600.0 * step, "num_tokens": 10 * step, **values}) + "\n"


def test_metrics_are_read_on_and_damage_is_counted(tmp_path):
    file, series = tmp_path / METRICS, Series(tmp_path)
    assert series.refresh().names == []
    file.write_text(line(1, loss=2.0) + "damaged\n" + line(2, loss=None) + line(3, loss=1.0)[:-9])
    series.refresh()
    assert series.points("loss")[0] == [1, 2] and series.points("loss")[1][0] == 2.0 and series.damaged == 1
    assert math.isnan(series.points("loss")[1][1])
    with file.open("a") as more:
        more.write(line(3, loss=1.0)[-9:] + line(4, eval_loss=3.0))
    series.refresh()
    assert series.points("loss", "hours")[0] == [0, 1, 2] and series.points("loss", "tokens")[0] == [10, 20, 30]
    assert (
        series.points("eval_loss") == ([4], [3.0]) and series.at(2)["loss"] is not None and series.last()["loss"] == 1.0
    )
    file.unlink()
    file.write_text(line(1, loss=5.0))
    assert series.refresh().points("loss") == ([1], [5.0]) and series.damaged == 0
    assert sparkline(tmp_path, ["reward", "loss"]) == []  # one value is no line


def test_smoothing_and_thinning():
    assert smoothed([1.0, 3.0], 0.5) == [1.0, pytest.approx((0.5 * 0.5 * 1 + 0.5 * 3) / 0.75)]
    assert smoothed([7.0] * 9, 0.9) == pytest.approx([7.0] * 9)  # without the pull to 0 at the start
    values = [0.0] * 10_000
    values[5_003], values[777] = 9.0, -9.0
    xs, ys = thinned(range(10_000), values, 400)
    assert len(xs) <= 410 and (xs[0], xs[-1]) == (0, 9_999) and {9.0, -9.0} < set(ys)


def test_a_chart_escapes_names_breaks_at_gaps_and_tells_its_ticks_apart():
    made = text(chart([Line(HOSTILE, [1, 2, 3, 4], [1.0, math.nan, 2.0, 3.0])], HOSTILE, go="/rollouts?step="))
    assert "<script" not in made and made.count("M") == 2 and "NaN" not in made and "nan" not in made
    assert "no values yet" in text(chart([Line("a", [1], [math.nan])], "empty"))
    assert "path" in text(chart([Line("a", [5], [5.0])], "one point"))
    for low, high in ((0, 1), (-3e-7, 2e-6), (1e6, 9e6), (0.99, 1.01), (5, 5)):
        places = ticks(low, high, 4)
        assert all(low <= value <= high for value in places) and len(set(labels(places))) == len(places)


# --- runs -------------------------------------------------------------------------------------------------------------


def test_runs_are_rows_also_damaged_ones(viewer):
    for name, file, content in (("cut", "run.json", "{"), ("odd", METRICS, '{"step": 1, "loss": 1}\n{\n')):
        shutil.copytree(SAVED, viewer.root / name)
        (viewer.root / name / file).write_text(content)
    shutil.copytree(SAVED, viewer.root / "gone")
    facts = json.loads((SAVED / "run.json").read_text()) | {"state": "running", "ended": None}
    (viewer.root / "gone/run.json").write_text(json.dumps(facts))
    (viewer.root / "gone/training.log").write_text("x INFO step 2/9  loss 1  ETA 2h 05m\n")
    rows = {row.name: row for row in viewer.runs.all()}
    assert {name: row.state for name, row in rows.items()} == {
        "saved": "finished", "cut": "damaged", "odd": "damaged", "gone": "killed",
    }  # fmt: skip
    assert "damaged" in rows["cut"].problem and "near the end is damaged" in rows["odd"].problem
    assert rows["saved"].metric == "reward" and len(viewer.runs.spark(rows["saved"])) > 1 and rows["gone"].total == 9
    for name in rows:
        for page in (runs_page, run_page):
            assert "cannot be shown" not in attempt(page, viewer, f"?run={name}&chosen={name}")
    assert "was killed" in attempt(run_page, viewer, "?run=gone")
    assert "1 line of metrics.jsonl cannot be read" in attempt(run_page, viewer, "?run=odd")


def test_names_are_looked_up_and_never_joined_to_a_path(viewer):
    shutil.copytree(SAVED, viewer.root.parent / "outside")
    for name in ("../outside", str(viewer.root.parent / "outside"), "saved/../../outside", "", "\0"):
        assert viewer.runs.find(name) is None
        assert "outside/" not in attempt(rollouts_page, viewer, f"?run={name}")


def test_filters_order_and_settings_that_differ(viewer):
    shutil.copytree(viewer.root / "saved", viewer.root / "other")
    settings = (viewer.root / "other/config.yaml").read_text().replace("beta: 0.05", "beta: 0.7")
    (viewer.root / "other/config.yaml").write_text(settings)
    rows = Runs(viewer.root).all()
    assert [row.name for row in arranged(rows, parse("?find=OTHER grpo"))] == ["other"]
    assert [row.name for row in arranged(rows, parse("?sort=name"))] == ["other", "saved"]
    assert [row.name for row in arranged(rows, parse("?sort=name&reverse=1"))] == ["saved", "other"]
    assert arranged(rows, parse("?state=failed")) == []
    page = attempt(runs_page, viewer, "?chosen=saved&chosen=other&smooth=0.9&x=tokens")
    assert "method.beta" in page and "0.05" in page and "0.7" in page and "method.epsilon<" not in page


def test_an_overlay_has_validation_readable_titles_and_folds_what_a_method_lacks(viewer):
    """The table comes first, in a box; the settings of one method only are folded."""
    shutil.copytree(SAVED, viewer.root / "other")
    settings = (viewer.root / "other/config.yaml").read_text()
    (viewer.root / "other/config.yaml").write_text(
        settings.replace("  type: grpo", "  type: dpo").replace("  beta: 0.05", "  label_smoothing: 0.1")
    )
    for name, values in (("saved", {"rewards/margins": 1.0, "eval_rewards/margins": 2.0}), ("other", {"margin": 1.5})):
        with (viewer.root / name / METRICS).open("a") as more:
            more.write(line(3, **values))
    page = str(attempt(runs_page, viewer, "?chosen=saved&chosen=other"))
    titles = re.findall(r'class="title">([^<]*)<', page)
    assert "Margin: chosen − rejected" in titles and "Reward" in titles and not any("/" in title for title in titles)
    assert len(titles) == len(set(titles))
    figure = next(one for one in page.split("<figure")[1:] if "Margin: chosen" in one)
    shown = [
        (one["label"], one["c"])
        for one in json.loads(unescape(re.search(r'data-points="([^"]*)"', figure)[1]))["lines"]
    ]
    assert shown == [("saved", 0), ("saved, validation", 0), ("other", 1)] and figure.count("dashed") == 1
    assert page.index("<table") < page.index("<figure") and 'class="above"' in page
    folded = page.partition("that not all of these methods have")[2]
    assert "method.label_smoothing" in folded and "method.beta" in folded and "method.type" not in folded
    assert "method.type" in page.partition("Settings that differ")[2].partition("that not all of these methods")[0]


def test_every_step_has_its_total_and_the_columns_begin_with_the_result(viewer):
    (viewer.root / "saved/training.log").write_text("x INFO step 2/2  loss 1  ETA 0s\n")
    page = str(attempt(runs_page, viewer, "?"))
    assert "2 / 2" in page and "2 / 2" in str(attempt(run_page, viewer, "?run=saved"))
    columns = [re.sub("<[^>]*>", "", one).strip("↓ ") for one in re.findall(r"<th[^>]*>(.*?)</th>", page)]
    assert columns[1:4] == ["name", "state", "result"]


def test_without_runs_the_page_says_how_to_make_the_first(tmp_path):
    viewer = Viewer(tmp_path / "my runs", tmp_path / "cache")
    page = str(attempt(runs_page, viewer, "?"))
    assert "There are no runs yet" in page and 'href="/new"' in page
    assert "posttrain quickstart --output-dir &#x27;" in page and not viewer.root.exists()
    assert "0 runs" in where(viewer) and str(tmp_path / "my runs") in where(viewer)


def test_where_counts_the_runs_by_state(viewer):
    shutil.copytree(SAVED, viewer.root / "cut")
    (viewer.root / "cut/run.json").write_text("{")
    assert "2 runs: 1 finished, 1 damaged" in where(viewer)


def test_shares_fill_their_bars_by_the_largest(viewer):
    page = str(attempt(rollouts_page, viewer, "?run=saved&step=2"))
    widths = [float(width) for width in re.findall(r'<rect width="([\d.]+)"', page)]
    assert max(widths) == 60 and len(set(widths)) > 1


def test_tags_and_notes_are_shown_and_found(viewer):
    shutil.copytree(viewer.root / "saved", viewer.root / "other")
    assert len(viewer.runs.all()) == 2
    write_notes(viewer.root / "saved", Notes(("keep", "paper"), HOSTILE))
    again = Viewer(viewer.root, viewer.cache)
    for page, address in ((runs_page, "?"), (run_page, "?run=saved")):
        made = attempt(page, again, address)
        assert "#keep #paper" in made and "<script" not in made and "alert(1)" in made
    assert [run.name for run in arranged(again.runs.all(), parse("?find=paper"))] == ["saved"]
    write_notes(viewer.root / "saved", Notes(("draft",)))
    again.runs._listed = (-1.0, [])  # as a second later
    assert "#draft" in attempt(run_page, again, "?run=saved")


def test_alarms_come_with_advice(viewer):
    with (viewer.root / "saved" / METRICS).open("a") as more:
        more.write(line(3, reward=0.0, **{"alarms/no_spread": 12.0}))
    for page, address in ((runs_page, "?"), (run_page, "?run=saved")):
        made = attempt(page, viewer, address)
        assert "no_spread" in made and "the task is too hard or too easy" in made and "12" in made


def test_a_run_says_its_checks_data_log_and_command(viewer):
    folder = viewer.root / "saved"
    (folder / "training.log").write_text(f"d t INFO train: 16 rows read{HOSTILE}\nd t INFO step 1/2  loss 1\n")
    page = attempt(run_page, viewer, "?run=saved")
    assert "16 rows read" in page and "<script" not in page
    assert page.count(">not recorded<") == 7 and ">passed<" not in page  # the run is of a version without a record
    assert replay_command(viewer.runs.all()[0]) == f"posttrain train {folder}/config.yaml --name saved-again"
    facts = json.loads((folder / "run.json").read_text())
    packed = {"value": 3e-7, "limit": 5e-4, "unit": "nats", "failed": False, "times": 1}
    ratio = {"value": None, "limit": 5e-4, "unit": "nats", "failed": True, "times": 2}
    facts |= {
        "state": "failed",
        "reason": "out of memory",
        "checks": {"packed = one by one": packed, "ratio = 1": ratio},
    }
    (folder / "run.json").write_text(json.dumps(facts))
    page = attempt(run_page, Viewer(viewer.root, viewer.cache), "?run=saved")
    assert page.count(">passed<") == 1 and page.count(">failed<") == 2  # of the run, and of the check that recorded it
    assert "the first step: 3e-07 ≤ 0.0005 nats" in page and "not a number (largest of 2)" in page
    assert page.count(">waiting<") == 4 and page.count(">does not apply<") == 1


PACKED, RATIO = (
    {"value": value, "limit": 5e-4, "unit": "nats", "failed": failed, "times": times}
    for value, failed, times in ((3e-7, False, 1), (0.25, True, 3))
)


@pytest.mark.parametrize("shown_by", ["runs show", "report"])
@pytest.mark.parametrize(
    ("recorded", "outcomes"),
    [
        (None, {"not recorded": 7}),  # a run of an earlier version
        ({}, {"waiting": 4, "does not apply": 3}),  # the first step has passed
        ({"packed = one by one": PACKED, "ratio = 1": RATIO}, {"passed": 1, "failed": 1, "waiting": 4}),
    ],
)
def test_the_terminal_and_the_report_show_checks_with_their_numbers(tmp_path, recorded, outcomes, shown_by, capsys):
    folder = tmp_path / "saved"
    shutil.copytree(SAVED, folder)
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(facts if recorded is None else facts | {"checks": recorded}))
    if shown_by == "report":
        assert main(["report", str(folder)]) == 0
        shown = re.sub(r"<[^>]*>", "|", unescape((folder / "report.html").read_text()))
        found = Counter(re.findall(r"\|(not recorded|does not apply|waiting|passed|failed)\|", shown))
    else:
        assert main(["runs", "show", str(folder)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        found = Counter(re.findall(r" check (not recorded|does not apply|waiting|passed|failed):", shown))
    assert outcomes.items() <= found.items() and found.total() == 7, shown
    for number in ("the first step: 3e-07 ≤ 0.0005 nats", "the first step: 0.25 > 0.0005 nats (largest of 3)"):
        assert (number in shown) == bool(recorded)


# --- rollouts ---------------------------------------------------------------------------------------------------------


def rollout(prompt: int, index: int, completion: str, reward: float, tokens: int = 3) -> StoredRollout:
    numbers = np.linspace(-2, -0.5, tokens)
    arrays = {
        "tokens": np.arange(tokens), "sampler_logprobs": numbers + 0.1, "old_logprobs": numbers,
        "new_logprobs": numbers, "advantages": np.full(tokens, reward - 0.5), "clipped": np.zeros(tokens),
    }  # fmt: skip
    parts = {"exact": {"weight": 1.0, "value": reward, "verdict": "correct" if reward else "wrong"}}
    return StoredRollout(prompt, index, completion, reward, reward - 0.5, "stop", 0, parts, arrays)


def write(folder: Path, steps: dict[int, list[StoredRollout]], after: int = 0) -> None:
    store = RolloutStore(folder, GIB, after)
    for step, rollouts in steps.items():
        prompts = [StoredPrompt(7, f"what is {step}?", [1], {}), StoredPrompt(8, "another question", [1], {})]
        store.add(step, step / 10, prompts, rollouts)
    store.flush()
    store.close()


def test_why_and_the_page_name_the_same_largest_group(tmp_path, capsys, monkeypatch):
    """By push: the advantages of prompt 0 are the largest, but its tokens were certain, and prompt 1's were clipped."""
    monkeypatch.setenv("COLUMNS", "200")
    folder = tmp_path / "runs/saved"
    shutil.copytree(SAVED, folder)
    (folder / "rollouts.sqlite").unlink()
    rollouts = []
    for prompt, (advantage, logprob, clipped) in enumerate(
        [(9.0, -1e-4, 0), (5.0, -1.0, 1), (1.0, -1.0, 0), (2.0, -1.0, 0)]
    ):
        made = rollout(prompt, 0, "a", advantage)
        given = {"old_logprobs": logprob, "new_logprobs": logprob, "advantages": advantage, "clipped": clipped}
        arrays = {name: np.full(3, value) for name, value in given.items()}
        rollouts.append(replace(made, arrays={**made.arrays, **arrays}))
    store = RolloutStore(folder, GIB, 0)
    store.add(2, 0.5, [StoredPrompt(row, f"question {row}", [1], {}) for row in range(4)], rollouts)
    store.flush()
    store.close()
    assert main(["why", str(folder), "--step", "2"]) == 0
    table = capsys.readouterr().out.partition("share of the push")[2]
    in_terminal = re.findall(r"^ *(\d+) +\d+ .* (\d+%)", table, re.MULTILINE)
    page = str(attempt(rollouts_page, Viewer(folder.parent), "?run=saved&step=2"))
    on_page = re.findall(r">prompt (\d)</a>.*?> (\d+%)</span>", page, re.DOTALL)
    assert in_terminal == on_page == [("3", "67%"), ("2", "33%"), ("0", "0%"), ("1", "0%")]


@pytest.fixture
def indexed(tmp_path) -> Index:
    run = tmp_path / "run"
    run.mkdir()
    for step in (1, 2):
        made = [rollout(0, 0, f"the cat {step}", 1.0), rollout(0, 1, 'NOT a "dog" AND', 0.0, tokens=9)]
        write(run, {step: [*made, rollout(1, 0, HOSTILE, 0.0)]}, after=step)
    return Index(run, tmp_path / "cache").refresh(wait=20)


def test_rollouts_are_found_by_words_phrases_and_numbers(indexed):
    def count(**filters) -> int:
        return indexed.search(Query(tuple((name, str(value)) for name, value in filters.items())))[0]

    assert indexed.problem == "" and count() == 6
    assert count(find="cat") == 2 and count(find='"cat 2"') == 1 and count(find="ca") == 2  # the last may go on
    assert count(find="what 2") == 2 and count(find="cat question") == 0
    for operators in ("NOT a", "AND", '"', 'a" OR "b', "cat*", "(", "step:1", "NEAR(a b)", "-", "\0", "a" * 5000):
        count(find=operators)  # never an error
    assert count(verdict="correct") == 2 and count(row=8) == 2 and count(ended="length") == 0
    assert count(part="exact", least=0.5) == 2 and count(most=0.5) == 4 and count(shortest=4) == 2
    assert count(**{"from": 2, "to": 2, "longest": 3}) == 2
    top = indexed.search(parse("?sort=largest+push"))[1][0]
    assert top["length"] == 9 and top["push"] == pytest.approx(
        np.sum(0.5 * (1 - np.exp(np.linspace(-2, -0.5, 9)))), rel=1e-5
    )
    assert indexed.choices() == {"verdict": ["correct", "wrong"], "ended": ["stop"], "part": ["exact"]}


def test_a_resumed_run_is_indexed_again_and_the_run_is_not_touched(indexed):
    write(indexed.run, {2: [rollout(0, 0, "a fox", 1.0)]}, after=1)
    before = {path.name: path.stat().st_mtime_ns for path in indexed.run.iterdir()}
    again = Index(indexed.run, indexed.path.parent).refresh(wait=20)
    assert again.search(parse("?find=fox"))[0] == 1 and again.search(parse("?find=cat"))[0] == 1
    assert again.search(Query())[0] == 4
    assert {path.name: path.stat().st_mtime_ns for path in indexed.run.iterdir()} == before


def test_damage_and_locks_are_said(indexed, tmp_path, monkeypatch):
    monkeypatch.setattr(stored_rollouts, "LOOKING_S", 0.02)
    cache = tmp_path / "cache"
    for file in cache.iterdir():
        file.unlink()
    indexed.path.write_bytes(b"no database " * 999)  # the index: made again
    again = Index(indexed.run, cache).refresh(wait=20)
    assert again.problem == "" and again.search(Query())[0] == 6
    database = indexed.run / "rollouts.sqlite"
    whole = database.read_bytes()
    database.write_bytes(whole[: len(whole) // 2])
    assert "rollouts.sqlite" in (cut := Index(indexed.run, cache).refresh(wait=20)).problem
    assert cut.search(Query())[0] == 6  # what was read before
    database.write_bytes(whole)
    with sqlite3.connect(database) as other:
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN EXCLUSIVE")
        os.utime(database)
        Path(f"{database}-wal").touch()
        assert "locked" in Index(indexed.run, cache).refresh(wait=20).problem


def test_the_push_is_the_derivative_of_the_loss():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    tokens, advantage = torch.tensor([1, 5, 8, 0]), torch.tensor([0.7, -1.2, 0.3, 2.0], dtype=torch.float64)
    new = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    old = new.detach() - 0.05
    (-advantage * (new - old).exp()).sum().backward()
    one = {"tokens": tokens.numpy(), "new_logprobs": new.detach().numpy(), "old_logprobs": old.numpy()}
    numbers = TokenNumbers.of(one | {"advantages": advantage.numpy(), "clipped": np.array([0, 0, 0, 1])})
    assert logits.grad is not None
    wanted = -logits.grad.gather(1, tokens[:, None])[:, 0].numpy()
    assert numbers.push[:3] == pytest.approx(wanted[:3]) and numbers.push[3] == 0
    assert numbers.furthest_ratio == pytest.approx(math.exp(0.05))
    one |= {"old_logprobs": new.detach().numpy() - np.array([0.1, -0.7, 0.2, 0.0])}
    assert TokenNumbers.of(one).furthest_ratio == pytest.approx(math.exp(-0.7)), "the ratio itself, not its inverse"


def test_from_a_falling_reward_to_the_tokens_in_three_clicks(viewer):
    """Each click is a link of the page before; a fourth shows a token's numbers."""
    address, seen = "?run=saved", []
    for wanted in ("step=2", "prompt=", "rollout=", "token="):
        page = attempt(rollouts_page, viewer, address)
        address = next(one for one in links(page) if wanted in one and "run=saved" in one)
        seen.append(address)
    assert len(seen) == 4 and 'class="tokens"' in attempt(rollouts_page, viewer, seen[2])
    assert 'class="h' in attempt(rollouts_page, viewer, seen[3]) and "chosen" in attempt(rollouts_page, viewer, seen[3])
    for colour in ("advantage", "ratio", "sampler − trainer", "policy − reference", "clipped", "nonsense"):
        assert 'class="tokens"' in attempt(rollouts_page, viewer, f"{seen[2]}&colour={colour}")
    assert falls(viewer.series(viewer.root / "saved"))[0][0] == 2


def test_what_is_not_there_is_said(viewer):
    for address, words in (
        ("?run=saved&step=99", "no rollouts of step 99"),
        ("?run=saved&step=1&prompt=99", "has no prompt 99"),
        ("?run=saved&step=1&prompt=0&rollout=99", "but not 99"),
        ("?run=nobody", "There is no run nobody"),
    ):
        assert words in attempt(rollouts_page, viewer, address)
    (viewer.root / "saved/rollouts.sqlite").write_bytes(b"no database" * 500)
    assert "cannot be read" in attempt(rollouts_page, viewer, "?run=saved&step=1")
    assert "Not all rollouts can be searched" in attempt(rollouts_page, viewer, "?run=saved&find=x")


def test_tokens_have_the_text_of_the_completion(viewer):
    database = sqlite3.connect(SAVED / "rollouts.sqlite")
    completion, tokens = database.execute(
        "SELECT completion, tokens FROM rollouts WHERE LENGTH(completion) > 2"
    ).fetchone()
    texts = token_texts(np.frombuffer(tokens, "<i4").tolist(), decoder_of(viewer.root / "saved"))
    assert "".join(text or "" for text in texts).startswith(completion) and len(texts) == len(tokens) // 4
    shutil.rmtree(viewer.root / "saved/checkpoint-2")
    assert (decoder := decoder_of(viewer.root / "saved")) is None and token_texts([5, 6], decoder) == ["5", "6"]
    numbers = attempt(rollouts_page, viewer, "?run=saved&step=1&prompt=0&rollout=0")
    assert re.search(r">\d+ </a>", numbers), "numbers of tokens are apart"


def test_found_words_are_marked_and_inert():
    made = marked(f"{HOSTILE} the Cat sat {'far ' * 99}", ["cat", "sat"])
    assert "<mark>Cat</mark> <mark>sat</mark>" in made and "<script" not in made
    assert "<mark>" not in marked("ıİ" * 40, ["x"])


# --- evaluations ------------------------------------------------------------------------------------------------------


def test_evaluations_are_listed_compared_and_shown_item_by_item(viewer):
    classes = {"11": 3, "10": 1, "01": 0, "00": 2}
    facts = {
        "value": 0.5,
        "low": 0.2,
        "high": 0.8,
        "classes": classes,
        "graded": 6,
        "partial": "24 of 1,319 items",
        "groups": {"easy": {"value": 1.0, "items": 2}},
    }
    for name, scores in (("a", [1, 1, 0, 0, 1, 0]), ("b", [1, 0, 1, 1, 1, 0])):
        answers = [replace(one, completion=HOSTILE) for one in answered(scores)]
        evaluation(viewer.root / f"saved/evaluation/{name}", answers, name=name, **facts)
    (viewer.root / "cut").mkdir()
    (viewer.root / "cut/summary.json").write_text("{")
    (viewer.root / "cut/answers.jsonl").touch()
    page = attempt(evaluations_page, viewer, "?")
    assert "saved/a" in page and "0.200 to 0.800" in page and "cut" in page
    assert "24 of 1,319 items" in page and "24 of 1,319 items" in attempt(evaluations_page, viewer, "?of=saved/a")
    page = attempt(evaluations_page, viewer, "?of=saved/a&verdict=wrong")
    assert "3  (50%)" in page and "<script" not in page and page.count("<article") == 3 and "easy" in page
    page = attempt(evaluations_page, viewer, "?of=saved/a&of=saved/b")
    assert page.count("<article") == 3 and "No difference shown between saved/b and saved/a" in page
    assert attempt(evaluations_page, viewer, "?of=saved/a&of=saved/b&show=all").count("<article") == 6
    assert attempt(evaluations_page, viewer, "?of=saved/a&of=saved/b&won=b").count("<article") == 2
    assert "damaged" in attempt(evaluations_page, viewer, "?of=cut") or "cannot be read" in attempt(
        evaluations_page, viewer, "?of=cut"
    )
    assert "All evaluations" not in attempt(evaluations_page, viewer, "?of=../../etc")
