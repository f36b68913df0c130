"""Instruction data as blocks of equal length, and batches of them."""

from os import PathLike
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError
from posttrain.data.readers import read_jsonl
from posttrain.data.rows import RowError, field, text_of
from posttrain.data.templates import alpaca_prompt


class PackedSFTDataset(Dataset[dict[str, Tensor]]):
    """Blocks of `seq_length` tokens from one long row; each is {"input_ids", "labels"}, both (seq_length,) int64."""

    def __init__(self, tokens: Tensor, seq_length: int):
        self.tokens = tokens
        self.seq_length = seq_length

    def __len__(self) -> int:
        return max(len(self.tokens) - 1, 0) // self.seq_length  # the last label needs a token after its block

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start = index % len(self) * self.seq_length
        end = start + self.seq_length
        return {"input_ids": self.tokens[start:end], "labels": self.tokens[start + 1 : end + 1]}


def get_packed_sft_dataset(
    tokenizer: PreTrainedTokenizerBase, dataset_path: str | PathLike[str], seq_length: int, shuffle: bool
) -> PackedSFTDataset:
    """A JSONL file of `prompt` and `response` as blocks of `seq_length` tokens, with every token a target.

    Each row is a document: the begin token, prompt and response in the Alpaca template, the end token (begin and end
    tokens are omitted if the tokenizer has none). Documents are joined, in the file's order or shuffled by torch's
    global generator (`torch.manual_seed`), and cut every seq_length tokens:

        documents   <s> a b c </s> <s> d e </s>        seq_length 4
        input_ids   <s> a  b c   │ </s> <s> d e
        labels       a  b  c </s>│ <s>  d   e </s>

    `labels` is the joined row shifted by one token, across block borders. Tokens at the end that do not fill a block
    (with its last label) are dropped. A block may see the end of an earlier document, as in pre-training;
    `posttrain train` keeps documents apart (docs/sft.md).

    Raises DataError with file and line for a row that cannot be used, ValueError for a seq_length below 1.
    """
    if seq_length < 1:
        raise ValueError(f"seq_length is {seq_length}: it must be 1 or more")
    documents = _documents(Path(dataset_path))
    if shuffle:
        documents = [documents[i] for i in torch.randperm(len(documents)).tolist()]
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"] if documents else []
    return PackedSFTDataset(
        torch.tensor([t for ids in encoded for t in (*begin, *ids, *end)], dtype=torch.int64), seq_length
    )


def iterate_batches(
    dataset: Dataset[dict[str, Tensor]], batch_size: int, shuffle: bool
) -> DataLoader[dict[str, Tensor]]:
    """One epoch of a data set as batches, each with the examples' tensors stacked: {"input_ids": (B, L), …}.

    The last batch is smaller if batch_size does not divide the data. With `shuffle`, every pass over the result has
    a new order, from torch's global generator (`torch.manual_seed`). `len()` is the number of batches.
    """
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)


def _documents(path: Path) -> list[str]:
    """Every row in the Alpaca template."""
    documents = []
    try:
        for line, value, problem in read_jsonl(path):
            try:
                if value is None:
                    raise RowError(problem)
                prompt, response = (text_of(field(value, name), name) for name in ("prompt", "response"))
            except RowError as error:
                raise DataError(f"{path} line {line}: {error}") from None
            documents.append(alpaca_prompt(prompt) + response)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    return documents
