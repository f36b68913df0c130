"""`posttrain generate` and `posttrain sample`: prompts from every kind of row, what is written, what is suggested."""

import json
import re
import shutil

import pytest
import torch
import yaml

from posttrain.cli import main
from posttrain.config import DataConfig, dump, load
from posttrain.config.schema.rollout import RolloutConfig
from posttrain.data.prompts import prompts_of
from posttrain.data.readers import Record
from posttrain.inspection.sample import Measured, format_of, suggestions
from posttrain.models.load import load_model, load_tokenizer

TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
ROWS = {
    "prompt": ({"prompt": "Hi"}, "Hi"),
    "prompt as messages": ({"prompt": TURNS[:1]}, "Hi"),
    "question": ({"question": "Hi"}, "Hi"),
    "problem and answer": ({"problem": "Hi", "answer": "3"}, "Hi\n"),
    "prompt and completion": ({"prompt": "Hi", "completion": "Hello"}, "Hi"),
    "pair": ({"prompt": "Hi", "chosen": "a", "rejected": "b"}, "Hi"),
    "transcript": (
        {"chosen": "\n\nHuman: Hi\n\nAssistant: a", "rejected": "\n\nHuman: Hi\n\nAssistant: b"},
        "\n\nHuman: Hi\n\nAssistant:",
    ),
    "alpaca": ({"instruction": "Hi", "input": "", "output": "Hello"}, "Hi\n"),
    "document": ({"text": "Once upon"}, "Once upon"),
}


@pytest.fixture(scope="module")
def tokenizer(shared):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared / "tokenizers" / "minimind6400")


@pytest.mark.parametrize("name", ROWS)
def test_what_is_asked(tokenizer, name):
    row, text = ROWS[name]
    data = DataConfig(source="f.jsonl", template="none")
    [found] = prompts_of([Record(0, "f.jsonl", 1, row)], data, tokenizer, "f.jsonl")
    assert found.text == text and found.facts["columns"] == row and tokenizer.decode(found.tokens) == text


@pytest.mark.parametrize("row", [{"messages": TURNS}, {"messages": TURNS[:1]}, {"prompt": "Hi"}])
def test_the_template_opens_the_reply(tokenizer, row):
    """A conversation's own last reply is not part of what is asked."""
    data = DataConfig(source="f.jsonl", system_prompt="Be brief.")
    [found] = prompts_of([Record(0, "f.jsonl", 1, row)], data, tokenizer, "f.jsonl")
    asked = [{"role": "system", "content": "Be brief."}, TURNS[0]]
    assert found.text == tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)


def write_prompts(path):
    rows = [{"prompt": "Once upon a time", "id": 7}, {"prompt": 3}, {"prompt": "Lily and Tom"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


@pytest.mark.parametrize("engine", ["embedded", "transformers"])
def test_generate(shared, tmp_path, capsys, engine):
    rows = write_prompts(tmp_path / "p.jsonl")
    model = str(shared / "models/stories260K")
    if engine == "embedded":  # the folder of a run is as good
        shutil.copytree(model, tmp_path / "run/final")
        model = str(tmp_path / "run")
    arguments = ["generate", model, str(tmp_path / "p.jsonl"), "-n", "3", "--max-completion-length", "12"]
    assert main([*arguments, "--engine", engine, "--stop", "."]) == 0
    assert "6 completions of 2 prompts" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl.generated.jsonl").read_text().splitlines()]
    assert [{k: v for k, v in line.items() if k not in ("completions", "error")} for line in lines] == rows
    assert "prompt must be" in lines[1]["error"] and "completions" not in lines[1]
    for line in (lines[0], lines[2]):
        assert len(line["completions"]) == 3
        for done in line["completions"]:
            assert set(done) == {"text", "token_ids", "logprobs", "finish_reason"}
            assert 1 <= len(done["token_ids"]) == len(done["logprobs"]) <= 12
            assert ("." in done["text"]) == (done["finish_reason"] == "stop")


@pytest.mark.parametrize("version", [None, 1, 2])
def test_the_prompts_of_a_runs_model_are_those_of_its_version(shared, tmp_path, monkeypatch, version):
    """Version 1, also that of a run without the record, writes a second begin token before a text that has one."""
    from posttrain.export import rows as exported
    from posttrain.inspection import rows, sample

    run = tmp_path / "run"
    shutil.copytree(shared / "models/stories260K", run / "final")
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "<s>Once"}) + "\n")
    asked = {"model": {"path": str(run / "final")}, "method": "grpo", "rewards": [{"type": "length", "target": 6}]}
    asked |= {"data": {"source": str(tmp_path / "p.jsonl"), "template": "none"}}
    settings = yaml.safe_load(dump(load(asked).config))
    settings = {name: value for name, value in settings.items() if name != "behavior_version"}
    settings |= {} if version is None else {"behavior_version": version}
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    (run / "run.json").write_text("{}")
    found = []

    def spy(*arguments):
        found.append(prompts_of(*arguments))
        return found[-1]

    for module in (rows, sample, exported):
        monkeypatch.setattr(module, "prompts_of", spy)
    model, file = str(run / "final"), tmp_path / "p.jsonl"
    few = ["--max-completion-length", "2", "-n", "2"]
    assert main(["generate", model, str(file), "--template", "none", *few]) == 0
    assert main(["sample", model, *few]) == 0
    config = load(run / "config.yaml").config
    tokenizer = load_tokenizer(config.models[0])
    loaded = load_model(config.models[0], "lm", torch.float32, torch.device("cpu"))
    both = [exported.prompts_for(asked, config, loaded, tokenizer)[0] for asked in (file, None)]
    assert [[one.tokens for one in some] for some in found] == both * 2
    assert [tokens.count(tokenizer.bos_token_id) for [tokens] in both] == [2 if version != 2 else 1] * 2


def test_a_prompt_without_room_is_an_error_of_its_row(shared, tmp_path):
    rows = [{"prompt": "Once upon a time " * 300}, {"prompt": "Once"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = str(shared / "models/stories260K")
    assert main(["generate", model, str(tmp_path / "p.jsonl"), "--max-completion-length", "3"]) == 0
    long, short = map(json.loads, (tmp_path / "p.jsonl.generated.jsonl").read_text().splitlines())
    assert "leaves no room" in long["error"] and "completions" not in long and len(short["completions"]) == 1


def test_generate_is_the_same_whatever_the_engine_and_the_other_rows(shared, tmp_path):
    write_prompts(tmp_path / "p.jsonl")
    (tmp_path / "one.jsonl").write_text(json.dumps({"prompt": "Once upon a time"}) + "\n")
    model, found = str(shared / "models/stories260K"), []
    for file, engine in (("p", "embedded"), ("p", "transformers"), ("one", "embedded")):
        target = tmp_path / f"{file}.{engine}.jsonl"
        arguments = ["generate", model, str(tmp_path / f"{file}.jsonl"), "-n", "2", "-o", str(target), "--seed", "5"]
        assert main([*arguments, "--engine", engine, "--max-completion-length", "20"]) == 0
        first = json.loads(target.read_text().splitlines()[0])
        found.append([done["token_ids"] for done in first["completions"]])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--top-p", "0", "--top-p is 0.0; it must be a number above 0 and at most 1"),
        ("--engine", "vlm", "--engine is 'vlm'; "),
        ("--temperature", "-1", "--temperature is -1.0; it must be a number of 0 or more"),
        ("--format", "promt", "--format is 'promt'; did you mean prompt?"),
    ],
)
def test_wrong_flags_are_named(tmp_path, capsys, flag, value, message):
    assert main(["generate", "model", str(tmp_path / "p.jsonl"), flag, value]) == 2
    assert message in capsys.readouterr().err


def test_a_format_of_prompts_trains_nothing(tmp_path, capsys):
    settings = {"model": {"path": "m"}, "method": "sft", "data": {"source": "p.jsonl", "format": "prompt"}}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(settings))
    assert main(["config", "show", str(tmp_path / "a.yaml")]) == 1
    assert "data.format is prompt, which has no completions for sft to learn from" in capsys.readouterr().err


def test_sample_draws_with_the_settings_of_the_run(shared, scratch_model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    settings = {
        "name": "r",
        "model": {"path": str(scratch_model), "lora": True},
        "method": "sft",
        "data": {"source": "builtin:arithmetic", "max_rows": 20, "template": "tags", "validation": {"ratio": 0.2}},
        "training": {"max_steps": 1, "batch_size": 2},
        "rewards": [{"type": "length", "target": 6, "scale": 1.0}, {"type": "match_format_exactly", "weight": 0.5}],
    }
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(settings))
    assert main(["train", "a.yaml"]) == 0
    capsys.readouterr()
    assert main(["sample", "runs/r", "--prompts", "2", "-n", "3", "--max-completion-length", "8"]) == 0
    out = capsys.readouterr().out
    assert "<start_working_out>" in out, "the prompt ends as the template of the run has it"
    assert "runs/r/final" in out and "cut off" in out and "spread" in out and "100%" in out
    rows = re.findall(r"^ *(\d+) +8 +8 to 8 +100% +\d+% +0% +(\S+) +(\S+) *$", out, re.MULTILINE)
    assert rows == [("0", "-2", "0"), ("1", "-2", "0")], "8 tokens are 2 beyond the target, and none is in format"
    assert "row 0, reward -2" in out and "2 have completions with equal rewards" in out
    assert "truncated at 8 tokens" in out and "Only 0% of completions follow the template's format" in out
    assert main(["sample", "runs/nothing"]) == 2 and "is not a folder" in capsys.readouterr().err


def test_formats():
    tags = format_of(DataConfig(source="f", template="tags"))
    assert tags("so 3<end_working_out><SOLUTION>3</SOLUTION>") and not tags("3") and not tags("</SOLUTION>" * 2)
    assert format_of(DataConfig(source="f", template="r1_zero"))(" x </think> <answer> 3 </answer>")
    assert format_of(DataConfig(source="f", template="question_only"))("it is \\boxed{3}")
    assert format_of(DataConfig(source="f")) is None


def test_suggestions():
    rollout = RolloutConfig(max_completion_length=8)

    def said(**changes):
        fine = dict(row=0, lengths=(4, 5), truncated=0.0, distinct=1.0, formatted=1.0)
        return " ".join(suggestions([Measured(**(fine | changes))], rollout))

    assert said() == "No problems found."
    assert "truncated at 8 tokens" in said(truncated=1.0)
    assert "raise the temperature" in said(distinct=0.25)
    assert "Train with SFT first" in said(formatted=0.1) and said(formatted=None) == said()
    assert said(rewards=(0.0, 1.0)) == said()
    assert "Of 1 prompt, 1 has completions with equal rewards" in said(rewards=(1.0, 1.0))
    assert "1 of 2 completions have no reward" in said(rewards=(1.0,))
    assert "None of the 2 completions has a reward" in said(rewards=())
    one, other = (Measured(0, (4, 5), 0.0, 1.0, None, rewards) for rewards in ((0.0, 1.0), (1.0, 1.0)))
    [few] = suggestions([one, one, other], rollout)
    assert few == "Of 3 prompts, 1 has completions with equal rewards, from which nothing is learned."
