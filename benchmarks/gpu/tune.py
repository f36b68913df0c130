"""Part `tune`: compares kernel sizes with each other and with libraries, in order to choose sizes for a GPU.

`scores`: log-probabilities of 8,192 tokens over 151,936 words and their gradient with respect to the logits, for block
sizes of posttrain.models.kernels.scores, compared with only cuBLAS's product. `attention`: one sequence of 8,192
tokens, and a pair with a prompt of 4,096, with the heads of Qwen3-0.6B and 4B, by FlexAttention with various options
and by PyTorch's own kernels. `decode`: one new token of 256 completions. Times are medians of device events in
milliseconds.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.common import Case, CheckError, Setup
from benchmarks.gpu.generate import bandwidth
from posttrain.batch import Example, Node, pack
from posttrain.models import attention as packed_attention
from posttrain.models.attention import PackedMask

TOKENS, WORDS = 8192, 151_936
BLOCK_NAMES = ("ROWS", "WORDS", "INNER", "num_warps", "num_stages")
BLOCKS = [
    (128, 128, 64, 8, 2), (128, 128, 64, 8, 3), (128, 256, 64, 8, 3), (128, 256, 64, 8, 2), (128, 128, 64, 4, 3),
    (256, 128, 64, 8, 3),
]  # fmt: skip
HEADS = {"0.6B": (16, 8), "4B": (32, 8)}
LIBRARIES = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
ROWS, EACH, COLUMNS = 256, 8, 256  # decode: completions, completions per prompt, keys per prompt and per completion


def _forward(m: int, n: int, stages: int, warps: int) -> dict[str, Any]:
    return {"fwd_BLOCK_M": m, "fwd_BLOCK_N": n, "fwd_num_stages": stages, "fwd_num_warps": warps}


def _backward(m: int, n: int, stages: int, warps: int) -> dict[str, Any]:
    sizes = {"bwd_BLOCK_M1": m, "bwd_BLOCK_N1": n, "bwd_BLOCK_M2": n, "bwd_BLOCK_N2": m}
    return sizes | {"bwd_num_stages": stages, "bwd_num_warps": warps}


# Options in addition to those of posttrain.models.attention. PyTorch's own defaults for a head of 128 on an H100 are
# forward (128, 64, 3, 8) and backward (64, 128, 3, 8).
OPTIONS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "rows known to see a key": {"ROWS_GUARANTEED_SAFE": True},
    "tensor memory accelerator": {"USE_TMA": True},
    "128 x 128, 2 stages; 64 x 64, 3 stages": _forward(128, 128, 2, 8) | _backward(64, 64, 3, 4),
    "128 x 64, 4 warps; 64 x 64, 2 stages": _forward(128, 64, 3, 4) | _backward(64, 64, 2, 4),
    "128 x 128, 3 stages; 64 x 128, 2 stages": _forward(128, 128, 3, 8) | _backward(64, 128, 2, 8),
    "128 x 64, 2 stages; 64 x 128, 4 warps": _forward(128, 64, 2, 4) | _backward(64, 128, 3, 4),
    "64 x 64, 3 stages; 128 x 128, 1 stage": _forward(64, 64, 3, 4) | _backward(128, 128, 1, 8),
    "128 x 64, 4 stages; 32 x 128, 3 stages": _forward(128, 64, 4, 8) | _backward(32, 128, 3, 4),
}


def cases(setup: Setup) -> Iterator[Case]:
    for hidden in (1024, 2560):
        for block in BLOCKS:
            given = partial(scores, setup, hidden, dict(zip(BLOCK_NAMES, block, strict=True)))
            yield Case(f"scores, hidden size {hidden}, {block}", given, ("CUDA",))
        yield Case(f"cuBLAS logits, hidden size {hidden}", partial(logits, setup, hidden), ("CUDA",))
        yield Case(f"cuBLAS by chunks, hidden size {hidden}", partial(chunked, setup, hidden), ("CUDA",))
    for size in HEADS:
        for name, options in OPTIONS.items():
            yield Case(f"attention, {size}, {name}", partial(attention, setup, size, options), ("CUDA",))
        for name, backend in LIBRARIES.items():
            yield Case(f"attention, {size}, {name}", partial(library, setup, size, backend), ("CUDA",))
    yield Case("decode", partial(decode, setup), ("CUDA",))


def median(setup: Setup, work: Callable[[], Any], times: int = 10) -> float:
    """Median milliseconds that the device takes for the work."""
    for _ in range(2):
        work()
    taken = []
    for _ in range(times):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        work()
        ended.record()
        torch.cuda.synchronize(setup.device)
        taken.append(began.elapsed_time(ended))
    return statistics.median(taken)


def _both(forward: float, backward: float, name: str = "") -> dict[str, Any]:
    return {"forward_ms": forward, "backward_ms": backward, "note": f"{name}{forward:.2f} + {backward:.2f} ms"}


# --- scores -----------------------------------------------------------------------------------------------------------


def head(setup: Setup, hidden: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    inputs = torch.randn(TOKENS, hidden, device=setup.device), torch.randn(WORDS, hidden, device=setup.device)
    return inputs[0].bfloat16(), (inputs[1] * hidden**-0.5).bfloat16()


def scores(setup: Setup, hidden: int, block: dict[str, int]) -> Mapping[str, Any]:
    """Time forward, and the gradient with respect to a chunk's logits, scaled to the same number of tokens."""
    from posttrain.models.kernels import scores as kernels

    hidden_ND, weight_VD = head(setup, hidden)
    target_N = torch.randint(WORDS, (TOKENS,), device=setup.device)
    chosen, kernels.block_on = kernels.block_on, lambda device: block
    try:
        forward = partial(kernels.scores, hidden_ND, weight_VD, None, target_N, 1.0, None)
        log_z_N, logprob_N, entropy_N, _ = forward()
        want_N = (hidden_ND[:64].float() @ weight_VD.float().t()).log_softmax(-1).gather(1, target_N[:64, None])
        if not (error := float((logprob_N[:64, None] - want_N).abs().max())) <= 0.01:
            raise CheckError(f"log-probabilities differ by {error:.2e}")
        chunk = slice(TOKENS // 8)
        grad_N = torch.full((TOKENS // 8,), 1e-3, device=setup.device)
        given = hidden_ND[chunk], weight_VD, None, target_N[chunk], log_z_N[chunk], entropy_N[chunk], grad_N
        backward = partial(kernels.logits_gradient, *given, None, 1.0, None)
        return _both(median(setup, forward, 5), 8 * median(setup, backward, 5))
    finally:
        kernels.block_on = chosen


def logits(setup: Setup, hidden: int) -> Mapping[str, Any]:
    hidden_ND, weight_VD = head(setup, hidden)
    took = median(setup, lambda: hidden_ND @ weight_VD.t(), 5)
    return {"forward_ms": took, "note": f"{took:.2f} ms"}


def chunked(setup: Setup, hidden: int) -> Mapping[str, Any]:
    """The alternative to the kernel: float32 logits of a chunk of rows by cuBLAS, then log-probabilities and entropies
    in one compiled pass over them."""
    hidden_ND, weight_VD = head(setup, hidden)
    target_N = torch.randint(WORDS, (TOKENS,), device=setup.device)

    @torch.compile
    def reduced(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        log_p = logits.log_softmax(-1)
        return log_p.gather(1, target[:, None]), -(log_p.exp() * log_p).sum(-1)

    def forward() -> None:
        for rows, targets in zip(hidden_ND.split(1024), target_N.split(1024), strict=True):
            reduced(torch.mm(rows, weight_VD.t(), out_dtype=torch.float32), targets)

    took = median(setup, forward, 5)
    return {"forward_ms": took, "note": f"{took:.2f} ms"}


# --- attention --------------------------------------------------------------------------------------------------------


def leaf(count: int) -> Node:
    return Node([1] * (count + 1), trained=True)  # the last token is not fed


TREES = {"sequence": leaf(TOKENS), "pair": Node([1] * (TOKENS // 2), children=(leaf(TOKENS // 4), leaf(TOKENS // 4)))}


def inputs(setup: Setup, size: str) -> list[Tensor]:
    """Queries, keys and values with a layer's shapes."""
    torch.manual_seed(0)
    heads, shared = HEADS[size]
    made = [torch.randn(1, TOKENS, count, 128, device=setup.device) for count in (heads, shared, shared)]
    return [one.bfloat16().transpose(1, 2).requires_grad_() for one in made]


def timed(setup: Setup, forward: Callable[[], Tensor], qkv: list[Tensor]) -> tuple[float, float]:
    """Milliseconds of forward and of backward; backward is the time of both minus forward."""
    weight = torch.randn_like(forward())
    whole = median(setup, lambda: torch.autograd.grad(forward(), qkv, weight))
    alone = median(setup, forward)
    return alone, whole - alone


def attention(setup: Setup, size: str, options: dict[str, Any]) -> Mapping[str, Any]:
    """FlexAttention over a pack, with options in addition to those that posttrain sets."""
    torch.compiler.reset()  # new options are a new compilation, and a function may have at most eight
    qkv, found = inputs(setup, size), {}
    own = packed_attention._options_on
    packed_attention._options_on = lambda device, head: own(device, head) | options
    try:
        for name, tree in TREES.items():
            [whole] = pack([Example((tree,), 0)], TOKENS)
            mask = PackedMask(whole.to(setup.device))
            blocks = mask.blocks(None)
            forward = partial(packed_attention.flex_attend, *qkv, blocks, 128**-0.5, None, True)
            if name == "sequence":
                want = F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True).float()
                if not (error := float((forward().float() - want).norm() / want.norm())) <= 0.01:
                    raise CheckError(f"outputs differ by {error:.1%} (RMS)")
            found[name] = _both(*timed(setup, forward, qkv))
    finally:
        packed_attention._options_on = own
    return {**found, "options": json.dumps(options), "note": ", ".join(f"{n} {v['note']}" for n, v in found.items())}


def library(setup: Setup, size: str, backend: SDPBackend) -> Mapping[str, Any]:
    """PyTorch's own causal kernels, only for the sequence, because they do not support trees."""
    qkv = inputs(setup, size)

    def forward() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)

    return {"sequence": (both := _both(*timed(setup, forward, qkv))), "note": f"sequence {both['note']}"}


# --- decoding ---------------------------------------------------------------------------------------------------------


def decode(setup: Setup) -> Mapping[str, Any]:
    """The attention of a step, with Qwen3-0.6B's heads, compared with a copy of the same number of bytes."""
    from posttrain.models.kernels.decode import decode_attention

    torch.manual_seed(0)
    shared, groups, device = 8, ROWS // EACH, setup.device
    kept = [
        torch.randn(count, shared, COLUMNS, 128, device=device).bfloat16() for count in (groups, groups, ROWS, ROWS)
    ]
    query = torch.randn(ROWS, shared, 2, 128, device=device).bfloat16()
    row_R = torch.arange(ROWS, device=device)
    length_G, age_R = torch.full((groups,), COLUMNS, device=device), torch.full((ROWS,), COLUMNS, device=device)
    places = row_R // EACH, row_R % EACH, row_R.view(groups, EACH), length_G, row_R[:, None]
    given = query, *kept, *places, age_R - 1, age_R, age_R + COLUMNS - 1, 128**-0.5, None, None
    took = median(setup, lambda: decode_attention(*given))
    rate = sum(2 * side.numel() for side in kept) / took * 1e3
    share = rate / bandwidth(setup)
    return {"milliseconds": took, "bytes_per_second": rate, "note": f"{took:.3f} ms, {share:.0%} of a copy's rate"}
