"""`rollouts --to`: stored completions as rows that `train` reads."""

import json
from collections import Counter

import pytest
from test_acting import train
from transformers import AutoTokenizer

from posttrain.cli import main
from posttrain.runs.files import save_rows
from posttrain.runs.metrics import read_metrics
from posttrain.runs.selection import select
from posttrain.runs.stored_rollouts import StoredRun, of_trained


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
    assert messages[0]["prompt"] == [{"role": "user", "content": "one?"}]
    first = expected[0][0]
    assert messages[0][columns[0]] == [{"role": "assistant", "content": first}]


def test_tools_are_part_of_a_prompt():
    stored = Stored(("one?", [("a", 1.0)]), ("one?", [("b", 0.0)]))
    prompts = stored.prompts(1)
    prompts[1]["facts"]["tools"] = [{"function": {"name": "f"}}]
    stored.prompts = lambda step: prompts
    rows, _ = select(stored, "sft", [1])
    assert [(row["completion"], "tools" in row) for row in rows] == [("a", False), ("b", True)]


@pytest.fixture(scope="module")
def episodes(tmp_path_factory):
    from conftest import SAVED_SUMS

    overrides = ["training.batch_size=12", "training.max_steps=3", "seed=4"]
    return train(SAVED_SUMS / "calculator", tmp_path_factory.mktemp("grpo"), None, *overrides)


@pytest.mark.parametrize(("kind", "method"), [("sft", "sft"), ("pairs", "dpo"), ("kto", "kto")])
def test_rows_are_trained_on(calculator_home, tmp_path, kind, method):
    file = tmp_path / f"{kind}.jsonl"
    save_rows(file, select(Stored(*GIVEN, turns=True), kind, [1])[0])
    command = [
        "train", f"method={method}", f"model={calculator_home / 'model'}", f"data.source={file}", "devices.type=cpu",
        "training.max_steps=1", f"output_dir={tmp_path}", "name=after", "evaluation.eval_steps=-1",
    ]  # fmt: skip
    assert main(command) == 0
    assert any("loss" in line for line in read_metrics(tmp_path / "after"))


@pytest.mark.parametrize(("kind", "method"), [("sft", "sft"), ("pairs", "dpo"), ("kto", "kto")])
def test_only_sampled_tokens_are_targets(episodes, calculator_home, tmp_path, capsys, kind, method):
    """The trained tokens of an episode are those that the run has stored as trained."""
    file = tmp_path / "new" / "rows.jsonl"
    which = {"sft": ["--best", "9", "--above", "0.5"], "pairs": ["--best", "9"], "kto": []}[kind]
    assert main(["rollouts", str(episodes), "--to", kind, *which, "--output", str(file)]) == 0
    assert "assistant_only_loss" in capsys.readouterr().out
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert all(row["tools"][0]["function"]["name"] == "calculate" for row in rows)
    command = ["explore", f"method={method}", "method.assistant_only_loss=true", f"model={calculator_home / 'model'}"]
    assert main([*command, f"data.source={file}", "--json", "--no-quality", "--rows", "999", "devices.type=cpu"]) == 0
    shown = json.loads(capsys.readouterr().out)["rows"]
    tokenizer = AutoTokenizer.from_pretrained(calculator_home / "model")
    with StoredRun(episodes) as stored:
        sampled = [row for step in stored.steps() for row in stored.rollouts(step)]
    expected = {str(tokenizer.decode(of_trained(row)["tokens"])) for row in sampled}
    parts = [part["pieces"] for row in shown for part in row["parts"]]
    trained = {"".join(text for text, _, is_trained in pieces if is_trained) for pieces in parts} - {""}
    whole = {text for text in trained if "<call>" in text or "name" not in text}  # a broken call is text without marks
    texts = {text.replace("<|im_end|>\n", "<|im_end|>") for text in whole}  # a line break after the end of turn
    assert len(texts) > 5 and texts <= expected
    assert any(text.count("<|im_end|>") > 1 for text in texts), "of several turns"


def test_tools_are_stored_with_the_prompts(episodes):
    with StoredRun(episodes) as stored:
        assert all(row["facts"]["tools"][0]["function"]["name"] == "calculate" for row in stored.prompts(1))
