"""`posttrain score`: rows out as they came in, with the numbers of plain transformers."""

import json
import shutil
from datetime import date

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from posttrain.cli import main


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_logprobs_equal_transformers(tmp_path, shared, capsys):
    rows = [
        {"prompt": "Once upon a time", "completion": c, "n": i}
        for i, c in enumerate([" there was a cat.", " Lily ran", ""])
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    model = shared / "models/stories260K"
    shutil.copytree(model, tmp_path / "run/final")
    for path in (model, tmp_path / "run"):
        assert main(["score", str(path), str(file), "--template", "none", "--overwrite"]) == 0
    print(capsys.readouterr().out)
    out = read(tmp_path / "rows.jsonl.scored.jsonl")
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    for row, scored in zip(rows, out, strict=True):
        assert {k: scored[k] for k in row} == row
        prompt = tokenizer(row["prompt"])["input_ids"]
        ids = torch.tensor(tokenizer(row["prompt"] + row["completion"])["input_ids"] + [tokenizer.eos_token_id])
        with torch.no_grad():
            logprobs = plain(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
        want = logprobs[len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(scored["logprobs"]), want, rtol=0, atol=1e-5)
        assert scored["logprob"] == pytest.approx(float(want.sum()), abs=1e-4)


def test_rewards_of_pairs_and_a_bad_row(tmp_path, shared, scratch_model):
    """A reward model gives both rewards of a pair; a row that cannot be read keeps its place and says why."""
    folder = tmp_path / "reward"
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(scratch_model, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (scratch_model / name).exists():
            shutil.copy(scratch_model / name, folder / name)
    rows = [{"prompt": f"{i} + 1?", "chosen": f"{i + 1}", "rejected": "no"} for i in range(120)]
    lines = [json.dumps(row) for row in rows]
    lines[57] = '{"prompt": "broken'
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(lines))
    output = tmp_path / "out.jsonl"
    assert main(["score", str(folder), str(file), "--output", str(output)]) == 0
    out = read(output)
    assert len(out) == 120 and "error" in out[57] and "chosen_reward" not in out[57]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for i in (0, 119):
        chat = [{"role": "user", "content": rows[i]["prompt"]}, {"role": "assistant", "content": rows[i]["chosen"]}]
        ids = torch.tensor(tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False))
        with torch.no_grad():
            want = float(model(ids[None]).logits)
        assert out[i]["chosen_reward"] == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere/at/all", "rows.jsonl"], "no such folder"),
        (["MODEL", "absent.jsonl"], "cannot be read"),
        (["MODEL", "rows.jsonl", "--format", "alpacca"], "alpaca"),
        (["MODEL", "rows.jsonl", "--template", "none", "--max-length", "3"], "over the length limits"),
        (["MODEL", "rows.jsonl"], "neither"),
    ],
)
def test_mistakes_are_named(tmp_path, shared, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Once", "completion": " upon a time"}\n')
    if message == "neither":
        (tmp_path / "rows.jsonl").write_text('{"question": "Once"}\n')
        message = "question"
    arguments = [str(shared / "models/stories260K") if a == "MODEL" else a for a in arguments]
    assert main(["score", *arguments]) == 1
    error = capsys.readouterr().err
    print(error)
    assert message in error and "Traceback" not in error
    assert not list(tmp_path.glob("*.scored.jsonl"))


def test_columns_of_any_kind_come_out_and_a_bad_place_is_told_first(tmp_path, shared, capsys):
    """Dates and bytes of Parquet; an output that cannot be written costs no scoring."""
    row = {"prompt": "Once", "completion": " upon", "day": date(2024, 1, 2), "raw": b"x"}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    command = ["score", str(shared / "models/stories260K"), str(tmp_path / "rows.parquet"), "--template", "none", "-o"]
    assert main([*command, str(tmp_path / "out/scored.jsonl")]) == 0
    (out,) = read(tmp_path / "out/scored.jsonl")
    assert out["day"] == "2024-01-02" and out["raw"] == "b'x'" and out["logprob"] < 0
    capsys.readouterr()
    assert main([*command, str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "it is a folder" in error and "scoring" not in error


@pytest.fixture
def short_gpt2(tmp_path, scratch_model):
    """A GPT-2 with a table of 32 positions."""
    folder = tmp_path / "short"
    tokenizer = AutoTokenizer.from_pretrained(scratch_model)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=32, n_embd=16, n_layer=1, n_head=1, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_texts_longer_than_a_table_of_positions_are_refused(tmp_path, short_gpt2, capsys):
    """Only where a text that is used is longer: that the limit is higher is no harm, nor a row that is dropped."""
    rows = [{"prompt": "Once", "completion": " a" * words} for words in (5, 5, 60)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = ["method=sft", f"data.source={tmp_path / 'rows.jsonl'}", "data.template=none", "data.max_length=50"]
    assert main(["plan", *settings, f"model.path={short_gpt2}"]) == 0
    for words, refused in ((5, False), (60, True)):
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Once", "completion": " a" * words}) + "\n")
        rows = str(tmp_path / "rows.jsonl")
        settings = ["method=sft", f"data.source={rows}", "data.template=none", f"model.path={short_gpt2}"]
        settings += ["training.max_steps=1", f"output_dir={tmp_path}", f"name=run-{words}"]
        for command in (
            ["score", str(short_gpt2), rows, "--template", "none", "--overwrite"],
            ["plan", *settings],
            ["train", *settings],
        ):
            assert main(command) == refused, command
            error = capsys.readouterr().err
            beyond = "this model has 32 positions, but the longest example has 6"
            what = beyond if command[0] == "score" else "1 row (100%) over the length limit"
            assert (what in error) == refused
            assert "IndexError" not in error


def test_overlong_decides_about_examples_beyond_a_table_of_positions(tmp_path, short_gpt2, capsys):
    """As beyond data.max_length; where positions are computed, a longer example is trained on and warned of."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": "Once", "completion": " a" * words}) + "\n" for words in (5, 5, 60)))
    settings = ["method=sft", f"data.source={file}", "data.template=none", f"model.path={short_gpt2}"]
    settings += ["training.max_steps=1", "training.batch_size=1", f"output_dir={tmp_path}"]
    for overlong, said in (("drop", "1 row (33%) over the length limit, dropped"), ("truncate", "limit, truncated")):
        assert main(["train", *settings, f"data.overlong={overlong}", f"name={overlong}"]) == 0
        assert said in (tmp_path / overlong / "training.log").read_text()
    assert main(["train", *settings, "data.overlong=error", "name=error"]) == 1
    assert "32" in capsys.readouterr().err
    llama = tmp_path / "llama"
    LlamaForCausalLM(
        LlamaConfig(vocab_size=6400, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
                    max_position_embeddings=32, eos_token_id=1, bos_token_id=None)
    ).save_pretrained(llama)  # fmt: skip
    AutoTokenizer.from_pretrained(short_gpt2).save_pretrained(llama)
    assert main(["train", *settings, f"model.path={llama}", "name=of-llama"]) == 0
    assert "llama was trained on 32 positions" in (tmp_path / "of-llama/training.log").read_text()


def test_a_reward_model_is_no_policy(tmp_path, scratch_model, capsys):
    folder = tmp_path / "reward"
    AutoModelForSequenceClassification.from_pretrained(scratch_model, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(scratch_model).save_pretrained(folder)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Once", "completion": " a"}\n')
    settings = [f"data.source={tmp_path / 'rows.jsonl'}", f"model.path={folder}", f"output_dir={tmp_path}"]
    for command in (["generate", str(folder), str(tmp_path / "rows.jsonl")], ["train", "method=sft", *settings]):
        assert main(command) == 1
        assert "is a reward model, which scores completions and cannot generate" in capsys.readouterr().err
