"""`rollouts --to`: stored completions as rows that `train` reads."""

import json
from collections import Counter

import pytest
from test_acting import train

from posttrain.cli import main
from posttrain.runs.metrics import read_metrics
from posttrain.runs.selection import select
from posttrain.runs.stored_rollouts import StoredRun


class Stored:
    """A store of one step: for each prompt, its completions with rewards."""

    def __init__(self, *prompts, turns=False):
        self.given, self.turns = prompts, turns

    def prompts(self, step):
        facts = [{"prompt": prompt, "answer": None, "columns": {}} for prompt, _ in self.given]
        return [{"prompt_index": n, "prompt": "shown", "facts": each} for n, each in enumerate(facts)]

    def rollouts(self, step):
        for number, (_, completions) in enumerate(self.given):
            for text, reward in completions:
                turns = {"messages": [{"role": "assistant", "content": text}]} if self.turns else None
                reason = "length" if text.endswith("…") else "stop"
                row = {"prompt_index": number, "turns": turns, "completion": text, "reward": reward}
                yield row | {"finish_reason": reason}


GIVEN = [
    ("one?", [("a", 1.0), ("b", 0.0), ("c", 0.5), ("a", 1.0), ("long…", 2.0), ("none", None)]),
    ("two?", [("x", 0.25), ("y", 0.25)]),
]


@pytest.mark.parametrize(
    ("how", "expected", "left"),
    [
        (("sft",), ["a", "x"], {"not among the best": 3}),
        (("sft", [1], 2, 0.4), ["a", "c"], {"not among the best": 3}),
        (("pairs",), [("a", "b")], {"not in a pair": 3}),
        (("pairs", [1], 2), [("a", "b")], {"not in a pair": 3}),
        (("kto",), [("a", True), ("b", False)], {"equal to the mean": 3}),
        (("kto", [1], None, 0.1), [("a", True), ("c", True), ("b", False), ("x", True), ("y", True)], {}),
    ],
)
def test_rows_and_what_is_left_out(how, expected, left):
    rows, counts = select(Stored(*GIVEN), how[0], *(how[1:] or ([1],)))
    columns = {"sft": ("completion",), "pairs": ("chosen", "rejected"), "kto": ("completion", "label")}[how[0]]
    made = [tuple(row[column] for column in columns) for row in rows]
    assert made == [each if isinstance(each, tuple) else (each,) for each in expected]
    common = {"completions": 8, "without a reward": 1, "truncated": 1, "repeated": 1}
    assert +counts == Counter(common | left)
    messages, _ = select(Stored(*GIVEN, turns=True), how[0], *(how[1:] or ([1],)))
    if how[0] == "sft":
        assert messages[0]["messages"] == [{"role": "user", "content": "one?"}, {"role": "assistant", "content": "a"}]
    else:
        assert messages[0]["prompt"] == [{"role": "user", "content": "one?"}]
        assert messages[0][columns[0]] == [{"role": "assistant", "content": expected[0][0]}]


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    from conftest import SAVED_SUMS

    overrides = ["training.batch_size=12", "training.max_steps=3", "seed=4"]
    return train(SAVED_SUMS / "calculator", tmp_path_factory.mktemp("grpo"), None, *overrides)


@pytest.mark.parametrize(("kind", "method"), [("sft", "sft"), ("pairs", "dpo"), ("kto", "kto")])
def test_episodes_are_trained_on(episodes, calculator_home, tmp_path, capsys, kind, method):
    """Also those with calls: their rows have the tools."""
    file = tmp_path / f"{kind}.jsonl"
    assert main(["rollouts", str(episodes), "--to", kind, "--output", str(file)]) == 0
    said, rows = capsys.readouterr().out, [json.loads(line) for line in file.read_text().splitlines()]
    assert f"{len(rows)} rows of 288 completions" in said.replace("\n", " ")
    with_calls = [row for row in rows if '"tool_calls"' in json.dumps(row)]
    assert with_calls and all(row["tools"][0]["function"]["name"] == "calculate" for row in rows)
    command = [
        "train", f"method={method}", f"model={calculator_home / 'model'}", f"data.source={file}", "devices.type=cpu",
        "training.max_steps=1", f"output_dir={tmp_path}", "name=after", "evaluation.eval_steps=-1",
    ]  # fmt: skip
    assert main(command) == 0
    assert any("loss" in line for line in read_metrics(tmp_path / "after"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--to", "dpo", "--output", "x"], "sft, pairs"),
        (["--to", "sft"], "--to needs --output FILE"),
        (["--best", "2"], "--best is for rows that --to writes"),
        (["--to", "kto", "--best", "2", "--output", "x"], "--best is not read by kto"),
        (["--to", "pairs", "--above", "2", "--output", "x"], "--above is not read by pairs"),
        (["--to", "sft", "--above", "9", "--output", "x"], "nothing is left to train on: 288 completions"),
        (["--to", "sft", "--step", "9", "--output", "x"], "no rollouts of step 9"),
        (["--to", "sft", "--output", "there.jsonl"], "exists: give another file"),
    ],
)
def test_flags_that_do_not_fit_are_refused(episodes, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.jsonl").write_text("kept")
    assert main(["rollouts", str(episodes), *flags]) in (1, 2)
    assert message in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "there.jsonl").read_text() == "kept" and not (tmp_path / "x").exists()


def test_tools_are_stored_with_the_prompts(episodes):
    with StoredRun(episodes) as stored:
        assert all(row["facts"]["tools"][0]["function"]["name"] == "calculate" for row in stored.prompts(1))
