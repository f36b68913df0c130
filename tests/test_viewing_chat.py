"""What the chat page reads and writes: models, two replies at once, tokens in colour, votes."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from posttrain.base.errors import DataError, EngineError, RunError
from posttrain.config import DataConfig, RunConfig
from posttrain.data import prepare
from posttrain.data.prepare import prepare_run
from posttrain.serving.client import ScoredToken, together
from posttrain.ui.viewer import Viewer, models_below
from posttrain.ui.votes import cells, token_map, write_vote


def test_models_of_runs(tmp_path):
    run = tmp_path / "a/sft"
    for name in ("final", "best", *(f"checkpoint-{step}" for step in (9, 10, 100, 1)), "quantized_int8/final", "empty"):
        (run / name).mkdir(parents=True)
        (
            run / name / ("adapter_config.json" if name == "best" else "config.json" if name != "empty" else "x")
        ).write_text("{}")
    (run / "run.json").write_text("{}")
    (tmp_path / "quantized_models/gpt2").mkdir(parents=True)
    (tmp_path / "quantized_models/gpt2/config.json").write_text("{}")
    found = models_below(Viewer(tmp_path, tmp_path / "cache"))
    of_run = ["final", "best", "checkpoint-100", "checkpoint-10", "checkpoint-9", "quantized_int8/final"]
    assert list(found) == [*(f"a/sft/{name}" for name in of_run), "quantized_models/gpt2"]
    assert found["a/sft/best"] == str(run / "best")


def test_replies_come_together():
    closed = []

    def reply(name: str, pause: float, fail: bool = False):
        try:
            for number in range(3):
                time.sleep(pause)
                yield f"{name}{number}"
            if fail:
                raise EngineError(name)
        finally:
            closed.append(name)

    found = list(together([reply("a", 0.02), reply("b", 0.0)]))
    assert [piece for side, piece in found if side == 0] == ["a0", "a1", "a2"]
    assert [piece for side, piece in found if side == 1] == ["b0", "b1", "b2"]
    assert found[0][0] == 1 and sorted(closed) == ["a", "b"], "the quick one does not wait"
    several = together([reply("c", 0.01, fail=True), reply("d", 0.03)])
    got = []
    with pytest.raises(EngineError, match="c"):
        got += several
    left = together([reply("e", 0.01), reply("f", 0.01)])
    next(left)
    left.close()
    until = time.monotonic() + 5
    while len(closed) < 6 and time.monotonic() < until:
        time.sleep(0.01)
    assert {"e", "f"} <= set(closed), "leaving closes all"


def token(id: int, text: str, logprob: float | None, entropy: float = 1.0) -> ScoredToken:
    return ScoredToken(id, text, logprob, entropy, ((" <b>x", -0.5),))


def test_tokens_in_colour():
    a = [token(1, "<script>", -1.0), token(2, "\n", -2.0, 3.0), token(3, " ", None)]
    b = [token(1, "<script>", -0.5), token(2, "\n", -4.0), token(3, " ", None)]
    found = cells(a, b)
    assert [cell.value("difference") for cell in found] == [0.5, -2.0, None]
    assert [cell.value("entropy") for cell in found] == [1.0, 3.0, 1.0]
    shown = token_map(found, "difference", ["<i>A", "B"])
    assert "<script>" not in shown and "<i>" not in shown and "<b>x" not in shown and "&lt;script&gt;" in shown
    assert "mean -0.750" in shown and "over 2 tokens" in shown
    assert "--tone: var(--for); --much: 18" in shown and "--tone: var(--against); --much: 70" in shown
    other = cells(a, [token(9, "x", -1.0)])
    assert all(cell.b is None for cell in other), "other tokens cannot be compared one by one"
    assert "log-probability of A" in token_map(other, "difference", ["A", "B"])
    assert "tokens map" in token_map([], "entropy", ["A"])


def test_votes_are_training_data(shared, tmp_path):
    file = tmp_path / "new/votes.jsonl"
    prompt = [{"role": "user", "content": "Who?"}]
    assert write_vote(file, prompt, "Tim", "Tom \udcff", {"chosen_model": "a", "rejected_model": "b"}) == 1
    assert write_vote(file, prompt, "Lily", "Lil", {}) == 2
    row = json.loads(file.read_text().splitlines()[0])
    assert row["prompt"] == prompt and row["chosen"] == [{"role": "assistant", "content": "Tim"}]
    tokenizer = AutoTokenizer.from_pretrained(shared / "models/stories260K")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    data = prepare(DataConfig(source=str(file), template="chat"), tokenizer, "pair")
    assert len(data.train) == 2 and not data.report.malformed
    file.write_bytes(file.read_bytes() + b'{"cut')  # by a full disk
    assert write_vote(file, prompt, "Lily", "Lil", {}) == 4
    assert json.loads(file.read_text().splitlines()[-1])["chosen"][0]["content"] == "Lily"
    (tmp_path / "folder").mkdir()
    with pytest.raises(RunError, match="cannot write"):
        write_vote(tmp_path / "folder", prompt, "a", "b", {})


def test_a_vote_names_the_models_that_answered(tmp_path):
    """Whatever the controls say by then; and nothing answers in place of model A."""
    from posttrain.ui import chat

    asked = [{"role": "user", "content": "Who?"}]
    sides = [[*asked, {"role": "assistant", "content": name}] for name in ("Tim", "Tom")]
    controls = chat.Controls("one", "two", "", "Be brief.", "auto", 0.7, 1, 8, None)
    votes = tmp_path / "votes.jsonl"
    said = chat._voted(votes, "B is better", controls, *sides)
    assert "1 preference, training data" in said
    row = json.loads((tmp_path / "votes.jsonl").read_text())
    assert (row["chosen_model"], row["rejected_model"]) == ("two", "one") and row["prompt"][0]["content"] == "Be brief."
    assert "Ask two models first" in chat._voted(votes, "A is better", None, *sides)
    assert "Ask two models first" in chat._voted(votes, "A is better", replace(controls, model_b=""), *sides)
    assert replace(controls, model_a="").models == []


def test_ties_both_bad_and_undo(shared, tmp_path):
    """Votes that no preference method learns from are dropped and counted; equal replies cannot be voted on."""
    from posttrain.ui import chat

    votes = tmp_path / "votes.jsonl"
    asked = [{"role": "user", "content": "Who?"}]
    sides = [[*asked, {"role": "assistant", "content": name}] for name in ("Tim", "Tom")]
    controls = chat.Controls("one", "two", "", "", "auto", 0.7, 1, 8, None)
    assert "Both replies are the same" in chat._voted(votes, "A is better", controls, sides[0], sides[0])
    assert "is not a vote on these replies" in chat._voted(votes, "Undo vote", controls, *sides)
    assert not votes.exists()
    for count, vote in enumerate(("A is better", "Tie", "Both bad"), 1):
        assert f"{count} preference" in chat._voted(votes, vote, controls, *sides)
    assert [json.loads(line).get("tie") for line in votes.read_text().splitlines()] == [None, True, True]
    other = [[*asked, {"role": "assistant", "content": name}] for name in ("Lily", "Tom")]
    assert "is not a vote on these replies" in chat._voted(votes, "Undo vote", controls, *other)
    assert "2 preferences left" in chat._voted(votes, "Undo vote", controls, *sides)
    assert len(votes.read_text().splitlines()) == 2
    tokenizer = AutoTokenizer.from_pretrained(shared / "models/stories260K")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"

    def prepared(method: str):
        values = {
            "models": [{"path": "x"}],
            "method": {"type": method},
            "data": {"source": str(votes), "template": "chat"},
        }
        return prepare_run(RunConfig.model_validate(values), tokenizer)

    data = prepared("dpo")
    assert len(data.train) == data.report.used == 1
    assert any("1 tie among 2 pairs dropped" in line for line in data.report.lines())
    assert len(prepared("reward").train) == 2
    same = [{"role": "assistant", "content": "Tim"}]
    with votes.open("a") as file:
        file.write(json.dumps({"prompt": asked, "chosen": same, "rejected": same}) + "\n")
    data = prepared("dpo")
    assert (len(data.train), data.report.identical, data.report.malformed) == (1, 1, ())
    assert "1 row (33%) whose chosen and rejected are the same, dropped" in data.report.lines()
    votes.write_text("".join(votes.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(DataError, match="no row can be used: train: 1 tie among 1 pair dropped"):
        prepared("dpo")


def test_the_lists_hold_models_that_can_do_what_they_are_for(tmp_path):
    from posttrain.ui import chat

    files = {
        "sft/final/config.json": {"architectures": ["LlamaForCausalLM"]},
        "reward/final/config.json": {"architectures": ["LlamaForSequenceClassification"]},
        "lora/final/adapter_config.json": {"task_type": "CAUSAL_LM"},
        "scorer/final/adapter_config.json": {"task_type": "SEQ_CLS"},
        "odd/final/config.json": [],
    }
    for name, facts in files.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(facts))
        (file.parent.parent / "run.json").write_text("{}")
    models = chat.Models(Viewer(tmp_path, tmp_path / "cache"), None)
    a, b, rewards = (sorted(choices) for choices in models.choices())
    assert a == b == ["lora/final", "odd/final", "sft/final"] and rewards == ["reward/final", "scorer/final"]


def test_texts_of_a_chatbot_are_those_of_the_model():
    from posttrain.ui import chat  # Gradio takes seconds

    said = "<b>bold</b> &amp; 1 < 2 <SOLUTION>4</SOLUTION> <!-- x --> a&b"
    assert "<b" not in chat.shown(said) and "&amp" not in chat.shown(said)
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "text", "text": chat.shown(said)}]},
    ]
    assert chat.turns_of(history)[1] == {"role": "assistant", "content": said}
    assert [turn["role"] for turn in chat.without_reply(history)] == ["user"]
    assert chat.taken_back(history) == [] and chat.taken_back([]) == []
