"""Log-probabilities, entropies and rewards of a pack's scored tokens, as the forward of a module.

The LM head is applied only to `hidden[source_N]`, in chunks, with the logits recomputed in backward: a [N, V]
tensor never exists, and prompt tokens never go through the head.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from posttrain.base.errors import DamagedError
from posttrain.batch import Pack
from posttrain.models.attention import PackedMask
from posttrain.models.families import (
    backbone_of,
    base_of,
    head_layer,
    is_packed,
    logit_scale,
    logit_softcap,
    uses_triton,
)
from posttrain.models.lora import save
from posttrain.models.matmul import ROWS, float32_product, float32_weight, is_for_onednn, product, weight_of
from posttrain.models.sharding import PARTS

# Elements of the largest block of logits: 16 MB in float32, inside a CPU's cache; more on a GPU, where small products
# leave the device idle.
CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 28}
GRADIENT_ELEMENTS = 1 << 27  # minimum of a chunk of logits' gradients with kernels/scores.py: 256 MB in 16 bits
READ_STEP = 4 * ROWS  # the last layer continues with a multiple of this number of tokens


@dataclass(frozen=True, slots=True)
class Scores:
    """The policy's scores of a pack's scored tokens, all float32."""

    logprob_N: torch.Tensor  # nats
    entropy_N: torch.Tensor  # nats, of the full next-token distribution
    top1_N: torch.Tensor  # 1 where the target is the most likely token; no gradient


class Scorer(nn.Module):
    """A causal language model that takes packs. `model` is a plain transformers model or a PEFT one."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pack: Pack, temperature: float = 1.0) -> Scores:
        return scores_of(self.model, scored_states(self.model, pack), pack.target_N, temperature)


class ValueScorer(nn.Module):
    """A causal language model with a value head: the expected return before each scored token.

    The head reads the hidden states that predict the tokens. It starts at 0, and is saved next to the model.
    """

    FILE = "value_head.safetensors"

    def __init__(self, model: nn.Module, head: nn.Linear):
        super().__init__()
        self.model, self.head = model, head

    @classmethod
    def of(cls, model: nn.Module, checkpoint: Path | None = None) -> ValueScorer:
        """The model with a new head, or with a checkpoint's. Raises DamagedError if the checkpoint has none."""
        words, _, _ = head_of(model)
        head = nn.Linear(words.weight.shape[1], 1).to(words.weight.device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        if checkpoint is not None:
            try:
                head.load_state_dict(load_file(checkpoint / cls.FILE))
            except (OSError, SafetensorError, RuntimeError) as error:  # missing, damaged, of another shape
                raise DamagedError(f"{cls.FILE}: {error}") from error
        return cls(model, head)

    def forward(self, pack: Pack, temperature: float = 1.0) -> tuple[Scores, torch.Tensor]:
        """Scores, and values (N, float32)."""
        hidden_N = scored_states(self.model, pack)
        value_N = self.head(hidden_N.to(self.head.weight.dtype)).squeeze(-1).float()
        return scores_of(self.model, hidden_N, pack.target_N, temperature), value_N

    def save_pretrained(self, folder: Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """`state_dict`: the model's, if it is not in the model itself (models/sharding.py)."""
        save(self.model, folder, state_dict)
        save_file(
            {name: t.detach().float().contiguous() for name, t in self.head.state_dict().items()}, folder / self.FILE
        )


class RewardScorer(nn.Module):
    """A sequence classifier with one output that takes packs (made with `keep_last`): rewards (S), float32.

    It reads the last token that is not the config's pad token, as in transformers: for a model that pads with its stop
    token, the last token before the final stop tokens.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, pack: Pack) -> torch.Tensor:
        base = base_of(self.model)
        read_S = _read_at(pack, base.config.get_text_config().pad_token_id)
        head = base.get_submodule("score")
        return head(states_of_sequences(self.model, pack, read_S)).squeeze(-1).float()


def _read_at(pack: Pack, pad: int | None) -> torch.Tensor:
    """The index (S) of each sequence's last token that is not `pad`; its first token if there is no other."""
    if pad is None:
        return pack.last_S
    seen_ST, index_T = pack.seen_ST(), torch.arange(len(pack.tokens_T), device=pack.tokens_T.device)
    real_S = index_T.where(seen_ST & (pack.tokens_T != pad), -1).amax(1)
    first_S = seen_ST.int().argmax(1)
    return real_S.where(real_S >= 0, first_S)


def scored_states(model: nn.Module, pack: Pack) -> torch.Tensor:
    """The last hidden states (N, D) that predict the pack's targets; one that predicts several is repeated.

    This is an embedding lookup, whose gradient sums repeated rows in float32 and in a fixed order, on a GPU too.
    """
    if is_packed(base_of(model)):
        return nn.functional.embedding(pack.where_N, _packed_states(model, pack, pack.read_U))
    return _row_states(model, pack, pack.sequence_N, pack.source_N)


def states_of_sequences(model: nn.Module, pack: Pack, index_S: torch.Tensor) -> torch.Tensor:
    """The last hidden state (S, D) of one physical token of each sequence."""
    if is_packed(base_of(model)):
        return _packed_states(model, pack, index_S)
    return _row_states(model, pack, torch.arange(pack.num_sequences, device=index_S.device), index_S)


def _packed_states(model: nn.Module, pack: Pack, read: torch.Tensor) -> torch.Tensor:
    """For families proven for packing, which take the pack directly: last hidden states (len(read), D)."""
    requested = read
    if len(read) + -len(read) % READ_STEP < len(pack.tokens_T):
        requested = torch.cat([read, read[-1:].expand(-len(read) % READ_STEP)])
    out = _through_backbone(
        model,
        input_ids=pack.tokens_T[None],
        position_ids=pack.position_T[None],
        use_cache=False,
        packed=PackedMask(pack, requested, len(read)),
    )
    hidden = out.last_hidden_state[0]  # of all tokens, or only of the requested ones (models/lean.py)
    return hidden[: len(read)] if len(hidden) == len(requested) else hidden.index_select(0, read)


def _through_backbone(model: nn.Module, **inputs: Any) -> Any:
    """The output of the model's backbone, with what a sharded model does before and after its own forward."""
    backbone = backbone_of(base_of(model))
    return model.through_hooks(backbone, **inputs) if PARTS in model.__dict__ else backbone(**inputs)  # pyright: ignore


def _row_states(model: nn.Module, pack: Pack, owner: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """For other families, one sequence per row, right padded: last hidden states (len(index), D) of physical tokens.

    A token shared by several sequences is computed in each, and read from the row of the sequence `owner`.
    """
    tokens_SL, mask_SL = _rows(pack)
    out = _through_backbone(model, input_ids=tokens_SL, attention_mask=mask_SL, use_cache=False)
    return out.last_hidden_state[owner, pack.position_T[index]]


def scores_of(model: nn.Module, hidden_N: torch.Tensor, target_N: torch.Tensor, temperature: float) -> Scores:
    """The scores of targets from the hidden states (N, D) that predict them."""
    head, scale, cap = head_of(model)
    weight = head.weight  # once: with new tokens PEFT merges it at each access
    fused = uses_triton(base_of(model), weight)
    return Scores(*ChunkedScores.apply(hidden_N, weight, head.bias, target_N, temperature / scale, cap, fused))


def _rows(pack: Pack) -> tuple[torch.Tensor, torch.Tensor]:
    """A pack as right-padded rows, one sequence each: token ids and mask (S, L), column = position."""
    seen_ST, longest = pack.seen_ST(), pack.longest
    column_ST = pack.position_T.where(seen_ST, longest)  # invisible tokens go to an extra column
    tokens_SL = pack.tokens_T.new_zeros(len(seen_ST), longest + 1)
    mask_SL = torch.zeros_like(tokens_SL).scatter_(1, column_ST, seen_ST.long())
    tokens_SL.scatter_(1, column_ST, pack.tokens_T.where(seen_ST, 0))
    return tokens_SL[:, :longest], mask_SL[:, :longest]


class ChunkedScores(torch.autograd.Function):
    """log softmax(cap(h W^T + b) / temperature)[target], that softmax's entropy, and whether the target is its mode.

    Computed a chunk of rows at a time, or all at once by `fused` kernels (kernels/scores.py). Forward saves one number
    per row, the log of the softmax's denominator. Backward recomputes each chunk's logits:
        d logprob / d logits = onehot(target) - p          d entropy / d logits = -p (log p + entropy)
    Sums run in float32 whatever the model's dtype, those of the logits too.
    """

    @staticmethod
    def forward(ctx, hidden_N, weight, bias, target_N, temperature, softcap, fused=False):
        ctx.temperature, ctx.softcap, ctx.fused = temperature, softcap, fused
        parts = hidden_N, weight, bias, target_N, temperature, softcap
        log_z_N, logprob_N, entropy_N, top1_N = _triton().scores(*parts) if fused else _scores(*parts)
        ctx.save_for_backward(hidden_N, weight, bias, target_N, log_z_N, entropy_N)
        ctx.mark_non_differentiable(top1_N)
        ctx.set_materialize_grads(False)
        return logprob_N, entropy_N, top1_N

    @staticmethod
    def backward(ctx, *grad_outputs):
        grad_logprob_N, grad_entropy_N, _ = grad_outputs
        hidden_N, weight, bias, target_N, log_z_N, entropy_N = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden_N = torch.empty_like(hidden_N) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias else None
        if ctx.fused:
            factor, gradient = weight, _triton().logits_gradient
            chunks = chunks_of(len(target_N), max(1, gradient_elements(weight, need_weight) // len(weight)))
        else:
            factor, gradient = float32_weight(weight), _logits_gradient
            chunks = _chunks(len(target_N), weight, row_step(factor))
        for rows in chunks:
            grad_logits = gradient(
                hidden_N[rows],
                factor,
                bias,
                target_N[rows],
                log_z_N[rows],
                entropy_N[rows],
                None if grad_logprob_N is None else grad_logprob_N[rows],
                None if grad_entropy_N is None else grad_entropy_N[rows],
                ctx.temperature,
                ctx.softcap,
            )
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
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden_N, grad_weight, grad_bias, None, None, None, None


def _scores(hidden_N, weight, bias, target_N, temperature, softcap):
    """The log of the softmax's denominator, log-probability, entropy, and 1 where the target is the mode."""
    size = len(target_N)
    log_z_N, logprob_N, entropy_N, top1_N = hidden_N.new_empty(4, size, dtype=torch.float32).unbind()
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
    return log_z_N, logprob_N, entropy_N, top1_N


def _logits_gradient(
    hidden, weight, bias, target, log_z, entropy, grad_logprob, grad_entropy, temperature, softcap
) -> torch.Tensor:
    """One chunk's gradient by h W^T + b, float32. One of `grad_logprob` and `grad_entropy` may be None."""
    logits, capped = logits_of(hidden, weight, bias, temperature, softcap)
    log_p = logits.sub_(log_z[:, None])
    if grad_entropy is None:
        grad_logits = log_p.exp_().mul_(-grad_logprob[:, None])
    else:
        grad_logits = -log_p.exp() * grad_entropy[:, None] * (log_p + entropy[:, None])
        if grad_logprob is not None:
            grad_logits -= log_p.exp_() * grad_logprob[:, None]
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
    """The complete logits: (N, D) to (N, V) float32. For engines, which sample from them."""
    head, scale, cap = head_of(model)
    return logits_of(hidden_N, weight_of(head), head.bias, 1.0 / scale, cap)[0]


def row_chunks(model: nn.Module, size: int) -> list[slice]:
    """`size` rows split so that the logits of one part are a block of CHUNK_ELEMENTS."""
    return _chunks(size, head_of(model)[0].weight)


def head_of(model: nn.Module) -> tuple[nn.Linear, float, float | None]:
    """The LM head, the family's factor of the logits, and their cap."""
    config = base_of(model).config
    return head_layer(model), logit_scale(config), logit_softcap(config)


def logits_of(hidden, weight, bias, temperature, softcap):
    """One chunk's float32 logits over the temperature, and the capped logits if there is a cap (for its gradient)."""
    logits = float32_product(hidden, weight, bias)
    capped = None
    if softcap is not None:
        capped = logits = softcap * torch.tanh(logits / softcap)
    return (logits if temperature == 1.0 and softcap is None else logits / temperature), capped


def row_step(weight: torch.Tensor) -> int:
    return ROWS if is_for_onednn(weight) else 1


def gradient_elements(weight: torch.Tensor, trained: bool) -> int:
    """Elements of a chunk of the logits' gradient with kernels/scores.py. A trained weight's gradient, float32, is read
    and written for every chunk: with chunks of as many bytes that costs little beside the products."""
    return max(GRADIENT_ELEMENTS, 2 * weight.numel()) if trained else GRADIENT_ELEMENTS


def _chunks(size: int, weight: torch.Tensor, step: int = 1) -> list[slice]:
    rows = max(1, CHUNK_ELEMENTS.get(weight.device.type, CHUNK_ELEMENTS["cpu"]) // len(weight))
    return chunks_of(size, rows, step)


def chunks_of(size: int, rows: int, step: int = 1) -> list[slice]:
    """`size` rows in chunks of `rows`, rounded up to a multiple of `step`; the remainder by `step` is another chunk."""
    rows, even = -(-rows // step) * step, size - size % step
    return [slice(*pair) for pair in pairwise([*range(0, even, rows), even, size]) if pair[0] < pair[1]]
