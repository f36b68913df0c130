"""`posttrain explore --json`, and the page Data that shows it: rows with their masks, lengths, what was dropped."""

import json

import numpy as np
import pytest
from data_tokenizer import CHATML, byte_tokenizer, prepare

from posttrain.cli import main
from posttrain.config.schema.data import DataConfig, ValidationConfig
from posttrain.data import Selection, overview
from posttrain.ui.commands import Commands, Output
from posttrain.ui.data_page import CHECK, check, data_page, read
from posttrain.ui.parts import address
from posttrain.ui.viewer import Viewer, attempt

ROWS = [{"prompt": f"Say {n}<b>", "completion": " é" * (1 + n % 7)} for n in range(30)]


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class Explored(Commands):
    """The commands of a viewer, answered in this process."""

    def __init__(self, capsys, folder):
        super().__init__(folder)
        self.capsys, self.folder, self.asked, self.answers = capsys, folder, [], {}

    def find(self, verb, text, arguments=()):
        return self.answers.get((verb, text, *arguments))

    def has_run(self, verb, text):
        return any(key[:2] == (verb, text) for key in self.answers)

    def start(self, verb, text, arguments=()):
        self.asked.append(arguments)
        file = self.folder / "asked.yaml"
        file.write_text(text)
        code = main([verb, str(file), *arguments])
        said, wrong = self.capsys.readouterr()
        self.answers[verb, text, *arguments] = Output(wrong if code else said, code)


@pytest.fixture
def viewer(tmp_path, monkeypatch, capsys) -> Viewer:
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / "cache"))
    byte_tokenizer(CHATML).save_pretrained(tmp_path / "model")
    run = tmp_path / "runs/one"
    run.mkdir(parents=True)
    source = write(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "long", "completion": "x" * 90}])
    (run / "config.yaml").write_text(
        f"name: one\noutput_dir: {tmp_path}/runs\nmodel: {tmp_path}/model\nmethod: sft\n"
        f"data: {{source: {source}, template: none, max_length: 60, overlong: drop, validation: {{rows: 4}}}}\n"
        "training: {max_steps: 1}\n"
    )
    (run / "run.json").write_text("{}")
    made = Viewer(tmp_path / "runs", tmp_path / "cache/ui")
    made.commands = Explored(capsys, tmp_path)
    return made


def acted(act, viewer: Viewer, address: str) -> str:
    """What the page shows after a button was pressed."""
    return f"{attempt(act, viewer, address) or ''}{attempt(data_page, viewer, address)}"


def test_an_overview_is_the_data_that_trains(tmp_path):
    """Masks, lengths and counts against the examples themselves; rows over the limit are named."""
    tokenizer = byte_tokenizer(CHATML)
    source = write(tmp_path / "a.jsonl", [*ROWS, {"prompt": "long", "completion": "x" * 90}])
    data = DataConfig(source=source, template="none", max_length=60, validation=ValidationConfig(rows=4))
    prepared = prepare(data, tokenizer, "sft", cache_dir=tmp_path)
    found = json.loads(json.dumps(overview(prepared, tokenizer, Selection(30, sort="longest"))))
    assert [(one["row"], one["tokens"] > 60) for one in found["reports"]["train"]["dropped"]] == [(30, True)]
    assert found["sets"]["train"]["examples"] == len(prepared.train) == len(found["rows"]) == 26
    lengths = [sum(part["tokens"] for part in row["parts"]) for row in found["rows"]]
    assert lengths == sorted(prepared.train.lengths.tolist(), reverse=True)
    counts, width = found["sets"]["train"]["counts"], found["width"]
    assert counts == [sum(length // width == place for length in lengths) for place in range(len(counts))]
    examples = {int(example.row): example for example in (prepared.train[index] for index in range(26))}
    for row in found["rows"]:
        [part], tree = row["parts"], examples[row["row"]].trees[0]
        tokens = [token for _, ids, _ in part["pieces"] for token in ids]
        trained = [kept for _, ids, kept in part["pieces"] for _ in ids]
        assert tokens == list(tree.tokens) and trained == list(np.asarray(tree.trained))
        assert part["trained"] == sum(trained) > 0
        assert "".join(text for text, _, _ in part["pieces"]).startswith(ROWS[row["row"]]["prompt"])
    only = overview(prepared, tokenizer, Selection(9, row=int(prepared.train.rows[7])))["rows"]
    assert [row["row"] for row in only] == [prepared.train.rows[7]]
    later = overview(prepared, tokenizer, Selection(2, first=5))["rows"]
    assert [row["row"] for row in later] == prepared.train.rows[5:7].tolist()


def test_json_and_the_terminal_select_the_same_rows(viewer, tmp_path, capsys):
    file = str(tmp_path / "runs/one/config.yaml")
    arguments = ["--no-quality", "--rows", "2", "--first", "1", "--sort", "shortest", "--set", "validation"]
    assert main(["explore", file, *arguments, "--json"]) == 0
    rows = [row["row"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert main(["explore", file, *arguments]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("row ")]
    assert [int(number) for _, number, _ in shown] == rows != []
    assert main(["explore", file, "--no-quality", "--row", "30"]) == 0
    assert "train has no example of row 30: it was dropped, or is in" in capsys.readouterr().out
    assert main(["explore", file, "--set", "valid"]) == 1
    assert "there is no set 'valid': choose one of train, validation" in capsys.readouterr().err


def test_the_page_reads_a_run_by_itself_and_shows_its_rows(viewer):
    page = attempt(data_page, viewer, address("/data", run="one"))
    assert "<dt>rows dropped</dt><dd>1</dd>" in page and "over the length limit, dropped" in page
    assert "at most 60 tokens" in page
    assert "Row 30" not in page and page.count("<h3>Row ") == 10 and "1 to 10 of 26 examples" in page
    assert "<b>" not in page and ">&lt;</span>" in page, "text of rows is inert"
    assert page.count('class="trained"') > 10
    attempt(data_page, viewer, address("/data", run="one", page=2))
    assert len(viewer.commands.asked) == 1, "a block is read once"
    last = attempt(data_page, viewer, address("/data", run="one", page=2))
    assert "21 to 26 of 26 examples" in last and last.count("<h3>Row ") == 6
    alone = attempt(data_page, viewer, address("/data", run="one", row=7, set="train"))
    assert alone.count("<h3>Row 7<") + alone.count("There is no such example") == 1
    checked = acted(check, viewer, address("/data", run="one"))
    assert viewer.commands.asked[-1] == CHECK and "row, exact duplicate" in checked and "suites not checked" in checked


def test_settings_in_an_address_are_read_when_asked_for(viewer, tmp_path):
    """An address can name any file: only the button reads it."""
    given = {"method.type": "sft", "model.path": f"{tmp_path}/model", "data.source": f"{tmp_path}/rows.jsonl"}
    at = address("/data", **given, **{"data.template": "none"})
    page = attempt(data_page, viewer, at)
    assert 'value="read"' in page and viewer.commands.asked == []
    assert "<dd>31</dd>" in acted(read, viewer, at)
    attempt(data_page, viewer, f"{at}&sort=longest")
    assert len(viewer.commands.asked) == 2, "another order of what was read is no new question"
    missing = address("/data", **given | {"data.source": "nowhere.jsonl"})
    page = acted(read, viewer, missing)
    assert "nowhere.jsonl" in page and "Read again" in page and len(viewer.commands.asked) == 3
    assert "these settings are incomplete" in acted(read, viewer, "/data?method.type=sft")
    assert "There is no run ../x" in attempt(data_page, viewer, "/data?run=../x")
    assert ">one</a>" in attempt(data_page, viewer, "/data")


def test_a_damaged_answer_or_file_is_a_message(viewer, tmp_path):
    attempt(data_page, viewer, address("/data", run="one"))
    for key, answer in viewer.commands.answers.items():
        viewer.commands.answers[key] = Output(answer.text[:100], 0)
    assert "more than a page can show" in attempt(data_page, viewer, address("/data", run="one"))
    (tmp_path / "runs/one/config.yaml").write_bytes(b"\xff\xfe")
    assert "the settings of one cannot be read" in attempt(data_page, viewer, address("/data", run="one"))
