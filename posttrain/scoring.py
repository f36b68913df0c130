"""Modules whose forward computes log-probabilities, entropies, values or rewards of a pack.

The LM head is applied only to `hidden[source_N]`, in chunks, and backward recomputes the logits: no [N, V] tensor is
ever created, and prompt tokens never pass through the head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from posttrain.base.errors import DamagedError
from posttrain.batch import Example, Pack, pack
from posttrain.models.attention import PackedMask, width_step
from posttrain.models.families import (
    backbone_of,
    base_of,
    head_layer,
    is_packed,
    logit_scale,
    logit_softcap,
    uses_triton,
)
from posttrain.models.graphs import PackGraphs
from posttrain.models.lora import save
from posttrain.models.matmul import ROWS, float32_product, float32_weight, is_for_onednn, product, weight_of
from posttrain.models.sharding import PARTS

# Maximum elements of a chunk of logits. CPU: 16 MB in float32, which fits in its cache. GPU: more, because small
# products would leave it idle.
CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 28}
GRADIENT_ELEMENTS = 1 << 27  # minimum elements of a chunk of logit gradients (kernels/scores.py): 256 MB in 16 bits
SHARED = 0.75  # sources / targets; with fewer sources, equal predictions are looked for
READ_STEP = 4 * ROWS  # the last layer computes its output for a multiple of this number of tokens
T = TypeVar("T")


class Scores(NamedTuple):
    """The policy's scores of a pack's scored tokens, all float32."""

    logprob_N: torch.Tensor  # nats
    entropy_N: torch.Tensor  # nats, of the full next-token distribution
    top1_N: torch.Tensor  # 1 where the target is the most likely token; no gradient
    mean_N: torch.Tensor | None = None  # on request: mean log-probability over the vocabulary, nats
    top_entropy_N: torch.Tensor | None = None  # on request: entropy of the k largest logits / log k; no gradient


class Scorer(nn.Module):
    """A causal language model that takes packs. `model` is a plain transformers model or a PEFT model."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pack: Pack, temperature: float = 1.0, top: int | None = None) -> Scores:
        """Return the scores; with `top` also `mean_N`, and with `top` above 0 `top_entropy_N` of so many logits."""
        return scores_in(pack, self.model, scored_states(self.model, pack), temperature, top)


class ValueScorer(nn.Module):
    """A causal language model with a value head, which predicts the expected return before each scored token.

    The head reads the hidden states that predict the tokens. Its weights start at 0 and are saved next to the model.
    """

    FILE = "value_head.safetensors"

    def __init__(self, model: nn.Module, head: nn.Linear):
        super().__init__()
        self.model, self.head = model, head

    @classmethod
    def of(cls, model: nn.Module, checkpoint: Path | None = None) -> ValueScorer:
        """Add a new head to the model, or the head in `checkpoint`. Raises DamagedError if that cannot be loaded."""
        words, _, _ = head_of(model)
        head = nn.Linear(words.weight.shape[1], 1).to(words.weight.device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        if checkpoint is not None:
            try:
                head.load_state_dict(load_file(checkpoint / cls.FILE))
            except (OSError, SafetensorError, RuntimeError) as error:  # missing, damaged, or a different shape
                raise DamagedError(f"{cls.FILE}: {error}") from error
        return cls(model, head)

    def forward(self, pack: Pack, temperature: float = 1.0) -> tuple[Scores, torch.Tensor]:
        """Return the scores, and the values (N, float32)."""
        hidden_N = scored_states(self.model, pack)
        value_N = self.head(hidden_N.to(self.head.weight.dtype)).squeeze(-1).float()
        return scores_in(pack, self.model, hidden_N, temperature), value_N

    def save_pretrained(self, folder: Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Save model and head. `state_dict`: the model's weights, if the model is sharded (models/sharding.py)."""
        save(self.model, folder, state_dict)
        tensors = {name: t.detach().float().contiguous() for name, t in self.head.state_dict().items()}
        save_file(tensors, folder / self.FILE)


class RewardScorer(nn.Module):
    """A sequence classifier with one output. It takes packs made with `keep_last` and returns rewards (S), float32.

    Like transformers, it reads a sequence's last token that is not the config's pad token. If the model pads with its
    stop token, this is the last token before the final stop tokens.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pack: Pack) -> torch.Tensor:
        base = base_of(self.model)
        read_S = _read_at(pack, base.config.get_text_config().pad_token_id)
        if is_packed(base):
            hidden_S = _packed_states(self.model, pack, read_S)
        else:
            hidden_S = _row_states(self.model, pack, torch.arange(len(read_S), device=read_S.device), read_S)
        return base.get_submodule("score")(hidden_S).squeeze(-1).float()


@torch.no_grad()
def of_sequences(
    examples: Sequence[Example],
    score: Callable[[Pack], Iterable[T]],
    device: torch.device,
    tokens_per_pack: int,
    keep_last: bool = False,
) -> list[list[T]]:
    """What `score` gives for each sequence of a pack on the device, by example, in the order of its sequences."""
    found: list[list[T]] = [[] for _ in examples]
    packs = pack(examples, tokens_per_pack, keep_last, width_step(device, tokens_per_pack)) if examples else ()
    for packed in packs:
        for index, value in zip(packed.groups, score(packed.to(device)), strict=True):
            found[index].append(value)
    return found


def _read_at(pack: Pack, pad: int | None) -> torch.Tensor:
    """Return the index (S) of each sequence's last token that is not `pad`, or of its first token if all are `pad`."""
    if pad is None:
        return pack.last_S
    seen_ST, index_T = pack.seen_ST(), torch.arange(len(pack.tokens_T), device=pack.tokens_T.device)
    real_S = index_T.where(seen_ST & (pack.tokens_T != pad), -1).amax(1)
    return real_S.where(real_S >= 0, seen_ST.int().argmax(1))


def scored_states(model: nn.Module, pack: Pack) -> torch.Tensor:
    """Return the last hidden states (N, D) that predict the pack's targets, one row per target.

    A state that predicts several targets is repeated by an embedding lookup, because the gradient of the lookup sums
    repeated rows in float32 and in a fixed order, even on a GPU.
    """
    if is_packed(base_of(model)):
        return nn.functional.embedding(pack.where_N, _packed_states(model, pack, pack.read_U))
    return _row_states(model, pack, pack.sequence_N, pack.source_N)


def _packed_states(model: nn.Module, pack: Pack, read: torch.Tensor) -> torch.Tensor:
    """Return last hidden states (len(read), D) from a model of a packed family, which takes the pack directly."""
    graphs: PackGraphs | None = model.__dict__.get(PackGraphs.NAME)
    if graphs is not None:
        return nn.functional.embedding(read, graphs.states(pack))
    requested = read
    if len(read) + -len(read) % READ_STEP < len(pack.tokens_T):
        requested = torch.cat([read, read[-1:].expand(-len(read) % READ_STEP)])
    mask, ids = PackedMask(pack, requested, len(read)), pack.tokens_T[None]
    out = _through_backbone(model, input_ids=ids, position_ids=pack.position_T[None], use_cache=False, packed=mask)
    hidden = out.last_hidden_state[0]  # for all tokens, or only for the requested ones (models/lean.py)
    return hidden[: len(read)] if len(hidden) == len(requested) else hidden.index_select(0, read)


def _through_backbone(model: nn.Module, **inputs: Any) -> Any:
    """Run the model's backbone, with the hooks that a sharded model has around its own forward."""
    backbone = backbone_of(base_of(model))
    return model.through_hooks(backbone, **inputs) if PARTS in model.__dict__ else backbone(**inputs)  # pyright: ignore


def _row_states(model: nn.Module, pack: Pack, owner: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return last hidden states (len(index), D) from a model of any other family: one right-padded row per sequence.

    `index` are physical tokens. A token shared by several sequences is computed in each of their rows, and read from
    the row of the sequence in `owner`.
    """
    tokens_SL, mask_SL = _rows(pack)
    out = _through_backbone(model, input_ids=tokens_SL, attention_mask=mask_SL, use_cache=False)
    return out.last_hidden_state[owner, pack.position_T[index]]


def scores_in(
    pack: Pack, model: nn.Module, hidden_N: torch.Tensor, temperature: float, top: int | None = None
) -> Scores:
    """Return the scores of a pack's targets. Where several sequences go through the same trained tokens, as episodes do
    that branch, the head computes each of these once; on a GPU, to look for them would wait for the device."""
    if hidden_N.device.type != "cpu" or len(pack.read_U) > SHARED * len(pack.target_N):
        return scores_of(model, hidden_N, pack.target_N, temperature, top)
    vocabulary, index_N = len(head_of(model)[0].weight), torch.arange(len(hidden_N), device=hidden_N.device)
    pair_P, of_N = (pack.where_N * vocabulary + pack.target_N).unique(return_inverse=True)
    first_P = torch.empty_like(pair_P).scatter_(0, of_N, index_N)
    once = scores_of(model, nn.functional.embedding(first_P, hidden_N), pair_P % vocabulary, temperature, top)
    parts: Any = (part if part is None else nn.functional.embedding(of_N, part[:, None]).squeeze(1) for part in once)
    return Scores(*parts)


def scores_of(
    model: nn.Module, hidden_N: torch.Tensor, target_N: torch.Tensor, temperature: float, top: int | None = None
) -> Scores:
    """Return the scores of targets, from the hidden states (N, D) that predict them. No kernel has those of `top`."""
    head, scale, cap = head_of(model)
    weight = head.weight  # read once: with new tokens, PEFT merges it at every access
    fused = uses_triton(base_of(model), weight) and top is None
    return Scores(*ChunkedScores.apply(hidden_N, weight, head.bias, target_N, temperature / scale, cap, fused, top))


def _rows(pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a pack as right-padded rows, one per sequence: token ids and mask (S, L). Columns are positions."""
    seen_ST, longest = pack.seen_ST(), pack.longest
    column_ST = pack.position_T.where(seen_ST, longest)  # tokens of other sequences go to an extra column
    tokens_SL = pack.tokens_T.new_zeros(len(seen_ST), longest + 1)
    mask_SL = torch.zeros_like(tokens_SL).scatter_(1, column_ST, seen_ST.long())
    tokens_SL.scatter_(1, column_ST, pack.tokens_T.where(seen_ST, 0))
    return tokens_SL[:, :longest], mask_SL[:, :longest]


class ChunkedScores(torch.autograd.Function):
    """log softmax(cap(h W^T + b) / temperature)[target], the softmax's entropy, and whether the target is its mode.

    With `top`, also the mean log-probability of all V tokens, and the entropy of the `top` largest logits (None if 0).

    Rows are computed one chunk at a time, or all at once by `fused` kernels (kernels/scores.py). Forward saves two
    numbers per row: the log of the softmax's denominator, and the entropy. Backward recomputes each chunk's logits:
        d logprob / d logits = onehot(target) - p          d entropy / d logits = -p (log p + entropy)
        d mean / d logits = 1 / V - p
    All sums, including those of the logits, run in float32 whatever the model's dtype.
    """

    @staticmethod
    def forward(ctx, hidden_N, weight, bias, target_N, temperature, softcap, fused=False, top=None):
        ctx.temperature, ctx.softcap, ctx.fused = temperature, softcap, fused
        parts = hidden_N, weight, bias, target_N, temperature, softcap
        log_z_N, *results = _triton().scores(*parts) if fused else _scores(*parts, top)
        _, entropy_N, top1_N, *more = results
        ctx.save_for_backward(hidden_N, weight, bias, target_N, log_z_N, entropy_N)
        ctx.mark_non_differentiable(top1_N, *(x for x in more[1:] if x is not None))
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx, *grad_outputs):
        grad_logprob_N, grad_entropy_N, grad_mean_N = (*grad_outputs[:2], *grad_outputs[3:4], None)[:3]
        hidden_N, weight, bias, target_N, log_z_N, entropy_N = ctx.saved_tensors
        if ctx.fused:
            factor, gradient = weight, _triton().logits_gradient
            chunks = chunks_of(len(target_N), gradient_elements(weight, ctx.needs_input_grad[1]), weight)
        else:
            factor, gradient = float32_weight(weight), _logits_gradient
            chunks = _chunks(len(target_N), weight, row_step(factor))

        def of_logits(rows: slice) -> torch.Tensor:
            given = target_N, log_z_N, entropy_N, grad_logprob_N, grad_entropy_N
            parts = [values if values is None else values[rows] for values in given]
            parts = [hidden_N[rows], factor, bias, *parts, ctx.temperature, ctx.softcap]
            return gradient(*parts, *([] if grad_mean_N is None else [grad_mean_N[rows]]))

        return *head_gradients(ctx.needs_input_grad, hidden_N, weight, bias, chunks, of_logits), *[None] * 5


def head_gradients(needed, hidden_N, weight, bias, chunks: Iterable[slice], of_logits: Callable[[slice], torch.Tensor]):
    """Return the needed gradients of hidden states, weight and bias, in their dtypes, and None for the others, from
    `of_logits`, which gives a chunk's gradient with respect to h W^T + b."""
    grad_hidden_N = torch.empty_like(hidden_N) if needed[0] else None
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None
    grad_bias = torch.zeros_like(bias, dtype=torch.float32) if needed[2] else None
    for rows in chunks:
        grad_logits = of_logits(rows)
        if grad_bias is not None:
            grad_bias += grad_logits.sum(0, dtype=torch.float32)
        grad_logits = grad_logits.to(weight.dtype)
        if grad_hidden_N is not None:
            grad_hidden_N[rows] = product(grad_logits, weight.t())
        if grad_weight is not None:
            if weight.dtype == torch.float32:
                grad_weight.addmm_(grad_logits.t(), hidden_N[rows])
            else:
                grad_weight += grad_logits.t() @ hidden_N[rows]
    grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
    return grad_hidden_N, grad_weight, None if grad_bias is None else grad_bias.to(bias.dtype)


def _scores(hidden_N, weight, bias, target_N, temperature, softcap, top=None):
    """Return the log of the softmax's denominator, log-probability, entropy, and 1 where the target is the mode; with
    `top` also the mean log-probability and the top logits' entropy."""
    size, top_k = len(target_N), min(top or 0, len(weight))
    log_z_N, logprob_N, entropy_N, top1_N, mean_N, top_entropy_N = hidden_N.new_empty(6, size, dtype=torch.float32)
    wide = float32_weight(weight)
    for rows in _chunks(size, weight, row_step(wide)):
        logits, _ = logits_of(hidden_N[rows], wide, bias, temperature, softcap)
        highest = logits.amax(-1)
        logits -= highest[:, None]
        chosen = logits.gather(1, target_N[rows, None]).squeeze(1)
        p = logits.exp()
        z = p.sum(-1)
        log_z = z.log()
        logprob_N[rows] = chosen - log_z
        entropy_N[rows] = log_z - torch.linalg.vecdot(p, logits) / z
        top1_N[rows] = (chosen == 0).float()
        log_z_N[rows] = log_z + highest
        if top is not None:
            mean_N[rows] = logits.mean(-1) - log_z
        if top_k:
            log_p = logits.topk(top_k).values.log_softmax(-1)
            top_entropy_N[rows] = -torch.linalg.vecdot(log_p.exp(), log_p) / math.log(top_k)
    more = () if top is None else (mean_N, top_entropy_N if top_k else None)
    return log_z_N, logprob_N, entropy_N, top1_N, *more


def _logits_gradient(
    hidden, weight, bias, target, log_z, entropy, grad_logprob, grad_entropy, temperature, softcap, grad_mean=None
) -> torch.Tensor:
    """Return one chunk's gradient with respect to h W^T + b, float32. All gradients but one may be None."""
    logits, capped = logits_of(hidden, weight, bias, temperature, softcap)
    log_p = logits.sub_(log_z[:, None])
    of_p: Any = grad_mean if grad_logprob is None else grad_logprob if grad_mean is None else grad_logprob + grad_mean
    if grad_entropy is None:
        grad_logits = log_p.exp_().mul_(-of_p[:, None])
    else:
        grad_logits = -log_p.exp() * grad_entropy[:, None] * (log_p + entropy[:, None])
        if of_p is not None:
            grad_logits -= log_p.exp_() * of_p[:, None]
    if grad_mean is not None:
        grad_logits += grad_mean[:, None] / len(weight)
    if grad_logprob is not None:
        at = target[:, None]
        grad_logits.scatter_(1, at, grad_logits.gather(1, at) + grad_logprob[:, None])
    if temperature != 1.0:
        grad_logits /= temperature
    if capped is not None:
        grad_logits *= 1 - (capped / softcap) ** 2
    return grad_logits


def _triton():
    from posttrain.models.kernels import scores  # needs Triton, which comes with PyTorch for CUDA

    return scores


def next_token_logits(model: nn.Module, hidden_N: torch.Tensor) -> torch.Tensor:
    """Return the logits of all tokens, (N, D) -> (N, V) float32. Engines sample from them."""
    head, scale, cap = head_of(model)
    return logits_of(hidden_N, weight_of(head), head.bias, 1.0 / scale, cap)[0]


def row_chunks(model: nn.Module, size: int) -> list[slice]:
    """Split `size` rows into parts whose logits have at most CHUNK_ELEMENTS elements, but at least one row."""
    return _chunks(size, head_of(model)[0].weight)


def head_of(model: nn.Module) -> tuple[nn.Linear, float, float | None]:
    """Return the LM head, the factor by which the model scales its logits, and their softcap (None: no cap)."""
    config = base_of(model).config
    return head_layer(model), logit_scale(config), logit_softcap(config)


def logits_of(hidden, weight, bias, temperature, softcap):
    """Return a chunk's float32 logits divided by the temperature, and, for the gradient of a cap, the capped logits."""
    logits = float32_product(hidden, weight, bias)
    capped = None
    if softcap is not None:
        capped = logits = softcap * torch.tanh(logits / softcap)
    return (logits if temperature == 1.0 and softcap is None else logits / temperature), capped


def row_step(weight: torch.Tensor) -> int:
    return ROWS if is_for_onednn(weight) else 1


def gradient_elements(weight: torch.Tensor, trained: bool) -> int:
    """The number of elements in a chunk of logit gradients with kernels/scores.py. The float32 gradient of a trained
    weight is read and written for every chunk, which costs little next to the products if a chunk has as many bytes."""
    return max(GRADIENT_ELEMENTS, 2 * weight.numel()) if trained else GRADIENT_ELEMENTS


def _chunks(size: int, weight: torch.Tensor, step: int = 1) -> list[slice]:
    return chunks_of(size, CHUNK_ELEMENTS.get(weight.device.type, CHUNK_ELEMENTS["cpu"]), weight, step)


def chunks_of(size: int, elements: int, weight: torch.Tensor, step: int = 1) -> list[slice]:
    """Split `size` rows into chunks of `elements` logits, rounded up to `step` rows; `size % step` rows come last."""
    rows = max(1, elements // len(weight))
    rows, even = -(-rows // step) * step, size - size % step
    return [slice(*pair) for pair in pairwise([*range(0, even, rows), even, size]) if pair[0] < pair[1]]
