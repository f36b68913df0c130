"""Log-probabilities and entropies of given tokens under a model, and the DPO loss of one pair."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.batch import Example, Node, Pack, pack, physical_length
from posttrain.data.rows import Row
from posttrain.data.templates import alpaca_prompt
from posttrain.data.tokenise import Compared, Tokeniser
from posttrain.functional.softmax import compute_entropy, selective_log_softmax
from posttrain.losses import Pairs, preference_loss
from posttrain.models.families import is_adapted
from posttrain.scoring import Scorer


def tokenize_prompt_and_output(
    prompt_strs: Sequence[str], output_strs: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Tensor]:
    """Token ids of B prompts and their outputs, shifted for next-token prediction, with a mask of the output's tokens.

    Prompt and output are tokenised separately and joined, so that the border does not depend on the output. No special
    tokens are added: begin and stop tokens are present only if the strings contain them. Rows are padded on the right
    to L tokens, the longest row, with the tokenizer's pad token (or the stop token, or 0, if it has none).

    Returns `input_ids`, `labels` and `response_mask`, each (B, L − 1); the mask is bool. Column t of `labels` is column
    t + 1 of the row, which the model predicts from `input_ids` up to t. The mask is that of `labels`: 1 on tokens of
    the output, 0 on prompt and padding.

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


def get_response_log_probs(
    model: nn.Module, input_ids: Tensor, labels: Tensor, return_token_entropy: bool = False
) -> dict[str, Tensor]:
    """Log-probability of every label: `log_probs` (B, L), and on request `token_entropy` (B, L). Nats, float32.

        log_probs[b, t] = log p(labels[b, t] | input_ids[b, 0 … t])

    input_ids and labels are (B, L), as returned by `tokenize_prompt_and_output`. All positions have values, prompt and
    padding too: mask them afterwards. Padding on the right does not change the values before it, because a causal model
    only looks back. Gradients flow; the caller sets the model's mode (dropout) and device.

    A transformers or PEFT model is scored as the recipes score it, without the (B, L, V) tensor of logits
    (posttrain/scoring.py). For any other module the `logits` of its output are used.

    Raises ValueError if the shapes differ.
    """
    if input_ids.ndim != 2 or input_ids.shape != labels.shape:
        raise ValueError(f"expected (B, L) twice, got {list(input_ids.shape)} and {list(labels.shape)}")
    if isinstance(model, PreTrainedModel) or is_adapted(model):
        scores = Scorer(model)(_padded_pack(input_ids, labels))
        log_probs, entropy = scores.logprob_N.view_as(labels), scores.entropy_N.view_as(labels)
        return {"log_probs": log_probs} | ({"token_entropy": entropy} if return_token_entropy else {})
    logits = model(input_ids).logits
    log_probs = selective_log_softmax(logits, labels)
    return {"log_probs": log_probs} | ({"token_entropy": compute_entropy(logits)} if return_token_entropy else {})


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
    appended (unless the response ends in it); log π(y|x) is summed over the response's tokens. Prompt and response are
    tokenised together, as in the recipes, and the prompt is computed once for both. The loss is log 2 if π = π_ref.

    lm and lm_ref are transformers or PEFT models over the same tokens, on one device each; `lm_ref` gets no gradient.

    Raises ValueError for a beta that is not above 0, and for a tokenizer without a stop token.
    """
    if not beta > 0:
        raise ValueError(f"beta is {beta}: it must be above 0")
    if tokenizer.eos_token is None:
        raise ValueError("the tokenizer has no eos_token to end each response with")
    row = Row(alpaca_prompt(prompt), response_chosen, response_rejected)
    [pair] = Tokeniser(tokenizer, None, assistant_only_loss=False).pairs([row])
    assert isinstance(pair, Compared)  # only templates cause errors, and there is none
    tree = Node(pair.prompt, False, (Node(pair.chosen, True), Node(pair.rejected, True)))
    [batch] = pack([Example((tree,), row=0)], tokens_per_pack=physical_length(tree))
    policy_S = _sequence_log_probs(lm, batch)
    with torch.no_grad():
        reference_S = _sequence_log_probs(lm_ref, batch).to(policy_S.device)
    length_S = batch.length_S.to(policy_S.device)
    columns = (column for values in (policy_S, reference_S, length_S) for column in (values[0::2], values[1::2]))
    loss_P = preference_loss(
        Pairs(*columns),
        loss_type=["sigmoid"],
        loss_weights=None,
        beta=beta,
        label_smoothing=0.0,
        f_divergence_type="reverse_kl",
        f_alpha_divergence_coef=0.0,
        discopop_tau=1.0,
    )
    return loss_P.squeeze(0)


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
