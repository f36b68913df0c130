"""Tokenising strings; log-probabilities and entropies of tokens, from a model or from logits; the DPO loss of a pair.

Functions of logits compute a few rows at a time, without a second tensor of the size of the logits. The backward pass
recomputes each chunk's softmax and writes into a single tensor, the gradient:

    d log p_i / d z_v = [i = v] − p_v          d H / d z_v = −p_v (log p_v + H)
"""

import math
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.base.errors import DataError
from posttrain.batch import Example, Node, Pack, pack, physical_length
from posttrain.data.readers import read_jsonl
from posttrain.data.rows import Row, RowError, field, text_of
from posttrain.data.templates import alpaca_prompt
from posttrain.data.tokenise import Compared, Tokeniser
from posttrain.losses.preference import Pairs, reverse_kl, sigmoid
from posttrain.models.families import is_adapted
from posttrain.scoring import Scorer

ROWS = 128  # number of rows of V logits to process at a time


def tokenize_prompt_and_output(
    prompt_strs: Sequence[str], output_strs: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Tensor]:
    """Token ids of B prompts and their outputs, shifted for next-token prediction, with a mask of the output's tokens.

    Prompt and output are tokenised separately and joined, so the boundary does not depend on the output. No special
    tokens are added: begin and stop tokens are present only if the strings contain them. Rows are padded on the right
    to L tokens, the length of the longest, with the tokenizer's pad token (if it has none, the stop token, or 0).

    Returns `input_ids`, `labels` and `response_mask`, each (B, L − 1); the mask is bool. Column t of `labels` is column
    t + 1 of the row, which the model predicts from `input_ids` up to t. The mask applies to `labels`: it is 1 on tokens
    of the output, and 0 on prompt and padding.

        row             p  q  c  d  -        prompt p q, output c d, one column of padding
        input_ids       p  q  c  d
        labels          q  c  d  -
        response_mask   0  1  1  0

    Raises ValueError if the lists differ in length or are empty, and for a row without tokens.
    """
    if len(prompt_strs) != len(output_strs) or not prompt_strs:
        raise ValueError(f"{len(prompt_strs)} prompts and {len(output_strs)} outputs: give one output for each prompt")
    prompts, outputs = (
        [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
        for texts in (prompt_strs, output_strs)
    )
    lengths = [len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)]
    if 0 in lengths:
        raise ValueError(f"row {lengths.index(0)} has no tokens: its prompt and its output are empty")
    filler: Any = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    tokens = torch.full((len(lengths), max(lengths)), filler)
    is_output = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        tokens[row, : lengths[row]] = torch.tensor([*prompt, *output])
        is_output[row, len(prompt) : lengths[row]] = True
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "response_mask": is_output[:, 1:]}


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
    """Read a JSONL file of `prompt` and `response` as blocks of `seq_length` tokens, in which every token is a target.

    Each row is a document: the begin token, prompt and response in the Alpaca template, and the end token (begin and
    end tokens are omitted if the tokenizer has none). Documents are joined, in the file's order or shuffled by torch's
    global generator (`torch.manual_seed`), and cut every seq_length tokens:

        documents   <s> a b c </s> <s> d e </s>        seq_length 4
        input_ids   <s> a  b c   │ </s> <s> d e
        labels       a  b  c </s>│ <s>  d   e </s>

    `labels` is the joined row shifted by one token, across block borders. Tokens at the end that do not fill a block
    (with its last label) are dropped. A block may see the end of an earlier document, as in pre-training;
    `posttrain train` keeps documents apart (docs/sft.md).

    Raises DataError with file and line for an unusable row, and ValueError if seq_length is below 1.
    """
    if seq_length < 1:
        raise ValueError(f"seq_length is {seq_length}: it must be 1 or more")
    documents = _documents(Path(dataset_path))
    if shuffle:
        documents = [documents[i] for i in torch.randperm(len(documents)).tolist()]
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"] if documents else []
    tokens = [token for ids in encoded for token in (*begin, *ids, *end)]
    return PackedSFTDataset(torch.tensor(tokens, dtype=torch.int64), seq_length)


def iterate_batches(
    dataset: Dataset[dict[str, Tensor]], batch_size: int, shuffle: bool
) -> DataLoader[dict[str, Tensor]]:
    """One epoch of a data set as batches, each with the examples' tensors stacked: {"input_ids": (B, L), …}.

    The last batch is smaller if batch_size does not divide the data. With `shuffle`, every pass over the result has
    a new order, from torch's global generator (`torch.manual_seed`). `len()` is the number of batches.
    """
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)


def _documents(path: Path) -> list[str]:
    """Every row of the file, formatted with the Alpaca template."""
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


def get_response_log_probs(
    model: nn.Module, input_ids: Tensor, labels: Tensor, return_token_entropy: bool = False
) -> dict[str, Tensor]:
    """The log-probability of every label: `log_probs` (B, L), and on request `token_entropy` (B, L). Nats, float32.

        log_probs[b, t] = log p(labels[b, t] | input_ids[b, 0 … t])

    input_ids and labels are (B, L), as returned by `tokenize_prompt_and_output`. All positions have values, including
    prompt and padding, which the caller masks. Padding on the right does not change the values before it, because a
    causal model only looks back. Gradients flow; the caller sets the model's mode (dropout) and device.

    A transformers or PEFT model is scored as in the recipes, without the (B, L, V) tensor of logits
    (posttrain/scoring.py). For any other module, the `logits` of its output are used.

    Raises ValueError if the shapes differ.
    """
    if input_ids.ndim != 2 or input_ids.shape != labels.shape:
        raise ValueError(f"expected (B, L) twice, got {list(input_ids.shape)} and {list(labels.shape)}")
    if isinstance(model, PreTrainedModel) or is_adapted(model):
        scores = Scorer(model)(_padded_pack(input_ids, labels))
        result = {"log_probs": scores.logprob_N.view_as(labels)}
        return result | ({"token_entropy": scores.entropy_N.view_as(labels)} if return_token_entropy else {})
    logits = model(input_ids).logits
    result = {"log_probs": selective_log_softmax(logits, labels)}
    return result | ({"token_entropy": compute_entropy(logits)} if return_token_entropy else {})


def compute_per_instance_dpo_loss(
    lm: nn.Module,
    lm_ref: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    beta: float,
    prompt: str,
    response_chosen: str,
    response_rejected: str,
) -> Tensor:
    """The DPO loss of one preference pair: a scalar with gradients for `lm`. arXiv 2305.18290, eq. 7.

        loss = −log σ(β [(log π(y_w|x) − log π_ref(y_w|x)) − (log π(y_l|x) − log π_ref(y_l|x))])

    x is the prompt in the Alpaca template, y_w the chosen and y_l the rejected response, each with the stop token
    appended (unless the response ends with it); log π(y|x) is summed over the response's tokens. Prompt and response
    are tokenised together, as in the recipes, and the prompt is computed once for both responses. The loss is log 2 if
    π = π_ref.

    lm and lm_ref are transformers or PEFT models with the same vocabulary, each on one device. `lm_ref` receives no
    gradient.

    Raises ValueError if beta is not above 0, and if the tokenizer has no stop token.
    """
    if not beta > 0:
        raise ValueError(f"beta is {beta}: it must be above 0")
    if tokenizer.eos_token is None:
        raise ValueError("the tokenizer has no eos_token to end each response with")
    row = Row(alpaca_prompt(prompt), response_chosen, response_rejected)
    [pair] = Tokeniser(tokenizer, None, assistant_only_loss=False).pairs([row])
    assert isinstance(pair, Compared)  # only chat templates cause errors, and none is used
    tree = Node(pair.prompt, False, (Node(pair.chosen, True), Node(pair.rejected, True)))
    [batch] = pack([Example((tree,), row=0)], tokens_per_pack=physical_length(tree))
    policy_S = _sequence_log_probs(lm, batch)
    with torch.no_grad():
        reference_S = _sequence_log_probs(lm_ref, batch).to(policy_S.device)
    length_S = batch.length_S.to(policy_S.device)
    columns = (column for values in (policy_S, reference_S, length_S) for column in (values[0::2], values[1::2]))
    return sigmoid(Pairs(*columns), beta=beta, label_smoothing=0.0, score=reverse_kl).squeeze(0)


def _sequence_log_probs(model: nn.Module, batch: Pack) -> Tensor:
    """log π of each response of the pack, on the model's device: (S)."""
    batch = batch.to(next(model.parameters()).device)
    return batch.sum_by_sequence(Scorer(model)(batch).logprob_N)


def _padded_pack(input_ids: Tensor, labels: Tensor) -> Pack:
    """Rows of equal length as a pack in which every position is scored: T = N = B · L."""
    rows, columns = input_ids.shape
    index_N = torch.arange(rows * columns, device=input_ids.device)
    row_N = index_N // columns
    return Pack(
        tokens_T=input_ids.flatten(),
        position_T=index_N % columns,
        end_T=(row_N + 1) * columns,
        source_N=index_N,
        target_N=labels.flatten(),
        sequence_N=row_N,
        read_U=index_N,
        where_N=index_N,
        length_S=torch.full((rows,), columns, device=input_ids.device),
        last_S=torch.arange(1, rows + 1, device=input_ids.device) * columns - 1,
        group_S=torch.arange(rows, device=input_ids.device),
        groups=tuple(range(rows)),
        tree_start=tuple(range(0, rows * columns + 1, columns)),
        nodes=tuple((start, start + columns) for start in range(0, rows * columns, columns)),
        longest=columns,
    )


def selective_log_softmax(logits: Tensor, index: Tensor, chunk_size: int = ROWS) -> Tensor:
    """Log-probabilities of given tokens: `log_softmax(logits, -1)` gathered at `index`, in nats.

    logits (…, V) and index (…) give (…); index (…, K), K tokens of each row, gives (…, K). As in TRL; computed a chunk
    of `chunk_size` rows at a time, which changes neither value nor gradient. Computed and returned in at least float32.

    Raises ValueError if the shape of index does not fit, and if chunk_size is below 1.
    """
    single = index.ndim == logits.ndim - 1  # one token of each row
    if index.shape[: logits.ndim - 1] != logits.shape[:-1] or index.ndim > logits.ndim:
        raise ValueError(f"index {list(index.shape)} does not fit logits {list(logits.shape)}: give one for each row")
    chosen = _OfRows.apply(logits, index[..., None] if single else index, _rows(chunk_size))
    return chosen.squeeze(-1) if single else chosen  # pyright: ignore[reportOptionalMemberAccess, reportReturnType]


def compute_entropy(logits: Tensor, chunk_size: int = ROWS) -> Tensor:
    """Entropy of each next-token distribution, in nats: (B, L, V) gives (B, L), or any leading shape.

        H = −Σ_v p_v log p_v,   log p_v = z_v − log Σ_u e^{z_u}

    log p is computed from the logits z directly, never as the logarithm of a rounded p, so logits of any size are safe;
    a token excluded by a logit of −∞ adds 0 to value and gradient. Computed and returned in at least float32. The
    entropy is log V if all tokens are equally likely, 0 if one is certain.

    A chunk of `chunk_size` rows is computed at a time, which changes neither value nor gradient.

    Raises ValueError if chunk_size is below 1.
    """
    return _OfRows.apply(logits, None, _rows(chunk_size))  # pyright: ignore[reportReturnType]


class _OfRows(torch.autograd.Function):
    """Log-probabilities of the tokens `index` (…, K), or the entropy if `index` is None, of rows of logits (…, V)."""

    @staticmethod
    def forward(ctx, logits, index, chunk_size):
        shape = logits.shape[:-1] if index is None else index.shape
        value = torch.empty(shape, dtype=_dtype(logits), device=logits.device)
        for rows in _chunks(logits, chunk_size):
            logprob = logits[rows].log_softmax(-1, dtype=_dtype(logits))
            if index is None:
                value[rows] = -(logprob.exp() * _finite(logprob)).sum(-1)
            else:
                value[rows] = logprob.gather(-1, index[rows])
        ctx.save_for_backward(logits, index, value)
        ctx.chunk_size = chunk_size
        return value

    @staticmethod
    def backward(ctx, *grad_outputs):
        logits, index, value = ctx.saved_tensors
        [grad] = grad_outputs
        by_logits = torch.empty_like(logits)
        for rows in _chunks(logits, ctx.chunk_size):
            logprob = logits[rows].log_softmax(-1, dtype=_dtype(logits))
            if index is None:
                chunk = logprob.exp() * (_finite(logprob) + value[rows][..., None]) * -grad[rows][..., None]
            else:
                chunk = logprob.exp() * -grad[rows].sum(-1, keepdim=True)
                chunk.scatter_add_(-1, index[rows], grad[rows])
            by_logits[rows] = chunk.to(logits.dtype)
        return by_logits, None, None


def _chunks(logits: Tensor, size: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield the indices of `size` rows (…, V) at a time, one tensor per leading dimension, so nothing is copied."""
    leading = logits.shape[:-1]
    for start in range(0, math.prod(leading), size):
        stop = min(start + size, math.prod(leading))
        yield torch.unravel_index(torch.arange(start, stop, device=logits.device), leading) if leading else ()


def _finite(logprob: Tensor) -> Tensor:
    """The log-probabilities clamped to finite numbers: 0 · −∞ is NaN, 0 · finite is 0."""
    return logprob.clamp(min=torch.finfo(logprob.dtype).min)


def _dtype(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _rows(chunk_size: int) -> int:
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}: it must be 1 or more")
    return chunk_size
