"""The report: a run, a pipeline, several runs, on a page without requests in which every string is inert."""

import json
import math
import re
import shutil
import sqlite3
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from posttrain.base.errors import RunError
from posttrain.cli import main
from posttrain.reports.chart import Interval, intervals
from posttrain.reports.completions import marked, spans
from posttrain.reports.markup import Markup, text
from posttrain.reports.page import MOST_BYTES, POLICY, SCRIPT, Facts, Html, Table, Text, cut, write_page
from posttrain.reports.report import differing, write_pipeline_report, write_report
from posttrain.runs.folder import Notes, write_notes
from posttrain.runs.metrics import NAME
from posttrain.runs.rollouts import GIB, RolloutStore, StoredEvaluation, StoredPrompt, StoredRollout
from posttrain.runs.run import Run

HOSTILE = "</td></pre><script>alert('x')</script><img src=http://evil/x onerror=go()>\x00\x1b[31m\ud800&amp;\u202e"
CONFIG = """\
name: toy
models: [{path: toy/model, lora: {r: 8}}]
method: {type: grpo}
data: {source: [{source: builtin:sums}, {source: more.jsonl}]}
rewards: [check_answer, {type: match_format_exactly, name: shape, weight: 0.5}, {type: r1_zero}]
"""
RIGHT = "1 + 1 = 2<end_working_out><SOLUTION>2</SOLUTION>"


class Page(HTMLParser):
    """Collects the tags, their addresses and the text of a page, and checks that tags close in order."""

    VOID = ("meta", "br", "img", "input")

    def __init__(self, path: Path):
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.text, self.size = "", path.stat().st_size
        self.html = path.read_text(encoding="utf-8")
        self.feed(self.html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "srcset", "href", "action")]
        assert not [name for name, _ in attrs if name.startswith("on") or name == "style"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data


def completion(index: int, text: str, reward: float | None, part: dict, reason: str = "stop") -> StoredRollout:
    return StoredRollout(index, 0, text, reward, 0.5, reason, 1, part, {})


def make(folder: Path, steps: int = 30, config: str = CONFIG, hostile: str = "") -> Path:
    """A run with metrics, alarms, completions of its last two steps and of an evaluation."""
    with Run.create(folder, config, {"seed": 1, "note": hostile}) as run:
        run.log(0, {"eval_reward": 0.1})
        for step in range(1, steps + 1):
            alarm = {"alarms/no_spread": step - 10.0} if step > 10 else {}
            run.log(
                step, {"loss": 1 / step, "reward": step / steps, "grad_norm": 2.0 if step != 3 else math.nan} | alarm
            )
        run.log(steps, {"eval_reward": 0.9})
        run.write_results({"train_runtime": 7500.0})
        run.set_counters({"skipped_steps": 3})
        run.set_state("finished")
    store = RolloutStore(folder, GIB, after=0)
    verdict = {"value": 5.0, "weight": 1.0, "verdict": "correct", "extracted": "2", "reason": None}
    shape = {"value": 3.0, "weight": 0.5}
    for step in (steps - 1, steps):
        prompts = [StoredPrompt(n, f"{n} + 1?{hostile}", (1,), {"answer": str(n + 1)}) for n in range(9)]
        rollouts = [completion(n, f"try {n} of step {step}{hostile}", n / 10, {}) for n in range(1, 8)]
        rollouts += [completion(8, RIGHT, 6.5, {"check_answer": verdict, "shape": shape})]
        wrong = {"value": -2.0, "weight": 1.0, "verdict": "wrong", "extracted": None, "reason": hostile or None}
        store.add(step, 0.5, prompts, [*rollouts, completion(0, "?", -2.0, {"check_answer": wrong}, "length")])
    store.add_evaluation(steps, "validation", [StoredEvaluation(4, "2 + 2?", "4", 1.0, "stop", {}, (1, 2, 3))])
    store.flush()
    store.close()
    return folder


def test_a_report_of_a_run(tmp_path):
    before = {path.name for path in make(tmp_path / "x").iterdir()}
    page = Page(write_report(tmp_path / "x"))
    assert {path.name for path in (tmp_path / "x").iterdir()} - before == {"report.html"}  # no log of the database
    assert page.tags.count("script") == 1 and page.tags.count("figure") == 3
    assert all(address.startswith("#") for address in page.addresses)
    words = " ".join(page.text.split())
    for expected in (
        "grpo of model", "toy/model", "r 8", "builtin:sums, more.jsonl", "2h 05m", "validation reward0.9",
        "skipped steps3",
        "no_spread, in 20 steps, first seen at step 11: no group has", "Completions, step 30", "reward 6.5",
        "check_answer +5, correct", "shape +3 × 0.5", "right answer 9", "check_answer -2, wrong", "truncated",
        "Completions, validation at step 30", "Settings", "Provenance",
    ):  # fmt: skip
        assert expected in words, expected
    assert "try 7 of step 30" in words and "of step 29" not in words and "Not complete" not in words
    best, _, worst = words.partition("Worst")
    assert "reward 6.5" in best and "reward -2" in worst.partition("Completions, validation")[0]
    marks = re.findall(r'<mark class="(\w+)">(.*?)</mark>', page.html)
    assert ("answer", "2") in marks and ("tag", "&lt;SOLUTION&gt;") in marks


def test_tags_and_notes_are_in_reports(tmp_path):
    write_notes(make(tmp_path / "all/a"), Notes(("keep", "paper"), "the good one"))
    make(tmp_path / "all/b")
    for path in (write_report(tmp_path / "all/a"), write_pipeline_report(tmp_path / "all")):
        text = Page(path).text
        assert "#keep #paper" in text and "the good one" in text
    assert "#keep" not in Page(write_report(tmp_path / "all/b")).text


def test_everything_in_a_report_is_inert(tmp_path):
    config = CONFIG.replace("toy/model", json.dumps(HOSTILE.replace("\ud800", ""))).replace("\x1b", "")
    page = Page(write_report(make(tmp_path / "x", config=config, hostile=HOSTILE), HOSTILE))
    assert not {"img", "link", "iframe", "object", "form"} & set(page.tags) and page.tags.count("script") == 1
    assert all(address.startswith("#") for address in page.addresses)
    assert page.text.count("<script>alert('x')</script>") > 8  # title, heading, completions …
    assert not set("\x00\x1b\u202e") & set(page.text) and "\\x1b[31m" in page.text
    assert f'content="{POLICY}"' in page.html and f"<script>{SCRIPT}</script>" in page.html
    assert "default-src 'none'" in POLICY and "'sha256-" in POLICY  # no other script would run


def test_secrets_are_hidden_also_where_a_rule_read_them(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", "s3cret-number-2-value")
    folder = make(tmp_path / "x", hostile=" s3cret-number-2-value ")
    assert "s3cret" not in write_report(folder).read_text()


def test_what_rules_matched():
    tags = {"shape": ("<a>", "</a>", "<b>"), "other": ("<c>",)}
    found = list(spans("x<a>12</a> 12<b><b>", {"shape": {}, "check": {"extracted": " 12 "}}, tags))
    assert found == [(1, 4, "tag"), (6, 10, "tag"), (11, 13, "answer")]  # <b> twice is no match, the last 12 counts
    assert marked("a<12>", [(1, 5, "tag"), (2, 4, "answer")]) == 'a<mark class="tag">&lt;12&gt;</mark>'
    long = marked("y" * 9_000 + "<a>", [(9_000, 9_003, "tag")])
    assert "5,000 characters cut" in long and len(long) < 5_000
    assert "".join(map(str, cut("abcdefgh", 4))).count("characters cut") == 1 and cut("abcd", 4) == "abcd"


def test_a_long_run_stays_small_and_keeps_its_extremes(tmp_path):
    folder = tmp_path / "x"
    with Run.create(folder, CONFIG, {}) as run:
        run.log(1, {"loss": 1.0})
    names = ("loss", "reward", "entropy", "grad_norm", "kl", "delta", "logps/chosen", "logps/rejected", "clip_ratio")
    line = ", ".join(f'"{kind}{name}": 0.123456789' for name in names for kind in ("", "eval_"))
    lines = [f'{{"step": {step}, {line}}}\n' for step in range(1, 10_001)]
    lines[4_999] = lines[4_999].replace("0.123456789", "77.5")
    (folder / NAME).write_text("".join(lines))
    store = RolloutStore(folder, GIB, after=0)
    prompts = [StoredPrompt(n, "p" * 50_000, (), {}) for n in range(9)]
    store.add(1, 0.0, prompts, [completion(n, "long " * 40_000, float(n), {}) for n in range(9)])
    store.flush()
    store.close()
    page = Page(write_report(folder))
    assert page.size < MOST_BYTES / 2, page.size
    assert "196,000 characters cut" in page.text and "48,500 characters cut" in page.text
    drawn = [json.loads(unescape(found)) for found in re.findall(r'data-points="([^"]*)"', page.html)]
    (train, validation) = drawn[0]["lines"]
    assert (validation["x"][0], validation["x"][-1]) == (1, 10_000) and 60 <= len(validation["x"]) <= 402
    assert set(validation["y"]) == {0.12346, 77.5}  # not smoothed
    assert 5_000 in train["x"] and max(train["y"]) > 0.13  # smoothed, the spike is still seen


def test_a_page_that_would_be_large_is_cut_with_a_count(tmp_path):
    rows = [[n, "x" * 3_000] for n in range(1_000)]
    write_page(tmp_path / "x.html", "x", [Table("Large", ["n", "text"], rows), Text("End", "here")])
    page = Page(tmp_path / "x.html")
    assert page.size < MOST_BYTES and "strings are cut to 5,000 characters and tables to 500 rows" in page.text
    assert "500 more rows are not shown" in page.text and "here" in page.text


def test_sections_without_content_are_omitted_and_numbers_are_aligned(tmp_path):
    sections = [
        Table("Nothing", ["x"], []),
        Facts("None", {}),
        Html("Empty", Markup("")),
        Facts("Some", {"rows": {"kept": 1234567}}, folded=True),
        Table("Numbers", ["name", "value", "text"], [["a", 1.5, "x"], ["b", "+2.0 %", "2"], ["c", "", "y"]]),
    ]
    write_page(tmp_path / "new" / "x.html", "x", sections)
    page = Page(tmp_path / "new" / "x.html")
    assert not [name for name in ("Nothing", "None", "Empty") if name in page.text]
    assert "rows.kept1,234,567" in page.text and page.tags.count("details") == 1
    assert re.findall(r'<th class="number" scope="col">(\w+)', page.html) == ["value"]
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot write"):
        write_page(tmp_path / "file" / "x.html", "x", [])


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("metrics.jsonl", '{"step": 1, "loss": 2.0}\n{"step": 2, "lo\n{"step": 3, "loss": 1.0}\n{"st', "1 line of"),
        ("metrics.jsonl", '{"step": 1, "loss": 2.0}\n{"step": 2', "The last line of"),
        ("metrics.jsonl", None, None),
        ("run.json", '{"state": ', "State and provenance are not shown"),
        ("config.yaml", "[unclosed", "Method, model and data are not shown"),
        ("config.yaml", "- 1", "Method, model and data are not shown"),
        ("config.yaml", None, "Settings are not shown"),
        ("results.json", "{", "Results are not shown"),
        ("results.json", "[1]", "Results are not shown"),
        ("rollouts.sqlite", "no database at all" * 99, "Completions are not shown"),
        ("rollouts.sqlite", "", "Completions are not shown"),
        ("training.log", None, None),
    ],
)
def test_what_is_damaged_is_said_and_the_rest_is_shown(tmp_path, file, content, said):
    folder = make(tmp_path / "x")
    (folder / file).unlink(missing_ok=True)
    if content is not None:
        (folder / file).write_text(content)
    page = Page(write_report(folder))
    assert ("Not complete" in page.text) == (said is not None)
    assert said is None or said in page.text
    shown = {
        "metrics.jsonl": "Curves",
        "run.json": "statefinished",
        "config.yaml": "grpo",
        "rollouts.sqlite": "Completions,",
    }
    for other, words in shown.items():
        assert words in page.text or other == file, words


def test_one_damaged_completion(tmp_path):
    folder = make(tmp_path / "x")
    with sqlite3.connect(folder / "rollouts.sqlite") as connection:
        connection.execute("UPDATE rollouts SET parts = '{' WHERE step = 30")
    connection.close()
    assert "is damaged" in Page(write_report(folder)).text


def test_a_pipeline(tmp_path):
    for stage, method in (("first", "sft"), ("second", "grpo")):
        make(tmp_path / "chain" / stage, config=CONFIG.replace("grpo", method))
    (tmp_path / "chain" / "config.yaml").write_text("stages: here\n")
    write_report(tmp_path / "chain" / "second")
    page = Page(write_pipeline_report(tmp_path / "chain"))
    assert page.text.index("first") < page.text.index("second") and "stages: here" in page.text
    assert "second/report.html" in page.addresses and "first/report.html" not in page.addresses
    assert "first: no_spread, in 20 steps" in page.text
    words = " ".join(page.text.split())
    assert words.count("Completions, step 30") == 2 and words.count("reward 6.5") == 2


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make(Path("runs/a"))
    make(Path("runs/b"), config=CONFIG.replace("r: 8", "r: 16"))
    shutil.copytree("runs", "runs/chain", ignore=lambda folder, names: {"chain"} & set(names))
    assert main(["report", "a"]) == 0 and capsys.readouterr().out == "written: runs/a/report.html\n"
    assert main(["report", "runs/chain"]) == 0 and Path("runs/chain/report.html").is_file()
    assert main(["report", "a", "b", "chain", "--output", "new/all.html"]) == 0
    page = Page(Path("new/all.html"))
    assert "Comparison of runs/a, runs/b, chain/a, chain/b" in page.text or "Comparison of a, b, chain/a" in page.text
    assert "../runs/a/report.html" in page.addresses and "models.0.lora.r" in page.text
    assert main(["report", "a", "b"]) == 0 and Path("comparisons/a-b.html").is_file()
    capsys.readouterr()
    assert main(["report", "a", "--output", "new/all.html"]) != 0
    assert "--overwrite" in capsys.readouterr().err
    assert main(["report", "a", "--output", "new/all.html", "--overwrite"]) == 0
    for wrong, said in (("c", "there are a, chain/a, b, chain/b"), ("new", "has no run.json")):
        assert main(["report", wrong]) == 2
        assert said in capsys.readouterr().err


def test_settings_that_differ():
    one = {"name": "a", "method": {"beta": 0.1, "loss": "x", "same": 1}, "r": [1]}
    other = {"name": "b", "method": {"beta": None, "same": 1}, "r": [1, 2]}
    assert differing([one, other]) == [["method.beta", 0.1, ""], ["method.loss", "x", ""], ["r.1", "", 2]]


def test_intervals_are_where_their_values_are():
    rows = [Interval("a", 0.5, 0.0, 1.0, 0), Interval("<b>", 0.25, None, None, band=0.1)]
    drawn = text(intervals("t", rows, zero=True))
    circles = [float(x) for x in re.findall(r'<circle cx="([\d.]+)"', drawn)]
    (low, high), *_ = [(float(a), float(b)) for a, b in re.findall(r"M([\d.]+) \d+H([\d.]+)", drawn)]
    assert circles[0] == pytest.approx((low + high) / 2, abs=0.1)
    assert circles[1] == pytest.approx(low + (high - low) / 4, abs=0.1)
    assert "&lt;b&gt;" in drawn and "0.500 (0.000 to 1.000)" in drawn and 'class="band"' in drawn
