"""Files of every kind, good and bad, and the hub's cache."""

import gzip
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_tokenizer import CHATML, byte_tokenizer, prepare

from posttrain.base.errors import DataError
from posttrain.config.schema.data import DataConfig
from posttrain.data import streams
from posttrain.data.readers import read_files
from posttrain.data.sources import open_source, splits_of

ROWS = [{"prompt": f"Name a number after {n}. ", "completion": f"{n + 1} é\n"} for n in range(4)]


def written(path: Path, rows: list[dict]) -> None:
    """A file of rows in the form that its name says."""
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist(rows), path.with_name(name))
        content = path.with_name(name).read_bytes()
    elif name.endswith(".csv"):
        cells = ["prompt,completion"] + ['"{prompt}","{completion}"'.format(**row) for row in rows]
        content = ("\r\n".join(cells) + "\r\n").encode()
    elif name.endswith(".jsonl"):
        content = "\n".join(json.dumps(row) for row in rows).encode()
    else:
        content = json.dumps(rows, indent=1).encode()
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)


@pytest.mark.parametrize("gz", ["", ".gz"])
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, suffix, gz):
    path = tmp_path / f"rows{suffix}{gz}"
    written(path, ROWS)
    records = list(read_files((path,)))
    assert [record.value for record in records] == ROWS
    assert [record.row for record in records] == [0, 1, 2, 3]


def test_lines_are_those_of_the_file(tmp_path):
    (tmp_path / "a.jsonl").write_text('\ufeff{"text": "one"}\n\n{"text": "three"}\n', encoding="utf-8")
    (tmp_path / "b.json").write_text('[\n {"text": "two"},\n\n {"text":\n "four"}\n]\n')
    (tmp_path / "b2.json").write_text('\n{"of": "me", "n": 1,\n "rows": [\n {"text": "two"},\n {"text": "four"}]}\n')
    (tmp_path / "c.csv").write_text('text,other\n"two\nlines",1\nfour,2\n')
    (tmp_path / "d.txt").write_text("one\nstill one<|endoftext|>\n\nthree<|endoftext|>")
    found = {path.name: [(r.line, r.value["text"]) for r in read_files((path,))] for path in sorted(tmp_path.iterdir())}
    assert found == {
        "a.jsonl": [(1, "one"), (3, "three")],
        "b.json": [(2, "two"), (4, "four")],
        "b2.json": [(4, "two"), (5, "four")],
        "c.csv": [(2, "two\nlines"), (4, "four")],
        "d.txt": [(1, "one\nstill one"), (4, "three")],
    }


def test_json_with_one_list_in_it_and_json_lines_under_the_name_of_json(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"version": 1, "data": ROWS}))
    (tmp_path / "b.json").write_text("\n".join(json.dumps(row) for row in ROWS))
    for path in tmp_path.iterdir():
        assert [record.value for record in read_files((path,))] == ROWS


BAD_FILES = {
    "empty.jsonl": (b"", "empty"),
    "empty.json": (b" \n", "empty"),
    "empty.csv": (b"prompt,completion\n", "empty"),
    "empty.parquet": (b"", "empty"),
    "blank.jsonl": (b"\n\n  \n", "empty"),
    "utf16.jsonl": ('{"text": "a"}'.encode("utf-16"), "UTF-16"),
    "plain.jsonl": (gzip.compress(b"{}"), r"\.gz"),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "a long enough line"}\n' * 99)[:-20], "gzip"),
    "not.jsonl.gz": (b'{"text": "a"}', "gzip"),
    "latin.json": ('[\n{"text": "\xe9"}]'.encode("latin-1"), "line 2 is not UTF-8: byte 0xe9"),
    "comma.json": (b'[\n{"a": 1},\n{"a": 2\n]', "line 4"),
    "deep.json": (b"[" + b"[" * 100_000, "deep.json"),
    "scalar.json": (b"12", "not a JSON list"),
    "two.json": (b'{"a": [1], "b": [2]}', "one list"),
    "more.json": (b'[{"a": 1}]\n\n[{"a": 2}]', "line 3 column 1 is not JSON: Extra data after the list"),
    "key.json": (b'[{"a": 1},\n{"a": 1, "a": 2}]', "line 2 is not JSON: the key 'a' appears twice"),
    "head.csv": (b'a,"b\n1,2\n', "line 1, the column names"),
    "twice.csv": (b"a,a\n1,2\n", "column twice"),
    "bytes.parquet": (b"PAR1 no", "Parquet"),
    "rows.xlsx": (b"PK", r"\.jsonl, \.json, \.csv"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path, name):
    content, reason = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=reason) as error:
        list(read_files((tmp_path / name,)))
    assert name in str(error.value)


def repeated(rows: int) -> dict[str, pa.Array]:
    """Columns of one long string that is stored once: alone, in lists, in objects in lists, and in one list."""
    text = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["x" * 1_000_000])
    each = pa.array(range(rows + 1), pa.int32())
    inside = pa.ListArray.from_arrays(each, pa.StructArray.from_arrays([text], ["content"]))
    whole = pa.ListArray.from_arrays(pa.array([0, rows], pa.int32()), text)
    return {"text": text, "list": pa.ListArray.from_arrays(each, text), "messages": inside, "whole": whole}


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("name", repeated(1))
def test_a_string_that_is_stored_once_does_not_fill_the_memory(tmp_path, suffix, name):
    """Of 500 bytes of Parquet, 400 MB would be made; of fewer rows, a few are read at a time."""
    for rows in (400, 20):
        table, path = pa.table({name: repeated(rows)[name]}), tmp_path / f"rows-{rows}{suffix}"
        if suffix == ".parquet":
            pq.write_table(table, path, compression="zstd", store_schema=False, dictionary_pagesize_limit=2**30)
        else:
            compressed = pa.ipc.IpcWriteOptions(compression="zstd")
            with (
                pa.OSFile(str(path), "wb") as file,
                pa.ipc.new_stream(file, table.schema, options=compressed) as writer,
            ):
                writer.write_table(table)
        if rows == 400:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with pytest.raises(DataError, match=f"column {name}: unpacks to more than 200 times its size"):
                next(read_files((path,)))
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB
        else:
            assert [record.value for record in read_files((path,))] == table.to_pylist()


def test_a_long_list_of_one_number_does_not_fill_the_memory(tmp_path):
    """Parquet stores how often it is repeated."""
    ones = pa.ListArray.from_arrays(pa.array([0, 70_000_000], pa.int32()), pa.array(np.ones(70_000_000, dtype="int8")))
    pq.write_table(pa.table({"mask": ones}), tmp_path / "mask.parquet")
    pool = pa.proxy_memory_pool(usual := pa.default_memory_pool())
    pa.set_memory_pool(pool)
    try:
        with pytest.raises(DataError, match=r"column mask\.list\.element: unpacks to more than 200 times"):
            next(read_files((tmp_path / "mask.parquet",)))
    finally:
        pa.set_memory_pool(usual)
    assert pool.max_memory() < 1_000_000


def test_a_key_that_appears_twice_among_many_is_found_at_once(tmp_path):
    keys = ",".join(f'"k{number}": 1' for number in range(60_000))
    (tmp_path / "rows.jsonl").write_text(f'{{{keys}, "k59999": 2}}\n')
    before = time.process_time()
    [record] = read_files((tmp_path / "rows.jsonl",))
    assert record.problem is not None and "the key 'k59999' appears twice" in record.problem
    assert time.process_time() - before < 10  # it took minutes


def test_a_missing_file_names_near_matches(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"did you mean .*train\.jsonl"):
        open_source(str(tmp_path / "trian.jsonl"), "train", None, 0, str.join)
    with pytest.raises(DataError, match="builtin:arithmetic"):
        open_source("builtin:algebra", "train", None, 0, str.join)


def test_rows_of_a_function(tmp_path, monkeypatch):
    """As a file with the same rows, by split, also for validation; its faults name the function and the line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_source.py").write_text(
        f"ROWS = {ROWS!r}\n\n\ndef load(split):\n    yield from ROWS[:3] if split == 'train' else ROWS[3:]\n"
        "def broken(split):\n    yield ROWS[0]\n    raise KeyError(split)\n"
        "def mixed(split):\n    return [*ROWS * 50, 'no row']\n"
        "def nothing(split):\n    return []\n"
        "def none(split): ...\n"
    )
    written(tmp_path / "train.jsonl", ROWS[:3])
    written(tmp_path / "held.jsonl", ROWS[3:])
    own, file = (
        prepare(DataConfig(source=train, validation={"source": held}, template="none"), byte_tokenizer(), "sft")
        for train, held in (("own_source:load", "own_source:load"), ("train.jsonl", "held.jsonl"))
    )
    for ours, theirs in ((own.train, file.train), (own.validation["validation"], file.validation["validation"])):
        assert [e.trees[0].tokens.tolist() for e in ours] == [e.trees[0].tokens.tolist() for e in theirs]
    assert splits_of("own_source:load") == ["train"]
    mixed = prepare(DataConfig(source="own_source:mixed", template="none"), byte_tokenizer(), "sft")
    assert [(row.file, row.line) for row in mixed.reports["train"].malformed] == [("own_source:mixed", 201)]
    for name, message in (
        ("broken", r"own_source:broken\('train'\) failed: KeyError: 'train' .*line 8"),
        ("nothing", "own_source:nothing.* yields no rows"),
        ("none", "own_source:none.* failed: TypeError: 'NoneType'"),
        ("laod", "own_source has no function laod; it has load"),
    ):
        with pytest.raises(DataError, match=message):
            prepare(DataConfig(source=f"own_source:{name}", template="none"), byte_tokenizer(), "sft")
    with pytest.raises(DataError, match="there is no module own_sauce"):
        open_source("own_sauce:load", "train", None, 0, lambda working, answer: working)


def test_folder_with_splits(tmp_path):
    for split, count in (("train", 3), ("test", 1)):
        written(tmp_path / f"{split}.jsonl.gz", ROWS[:count])
    (tmp_path / "LICENSE").write_text("free")
    assert len(list(open_source(str(tmp_path), "train", None, 0, str.join).read())) == 3
    assert len(list(open_source(str(tmp_path), "test", None, 0, str.join).read())) == 1
    with pytest.raises(DataError, match="no split 'dev': it has train, test"):
        open_source(str(tmp_path), "dev", None, 0, str.join)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="no data files"):
        open_source(str(tmp_path / "none"), "train", None, 0, str.join)


def test_a_folder_named_like_a_kind_of_file_is_that_folder(tmp_path, monkeypatch, caplog):
    """`datasets` has loaders of these names, which would read whatever lies beside."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "other.jsonl", ROWS)
    (tmp_path / "json").mkdir()
    for name, count in (("train-1.jsonl", 2), ("train-2.csv", 1)):
        written(tmp_path / "json" / name, ROWS[:count])
    assert len(list(open_source("json", "train", None, 0, str.join).read())) == 2
    assert "json: files not read because of their names or types: train-2.csv" in caplog.text
    caplog.clear()
    (tmp_path / "json" / "train-2.csv").unlink()
    (tmp_path / "link").symlink_to("json")
    (tmp_path / "beside").mkdir()
    monkeypatch.chdir(tmp_path / "beside")
    for name in ("../json", "../link"):
        assert len(list(open_source(name, "train", None, 0, str.join).read())) == 2
    (tmp_path / "json" / "notes.txt").write_text("two files")
    (tmp_path / "json" / "README.md").write_text("a folder that says itself what is in it")
    open_source("../json", "train", None, 0, str.join)
    assert "not read" not in caplog.text


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in (("a", {"x": {"type": "n"}}), ("b", {"y": {"enum": [None]}}))
]
CALLS = [({"x": 1}, TOOLS[:1]), ({"y": "2", "z": {"deep": [1, 2]}}, TOOLS), ({}, None)]
CALLING = [
    {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]},
        ],
        **({"tools": tools} if tools else {}),
    }
    for arguments, tools in CALLS
]


def test_every_kind_of_file_gives_the_same_tokens(tmp_path):
    """Typed columns give every object the keys of all others, as null; the tokens are those of the JSON lines."""
    import datasets

    datasets.disable_progress_bars()
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, CALLING)))
    table = pa.Table.from_pylist(CALLING)
    pq.write_table(table, tmp_path / "rows.parquet")
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    saved = datasets.Dataset.from_list(CALLING)
    saved.save_to_disk(tmp_path / "one", num_shards=2)
    datasets.DatasetDict({"train": saved, "test": saved.select([1])}).save_to_disk(tmp_path / "two")
    mixed = [
        *CALLING,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, {"role": "gpt", "content": "x"}]},
    ]
    datasets.Dataset.from_list(mixed, on_mixed_types="use_json").to_parquet(tmp_path / "json.parquet")
    template = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}<|im_end|>"

    def texts(source, **options):
        data = DataConfig(source=str(tmp_path / source), max_length=10_000)
        train = prepare(data, byte_tokenizer(template), "sft", cache_dir=tmp_path / "cache", **options).train
        return [byte_tokenizer().decode(train[index].trees[0].tokens) for index in range(3)]

    expected = texts("rows.jsonl")
    assert "null" not in expected[0] and "[null]" in expected[1]  # items of a list stay
    for source in ("rows.parquet", "rows.arrow", "one", "two", "json.parquet"):
        assert texts(source) == expected, source
    old = texts("rows.parquet", behavior_version=1)  # a run of version 1 goes on as it began
    assert '"y": null' in old[0] and texts("rows.jsonl", behavior_version=1) != old


def test_keys_that_are_null_in_json_lines_are_as_if_they_were_not_there(tmp_path):
    """Written out by hand, at every depth of tools and of calls; a null in a list stays."""

    def nulls(value):
        if isinstance(value, list):
            return [nulls(item) for item in value]
        return {**{key: nulls(item) for key, item in value.items()}, "gone": None} if isinstance(value, dict) else value

    template = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}<|im_end|>"
    texts = []
    for name, change in (("without", lambda value: value), ("with", nulls)):
        rows = [
            {
                "messages": [
                    {key: change(value) if key == "tool_calls" else value for key, value in message.items()}
                    for message in row["messages"]
                ],
                **({"tools": change(row["tools"])} if "tools" in row else {}),
            }
            for row in CALLING
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        assert ("gone" in (tmp_path / f"{name}.jsonl").read_text()) == (name == "with")
        data = DataConfig(source=str(tmp_path / f"{name}.jsonl"), max_length=10_000)
        train = prepare(data, byte_tokenizer(template), "sft", cache_dir=tmp_path / "cache").train
        texts.append([byte_tokenizer().decode(train[index].trees[0].tokens) for index in range(len(CALLING))])
    assert texts[0] == texts[1] and "[null]" in texts[0][1] and "gone" not in "".join(texts[1])


def test_folders_of_save_to_disk(tmp_path, caplog):
    import datasets

    datasets.disable_progress_bars()
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "one", num_shards=3)
    datasets.DatasetDict({"train": saved, "dev": saved.select([2])}).save_to_disk(tmp_path / "two")

    def read(name, split):
        return [record.value for record in open_source(str(tmp_path / name), split, None, 0, str.join).read()]

    assert read("one", "train") == read("one", "test") == read("two", "train") == ROWS  # one data set has no splits
    assert read("two", "dev") == ROWS[2:3] and splits_of(str(tmp_path / "two")) == ["dev", "train"]
    assert "not read" not in caplog.text
    with pytest.raises(DataError, match="no split 'test': it has dev, train"):
        read("two", "test")
    state = tmp_path / "one" / "state.json"
    state.write_text(json.dumps({"_data_files": [{"filename": "../two/train/data-00000-of-00001.arrow"}]}))
    with pytest.raises(DataError, match="names a file outside its folder"):
        read("one", "train")
    state.write_text("[]")
    with pytest.raises(DataError, match=r"state\.json cannot be read"):
        read("one", "train")
    (tmp_path / "bad.arrow").write_bytes(b"ARROW1 and more")
    with pytest.raises(DataError, match="not a readable Arrow file"):
        read("bad.arrow", "train")


def test_csv_of_labels_conversations_and_empty_cells(tmp_path):
    talk = json.dumps([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]).replace('"', '""')
    lines = ["messages,prompt,completion,label,tools,note"]
    lines += [f'"{talk}",,,{label},,' for label in ("TRUE", "no")] + ["x,q,a,1,,n"]
    (tmp_path / "a.csv").write_text("\n".join([*lines, *[",q,a,0,,n"] * 300]))
    data = DataConfig(source=str(tmp_path / "a.csv"), format="kto")
    prepared = prepare(data, byte_tokenizer(CHATML), "unpaired", cache_dir=tmp_path / "cache")
    assert prepared.train.labels.tolist() == [True] + [False] * 301
    [bad] = prepared.report.malformed
    assert (bad.line, bad.reason) == (4, "messages must be JSON, not the string 'x'")
    assert prepared.report.unread == {"note": 301, "prompt": 1, "completion": 1}  # beside messages they are not read
    assert "not read: `note` in 301 of 303 rows" in prepared.report.lines()


@pytest.mark.parametrize(
    ("kind", "format", "columns", "good"),
    [
        ("prompt", "prompt", ("prompt", "answer"), ("q", "3")),
        ("prompt", "problem_answer", ("problem", "answer"), ("q", "3")),
        ("prompt", "problem_answer", ("question", "answer"), ("q", "3")),
        ("sft", "prompt_completion", ("prompt", "completion"), ("q", "a")),
        ("unpaired", "kto", ("prompt", "completion", "label"), ("q", "a", "{label}")),
    ],
)
@pytest.mark.parametrize("blank", ["", " "])
def test_a_blank_prompt_of_csv_is_missing(tmp_path, kind, format, columns, good, blank):
    """As null is in JSON, where an empty string is a text, but nothing to sample completions for."""
    rows = [[*good]] * 300 + [[blank, *good[1:]]]
    rows = [[cell.format(label=number % 2) for cell in row] for number, row in enumerate(rows)]
    (tmp_path / "a.csv").write_text("\n".join(map(",".join, [columns, *rows])))
    lines = [dict(zip(columns, row, strict=True)) for row in rows]
    lines = [{**row, "label": row["label"] == "1"} if "label" in row else row for row in lines]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = [
        prepare(
            DataConfig(source=str(tmp_path / name), format=format), byte_tokenizer(CHATML), kind, cache_dir=tmp_path
        ).report
        for name in ("a.csv", "a.jsonl")
    ]
    name, path = "problem" if format == "problem_answer" else "prompt", tmp_path / "a.csv"
    assert [str(bad) for bad in found[0].malformed] == [f"{path} line 302: {name} is null"]
    empty = ["prompt and completion are both empty"] if kind == "prompt" and not blank else []
    assert [bad.reason for bad in found[1].malformed] == empty


def test_a_blank_prompt_of_csv_is_allowed_where_it_is_optional(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,chosen,rejected\n,a,b\nq,a,b\n")
    data = DataConfig(source=str(tmp_path / "a.csv"), format="preference")
    report = prepare(data, byte_tokenizer(CHATML), "pair", cache_dir=tmp_path / "cache").report
    assert (report.used, report.malformed) == (2, ())


def hub_cache(folder: Path, repo: str, files: dict[str, bytes]) -> None:
    """Lay files out as the hub's cache has a downloaded data set."""
    place = folder / "hub" / f"datasets--{repo.replace('/', '--')}"
    for name, content in files.items():
        path = place / "snapshots" / "0123456789abcdef0123456789abcdef01234567" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0123456789abcdef0123456789abcdef01234567")


CARD = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: main/train*}
  - {split: test, path: main/test*}
- config_name: other
  data_files: other/*.jsonl
---
"""


def test_hub_data_sets_load_from_the_local_cache(tmp_path):
    """In a process of its own, since the hub's library reads its settings when it is imported."""
    lines = {count: "\n".join(json.dumps(row) for row in ROWS[:count]).encode() for count in (1, 2, 3)}
    hub_cache(tmp_path, "someone/plain", {"data/train.jsonl.gz": gzip.compress(lines[3]), "test.jsonl": lines[1]})
    hub_cache(
        tmp_path,
        "someone/subsets",
        {
            "README.md": CARD.encode(),
            "main/train.jsonl": lines[2],
            "main/test.jsonl": lines[1],
            "other/a.jsonl": lines[3],
        },
    )
    code = """
from posttrain.data.sources import open_source, splits_of
from posttrain.base.errors import DataError
for source, split in (("someone/plain", "train"), ("someone/subsets/main", "train"), ("someone/subsets/main", "test"),
                      ("someone/subsets/other", "train"), ("someone/subsets", "train"), ("someone/absent", "train")):
    try:
        print(len(list(open_source(source, split, None, 0, str.join).read())))
    except DataError as error:
        print(error)
"""
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    *counts, subset, absent = done.stdout.splitlines()
    assert counts == ["3", "2", "1", "3"]
    assert subset == "someone/subsets needs the name of a subset, as in owner/name/main; it has main, other"
    assert "not in the local cache" in absent and "hf download --repo-type dataset someone/absent" in absent


MALFORMED = [
    '{"prompt": "no chosen", "rejected": "b"}',
    '{"prompt": "p", "chosen": null, "rejected": "b"}',
    '{"prompt": "p", "chosen": 3, "rejected": "b"}',
    '{"prompt": "p", "chosen": {"a": 1}, "rejected": "b"}',
    '{"prompt": ["p"], "chosen": "a", "rejected": "b"}',
    '{"prompt": "p", "chosen": true, "rejected": "b"}',
    '{"prompt": "p", "chosen": "nul \\u0000", "rejected": "b"}',
    '{"prompt": "p", "chosen": "lone \\ud800", "rejected": "b"}',
    '{"prompt": "p", "chosen": "a", "chosen": "twice", "rejected": "b"}',
    '{"prompt": "p", "chosen": "a", "rejected": "b"',
    "not JSON at all",
    "[1, 2]",
    '"text"',
    "{}",
    '{"prompt": "p", "chosen": "a", "rejected": null}',
    '{"prompt": "p", "chosen": "a", "rejected": "b", "margin": "much"}',
    '{"prompt": "p", "chosen": [], "rejected": []}',
    '{"prompt": "p", "chosen": [{"role": "robot", "content": "a"}], "rejected": "b"}',
    '{"prompt": "p", "chosen": ' + "[" * 5_000 + ', "rejected": "b"}',
    '{"prompt": "p", "chosen": "a", "rejected": ' + "9" * 5_000 + "}",
]


def malformed_file(path: Path, good: int) -> list[int]:
    """50 malformed rows spread over good ones; returns their lines."""
    bad = [line.encode() for line in MALFORMED]
    bad += [
        b'{"prompt": "\xff", "chosen": "a", "rejected": "b"}',
        b'{"prompt": "p", "chosen": "' + b"x" * 10_000_000 + b'"}',
    ]
    bad += [json.dumps({"prompt": "p", "chosen": "y" * 10_000_000, "rejected": "b"}).encode()]
    bad = (bad * 3)[:50]
    every = max(good // 50, 1)
    lines, at = [], []
    for number in range(good):
        lines.append(json.dumps({"prompt": f"p{number}", "chosen": "a", "rejected": "b"}).encode())
        if number % every == 0 and len(at) < 50:
            lines.append(bad[len(at)])
            at.append(len(lines))
    path.write_bytes(b"\n".join(lines) + b"\n")
    return at


def test_fifty_malformed_rows_are_counted_with_their_lines(tmp_path, figure):
    at = malformed_file(tmp_path / "rows.jsonl", good=5_000)
    data = DataConfig(source=str(tmp_path / "rows.jsonl"), template="none")
    prepared = prepare(data, byte_tokenizer(), "pair", cache_dir=tmp_path / "cache")
    assert [row.line for row in prepared.report.malformed] == at
    figure("malformed rows named", len(at))
    assert len(at) == 50 and len(prepared.train) == 5_000 and prepared.report.read == 5_050
    reasons = [row.reason for row in prepared.report.malformed]
    for part in ("missing", "null", "not a number", "NUL", "surrogate", "twice", "not JSON", "not UTF-8"):
        assert any(part in reason for reason in reasons), part
    assert max(len(reason) for reason in reasons) < 300


def test_more_than_one_in_a_hundred_is_refused(tmp_path):
    malformed_file(tmp_path / "rows.jsonl", good=4_000)
    data = DataConfig(source=str(tmp_path / "rows.jsonl"), template="none")
    with pytest.raises(DataError, match="50 of 4,050 rows are malformed, more than 1%") as error:
        prepare(data, byte_tokenizer(), "pair", cache_dir=tmp_path / "cache")
    assert str(error.value).count("rows.jsonl line ") == 10
    told = prepare(data, byte_tokenizer(), "pair", cache_dir=tmp_path / "cache", refuse_malformed=False)
    assert (len(told.train), len(told.report.malformed)) == (4_000, 50)
    assert any("50 of 4,050 rows are malformed, more than 1%, so plan" in line for line in told.report.findings())
    with pytest.raises(DataError, match="50 of 4,050 rows"):  # also when their tokens are in the cache
        prepare(data, byte_tokenizer(), "pair", cache_dir=tmp_path / "cache")


def test_bad_rows_of_csv_and_text(tmp_path):
    good = "".join(f"p{n},c\n" for n in range(300))
    (tmp_path / "a.csv").write_bytes(f"prompt,completion\n{good}".encode() + b"one cell\n\xff,bytes\n")
    prepared = prepare(
        DataConfig(source=str(tmp_path / "a.csv"), template="none"),
        byte_tokenizer(),
        "sft",
        cache_dir=tmp_path / "cache",
    )
    assert [(row.line, row.reason[:8]) for row in prepared.report.malformed] == [(302, "1 values"), (303, "prompt i")]


def test_lines_that_an_open_quote_takes_along_are_counted(tmp_path):
    """One stray quote is a malformed row; all that it swallows up to the next one are lost too, and reported."""
    rows = [f"p{n},c" for n in range(2_000)]
    rows[200] = 'p"200,"c'
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["prompt,completion", *rows]) + "\n")
    data = DataConfig(source=str(path), template="none")
    with pytest.raises(DataError, match="1,800 of 2,000 rows are malformed") as error:
        prepare(data, byte_tokenizer(), "sft", cache_dir=tmp_path / "cache")
    assert "line 202: not CSV" in str(error.value) and "line 203: part of line 202" in str(error.value)
    rows[204] = 'p204,"c"'
    path.write_text("\n".join(["prompt,completion", *rows]) + "\n")
    prepared = prepare(data, byte_tokenizer(), "sft", cache_dir=tmp_path / "cache")
    assert [row.line for row in prepared.report.malformed] == [202, 203, 204, 205, 206]
    assert len(prepared.train) == 1_995


def test_a_line_of_csv_that_is_too_long_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "LINE_BYTES", 100)
    (tmp_path / "a.csv").write_text(f"text\none\n{'x' * 300}\nthree\n")
    found = [(record.line, record.problem) for record in read_files((tmp_path / "a.csv",))]
    assert found == [(2, None), (3, "not CSV: a line of more than 100 bytes"), (4, None)]


def test_lone_surrogates_anywhere_are_one_malformed_row(tmp_path):
    """In a column that only rewards see, in what templates are given beside the content, in tools."""
    call = {"name": "f", "arguments": {"x": "\ud800"}}
    bad = {
        "prompt": [{"prompt": "p", "author": "Ren\udce9"}],
        "sft": [
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", key: value}]}
            for key, value in (("reasoning_content", "\udce9"), ("tool_calls", [call]))
        ]
        + [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "tools": [call]}],
    }
    good = {
        "prompt": {"prompt": "p", "author": "x"},
        "sft": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    }
    for kind, rows in bad.items():
        path = tmp_path / f"{kind}.jsonl"
        path.write_text("\n".join(map(json.dumps, [*rows, *[good[kind]] * 400])))
        prepared = prepare(DataConfig(source=str(path)), byte_tokenizer(CHATML), kind, cache_dir=tmp_path / "cache")
        assert [row.line for row in prepared.report.malformed] == [n + 1 for n in range(len(rows))]
        assert all("lone surrogate" in row.reason for row in prepared.report.malformed)
        assert len(prepared.train) == 400


def test_json_lines_with_space_around_them(tmp_path):
    """Also what only Python counts as space; a column is that of the line as it stands."""
    (tmp_path / "a.jsonl").write_text('\x1e{"a": 1}\u00a0\n  {"a": 2}\u2028\n  {"a": 1, "b":\n', encoding="utf-8")
    found = [(record.value, record.problem) for record in read_files((tmp_path / "a.jsonl",))]
    assert found[:2] == [({"a": 1}, None), ({"a": 2}, None)]
    assert found[2] == (None, "not JSON: Expecting value at column 16")
    (tmp_path / "b.json").write_text('\n{"a": "x\u2028y"}\n{"a": 2}\n', encoding="utf-8")
    assert [(r.line, r.value["a"]) for r in read_files((tmp_path / "b.json",))] == [(2, "x\u2028y"), (3, 2)]
    (tmp_path / "c.json").write_text('\n\n{"a": \n')
    with pytest.raises(DataError, match="line 4 column 1"):
        list(read_files((tmp_path / "c.json",)))


def test_csv_may_begin_with_blank_lines(tmp_path):
    (tmp_path / "a.csv").write_text("\n\ntext,n\none,1\n")
    assert [(r.line, r.value) for r in read_files((tmp_path / "a.csv",))] == [(4, {"text": "one", "n": "1"})]


def test_rows_of_one_line_keep_their_own_reasons(tmp_path):
    rows = [{"prompt": "p", "completion": "c"}] * 300 + [{"prompt": 1, "completion": "x"}, {"prompt": "a"}]
    (tmp_path / "a.json").write_text(json.dumps({"rows": rows}))
    data = DataConfig(source=str(tmp_path / "a.json"), template="none")
    prepared = prepare(data, byte_tokenizer(), "sft", cache_dir=tmp_path / "cache")
    first, second = prepared.report.malformed
    assert (first.row, second.row) == (300, 301) and str(second).endswith(
        "a.json line 1 (row 301): completion is missing"
    )
    assert "prompt must be a string" in first.reason
