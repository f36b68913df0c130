"""Data sets known by name, and data sets kept in a folder for offline use."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_tokenizer import CHATML, byte_tokenizer, prepare
from test_data_sources import hub_cache

from posttrain.base.errors import DataError
from posttrain.cli import main
from posttrain.config.schema.data import DataConfig
from posttrain.config.schema.datasets import known_set, known_sets
from posttrain.data import sources
from posttrain.data.readers import Record
from posttrain.data.sources import keep, layout_of, splits_of

KNOWN = known_sets()
CHAT = [{"role": "user", "content": "Q?"}]
WORSE, BETTER = ([*CHAT, {"role": "assistant", "content": text}] for text in ("worse", "better"))

# Short name -> (file in the repository, a row with the columns that the data set has on the hub, the split to ask for).
ON_THE_HUB = {
    "hh-rlhf": (
        "train.parquet",
        {"chosen": "\n\nHuman: Q?\n\nAssistant: better", "rejected": "\n\nHuman: Q?\n\nAssistant: worse"},
        "train",
    ),
    "ultrafeedback": (
        "data/train-0.parquet",
        {"chosen": BETTER, "rejected": WORSE, "score_chosen": 8.0, "score_rejected": 2.0},
        "train",
    ),
    "orca-dpo-pairs": ("data/test_prefs-0.parquet", {"chosen": BETTER, "rejected": WORSE, "prompt": "Q?"}, "test"),
    "stack-exchange-paired": (
        "data/rl/train-0.parquet",
        {"qid": 1, "question": "Q?", "date": "today", "response_j": "better", "response_k": "worse"},
        "train",
    ),
    "openmathreasoning-mini": (
        "data/cot-0.parquet",
        {"problem": "Q?", "generated_solution": "better", "expected_answer": "3", "pass_rate_72b_tir": "0.9"},
        "train",
    ),
    "dapo-math-17k": (
        "en/train-0.parquet",
        {"prompt": "Q?", "solution": "better", "source_prompt": CHAT, "ability": "MATH"},
        "train",
    ),
    "gsm8k": ("main/test-0.parquet", {"question": "Q?", "answer": "better\n#### 3"}, "test"),
    "math": ("data/train-0.parquet", {"problem": "Q?", "level": "1", "type": "x", "solution": "better"}, "train"),
    "openmathreasoning": (
        "data/tir-0.parquet",
        {"problem": "Q?", "generated_solution": "better", "expected_answer": "3", "inference_mode": "tir"},
        "tir",
    ),
    "aime24": ("data/train-0.parquet", {"problem": "Q?", "solution": "better", "answer": "3", "year": "2024"}, "test"),
    "aime25": ("test.parquet", {"problem": "Q?", "answer": "better", "id": "0"}, "test"),
    "amc": ("data/train-0.parquet", {"id": 0, "problem": "Q?", "answer": 142.0, "url": "x"}, "test"),
    "minerva-math": ("test.parquet", {"question": "Q?", "answer": "better"}, "test"),
    "olympiadbench": (
        "OlympiadBench/train-0.parquet",
        {"question": "Q?", "solution": ["better", "worse"], "final_answer": ["3"], "answer_type": "Numerical"},
        "test",
    ),
    "svamp": ("data/test-0.parquet", {"question": "Q?", "chain": "x", "result": "better", "result_float": 3.0}, "test"),
    "math-500": ("test.parquet", {"problem": "Q?", "solution": "better", "answer": "3", "unique_id": "1"}, "test"),
}


def parquet(folder: Path, row: dict) -> bytes:
    path = folder / "row.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    return path.read_bytes()


def test_every_known_set_is_read_with_its_columns(tmp_path):
    """In one process of its own, since the hub's library reads its settings when it is imported."""
    assert ON_THE_HUB.keys() == KNOWN.keys()
    for name, (file, row, _) in ON_THE_HUB.items():
        content = {file: parquet(tmp_path, row)}
        subset = KNOWN[name].source.removeprefix(KNOWN[name].repo)[1:]
        if subset or KNOWN[name].splits:
            card = f"---\nconfigs:\n- config_name: {subset or 'default'}\n  data_files: SPLITS\n---\n"
            split = Path(file).name.partition("-")[0]
            content["README.md"] = card.replace("SPLITS", f"[{{split: {split}, path: {file}}}]").encode()
        hub_cache(tmp_path, KNOWN[name].repo, content)
    code = """
import json, sys
from data_tokenizer import byte_tokenizer
from posttrain.config.schema.data import DataConfig
from posttrain.data import prepare
from posttrain.base.errors import DataError
tokenizer = byte_tokenizer()
found = {}
for name, kind, split in json.load(sys.stdin):
    data = prepare(DataConfig(source=name, split=split, template="none"), tokenizer, kind)
    node = data.train[0].trees[0]
    texts = [node, *node.children]
    found[name] = [data.report.formats[0], *(tokenizer.decode(each.tokens) for each in texts)]
try:
    prepare(DataConfig(source="gsm8k", split="train", template="none"), tokenizer, "sft")
except DataError as error:
    found["no split"] = str(error)
print(json.dumps(found))
"""
    asked = [
        [n, "pair" if KNOWN[n].format in ("hh", "preference") else "sft", s] for n, (_, _, s) in ON_THE_HUB.items()
    ]
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    env |= {"POSTTRAIN_CACHE": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, input=json.dumps(asked), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("no split") == "openai/gsm8k/main has no split 'train': it has test"
    for name, (format, *texts) in found.items():
        whole = "".join(texts)
        assert format == KNOWN[name].format, name
        assert "Q?" in texts[0] and ("142" if name == "amc" else "better") in whole, (name, texts)
        assert ("worse" in whole) == (len(texts) == 3) == (KNOWN[name].format in ("hh", "preference")), (name, texts)


# file of the folder of real data -> (the known set that has its columns, rows, and the answer to the first problem)
LOCAL = {
    "aime24.json": ("aime24", 30, "204"),
    "amc.json": ("amc", 83, "142"),
    "minerva_math.jsonl": ("math", 272, "1.6"),
    "olympiadbench.jsonl": ("olympiadbench", 675, "2"),
    "math500.jsonl": ("math-500", 500, None),
}


@pytest.mark.parametrize("file", LOCAL)
def test_benchmarks_are_read_whole(shared, tmp_path, file):
    """Real rows with the columns that a known set maps: every one has its answer, and none is malformed."""
    name, rows, first = LOCAL[file]
    data = DataConfig(
        source=str(shared / "data/math" / file),
        format=KNOWN[name].format,
        columns=KNOWN[name].columns,
        template="question_only",
        max_length=10_000,
        max_prompt_length=None,
    )
    prompts = prepare(data, byte_tokenizer(), "prompt", cache_dir=tmp_path).train
    answers = [prompts[index].facts["answer"] for index in range(len(prompts))]
    assert len(answers) == rows and all(answers)
    assert first is None or answers[0] == first
    learnt = prepare(data.model_copy(update={"template": "r1_zero"}), byte_tokenizer(), "sft", cache_dir=tmp_path)
    assert learnt.report.read == rows and not learnt.report.malformed


def test_names():
    assert known_set("gsm8k") is known_set("openai/gsm8k") is known_set("OpenAI/GSM8K/socratic") is KNOWN["gsm8k"]
    assert known_set("someone/else") is None and layout_of("gsm8k") is KNOWN["gsm8k"]
    with pytest.raises(DataError, match=r"gsm8 is neither a file or folder here nor .* data set: did you mean gsm8k"):
        prepare(DataConfig(source="gsm8"), byte_tokenizer(CHATML), "sft")


ROWS = [{"question": f"What is {n} and 1?", "answer": f"{n} + 1\n#### {n + 1}", "é": n} for n in range(5)]


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A folder of two splits kept as `kept`."""
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "source"
    source.mkdir()
    lines = [json.dumps(row) for row in ROWS]
    (source / "train.jsonl").write_text("\n".join([*lines, "{broken"]))
    (source / "test.jsonl").write_text(lines[0])
    done = keep("source", Path("kept"))
    assert [(one.name, one.rows, one.malformed) for one in done] == [("train", 5, 1), ("test", 1, 0)]
    return tmp_path / "kept"


def test_what_is_kept_is_what_was_there(kept):
    with gzip.open(kept / "train.jsonl.gz", "rt", encoding="utf-8") as file:
        assert [json.loads(line) for line in file] == ROWS
    assert splits_of(str(kept)) == ["train", "test"]
    manifest = json.loads((kept / "posttrain-data.json").read_text())
    assert manifest["source"] == "source" and manifest["splits"]["test"]["rows"] == 1
    one, two = (
        prepare(
            DataConfig(source=source, split="test", template="none"),
            byte_tokenizer(),
            "sft",
            cache_dir=kept.parent / "cache",
        )
        for source in ("source", "kept")
    )
    assert one.train[0].trees[0].tokens.tolist() == two.train[0].trees[0].tokens.tolist()
    keep("source", Path("again"))
    assert (kept / "train.jsonl.gz").read_bytes() == (kept.parent / "again/train.jsonl.gz").read_bytes()


def test_damage_is_seen(kept):
    with pytest.raises(DataError, match="kept has no split 'dev': it has train, test"):
        prepare(DataConfig(source="kept", split="dev"), byte_tokenizer(CHATML), "sft")
    with gzip.open(kept / "train.jsonl.gz", "wt") as file:
        file.write(json.dumps(ROWS[0]))
    with pytest.raises(DataError, match=r"train\.jsonl\.gz is damaged or was changed since it was saved"):
        prepare(DataConfig(source="kept"), byte_tokenizer(CHATML), "sft")
    (kept / "test.jsonl.gz").unlink()
    with pytest.raises(DataError, match=r"test\.jsonl\.gz is missing"):
        prepare(DataConfig(source="kept", split="test"), byte_tokenizer(CHATML), "sft")
    (kept / "posttrain-data.json").write_text("{")
    with pytest.raises(DataError, match=r"posttrain-data\.json cannot be read"):
        prepare(DataConfig(source="kept"), byte_tokenizer(CHATML), "sft")


def test_a_failure_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text("{broken")
    with pytest.raises(DataError, match="has no readable row"):
        keep("bad.jsonl", tmp_path / "kept")
    with pytest.raises(DataError, match="no split 'dev'"):
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder/train.jsonl").write_text('{"text": "a"}')
        keep("folder", tmp_path / "kept", ["train", "dev"])
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file/kept cannot be written"):
        keep("folder", tmp_path / "file/kept")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl", "file", "folder"]


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    Path("rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    assert main(["data", "save", "rows.jsonl", "kept", "--max-rows", "2"]) == 0
    out = capsys.readouterr().out
    assert "train: 2 rows" in out and "saved in kept; use it with data.source=kept" in out
    for arguments, message in (
        (["rows.jsonl", "kept"], "kept already exists"),
        (["builtin:arithmetic", "other"], "is generated and need not be saved"),
        (["gsm8", "other"], "did you mean gsm8k"),
    ):
        assert main(["data", "save", *arguments]) == 1
        assert message in capsys.readouterr().err
    assert main(["data", "list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out and known.source in out for name, known in KNOWN.items())


def test_short_rows_of_several_sets(tmp_path, monkeypatch, capsys):
    """Rows are chosen by the tokens of all their texts; the longer ones are counted. Each set has a folder."""
    monkeypatch.chdir(tmp_path)
    byte_tokenizer().save_pretrained("model")
    Path("model/config.json").write_text('{"model_type": "gpt2"}')
    turns = [{"role": "user", "content": "a" * 5}, {"role": "assistant", "content": "b" * 5}]  # 23 bytes with the roles
    rows = [{"text": "a" * length, "number": 7} for length in (10, 24, 23, 11)] + [{"messages": turns}]
    Path("one.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("two.jsonl").write_text("\n".join(map(json.dumps, rows[:2])))
    assert main(["data", "save", "one.jsonl", "two.jsonl", "kept", "--max-length", "23", "--model", "model"]) == 0
    out = capsys.readouterr().out
    assert "train: 4 rows" in out and out.count("1 longer than 23 tokens left out") == 2
    assert "data.source=kept/one" in out and "data.source=kept/two" in out
    with gzip.open("kept/one/train.jsonl.gz", "rt") as file:
        assert [json.loads(line) for line in file] == [row for row in rows if row.get("text") != "a" * 24]
    short = ["--max-length", "12", "--max-rows", "2", "--model", "model"]
    assert main(["data", "save", "one.jsonl", "first", *short]) == 0, "the first two that fit"
    with gzip.open("first/train.jsonl.gz", "rt") as file:
        assert [json.loads(line) for line in file] == [rows[0], rows[3]]
    capsys.readouterr()
    Path("other").mkdir()
    Path("other/one.jsonl").write_text(json.dumps(rows[0]))
    for arguments, status, message in (
        (["one.jsonl", "none", "--max-length", "3", "--model", "model"], 1, "has no readable row below the length"),
        (["one.jsonl", "none", "--max-length", "3"], 2, "--max-length and --model belong together"),
        (["one.jsonl", "other/one.jsonl", "none"], 2, "would be saved in the same folder"),
        (["two.jsonl", "one.jsonl", "kept"], 1, "kept/two already exists"),
    ):
        assert main(["data", "save", *arguments]) == status
        assert message in capsys.readouterr().err
    assert not Path("none").exists()


def test_a_folder_that_appears_during_a_save_is_kept(tmp_path, monkeypatch):
    folder = tmp_path / "kept"

    def records():
        folder.mkdir()
        (folder / "mine.txt").write_text("mine")
        yield Record(file="a", line=1, row=0, value={"text": "a"})

    monkeypatch.setattr(sources, "open_source", lambda *args: SimpleNamespace(read=records))
    with pytest.raises(DataError, match="kept already exists"):
        keep("rows", folder, ["train"])
    assert (folder / "mine.txt").read_text() == "mine" and [path.name for path in tmp_path.iterdir()] == ["kept"]
