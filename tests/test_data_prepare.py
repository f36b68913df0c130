"""The whole way from settings to examples: limits, splits, mixtures, the cache, the built-in task, `explore`."""

import csv
import gzip
import json
import os
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_tokenizer import CHATML, byte_tokenizer, prepare, trained_text
from rich.console import Console
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from posttrain.base.errors import DataError
from posttrain.base.words import counted
from posttrain.batch import pack, physical_length, sequences
from posttrain.cli import main
from posttrain.config.schema.data import DataConfig
from posttrain.config.schema.evaluation import EvaluationDataset
from posttrain.data import KINDS, Selection, arithmetic_problems, cache, explore, reading
from posttrain.data.holdout import hashes_of, row_hash
from posttrain.data.readers import Record
from posttrain.data.reading import SourcePart
from posttrain.data.report import Reading
from posttrain.data.table import Room


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def completions(tmp_path):
    """Rows whose prompt and completion (with its stop token) have 1..20 tokens each."""
    rows = [{"prompt": "p" * n, "completion": "c" * (n - 1)} for n in range(1, 21)]
    return write(tmp_path / "completions.jsonl", rows)


@pytest.fixture
def pairs(tmp_path):
    rows = [{"prompt": "p" * n, "chosen": "c" * n, "rejected": "r" * (2 * n), "margin": n / 2} for n in range(1, 21)]
    return write(tmp_path / "pairs.jsonl", rows)


def run(tmp_path, kind="sft", tokenizer=None, options=None, **settings):
    data = DataConfig(**{"template": "none", **settings})
    return prepare(data, tokenizer or byte_tokenizer(), kind, cache_dir=tmp_path / "cache", **(options or {}))


def rows_of(dataset):
    return [dataset[index].row for index in range(len(dataset))]


def test_lengths_are_physical_tokens_and_pack_takes_them(tmp_path, pairs):
    prepared = run(tmp_path, "pair", source=pairs)
    example = prepared.train[4]
    assert (example.row, example.margin, prepared.train.lengths[4]) == (4, 2.5, 5 + 6 + 11)
    assert len(list(sequences(example.trees[0]))) == 2
    examples = [prepared.train[index] for index in range(len(prepared.train))]
    (packed,) = pack(examples, 10_000, keep_last=True)
    assert packed.num_tokens == prepared.train.lengths.sum()


def test_two_prompts_become_two_trees(tmp_path):
    said = "\n\nHuman: a\n\nAssistant: {}\n\nHuman: b\n\nAssistant: {}"
    rows = [{"chosen": said.format("x", "good"), "rejected": said.format(y, "bad")} for y in ("x", "y")]
    prepared = run(tmp_path, "pair", source=write(tmp_path / "hh.jsonl", rows))
    assert [len(prepared.train[index].trees) for index in (0, 1)] == [1, 2]
    tokenizer = byte_tokenizer()
    texts = [tokenizer.decode(ids) for tree in prepared.train[1].trees for ids, _ in sequences(tree)]
    assert texts == [said.format("x", "good<|im_end|>"), said.format("y", "bad<|im_end|>")]
    assert prepared.train.lengths[1] == sum(len(tokenizer(text).input_ids) for text in texts)


@pytest.mark.parametrize("room", [{"max_length": 24}, {"options": {"positions": 23}}])
@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_evaluation_prompts_leave_room_for_completions_of_their_own_length(tmp_path, prompts, caplog, room, overlong):
    """Completions of 4 tokens in training and 14 in evaluation: in 24, prompts have 20 there and 10 here."""
    room = dict(room)
    options = room.pop("options", {}) | {"completion_length": 4, "evaluated": Room(14, "evaluation.max")}
    options["datasets"] = [EvaluationDataset(name="other", source=prompts)]
    settings = {"source": prompts, "max_prompt_length": None, "overlong": overlong, "validation": {"rows": 12}, **room}
    prepared = run(tmp_path, "prompt", options=options, **settings)
    assert prepared.report.used == 20 and prepared.train.longest > 10
    for name, dataset in prepared.validation.items():
        rows = {"validation": 12, "other": 20}[name]
        assert dataset.longest == 10 and (len(dataset) < rows if overlong == "drop" else len(dataset) == rows)
    assert ("of 12 prompts leave room" in caplog.text) == (overlong == "drop")
    assert not set(rows_of(prepared.train)) & set(rows_of(prepared.validation["validation"]))
    options["evaluated"] = Room(23, "evaluation.max")
    if overlong == "drop":
        with pytest.raises(DataError, match=r"validation: no prompt leaves room .* 23 tokens .evaluation"):
            run(tmp_path, "prompt", options=options, skip_rows=3, **settings)


@pytest.mark.parametrize(("overlong", "used", "dropped", "truncated"), [("drop", 10, 10, 0), ("truncate", 20, 0, 10)])
def test_overlong_rows_are_counted(tmp_path, completions, overlong, used, dropped, truncated):
    prepared = run(tmp_path, source=completions, max_length=20, overlong=overlong)
    report = prepared.report
    assert (report.used, report.overlong_dropped, report.overlong_truncated) == (used, dropped, truncated)
    assert prepared.train.lengths.max() == 20
    assert all(np.any(prepared.train[index].trees[0].trained) for index in range(used))


def test_overlong_error_lists_the_rows(tmp_path, completions):
    with pytest.raises(DataError, match=r"10 rows are over the length limits .*\n  row 10 has 22 tokens, 11 of them"):
        run(tmp_path, source=completions, max_length=20, overlong="error")


def test_prompt_limit_cuts_the_prompt_from_the_left(tmp_path):
    source = write(
        tmp_path / "rows.jsonl", [{"prompt": "abcdef", "completion": "xyz"}, {"prompt": "ab", "completion": "x"}]
    )
    kept = run(tmp_path, source=source, max_prompt_length=3, overlong="truncate").train[0].trees[0]
    assert byte_tokenizer().decode(kept.tokens) == "defxyz<|im_end|>" and list(kept.trained) == [False] * 3 + [True] * 4
    assert rows_of(run(tmp_path, source=source, max_prompt_length=3).train) == [1]


def test_prompt_limit_from_a_percentile(tmp_path, completions, pairs):
    prepared = run(tmp_path, source=completions, max_prompt_length="p90")
    expected = int(np.percentile(np.arange(1, 21), 90, method="higher"))
    assert prepared.report.max_prompt_length == expected == 19 and prepared.report.overlong_dropped == 1
    assert run(tmp_path, "pair", source=pairs, max_prompt_length="p50").report.used == 11


def test_two_stages_on_disjoint_rows(tmp_path, completions):
    """`max_rows` of the one and `skip_rows` of the other; rows keep the numbers that they have in the file."""
    first, second = (run(tmp_path, source=completions, **some) for some in ({"max_rows": 12}, {"skip_rows": 12}))
    assert sorted(rows_of(first.train)) == list(range(12)) and sorted(rows_of(second.train)) == list(range(12, 20))
    some = run(tmp_path, source=completions, skip_rows=12, max_rows=3, validation={"rows": 1})
    assert sorted(rows_of(some.train) + rows_of(some.validation["validation"])) == [12, 13, 14]
    assert second.fingerprint != run(tmp_path, source=completions).fingerprint
    task = run(tmp_path, source="builtin:arithmetic", skip_rows=5, max_rows=5)
    assert sorted(rows_of(task.train)) == [5, 6, 7, 8, 9]
    with pytest.raises(DataError, match="has no row after the first 20"):
        run(tmp_path, source=completions, skip_rows=20)


@pytest.fixture
def prompts(tmp_path):
    """Prompts of 1..20 tokens."""
    return write(tmp_path / "prompts.jsonl", [{"prompt": "p" * n} for n in range(1, 21)])


@pytest.mark.parametrize(
    ("kind", "settings", "longest"),
    [
        ("prompt", {}, 20),
        ("prompt", {"behavior_version": 2}, 19),
        ("prompt", {"max_prompt_length": None}, 20),
        ("prompt", {"overlong": "truncate"}, 20),
        ("prompt", {"overlong": "error"}, 20),
        ("prompt", {"max_prompt_length": "p50"}, 11),
        ("sft", {}, 20),
    ],
)
def test_only_prompts_without_room_are_too_long_by_default(tmp_path, prompts, completions, kind, settings, longest):
    """A set with a source of its own is measured whole, unless the limit was asked for. Online runs that started with
    behavior_version 2 drop the longest tenth."""
    other = EvaluationDataset(name="other", source=prompts if kind == "prompt" else completions)
    source = prompts if kind == "prompt" else completions
    own = {name: value for name, value in settings.items() if name == "behavior_version"}
    settings = {name: value for name, value in settings.items() if name not in own}
    prepared = run(tmp_path, kind, source=source, options={"datasets": [other], **own}, **settings)
    report = prepared.report
    assert (report.used, report.overlong_dropped) == (longest, 20 - longest)
    if longest < 20:
        rows = counted(20 - longest, "row")
        assert f"{rows} ({(20 - longest) / 20:.0%}) over the length limit, dropped" in report.lines()
    assert len(prepared.validation["other"]) == (11 if settings.get("max_prompt_length") == "p50" else 20)
    assert prepared.reports["other"].overlong_dropped == 20 - len(prepared.validation["other"])


@pytest.mark.parametrize(("overlong", "used", "dropped", "truncated"), [("drop", 13, 7, 0), ("truncate", 20, 0, 7)])
def test_prompts_end_before_the_models_positions(tmp_path, prompts, overlong, used, dropped, truncated):
    """At the start, with `overlong` in force: 16 positions and completions of 4 tokens leave 13 for a prompt: the last
    of them is predicted, and nothing from it."""
    room = {"completion_length": 4, "positions": 16}
    prepared = run(tmp_path, "prompt", source=prompts, options=room, max_prompt_length=None, overlong=overlong)
    report = prepared.report
    assert (report.used, report.overlong_dropped, report.overlong_truncated) == (used, dropped, truncated)
    assert prepared.longest == 13 and "the model has 16 positions: prompts have at most 13 tokens" in report.lines()[-1]
    automatic = run(tmp_path, "prompt", source=prompts, options=room)
    assert automatic.report.used == 13 and "16 positions" in automatic.report.lines()[-1]
    with pytest.raises(DataError, match=r"7 rows are over .*at most 13 tokens, so that.*\n  row 13 has"):
        run(tmp_path, "prompt", source=prompts, options=room, max_prompt_length=None, overlong="error")
    with pytest.raises(DataError, match=r"has 16 positions, but rollout\.max_completion_length is 17, which leaves no"):
        run(tmp_path, "prompt", source=prompts, options={"completion_length": 17, "positions": 16})
    whole = run(tmp_path, "prompt", source=prompts, options={"positions": 2048}, max_prompt_length=None)
    assert whole.report.used == 20 and "positions" not in " ".join(whole.report.lines())


def test_truncated_pairs(tmp_path, pairs):
    prepared = run(tmp_path, "pair", source=pairs, max_length=10, max_prompt_length=6, overlong="truncate")
    for index in range(len(prepared.train)):
        (tree,) = prepared.train[index].trees
        chosen, rejected = (len(child.tokens) for child in tree.children)
        row = prepared.train[index].row + 1
        prompt = min(row, 6)
        assert (len(tree.tokens), chosen, rejected) == (
            prompt,
            min(row + 1, 10 - prompt),
            min(2 * row + 1, 10 - prompt),
        )
        assert prepared.train.lengths[index] == prompt + chosen + rejected
    assert prepared.report.used == 20


TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "abcdefghij"},
    {"role": "assistant", "content": "klm"},
    {"role": "user", "content": "nopqrst"},
]
REPLY = {"role": "assistant", "content": "uvw"}
LAST = "<|im_start|>assistant\n"
MIDDLE = "<|im_start|>assistant\nklm<|im_end|>\n<|im_start|>user\nnopqrst<|im_end|>\n" + LAST
WHOLE = "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nabcdefghij<|im_end|>\n" + MIDDLE
SIZE = 80
CUTS = {  # the most tokens of that prompt -> what is left: the begin token, a header, the end of a turn, later turns
    SIZE: WHOLE,
    SIZE - 1: WHOLE.replace("Be", "e"),
    53: "<s><|im_start|>user\nij<|im_end|>\n" + MIDDLE,
    30: "<s><|im_start|>user\nnopqrst<|im_end|>\n" + LAST,  # no room for a token of the reply before it
    25: "<s><|im_start|>user\npqrst<|im_end|>\n" + LAST,
    12: "<s>" + LAST,
    11: LAST,  # no room for more
}


def chat_tokenizer():
    tokenizer = byte_tokenizer("{{ bos_token }}" + CHATML)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    return tokenizer


def in_chat(tmp_path, kind, rows, **settings):
    source = write(tmp_path / f"{kind}.jsonl", rows)
    return run(tmp_path, kind, source=source, tokenizer=chat_tokenizer(), template="chat", **settings)


@pytest.mark.parametrize("most", CUTS)
def test_a_prompt_that_is_cut_keeps_its_begin_token_and_a_header(tmp_path, most):
    """For every kind of method."""
    tokenizer = chat_tokenizer()
    assert tokenizer.apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True) == WHOLE
    size = {text: len(tokenizer(text)["input_ids"]) for text in (WHOLE, CUTS[most])}
    assert size[WHOLE] == SIZE and size[CUTS[most]] <= most
    kinds = {
        "sft": [{"prompt": TURNS, "completion": [REPLY]}],
        "pair": [{"prompt": TURNS, "chosen": [REPLY], "rejected": [{**REPLY, "content": "no"}]}],
        "unpaired": [{"prompt": TURNS, "completion": [REPLY], "label": label} for label in (True, False)],
        "prompt": [{"prompt": TURNS}],
    }
    for kind, rows in kinds.items():
        prepared = in_chat(tmp_path, kind, rows, max_prompt_length=most, overlong="truncate")
        (tree,) = prepared.train[0].trees
        end = "uvw<|im_end|>\n"
        assert (tokenizer.decode(tree.tokens), [tokenizer.decode(child.tokens) for child in tree.children]) == {
            "sft": (CUTS[most] + end, []),
            "pair": (CUTS[most], [end, "no<|im_end|>\n"]),
            "unpaired": (CUTS[most], [end]),
            "prompt": (CUTS[most], []),
        }[kind]
        assert prepared.train.lengths[0] == physical_length(tree, keep_last=True)
        assert prepared.longest == size[CUTS[most]] + (5 if kind != "prompt" else 0)
        assert prepared.report.overlong_truncated == (len(rows) if most < SIZE else 0)
        if kind == "sft":
            assert np.flatnonzero(tree.trained).tolist() == [*range(size[CUTS[most]], size[CUTS[most]] + 5)]


@pytest.mark.parametrize(("header", "most", "trained"), [("", 2, ["p"]), ("[U]", 5, ["[U]p"])])
def test_a_row_whose_only_target_follows_the_begin_token_or_header_of_its_prompt_is_used(
    tmp_path, header, most, trained
):
    """The reply has the weight 0, and all but one token of the prompt's text is cut: the kept begin token precedes it,
    so it is a target."""
    tokenizer = byte_tokenizer(
        "{{ bos_token }}{% for m in messages %}{{ '" + header + "' if m.role == 'user' }}{{ m.content }}{% endfor %}"
    )
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    row = {"prompt": [{"role": "user", "content": "p" * 9}], "completion": [{**REPLY, "weight": 0}]}
    settings = {"template": "chat", "overlong": "truncate", "options": {"completion_only_loss": False}}
    source = write(tmp_path / "rows.jsonl", [row])
    prepared = run(tmp_path, source=source, tokenizer=tokenizer, max_prompt_length=most, **settings)
    (tree,) = prepared.train[0].trees
    assert tokenizer.decode(tree.tokens) == f"<s>{header}puvw<|im_end|>"
    assert [text.removeprefix("<s>") for text in trained_text(prepared, tokenizer)] == trained
    with pytest.raises(DataError, match="no row can be used"):  # no begin token is kept: the first token is no target
        run(tmp_path, source=source, tokenizer=tokenizer, max_prompt_length=1, **settings)


def test_two_prompts_are_cut_each_at_its_turn(tmp_path):
    said, tokenizer = "\n\nAssistant:", chat_tokenizer()
    row = {"chosen": f"\n\nHuman: {'a' * 30}{said} b", "rejected": f"\n\nHuman: {'c' * 20}{said} d"}
    prepared = in_chat(tmp_path, "pair", [row], max_prompt_length=30, overlong="truncate")
    trees = prepared.train[0].trees
    assert [tokenizer.decode(tree.tokens) for tree in trees] == [
        f"<s><|im_start|>user\n{letter * 10}<|im_end|>\n{LAST}" for letter in "ac"
    ]
    assert prepared.train.lengths[0] == sum(physical_length(tree, keep_last=True) for tree in trees)
    assert prepared.longest == 30 + 3


@pytest.mark.parametrize("reply", ["uvw", "u" * 60])
def test_a_prompt_over_max_length_is_truncated(tmp_path, reply):
    """With `max_length` alone, until the reply has room, or half of it; not dropped."""
    tokenizer, said = chat_tokenizer(), {**REPLY, "content": reply}
    kinds = {
        "sft": [{"prompt": TURNS, "completion": [said]}],
        "pair": [{"prompt": TURNS, "chosen": [said], "rejected": [{**REPLY, "content": "no"}]}],
        "unpaired": [{"prompt": TURNS, "completion": [said], "label": label} for label in (True, False)],
    }
    for kind, rows in kinds.items():
        prepared = in_chat(tmp_path, kind, rows, max_length=60, overlong="truncate")
        (tree,) = prepared.train[0].trees
        read = tokenizer.decode([*tree.tokens, *(tree.children[0].tokens if tree.children else ())])
        prompt = "<s><|im_start|>user\nij<|im_end|>\n" + MIDDLE if reply == "uvw" else CUTS[30]
        prompt = prompt.replace("\nij", "\nghij") if reply == "uvw" else prompt
        left = 60 - len(tokenizer(prompt)["input_ids"])
        assert read == prompt + (f"{reply}<|im_end|>\n" if reply == "uvw" else reply[:left])
        assert prepared.report.overlong_dropped == 0 and prepared.report.overlong_truncated == len(rows)
        with pytest.raises(DataError, match="no row can be used"):
            in_chat(tmp_path, kind, rows, max_length=60, overlong="truncate", options={"behavior_version": 1})


def test_long_documents_are_cut_so_that_every_token_is_a_target_once(tmp_path):
    text = "".join(chr(97 + n % 26) for n in range(99))
    (tmp_path / "a.txt").write_text(text + "<|endoftext|>short")
    prepared = run(tmp_path, source=str(tmp_path / "a.txt"), max_length=10, template="chat")
    assert prepared.report.overlong_split == 1 and prepared.train.lengths.max() == 10
    targets = [
        int(token)
        for index in range(len(prepared.train))
        for token in prepared.train[index].trees[0].tokens[1:]
        if prepared.train[index].row == 0
    ]
    assert byte_tokenizer().decode(targets) == text[1:] + "<|im_end|>"


def test_nothing_left_is_an_error_with_the_report(tmp_path):
    long = write(tmp_path / "long.jsonl", [{"prompt": "pp", "completion": "c"}] * 20)
    with pytest.raises(
        DataError, match=r"no row can be used:\n(.*\n)*.*20 rows \(100%\) over the length limit, dropped"
    ):
        run(tmp_path, source=long, max_length=2)


@pytest.mark.parametrize(("validation", "count"), [({"ratio": 0.25}, 5), ({"rows": 3}, 3), ({"ratio": 0.01}, 1)])
def test_split_is_disjoint_and_follows_the_seed(tmp_path, completions, validation, count):
    splits = [run(tmp_path, source=completions, validation=validation, options={"seed": seed}) for seed in (0, 0, 1)]
    held_out = [rows_of(split.validation["validation"]) for split in splits]
    assert len(held_out[0]) == count and held_out[0] == held_out[1] != held_out[2]
    assert sorted(rows_of(splits[0].train) + held_out[0]) == list(range(20))
    assert splits[0].fingerprint == splits[1].fingerprint != splits[2].fingerprint
    with pytest.raises(DataError, match="leaves none to train on"):
        run(tmp_path, source=completions, validation={"rows": 20})


@pytest.fixture
def varied(tmp_path):
    """200 pairs: prompts of 1 to 40 tokens, replies of 1 to 30; of rows 6 and 106 both are the same."""
    rng = np.random.default_rng(5)
    rows = []
    for n in range(200):
        prompt, chosen, rejected = (rng.choice(list("abcdef"), rng.integers(1, most)).tolist() for most in (41, 31, 31))
        rows.append({"prompt": "".join(prompt), "chosen": f"{n}{''.join(chosen)}", "rejected": "".join(rejected) + "r"})
        if n % 100 == 6:
            rows[-1]["rejected"] = rows[-1]["chosen"]
    return write(tmp_path / "varied.jsonl", rows)


SECTIONS = [
    {"kind": "sft"},
    {"kind": "sft", "max_length": 30},
    {"kind": "pair", "max_length": 60},
    {"kind": "pair", "max_length": 40, "overlong": "truncate", "max_prompt_length": 10},
    {"kind": "prompt"},
    {"kind": "prompt", "max_prompt_length": "p50", "template": "question_only"},
    {"kind": "prompt", "columns": {"prompt": "chosen"}, "format": "prompt"},
    {"kind": "sft", "columns": {"prompt": "rejected", "completion": "prompt"}, "format": "prompt_completion"},
    {"kind": "sft", "columns": {"text": "chosen"}, "format": "text", "template": "chat"},
]


def test_all_methods_hold_out_the_same_rows_of_a_source(tmp_path, varied):
    """Whatever the format, the columns, the template and the limits: nobody trains on what another validates on."""
    trained, validated, counts = [], [], []
    for settings in SECTIONS:
        settings = dict(settings)
        prepared = run(tmp_path, settings.pop("kind"), byte_tokenizer(CHATML), source=varied, **settings,
                       validation={"rows": 50}, options={"seed": 3, "method": "this"})  # fmt: skip
        trained.append(set(rows_of(prepared.train)))
        validated.append(set(rows_of(prepared.validation["validation"])))
        counts.append(len(validated[-1]))
        assert f"validation: {counts[-1]} of 50 held-out rows can be used by this" in prepared.report.lines()[-1]
    held_out = set.union(*validated)
    assert len(held_out) == 50 == max(counts) and min(counts) < 45, "limits apply after the rows are held out"
    assert not held_out & set.union(*trained)
    assert held_out == validated[4] == validated[6], "prompts are measured beyond the training prompts' percentile"
    other = run(tmp_path, source=varied, validation={"rows": 50}, options={"seed": 4}).validation["validation"]
    assert len(set(rows_of(other)) & held_out) < 30, "another seed, other rows"
    more = run(tmp_path, source=varied, validation={"rows": 80}, options={"seed": 3}).validation["validation"]
    assert len(more) == 80 and held_out < set(rows_of(more)), "the first 50 of an order of which these are the first 80"


def test_malformed_rows_are_held_out_too(tmp_path, varied):
    """Rows that are malformed for pairs are rows of the source, and other methods validate on them."""
    found, lines = {}, {}
    for kind in ("pair", "prompt"):
        prepared = run(tmp_path, kind, source=varied, max_rows=100, validation={"rows": 99})
        found[kind] = set(rows_of(prepared.validation["validation"]))
        lines[kind] = prepared.report.lines()[-1]
    assert lines == {
        "pair": "validation: 98 of 99 held-out rows can be used: 1 malformed",
        "prompt": "validation: 99 of 99 held-out rows can be used",
    }
    assert found["prompt"] - found["pair"] == {6} and found["pair"] <= found["prompt"]


def test_none_of_the_held_out_rows_is_usable(tmp_path):
    rows = [{"prompt": "p" * 20 if n else "p", "completion": f"{n}"} for n in range(6)]
    source = write(tmp_path / "rows.jsonl", rows)
    errors = []
    for seed in range(20):
        try:
            run(tmp_path, source=source, max_length=15, validation={"rows": 1}, options={"seed": seed})
        except DataError as error:
            errors.append(str(error))
    few = r"validation: none of the 1 held-out rows can be used: 1 over the length limits"
    assert any(few in error for error in errors), errors
    assert all(few in error or "every row that can be used is held out" in error for error in errors)


@pytest.mark.parametrize(("times", "rows", "expected"), [(2, 10, 10), (2, 11, 12), (3, 9, 9), (3, 1, 3)])
def test_equal_rows_are_on_one_side(tmp_path, times, rows, expected):
    """Also where one file has the keys in another order and nulls for missing ones; the last group is not torn."""
    groups = [{"prompt": f"p{n}", "completion": "c", "extra": {"a": n}} for n in range(12)]
    other = [{"extra": {"b": None, "a": one["extra"]["a"]}, "note": None, **one} for one in groups]
    sources = [write(tmp_path / f"{n}.jsonl", other if n else groups) for n in range(times)]
    other = [one | {"extra": {"b": None, **one["extra"]}, "note": None} for one in groups]
    prepared = run(tmp_path, source=[{"source": one, "weight": 2} for one in sources], validation={"rows": rows})
    held_out = rows_of(prepared.validation["validation"])
    assert len(held_out) == expected and all(held_out.count(row) == 1 for row in held_out)
    assert sorted({row % 12 + 12 * n for row in held_out for n in range(times)}) == sorted(held_out)
    assert not set(held_out) & set(rows_of(prepared.train)) and len(prepared.train) == 2 * (12 * times - expected)


def test_the_same_rows_in_every_file_type(tmp_path):
    """JSON, JSONL, packed JSONL, Parquet and CSV of the same rows hold out the same ones."""
    rows = [
        {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "x" * n}], "n": n,
         "score": n / 2, "good": n % 2 == 0} | ({"note": "é 🦙"} if n % 3 else {})
        for n in range(1, 31)
    ]  # fmt: skip
    write(tmp_path / "rows.jsonl", rows)
    (tmp_path / "rows.json").write_text(json.dumps({"rows": rows}))
    with gzip.open(tmp_path / "packed.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(dict(reversed(row.items()))) + "\n" for row in rows)
    table = pa.Table.from_pylist([{**row, "note": row.get("note")} for row in rows])
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=7)
    with open(tmp_path / "rows.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["note", "good", "score", "n", "messages"])
        writer.writeheader()
        writer.writerows(row | {"messages": json.dumps(row["messages"])} for row in rows)
    files = ("rows.jsonl", "rows.json", "packed.jsonl.gz", "rows.parquet", "rows.csv")
    parts = [SourcePart(str(tmp_path / name), "train", None) for name in files]
    first, *others = (hashes_of(part, None, 0, tmp_path / "cache").tolist() for part in parts)
    assert len(set(first)) == 30 and 0 not in first
    assert others == [first] * 4


def test_a_hash_is_of_the_values_and_where_they_are():
    def hashed(value):
        return row_hash(Record(0, "file", 1, value))

    deep = {"a": "z"}
    for _ in range(900):
        deep = {"a": [deep]}
    rows = [
        {"a": "x", "b": "y"}, {"a": "y", "b": "x"}, {"a": ["x", "y"]}, {"a": ["y", "x"]}, {"a": ["x", None, "y"]},
        {"a": {"b": "x"}}, {"b": {"a": "x"}}, {"a": "xy"}, {"a": "x"}, {"ab": "x"}, {"a": 1}, {"a": "01"}, {"a": 1.5},
        {"a": "\ud800"}, {"a": "[x"}, {"a": 0}, {"a": False}, {}, deep,
    ]  # fmt: skip
    assert len({hashed(row) for row in rows}) == len(rows) and all(0 < hashed(row) < 2**64 for row in rows)
    assert row_hash(Record(0, "file", 1, None, "malformed")) == 0
    nan = {"a": "x", "b": float("nan"), "c": {"d": None}, "e": "", "f": []}
    assert hashed(nan) == hashed({"a": "x"}) and hashed({"a": 2.0}) == hashed({"a": "2"}) == hashed({"a": 2})


def test_documents_are_held_out_whole(tmp_path):
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(f"document {n} " * 9 for n in range(10)))
    prepared = run(tmp_path, source=str(tmp_path / "a.txt"), max_length=12, template="chat", validation={"ratio": 0.3})
    held_out, trained = set(rows_of(prepared.validation["validation"])), set(rows_of(prepared.train))
    assert len(held_out) == 3 and held_out | trained == set(range(10)) and not held_out & trained
    assert "validation: 3 of 3 held-out rows can be used" in prepared.report.lines()


def test_a_validation_set_that_is_trained_on_is_reported(tmp_path, completions):
    """Rows of a set with a source of its own stay where they are: training rows may be measured on purpose."""
    further = [EvaluationDataset(name="own", source=completions, max_rows=8)]
    prepared = run(tmp_path, source=completions, validation={"rows": 5}, options={"datasets": further})
    expected = len(set(range(8)) - set(rows_of(prepared.validation["validation"])))
    assert f"{expected} of 8 rows are also trained on" in prepared.reports["own"].lines()
    other = [EvaluationDataset(name="other", source=write(tmp_path / "o.jsonl", [{"prompt": "q", "completion": "d"}]))]
    clean = run(tmp_path, source=completions, options={"datasets": other})
    assert "trained on" not in " ".join(clean.reports["other"].lines())


@pytest.mark.parametrize("kind", ["sft", "prompt"])
def test_runs_of_version_1_keep_their_split(tmp_path, varied, kind):
    """A permutation of the rows within the limits: the fingerprint of a run that is resumed is the old one."""
    prepared = run(
        tmp_path, kind, source=varied, max_length=40, validation={"rows": 20}, options={"behavior_version": 1}
    )
    usable = [
        n
        for n, row in enumerate(map(json.loads, Path(varied).read_text().splitlines()))
        if len(row["prompt"]) + (len(row["chosen"]) + 1 if kind == "sft" else 0) <= 40
    ]
    if kind == "prompt":
        lengths = [len(json.loads(line)["prompt"]) for line in Path(varied).read_text().splitlines()]
        usable = [n for n in usable if lengths[n] <= np.percentile(lengths, 90, method="higher")]
    chosen = np.random.default_rng([0, zlib.crc32(b"validation")]).permutation(usable)[:20]
    assert rows_of(prepared.validation["validation"]) == sorted(chosen)
    assert rows_of(prepared.train) == [n for n in usable if n not in chosen]


def test_validation_from_other_sources(tmp_path, completions):
    other = write(tmp_path / "other.jsonl", [{"prompt": "q", "completion": "d"}] * 5)
    further = (EvaluationDataset(name="again", source=completions, max_rows=4),)
    prepared = run(
        tmp_path, source=completions, validation={"source": other, "max_rows": 2}, options={"datasets": further}
    )
    assert {name: len(data) for name, data in prepared.validation.items()} == {"validation": 2, "again": 4}
    assert list(prepared.reports) == ["train", "validation", "again"] and len(prepared.train) == 20
    clash = (EvaluationDataset(name="validation", source=other),)
    with pytest.raises(DataError, match="choose another name"):
        run(tmp_path, source=completions, validation={"rows": 1}, options={"datasets": clash})


def test_mixed_sources_and_weights(tmp_path, completions):
    other = write(tmp_path / "other.jsonl", [{"instruction": f"i{n}", "output": "d"} for n in range(8)])
    parts = [
        {"source": completions, "max_rows": 4, "weight": 2.5},
        {"source": other, "weight": 0.5},
        {"source": other, "max_rows": 1},
    ]
    prepared = run(tmp_path, source=parts)
    counts = np.bincount(rows_of(prepared.train), minlength=13)
    assert prepared.report.formats == ("prompt_completion", "alpaca", "alpaca")
    assert sorted(counts[:4]) == [2, 2, 3, 3] and sorted(counts[4:12]) == [0] * 4 + [1] * 4 and counts[12] == 1
    assert rows_of(run(tmp_path, source=parts).train) == rows_of(prepared.train)
    split = run(tmp_path, source=parts, validation={"rows": 6})
    assert not set(rows_of(split.train)) & set(rows_of(split.validation["validation"]))
    assert len(run(tmp_path, source=parts, max_rows=5).train) == 4 * 2 + 2 + 0


def test_max_rows_takes_the_first(tmp_path, completions):
    prepared = run(tmp_path, source=completions, max_rows=3)
    assert rows_of(prepared.train) == [0, 1, 2] and prepared.report.read == 3


def test_preference_rows_for_sft_are_their_chosen(tmp_path, pairs):
    tree = run(tmp_path, source=pairs, max_rows=3).train[2].trees[0]
    assert byte_tokenizer().decode(tree.tokens) == "pppccc<|im_end|>" and list(tree.trained) == [False] * 3 + [True] * 4


def test_duplicates_are_counted_and_used(tmp_path):
    rows = [{"prompt": "a", "completion": c} for c in ("b", "b", "c", "b")]
    prepared = run(tmp_path, source=write(tmp_path / "rows.jsonl", rows))
    assert prepared.report.duplicates == 2 and len(prepared.train) == 4


def test_cache_is_used_and_follows_content_settings_and_tokenizer(tmp_path, completions):
    def entries():
        return {path.parent.name for path in (tmp_path / "cache").rglob("rows.arrow")}

    first = run(tmp_path, source=completions)
    (entry,) = entries()
    written = (tmp_path / "cache" / "data" / entry / "rows.arrow").stat().st_mtime_ns
    again = run(
        tmp_path, source=completions, max_length=30, validation={"rows": 2}
    )  # limits and splits need no new tokens
    assert entries() == {entry} and again.fingerprint != first.fingerprint
    assert (tmp_path / "cache" / "data" / entry / "rows.arrow").stat().st_mtime_ns == written
    run(tmp_path, source=completions, strip_think=True)
    run(tmp_path, source=completions, max_rows=5)
    other = byte_tokenizer()
    other.eos_token = "<|endoftext|>"
    run(tmp_path, source=completions, tokenizer=other)
    run(tmp_path, source=completions, options={"completion_only_loss": False})
    run(tmp_path, source=completions, template="question_only")
    assert len(entries()) == 6
    with open(completions, "a") as file:
        file.write('{"prompt": "new", "completion": "row"}\n')
    assert len(run(tmp_path, source=completions).train) == 21 and len(entries()) == 7


@pytest.mark.parametrize("kind", ["sft", "pair", "prompt", "unpaired"])
def test_the_fingerprint_is_of_the_data_alone(tmp_path, completions, pairs, monkeypatch, kind):
    """Not of the code that read it, of its file's bytes, or of the batches it came in; but of every value of it."""
    names = {
        "sft": ("prompt", "completion"), "prompt": ("prompt", "answer"), "pair": ("prompt", "chosen", "rejected"),
        "unpaired": ("prompt", "completion", "label"),
    }[kind]  # fmt: skip
    rows = [{name: f"{name}{i}" if name != "label" else i > 5 for name in names} for i in range(12)]

    def seen(name, rows, **settings):
        source = write(tmp_path / name, rows)
        return run(tmp_path, kind, source=source, max_length=40, **settings).fingerprint

    first = seen("a.jsonl", rows)
    monkeypatch.setattr(cache, "CODE_VERSION", cache.CODE_VERSION + 1)
    monkeypatch.setattr(reading, "BATCH", 5)
    assert seen("b.jsonl", rows) == first and len(list((tmp_path / "cache" / "data").iterdir())) == 2
    last = rows[-1] | {names[-1]: False if kind == "unpaired" else "another"}
    others = [seen("c.jsonl", changed) for changed in (rows[::-1], rows[:-1], [*rows[:-1], last])]
    assert len({first, *others, seen("a.jsonl", rows, max_prompt_length=7)}) == 5


@pytest.mark.parametrize("damage", ["flip", "cut", "facts", "gone"])
def test_damaged_cache_is_made_again_with_a_note(tmp_path, completions, damage):
    before = run(tmp_path, source=completions)
    (path,) = (tmp_path / "cache").rglob("rows.arrow")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "flip":
        path.write_bytes(content)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "facts":
        path.with_name("facts.json").write_text("{")
    else:
        path.unlink()
    after = run(tmp_path, source=completions)
    assert "were damaged" in "\n".join(after.report.lines()) and not before.report.notes
    assert rows_of(after.train) == list(range(20)) and after.fingerprint == before.fingerprint
    assert not run(tmp_path, source=completions).report.notes


def test_cache_of_somebody_else_is_left_alone(tmp_path, completions, monkeypatch):
    """What may not be read is not damaged."""
    run(tmp_path, source=completions)
    (path,) = (tmp_path / "cache").rglob("rows.arrow")
    read = Path.read_text

    def refuse(at, *rest, **more):
        if at.name == "facts.json":
            raise PermissionError(13, "Permission denied")
        return read(at, *rest, **more)

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(DataError, match=r"cannot be used: Permission denied\. Set POSTTRAIN_CACHE"):
        run(tmp_path, source=completions)
    assert path.exists()


def test_a_folder_that_another_run_has_just_finished_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "a.tmp-1").mkdir()
    monkeypatch.setattr(Path, "iterdir", lambda *_: [tmp_path / "gone.tmp-1", tmp_path / "a.tmp-1"])
    monkeypatch.setattr(cache, "LEFTOVER_SECONDS", -1)
    cache._clean(tmp_path)
    assert not (tmp_path / "a.tmp-1").exists()


def test_cache_that_cannot_be_written(tmp_path, completions):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(DataError, match="POSTTRAIN_CACHE"):
        run(tmp_path, source=completions)


def test_arithmetic_is_right_and_its_splits_are_disjoint():
    train, test = ({row["problem"]: row for row in arithmetic_problems(split, 2_000, 0)} for split in ("train", "test"))
    assert len(train) == len(test) == 2_000 and not train.keys() & test.keys()
    for row in train.values():
        expression = row["problem"].removeprefix("What is ").removesuffix("?")
        assert int(row["answer"]) == eval(expression)
        for step in row["solution"].split("\n"):
            values = [eval(part) for part in step.split(" = ")]
            assert len(set(values)) == 1, step
        assert row["solution"].endswith(f"= {row['answer']}")
    assert list(arithmetic_problems("train", 5, 1)) != list(arithmetic_problems("train", 5, 0))


def test_arithmetic_with_tags(tmp_path):
    tokenizer = byte_tokenizer()
    prepared = run(tmp_path, tokenizer=tokenizer, source="builtin:arithmetic", template="tags", max_rows=20)
    tree = prepared.train[0].trees[0]
    text, trained = tokenizer.decode(tree.tokens), tokenizer.decode(np.asarray(tree.tokens)[tree.trained])
    assert text.endswith(trained) and "<start_working_out>" + trained in text
    assert trained.endswith("</SOLUTION><|im_end|>") and trained.count("<SOLUTION>") == 1


def test_arithmetic_preferences_differ_in_the_answer(tmp_path):
    tokenizer = byte_tokenizer()
    source = "builtin:arithmetic-preference"
    prepared = run(tmp_path, "pair", tokenizer, source=source, template="tags", max_rows=50)
    for index in range(50):
        (tree,) = prepared.train[index].trees
        chosen, rejected = (tokenizer.decode(child.tokens) for child in tree.children)
        right, wrong = (reply.split("<SOLUTION>")[1].split("<")[0] for reply in (chosen, rejected))
        assert int(right) != int(wrong) and f"= {wrong}<end_working_out>" in rejected


@pytest.mark.parametrize(("kind", "colour"), [("sft", False), ("pair", True)])
def test_explore_fits_eighty_columns_and_marks_what_is_trained(tmp_path, pairs, kind, colour):
    prepared = run(tmp_path, kind, byte_tokenizer(CHATML), source=pairs, template="chat", validation={"rows": 2})
    out = StringIO()
    console = Console(file=out, width=80, force_terminal=colour, color_system="truecolor" if colour else None)
    explore(prepared, byte_tokenizer(CHATML), Selection(2), console)
    text = out.getvalue()
    assert ("\x1b[" in text) == colour
    if not colour:
        assert max(map(len, text.splitlines())) <= 80
        assert "20 rows read as preference, 20 examples used" in text and "validation" in text
        assert "⟦c<|im_end|>↵\n⟧" in text and "assistant↵\n⟦" in text


def test_explore_shows_characters_of_several_tokens(tmp_path):
    source = write(tmp_path / "rows.jsonl", [{"prompt": "é ✓", "completion": "日本\t\u0007"}])
    out = StringIO()
    explore(run(tmp_path, source=source), byte_tokenizer(), Selection(1), Console(file=out, width=80))
    assert "é ✓⟦日本→\\x07<|im_end|>⟧" in out.getvalue()


def test_hh_harmless(shared, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "minimind6400")
    folder = str(shared / "data" / "hh-harmless")
    data = DataConfig(source=folder, template="none", validation={"source": folder})
    first = prepare(data, tokenizer, "pair", cache_dir=tmp_path)
    assert (first.report.read, first.reports["validation"].read) == (1_600, 300)
    assert first.report.malformed == () and first.report.used + first.report.overlong_dropped == 1_600
    two = sum(len(first.train[index].trees) == 2 for index in range(len(first.train)))
    assert 1 <= two <= 10


def test_explore_on_the_command_line(tmp_path, monkeypatch, capsys):
    byte_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setenv("POSTTRAIN_CACHE", str(tmp_path / "cache"))
    command = ["explore", "method=sft", f"model.path={tmp_path / 'model'}", "data.source=builtin:arithmetic"]
    assert main([*command, "data.template=tags", "data.max_rows=20", "--rows", "1"]) == 0
    shown = capsys.readouterr().out
    assert "20 rows read as problem_answer" in shown and "⟦" in shown and list(tmp_path.rglob("rows.arrow"))
    assert main([*command, "data.template=chat"]) != 0
    assert "the tokenizer has no chat template" in capsys.readouterr().err


def test_pairs_and_whole_conversations_in_one_sharegpt_file(tmp_path):
    """SFT keeps the question of the pairs among them."""
    said = [{"from": "human", "value": "Q"}]
    rows = [
        {"conversations": [*said, {"from": "gpt", "value": "A"}]},
        {"conversations": said, "chosen": {"from": "gpt", "value": "B"}, "rejected": {"from": "gpt", "value": "C"}},
    ]
    tokenizer = byte_tokenizer(CHATML)
    prepared = run(tmp_path, tokenizer=tokenizer, source=write(tmp_path / "rows.jsonl", rows), template="chat")
    texts = [tokenizer.decode(prepared.train[index].trees[0].tokens) for index in (0, 1)]
    both = "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
    assert texts == [both.format("A"), both.format("B")]


def test_a_tokenizer_that_ends_texts_itself_leaves_one_stop_token(tmp_path):
    """And none after a prompt that is to be continued."""
    tokenizer = byte_tokenizer()
    stop = ("<|im_end|>", tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("$A <|im_end|>", None, [stop])
    assert tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id
    source = write(tmp_path / "rows.jsonl", [{"prompt": "p", "completion": "c"}])
    (tree,) = run(tmp_path, tokenizer=tokenizer, source=source).train[0].trees
    assert tokenizer.decode(tree.tokens) == "pc<|im_end|>"
    (tree,) = run(tmp_path, "prompt", tokenizer, source=source).train[0].trees
    assert tokenizer.decode(tree.tokens) == "p"


def test_a_tokenizer_that_knows_next_to_nothing_keeps_every_token(tmp_path):
    """Where any text comes to the stop token, that is no sign of one at the end of every text."""
    backend = Tokenizer(models.WordLevel({"<e>": 0, "0": 1, "1": 2, "2": 3}, unk_token="<e>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<e>", unk_token="<e>")
    source = write(tmp_path / "rows.jsonl", [{"prompt": "0 1 2", "completion": " 1"}])
    (tree,) = run(tmp_path, "prompt", tokenizer, source=source).train[0].trees
    assert list(tree.tokens) == [1, 2, 3]


def test_pairs_that_are_the_same_are_not_trained_on(tmp_path):
    """Once cut they are dropped with a warning; as a template has them they are malformed."""
    rows = [{"prompt": "p", "chosen": "same" + end, "rejected": "same" + other} for end, other in ("ab", "cd", "ef")]
    rows.append({"prompt": "p", "chosen": "x", "rejected": "y"})
    source = write(tmp_path / "rows.jsonl", rows)
    prepared = run(tmp_path, "pair", source=source, max_length=5, overlong="truncate")
    assert rows_of(prepared.train) == [3] and prepared.report.overlong_dropped == 3
    trimmed = CHATML.replace("message.content", "message.content | trim")
    rows = [{"prompt": "p", "chosen": "a", "rejected": "a "}, *[{"prompt": "p", "chosen": "x", "rejected": "y"}] * 100]
    source = write(tmp_path / "trimmed.jsonl", rows)
    prepared = run(tmp_path, "pair", byte_tokenizer(trimmed), source=source, template="chat")
    assert [row.reason for row in prepared.report.malformed] == ["chosen and rejected have the same tokens"]


def test_one_row_without_its_prompt_is_a_malformed_row(tmp_path):
    rows = [{"prompt": "p", "chosen": f"a{n}", "rejected": "b"} for n in range(300)]
    lacking = {"chosen": "a e", "rejected": "a f"}
    source = write(tmp_path / "rows.jsonl", [*rows, {"prompt": None, "chosen": "a c", "rejected": "a d"}, lacking])
    prepared = run(tmp_path, "pair", byte_tokenizer(CHATML), source=source, template="chat")
    assert len(prepared.train) == 300
    assert ["has no prompt" in row.reason for row in prepared.report.malformed] == [True, True]
    with pytest.raises(DataError, match=r"rows2\.jsonl line 1: the pair has no prompt"):
        run(
            tmp_path, "pair", byte_tokenizer(CHATML), source=write(tmp_path / "rows2.jsonl", [lacking]), template="chat"
        )


def test_the_longest_sequence_is_of_what_is_used(tmp_path, pairs):
    whole = run(tmp_path, "pair", source=pairs)
    assert whole.longest == 20 + 41  # with the stop token
    assert run(tmp_path, "pair", source=pairs, max_length=40).longest == 13 + 27
    assert run(tmp_path, "pair", source=pairs, max_length=40, overlong="truncate").longest == 40
    rows = [{"prompt": "p" * n, "completion": "c"} for n in (3, 9)]
    source = write(tmp_path / "rows.jsonl", rows)
    assert run(tmp_path, source=source).longest == 11 and run(tmp_path, source=source, max_length=8).longest == 5


def test_several_runs_may_fill_one_cache(tmp_path):
    """Two find the same entry damaged and make it again, or make the same one: both get it, and others may read it."""

    def build(writer):
        writer.write([{"row": 0, "tokens": [1, 2], "spans": [0, 2], "prompt": 0}])
        together.wait()
        return Reading("text", 1)

    def make(name):
        return cache.cached(tmp_path, name, KINDS["sft"].schema, build)[0].num_rows

    with ThreadPoolExecutor(2) as threads:
        for damaged in (False, True):
            together = threading.Barrier(2, timeout=20)
            if damaged:
                (tmp_path / "data/key/rows.arrow").write_bytes(b"no table")
                together = threading.Barrier(1)
            assert list(threads.map(make, ["key", "key"])) == [1, 1]
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "data/key").stat().st_mode & 0o777 == 0o777 & ~umask
    assert not list((tmp_path / "data").glob("*.tmp-*"))
