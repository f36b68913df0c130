"""Token ids and masks equal those of TRL 1.16's own data set preparation."""

import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from data_tokenizer import byte_tokenizer, prepare
from transformers import AutoTokenizer

from posttrain.config.schema.data import DataConfig
from posttrain.data.readers import read_files
from posttrain.recipes.kto import with_other_completions

pytest.importorskip("trl", reason="needs TRL as the oracle (the `bench` extra)")
import trl
from trl import DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer
from trl.chat_template_utils import qwen3_training_chat_template
from trl.data_utils import apply_chat_template

datasets.disable_progress_bars()
ROWS = 40


@pytest.fixture(scope="module", params=["minimind6400", "gpt2", "stories260K"])
def plain_tokenizer(request, shared):
    """Tokenizers with and without a beginning-of-text token of their own."""
    folder = shared / ("models" if request.param == "stories260K" else "tokenizers")
    return AutoTokenizer.from_pretrained(folder / request.param)


@pytest.fixture(scope="module")
def minimind(shared):
    return AutoTokenizer.from_pretrained(shared / "tokenizers" / "minimind6400")


def trl_args(**more):
    return SimpleNamespace(
        dataset_num_proc=None,
        max_length=None,
        truncation_mode="keep_start",
        shuffle_dataset=False,
        dataset_text_field="text",
        **more,
    )


def trl_pairs(trainer, rows, tokenizer, **args):
    made = datasets.Dataset.from_list(rows)
    self = SimpleNamespace(_tokenizer=tokenizer)
    return list(trainer._prepare_dataset(self, made, tokenizer, trl_args(**args), "train"))


def trl_sft(rows, tokenizer, completion_only_loss, assistant_only_loss=False, chat_template=None):
    self = SimpleNamespace(_tokenizer=tokenizer, chat_template=chat_template, completion_only_loss=completion_only_loss)
    args = trl_args(assistant_only_loss=assistant_only_loss)
    made = datasets.Dataset.from_list(rows)
    return list(SFTTrainer._prepare_dataset(self, made, tokenizer, args, False, None, "train"))


def values(path, rows=ROWS):
    return [record.value for record, _ in zip(read_files((path,)), range(rows), strict=False)]


def split_reply(transcript):
    at = transcript.rindex("\n\nAssistant:") + len("\n\nAssistant:")
    return transcript[:at], transcript[at:]


def assert_pairs(prepared, expected):
    assert len(prepared.train) == len(expected)
    for index, row in enumerate(expected):
        (tree,) = prepared.train[index].trees
        chosen, rejected = tree.children
        assert list(tree.tokens) == row["prompt_ids"]
        assert (list(chosen.tokens), chosen.trained) == (row["chosen_ids"], True)
        assert (list(rejected.tokens), rejected.trained) == (row["rejected_ids"], True)


def assert_sft(prepared, expected):
    assert len(prepared.train) == len(expected)
    for index, row in enumerate(expected):
        (tree,) = prepared.train[index].trees
        labels = np.where(tree.trained, tree.tokens, -100)
        assert list(tree.tokens) == row["input_ids"]
        assert list(labels) == row["labels"]


def test_hh_pairs_as_text(shared, plain_tokenizer, tmp_path):
    source = shared / "data" / "hh-harmless" / "test.jsonl.gz"
    rows = []
    for value in values(source):
        (prompt, chosen), (other, rejected) = split_reply(value["chosen"]), split_reply(value["rejected"])
        assert prompt == other
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    data = DataConfig(source=str(source), template="none", max_rows=ROWS, max_length=10_000)
    prepared = prepare(data, plain_tokenizer, "pair", cache_dir=tmp_path)
    assert_pairs(prepared, trl_pairs(DPOTrainer, rows, plain_tokenizer))


def test_reward_pairs_are_whole_sequences(shared, minimind, tmp_path):
    source = shared / "data" / "hh-harmless" / "test.jsonl.gz"
    data = DataConfig(source=str(source), template="none", max_rows=ROWS, max_length=10_000)
    prepared = prepare(data, minimind, "pair", cache_dir=tmp_path)
    expected = trl_pairs(RewardTrainer, values(source), minimind)
    for index, row in enumerate(expected):
        (tree,) = prepared.train[index].trees
        for child, name in zip(tree.children, ("chosen_ids", "rejected_ids"), strict=True):
            assert [*tree.tokens, *child.tokens] == row[name]


def test_pairs_of_messages(shared, minimind, tmp_path):
    source = shared / "data" / "preference-demo" / "dpo_en_demo.json"

    def message(turn):
        roles = {"human": "user", "gpt": "assistant"}
        return {"role": roles.get(turn["from"], turn["from"]), "content": turn["value"]}

    rows = [
        {
            "prompt": [message(turn) for turn in value["conversations"]],
            "chosen": [message(value["chosen"])],
            "rejected": [message(value["rejected"])],
        }
        for value in values(source)
    ]
    data = DataConfig(source=str(source), max_rows=ROWS, max_length=10_000)
    prepared = prepare(data, minimind, "pair", cache_dir=tmp_path)
    assert prepared.report.formats == ("sharegpt",)
    assert_pairs(prepared, trl_pairs(DPOTrainer, rows, minimind))


def test_labelled_completions_and_their_rotation(shared, minimind, tmp_path):
    """Prompt, completion, label, and the completion of another prompt, in batches of 8 of which the last is short."""
    source = shared / "data" / "preference-demo" / "kto_en_demo.json"
    limit, size = 700, 8
    rows = [
        {"prompt": value["messages"][:-1], "completion": value["messages"][-1:], "label": value["label"]}
        for value in values(source)
    ]
    self = SimpleNamespace(_tokenizer=minimind, calculate_KL=True, desirable_weight=1.0, undesirable_weight=1.0)
    args = SimpleNamespace(dataset_num_proc=None, max_length=limit, per_device_train_batch_size=size)
    expected = list(KTOTrainer._prepare_dataset(self, datasets.Dataset.from_list(rows), minimind, args, "train"))
    data = DataConfig(source=str(source), max_rows=ROWS, max_length=limit, overlong="truncate")
    prepared = prepare(
        data, minimind, "unpaired", cache_dir=tmp_path, behavior_version=1
    )  # drops a prompt over it, too
    assert prepared.report.formats == ("kto",) and prepared.report.overlong_truncated
    examples = [prepared.train[index] for index in range(len(prepared.train))]
    assert len(examples) == len(expected) and len(examples) % size
    own_tokens = [len(example.trees[0].children[0].tokens) for example in examples]
    completions = {tuple(row["completion_ids"]): count for row, count in zip(expected, own_tokens, strict=True)}
    pairs = [
        pair
        for start in range(0, len(examples), size)
        for pair in with_other_completions(examples[start : start + size], limit)
    ]
    for example, pair, row in zip(examples, pairs, expected, strict=True):
        ((tree,), (both,)) = example.trees, pair.trees
        (own,), (kept, other) = tree.children, both.children
        assert (list(tree.tokens), list(both.tokens)) == (row["prompt_ids"], row["prompt_ids"])
        room = limit - len(tree.tokens)  # TRL cuts where it makes batches
        assert list(own.tokens) == list(kept.tokens) == row["completion_ids"][:room]
        kl_ids, known = row["KL_completion_ids"], completions[tuple(row["KL_completion_ids"])]
        assert list(other.tokens) == kl_ids[: min(room, known)]  # ours was cut behind its own prompt first
        assert (example.label, own.trained, other.trained) == (row["label"], True, True)


@pytest.mark.parametrize("completion_only_loss", [True, False])
def test_alpaca_as_text(shared, plain_tokenizer, tmp_path, completion_only_loss):
    source = shared / "data" / "sft-demo" / "alpaca_en_demo.json"
    rows = [
        {
            "prompt": value["instruction"] + "\n" + (value["input"] + "\n" if value["input"] else ""),
            "completion": value["output"],
        }
        for value in values(source)
    ]
    data = DataConfig(source=str(source), template="none", max_rows=ROWS, max_length=10_000)
    prepared = prepare(data, plain_tokenizer, "sft", completion_only_loss=completion_only_loss, cache_dir=tmp_path)
    assert_sft(prepared, trl_sft(rows, plain_tokenizer, completion_only_loss))


def test_alpaca_as_messages(shared, minimind, tmp_path):
    source = shared / "data" / "sft-demo" / "alpaca_en_demo.json"
    rows = [
        {
            "prompt": [
                {"role": "user", "content": value["instruction"] + ("\n" + value["input"] if value["input"] else "")}
            ],
            "completion": [{"role": "assistant", "content": value["output"]}],
        }
        for value in values(source)
    ]
    data = DataConfig(source=str(source), max_rows=ROWS, max_length=10_000)
    assert_sft(prepare(data, minimind, "sft", cache_dir=tmp_path), trl_sft(rows, minimind, True))


def test_messages_train_every_token_by_default(shared, minimind, tmp_path):
    source = shared / "data" / "preference-demo" / "kto_en_demo.json"
    rows = [{"messages": value["messages"]} for value in values(source)]
    data = DataConfig(source=str(source), format="messages", max_rows=ROWS, max_length=10_000)
    assert_sft(prepare(data, minimind, "sft", cache_dir=tmp_path), trl_sft(rows, minimind, False))


def test_assistant_only_loss_with_generation_marks(shared, tmp_path):
    """Qwen3's training template marks the assistant's turns; the marks decide, as in TRL."""
    tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "qwen3")
    template = qwen3_training_chat_template
    (tmp_path / "training.jinja").write_text(template)
    source = shared / "data" / "preference-demo" / "kto_en_demo.json"
    rows = [{"messages": value["messages"]} for value in values(source)]
    assert max(len(row["messages"]) for row in rows) > 2
    data = DataConfig(
        source=str(source),
        format="messages",
        template=str(tmp_path / "training.jinja"),
        max_rows=ROWS,
        max_length=10_000,
    )
    prepared = prepare(data, tokenizer, "sft", assistant_only_loss=True, cache_dir=tmp_path)
    assert_sft(prepared, trl_sft(rows, tokenizer, False, True, template))
    assert tokenizer.chat_template == template


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_5_think", "llama3_1", "glm4moe", "gptoss", "deepseekv3"])
@pytest.mark.parametrize("as_text", [False, True])
def test_tool_calls_in_the_templates_that_trl_has(name, as_text, tmp_path):
    """Arguments as objects and as JSON strings give what the template makes of those that it can take."""
    tokenizer = byte_tokenizer((Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text())
    arguments = {"city": "Bern", "days": [1, 2]}

    def chat(arguments):
        call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        asked = {"role": "assistant", "content": "", "tool_calls": [call]}
        return [{"role": "user", "content": "q"}, asked, {"role": "tool", "content": "5", "name": "weather"}]

    text = json.dumps(arguments)
    expected = tokenizer.apply_chat_template(chat(text if name == "deepseekv3" else arguments), tokenize=False)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": chat(text if as_text else arguments)}))
    data = DataConfig(source=str(tmp_path / "rows.jsonl"), max_length=10_000)
    prepared = prepare(data, tokenizer, "sft", cache_dir=tmp_path / "cache")
    assert tokenizer.decode(prepared.train[0].trees[0].tokens) == expected and "Bern" in expected


def test_a_prompt_that_is_prefilled(minimind, tmp_path):
    """The prompt alone is TRL's; with a reply TRL closes it and opens another turn, and posttrain continues it."""
    chat = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is"}]
    reply = {"completion": [{"role": "assistant", "content": " 4"}]}
    theirs = apply_chat_template({"prompt": chat, **reply}, minimind)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": chat, **reply}))
    data = DataConfig(source=str(tmp_path / "rows.jsonl"), format="prompt")
    [prompt] = prepare(data, minimind, "prompt", cache_dir=tmp_path / "cache").train[0].trees
    assert minimind.decode(prompt.tokens) == apply_chat_template({"prompt": chat}, minimind)["prompt"]
    assert theirs["completion"].count("assistant") == 1
    data = DataConfig(source=str(tmp_path / "rows.jsonl"))
    [tree] = prepare(data, minimind, "sft", cache_dir=tmp_path / "cache").train[0].trees
    assert minimind.decode(tree.tokens).count("assistant") == 1


def test_documents(shared, plain_tokenizer, tmp_path):
    source = shared / "data" / "tinystories" / "sample.txt"
    rows = [{"text": value["text"]} for value in values(source)]
    assert len(rows) == 5
    data = DataConfig(source=str(source), max_length=10_000)
    prepared = prepare(data, plain_tokenizer, "sft", cache_dir=tmp_path)
    assert_sft(prepared, trl_sft(rows, plain_tokenizer, False))


def test_truncation_keeps_what_trl_keeps(shared, minimind, tmp_path):
    source = shared / "data" / "sft-demo" / "alpaca_en_demo.json"
    rows = [
        {
            "prompt": value["instruction"] + "\n" + (value["input"] + "\n" if value["input"] else ""),
            "completion": value["output"],
        }
        for value in values(source)
    ]
    expected = [
        {"input_ids": row["input_ids"][:60], "labels": row["labels"][:60]}
        for row in trl_sft(rows, minimind, True)
        if any(label != -100 for label in row["labels"][:60])
    ]
    data = DataConfig(source=str(source), template="none", max_rows=ROWS, max_length=60, overlong="truncate")
    prepared = prepare(data, minimind, "sft", cache_dir=tmp_path)
    assert prepared.report.overlong_truncated > 10
    assert_sft(prepared, expected)
