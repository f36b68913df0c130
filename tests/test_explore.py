"""What `explore` shows of tokens, and rows that look right and are not: no reply, no prompt, other delimiters."""

import csv
import io
import json
import sys

import pytest
from data_tokenizer import CHATML, byte_tokenizer, find_layout, prepare
from transformers import AutoTokenizer

from posttrain.base.errors import DataError
from posttrain.base.pieces import pieces
from posttrain.cli import main
from posttrain.config.schema.data import DataConfig
from posttrain.data.explore import ASCII, parts_of, tokens_text
from posttrain.data.readers import delimiter_of, read_files

STORY = "Once upon a time\n\nZoë met 你好 👍\tand  so\n<think>"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepared(path, rows, kind="sft", tokenizer=None, **settings):
    data = DataConfig(**{"source": write(path, rows), "template": "none", **settings})
    return prepare(data, tokenizer or byte_tokenizer(CHATML), kind)


@pytest.mark.parametrize(
    ("row", "count"),
    [
        ({"question": "q", "answer": "He has 6 + 7. #### 13"}, 1),
        ({"problem": "q", "answer": "so \\boxed{13}"}, 1),
        ({"problem": "q", "solution": "He has 6 + 7.\n#### 13"}, 1),
        ({"problem": "q", "answer": " 13 "}, 0),
        ({"problem": "q", "answer": 13}, 0),
        ({"prompt": "q", "answer": "13"}, 0),
    ],
)
def test_an_answer_that_is_a_part_of_its_column_is_reported(tmp_path, row, count):
    data = prepared(tmp_path / "rows.jsonl", [row], "prompt")
    assert data.report.extracted == count and (data.train[0].facts or {})["answer"] == "13"
    said = "1 row (100%) whose answer for rewards is a part of the data's text, such as that after ####"
    assert (said in data.report.lines()) == bool(count)


@pytest.mark.parametrize("label", [0, 0.0, "no", False])
def test_sft_reports_completions_labelled_undesirable(tmp_path, label):
    rows = [{"prompt": f"q{n}", "completion": "a", "label": label if n else 1} for n in range(3)]
    own = {"format": "prompt_completion"} if label is False else {}  # otherwise a boolean is refused
    report = prepared(tmp_path / "rows.jsonl", rows, **own).report
    assert "2 rows (67%) labelled false or 0 (undesirable in KTO's data), trained on like the others" in report.lines()
    assert not prepared(tmp_path / "rows.jsonl", rows, "prompt").report.undesirable  # completions are not trained on
    texts = [{"text": "a review", "label": label} for label in (0, 1)]
    assert not prepared(tmp_path / "rows.jsonl", texts).report.undesirable  # a class of the text


@pytest.mark.parametrize("name", ["models/stories260K", "tokenizers/gpt2", "tokenizers/qwen3"])
def test_pieces_are_the_text_and_no_character_is_broken(shared, name):
    """stories260K falls back to bytes: `ë`, `你` and line breaks are tokens of single bytes there."""
    tokenizer = AutoTokenizer.from_pretrained(shared / name)
    ids = tokenizer(STORY).input_ids
    found = list(pieces(ids, tokenizer))
    texts = [text for _, text in found]
    assert "".join(texts) == tokenizer.decode(ids) and sum(count for count, _ in found) == len(ids)
    assert not any("\ufffd" in text for text in texts)
    assert name != "models/stories260K" or {"你", "好", "ë", "\n"} <= set(texts)
    end = len(ids) - 3
    behind = "".join(text for _, text in pieces(ids[end:], tokenizer, ids[end - 4 : end]))
    assert "".join(texts).endswith(behind) and len(behind) >= 3, "a reply is decoded behind its prompt"


def test_bytes_that_are_no_character_hold_nothing_up(shared):
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "gpt2")
    broken = tokenizer("é").input_ids[:1] * 6 + tokenizer(" so").input_ids
    found = list(pieces(broken, tokenizer))
    assert sum(count for count, _ in found) == len(broken) and found[-1][1].endswith(" so")


def test_the_first_token_of_a_sequence_is_not_trained(shared, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(shared / "models" / "stories260K")
    [document] = parts_of(
        prepared(tmp_path / "a.jsonl", [{"text": "Once\nZoë"}], tokenizer=tokenizer).train[0], tokenizer
    )
    assert tokens_text(document).plain == "<s>⟦ Once↵\nZoë</s>⟧"
    assert tokens_text(document, ASCII).plain == "<s>[[ Once\\n\nZoë</s>]]"
    row = {"prompt": "Once", "completion": " upon\n"}
    [asked] = parts_of(prepared(tmp_path / "b.jsonl", [row], tokenizer=tokenizer).train[0], tokenizer)
    assert tokens_text(asked).plain == "<s> Once⟦ upon↵\n</s>⟧"
    pair = {"prompt": "Once", "chosen": " upon", "rejected": " more"}
    parts = parts_of(prepared(tmp_path / "c.jsonl", [pair], "pair", tokenizer).train[0], tokenizer)
    assert [tokens_text(part).plain for part in parts] == ["<s> Once", "⟦ upon</s>⟧", "⟦ more</s>⟧"]


def test_explore_survives_a_locale_without_its_characters(tmp_path, monkeypatch):
    byte_tokenizer().save_pretrained(tmp_path / "model")
    rows = write(tmp_path / "a.jsonl", [{"prompt": "Zoë", "completion": "你好\n"}])
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", out)
    command = ["explore", "method=sft", f"model.path={tmp_path / 'model'}", f"data.source={rows}"]
    assert main([*command, "data.template=none"]) == 0
    shown = out.buffer.getvalue().decode("ascii")
    assert "Zo\\xeb[[\\u4f60\\u597d\\n" in shown and "[[trained]]" in shown


USER, REPLY = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
GOOD = {
    "sft": [{"messages": [USER, REPLY, dict(USER, content=str(n))]} for n in range(200)],
    "pair": [{"prompt": f"Q{n}", "chosen": "yes", "rejected": "no"} for n in range(200)],
}


@pytest.mark.parametrize(
    ("kind", "row", "reason"),
    [
        ("sft", {"messages": [USER]}, "the conversation has no assistant turn, so there is no reply"),
        ("pair", {"prompt": [USER], "chosen": [USER], "rejected": [REPLY]}, "chosen has no assistant turn"),
        ("pair", {"prompt": [USER], "chosen": [REPLY], "rejected": [USER]}, "rejected has no assistant turn"),
        ("pair", {"prompt": None, "chosen": "yes", "rejected": "no"}, "the pair has no prompt (null or missing)"),
        ("pair", {"chosen": "yes", "rejected": "no"}, "the pair has no prompt (null or missing)"),
        ("pair", {"prompt": None, "chosen": [REPLY], "rejected": [dict(REPLY, content="B")]}, "has no prompt"),
        ("pair", {"prompt": None, "system": "Be.", "chosen": "yes", "rejected": "no"}, "has no prompt"),
    ],
)
@pytest.mark.parametrize("template", ["chat", "alpaca"])
def test_a_row_without_reply_or_prompt_is_malformed(tmp_path, kind, row, reason, template):
    report = prepared(tmp_path / "a.jsonl", [*GOOD[kind], row], kind, template=template).report
    [bad] = report.malformed
    assert (bad.line, report.used) == (201, 200) and reason in bad.reason


def test_pairs_without_prompts_share_what_begins_alike_whatever_the_column(tmp_path):
    """A column `prompt` that is null everywhere is no prompt that some row lacks."""
    rows = [{"prompt": None, "chosen": f"Q{n}: yes", "rejected": f"Q{n}: no"} for n in range(3)]
    assert prepared(tmp_path / "a.jsonl", rows, "pair").report.used == 3
    whole = {"prompt": None, "chosen": [USER, REPLY], "rejected": [USER, dict(REPLY, content="B")]}
    rows = [*[{**whole, "prompt": [USER]}] * 2, whole]
    assert prepared(tmp_path / "b.jsonl", rows, "pair", template="chat").report.used == 3, "the turns tell the prompt"


@pytest.mark.parametrize(
    ("columns", "advice"),
    [
        ({"chosen": "nope"}, "has no column 'nope' (for chosen); did you mean chosen? it has prompt, chosen, rejected"),
        ({"chosen": "choosen"}, "has no column 'choosen' (for chosen); did you mean chosen? it has prompt"),
        ({"prompt": "rejecte"}, "(for prompt); did you mean rejected? it has prompt, chosen, rejected"),
    ],
)
def test_a_column_that_is_not_there(columns, advice):
    row = {"prompt": "Q", "chosen": "a", "rejected": "b"}
    with pytest.raises(DataError) as error:
        find_layout("auto", columns, [row], "pair", "rows.jsonl")
    assert advice in str(error.value)


ROWS = [("What is 1,5; or 2?", "it; is, 3"), ("a\tb", "c\nd"), ('say "so"', "")]


@pytest.mark.parametrize(("delimiter", "name"), [(",", "a.csv"), (";", "a.csv"), ("\t", "a.csv"), ("\t", "a.tsv")])
def test_values_between_commas_semicolons_and_tabs(tmp_path, delimiter, name):
    with open(tmp_path / name, "w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([("prompt", "completion"), *ROWS])
    found = [tuple((record.value or {}).values()) for record in read_files((tmp_path / name,))]
    assert found == ROWS


@pytest.mark.parametrize(
    ("delimiter", "text"),
    [
        (",", "text\none; two\nthree; four\n"),
        (",", "a;b,c\n1;2,3\n4;5,6\n"),
        (",", "a,b\n1;2,3;4\n"),
        (",", "a,b;c\n1,2;3\n4,5;6\n"),
        (",", '"a;b"\n1\n2\n'),
        (",", "a;b\nno such thing\nnor here\n"),
        (",", "a,b\n" + "1,2\n" * 9 + "only one\n"),
        (",", ""),
        (";", "a;b\n1,5;2\n3;4\n"),
        (";", 'a;b\n"1;1";2,0\n'),
        (";", "a, or b;c\n1;2, 3, 4\n5;6\n"),
        ("\t", "a\tb\n1;2\t3,4\n"),
    ],
)
def test_a_correct_comma_file_is_never_divided_otherwise(delimiter, text):
    assert delimiter_of(text) == delimiter


@pytest.mark.parametrize("verb", ["explore", "plan", "train"])
def test_what_is_not_read_is_said_once_with_its_count(verb, scratch_model, tmp_path, capsys):
    """Columns and keys of messages, by every command that reads the data; of prompts, rewards get the columns."""
    turns = [{"role": "user", "content": "q", "time": 3}, {"role": "assistant", "content": "a", "time": 4, "to": None}]
    rows = [{"messages": turns, "me\x1bta": {"a": n}, "url": "x" if n % 2 else None} for n in range(12)]
    write(tmp_path / "rows.jsonl", rows)
    settings = [f"model={scratch_model}", f"data.source={tmp_path / 'rows.jsonl'}", "devices.type=cpu"]
    more = {"explore": ["--rows", "0", "--no-quality"], "plan": [], "train": ["training.max_steps=1"]}[verb]
    name = f"output_dir={tmp_path}"
    assert main([verb, "method=sft", *settings, name, "name=run", *more]) == 0
    captured = capsys.readouterr()
    said = " ".join((captured.out + captured.err).split())
    log = tmp_path / "run/training.log"
    said += " ".join(log.read_text().split()) if log.exists() else ""
    for line in (r"`me\x1bta` in 12 of 12 rows", "`url` in 6 of 12 rows", "`messages[].time` in 12 of 12 rows"):
        assert f"not read: {line}" in said, (line, said)
    assert "messages[].to" not in said and said.count("messages[].time") <= (2 if verb == "train" else 1)
    if verb == "explore":
        write(tmp_path / "rows.jsonl", [{"prompt": "q", "answer": "4", "topic": "x"}, {"prompt": "r", "answer": "5"}])
        rewards = 'rewards=[{"type": "length", "target": 4}]'
        assert main([verb, "method=grpo", rewards, "data.format=prompt_completion", *settings, *more]) == 1
        assert main([verb, "method=grpo", rewards, "data.max_length=600", *settings, *more]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "not read: `topic` in 1 of 2 rows (rewards in Python receive it)" in said and "`answer`" not in said
