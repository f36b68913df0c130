"""FlexAttention on a GPU: when it is used, the padding to its blocks, the blocks that fit a card.

arXiv 2412.05496. One compilation with dynamic shapes serves every width, with the kernels of a fixed width, because
tokens are padded to complete blocks here. Padding sees only itself and is cut off afterwards.
"""

import functools
import importlib.util
import logging
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger("posttrain")

BLOCK = 128  # tokens of one block of the mask
NARROWEST = 16  # smallest head size that it supports
OWN_BLOCKS_BYTES = 160 << 10  # of shared memory: with this, PyTorch's default blocks fit heads of 64 and 128


def suits(query: Tensor, dropout: float) -> bool:
    """Whether it is used for this attention: on CUDA, in 16 bits (in float32 `scaled_dot_product_attention` is exact
    and its blocks fit), without attention dropout, and if kernels can be compiled."""
    on_gpu = query.is_cuda and query.dtype != torch.float32
    return on_gpu and not dropout and query.shape[-1] >= NARROWEST and lacking() is None


@functools.cache
def lacking() -> str | None:
    """What is missing to compile kernels for a GPU, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if os.name == "posix" and compiler is None:
        return "there is no C compiler (cc, gcc or clang, or the one that CC names), which Triton needs"
    return None


@functools.cache
def announce() -> None:
    """Warn once if attention runs without FlexAttention."""
    if why := lacking():
        log.warning("attention runs without FlexAttention, which would be faster: %s", why)


def width(tokens: int) -> int:
    """The padded number of tokens: complete blocks, at least two, since torch compiles a size of 1 separately."""
    return max(2, -(-tokens // BLOCK)) * BLOCK


def block_mask(end_T: Tensor, position_T: Tensor, window: int | None):
    """Which keys each query sees (models/attention.py), as a BlockMask `width(T)` wide."""
    total = width(len(end_T))
    index_T = torch.arange(total, dtype=torch.int32, device=end_T.device)
    # Padding sees itself: the softmax of a row that sees nothing would be NaN.
    end, position = index_T + 1, torch.zeros_like(index_T)
    end[: len(end_T)], position[: len(end_T)] = end_T, position_T
    # Tensors only: a captured number would be recompiled for each window.
    until = position + (total if window is None else window)

    def visible(b, h, q, k):
        return (k <= q) & (q < end[k]) & (position[q] < until[k])

    return _block_mask_maker(end_T.device.type)(visible, None, None, total, total, end_T.device)


def attend(
    query: Tensor, key: Tensor, value: Tensor, blocks, scaling: float, softcap: float | None, grouped: bool
) -> Tensor:
    """query (1, H, T, d), key and value (1, H_kv, T, d) to (1, H, T, d); the BlockMask `blocks` is `width(T)` wide."""
    tokens = query.shape[2]
    missing = width(tokens) - tokens
    if missing:
        query, key, value = (F.pad(x, (0, 0, 0, missing)) for x in (query, key, value))

    most = softcap or 1.0

    def cap(score, b, h, i, j):
        return most * torch.tanh(score / most)

    out = _compiled()(
        query,
        key,
        value,
        score_mod=None if softcap is None else cap,
        block_mask=blocks,
        scale=scaling,
        enable_gqa=grouped,
        kernel_options=dict(_options_on(query.device, query.shape[-1])),
    )
    return out[:, :, :tokens]


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return _with_dynamic_sizes(flex_attention)


@functools.cache
def _block_mask_maker(device_type: str) -> Callable[..., Any]:
    """create_block_mask; compiled on a GPU, so that no (width, width) tensor exists in between."""
    from torch.nn.attention.flex_attention import create_block_mask

    return _with_dynamic_sizes(create_block_mask) if device_type == "cuda" else create_block_mask


def _with_dynamic_sizes(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function compiled for all sizes; scale and cap of a layer's logits are constants of its kernel."""
    from torch._dynamo import config

    config.specialize_float = True
    # Beyond the limit of recompilations torch would silently compute the full matrix of scores.
    config.fail_on_recompile_limit_hit = True
    return torch.compile(function, dynamic=True)


@functools.cache
def _options_on(device: torch.device, head: int) -> dict[str, Any]:
    # The compiler does not know that a dynamic width is a multiple of blocks, and would check every block.
    options: dict[str, Any] = {"IS_DIVISIBLE": True}
    if device.type == "cuda":
        options |= blocks_for(head, torch.cuda.get_device_properties(device).shared_memory_per_block_optin)
    return options


def blocks_for(head: int, shared: int) -> dict[str, int]:
    """Blocks of FlexAttention's 16-bit kernels that fit in this shared memory (bytes); empty if its defaults fit.

    Forward keeps M queries and streams N keys and values; backward keeps as many of each, with the operands of their
    gradients, and streams the rest. Heads are padded to a power of two.
    """
    wide = 1 << (head - 1).bit_length()
    if shared >= OWN_BLOCKS_BYTES and head in (16, 32, 64, 128):
        return {}
    rows = [(128, 64, 2), (64, 64, 2), (64, 32, 2), (64, 32, 1), (32, 32, 1), (16, 16, 1)]
    room = shared * 9 // 10 // (2 * wide)  # rows of a head that fit, with a tenth left for the kernel's own
    m, n, stages = next((one for one in rows if one[0] + 2 * one[1] * one[2] <= room), rows[-1])
    kept, streamed, back_stages = next((one for one in rows if 2 * one[0] + 2 * one[1] * one[2] <= room), rows[-1])
    forward = {"fwd_BLOCK_M": m, "fwd_BLOCK_N": n, "fwd_num_stages": stages, "fwd_num_warps": _warps(m)}
    backward = {"bwd_BLOCK_N1": kept, "bwd_BLOCK_M1": streamed, "bwd_BLOCK_M2": kept, "bwd_BLOCK_N2": streamed}
    return forward | backward | {"bwd_num_stages": back_stages, "bwd_num_warps": _warps(kept)}


def _warps(rows: int) -> int:
    """PyTorch's defaults for heads of 128: twice as many for blocks of 128 rows, whose sums fill the registers."""
    return 8 if rows >= 128 else 4
