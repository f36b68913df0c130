"""Packed instruction data: every token of the joined documents, cut; batches of them."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from posttrain.base.errors import DataError
from posttrain.data.templates import alpaca_prompt
from posttrain.functional import get_packed_sft_dataset, iterate_batches

ROWS = [{"prompt": f"Say {i}.", "response": f"{i} it is" + " indeed" * i} for i in range(7)]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture(params=["stories260K", "qwen3", "gpt2"])
def tokenizer(shared, request):
    """With a begin token that it adds itself; without one; with one token for begin and end."""
    folder = "models" if request.param == "stories260K" else "tokenizers"
    return AutoTokenizer.from_pretrained(shared / folder / request.param)


def joined(tokenizer) -> list[int]:
    ids = []
    for row in ROWS:
        text = tokenizer.encode(alpaca_prompt(row["prompt"]) + row["response"], add_special_tokens=False)
        ids += [i for i in (tokenizer.bos_token_id, *text, tokenizer.eos_token_id) if i is not None]
    return ids


@pytest.mark.parametrize("seq_length", [1, 32, 50])
def test_blocks_are_the_documents_cut(tokenizer, file, seq_length):
    dataset, ids = get_packed_sft_dataset(tokenizer, file, seq_length, shuffle=False), joined(tokenizer)
    assert len(dataset) == (len(ids) - 1) // seq_length
    for i, block in enumerate(dataset):  # an ordinary sequence: iteration ends
        start = i * seq_length
        assert block["input_ids"].tolist() == ids[start : start + seq_length]
        assert block["labels"].tolist() == ids[start + 1 : start + seq_length + 1]
        assert block["input_ids"].dtype == block["labels"].dtype == torch.int64
    assert i == len(dataset) - 1
    assert torch.equal(dataset[-1]["labels"], block["labels"])
    with pytest.raises(IndexError, match=f"block {len(dataset)} of {len(dataset)}"):
        dataset[len(dataset)]


def test_the_remainder_is_dropped(tokenizer, file):
    """One token short of a block, exactly a block (whose last label is missing), and a block with its last label."""
    n = len(joined(tokenizer))
    assert [len(get_packed_sft_dataset(tokenizer, file, size, False)) for size in (n + 1, n, n - 1)] == [0, 0, 1]
    assert list(get_packed_sft_dataset(tokenizer, file, n, False)) == []


def test_shuffling_moves_documents_and_keeps_them_intact(tokenizer, file):
    def tokens(seed):
        torch.manual_seed(seed)
        return get_packed_sft_dataset(tokenizer, file, 1, shuffle=True).tokens.tolist()

    assert tokens(0) == tokens(0) != tokens(1)
    assert sorted(tokens(0)) == sorted(joined(tokenizer)) and tokens(0) != joined(tokenizer)


def test_bad_files_are_named(tokenizer, tmp_path):
    path = tmp_path / "bad.jsonl"
    for content, match in (
        ('{"prompt": "a", "response": "b"}\n{"prompt": "a"}\n', "line 2: response is missing"),
        ('{"prompt": "a", "response": 3}\n', "line 1: response must be a string, not a number"),
        ("nonsense\n", "line 1: not JSON"),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=match):
            get_packed_sft_dataset(tokenizer, path, 8, False)
    path.write_text("")
    assert len(get_packed_sft_dataset(tokenizer, path, 8, False)) == 0
    with pytest.raises(DataError, match="cannot be read: No such file"):
        get_packed_sft_dataset(tokenizer, tmp_path / "none.jsonl", 8, False)
    with pytest.raises(ValueError, match="seq_length is 0"):
        get_packed_sft_dataset(tokenizer, path, 0, False)


def test_batches_are_one_epoch(tokenizer, file):
    dataset = get_packed_sft_dataset(tokenizer, file, 9, False)
    batches = iterate_batches(dataset, batch_size=4, shuffle=False)
    assert len(batches) == -(-len(dataset) // 4) == len(list(batches)) and len(dataset) % 4
    for name in ("input_ids", "labels"):
        assert torch.equal(
            torch.cat([batch[name] for batch in batches]), torch.stack([block[name] for block in dataset])
        )
    torch.manual_seed(0)
    shuffled = iterate_batches(dataset, batch_size=4, shuffle=True)
    first, second = (torch.cat([batch["input_ids"] for batch in shuffled]) for _ in range(2))
    whole = torch.stack([block["input_ids"] for block in dataset])
    assert not torch.equal(first, whole) and not torch.equal(first, second)
    assert sorted(first.tolist()) == sorted(whole.tolist())
