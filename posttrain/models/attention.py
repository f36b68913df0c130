"""Attention over a pack, registered with transformers under the name `packed`; no model file is patched.

A query sees the keys `k <= q < end_T[k]` and, in a layer with a sliding window, only those with
`position_q - position_k < window`. The keyword argument `packed` is passed from the backbone's forward down to the
attention function. For a pack it is a `PackedMask`, whose masks are built once and shared by all layers. The object
implements `attend`, so engines can pass a cache instead (posttrain/engines/attention.py).

On CPU and MPS, scaled_dot_product_attention is called once for every node of a tree. On CUDA, FlexAttention processes
the full pack with one BlockMask if it supports the case, or FlashAttention 4 (nodes.py) where that is faster; otherwise
there is also one call per node.
"""

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from posttrain.base.errors import ModelError
from posttrain.base.log import log
from posttrain.batch import Pack
from posttrain.models.devices import lacks_bfloat16
from posttrain.models.matmul import ONEDNN, ROWS
from posttrain.models.nodes import BLOCK, HEADS, Paths, Segment, has_flash_attention, pays

NAME = "packed"
NARROWEST = 16  # smallest head size that FlexAttention supports
OWN_BLOCKS_BYTES = 160 << 10  # shared memory in which PyTorch's default blocks fit, for heads of up to 128


@dataclass(frozen=True, slots=True)
class How:
    """The settings of a layer's attention, apart from the projections."""

    scaling: float  # factor of the products of queries and keys
    dropout: float
    window: int | None  # a query sees only keys less than this many positions before it
    softcap: float | None  # Gemma-2's capping of the logits, softcap · tanh(logits / softcap), which SDPA lacks


class Visible(Protocol):
    """The argument `packed`: which keys the tokens of a forward pass see, and how they attend to them.

    `read` are the tokens, in order, whose last hidden states will be read. `attend_new` is None unless one kernel gives
    queries and keys their norms and rotations: it gets module, queries (1, T, H, d), keys and values (1, T, H_kv, d) as
    projected, cos and sin (1, T, d), the norms' weights and epsilon or None, and `how`, and returns (1, T, H d).
    """

    read: slice | Tensor
    attend_new: Callable[..., Tensor] | None

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Return the output (1, H, T, d) of attention from query (1, H, T, d) to key and value (1, H_kv, T, d)."""
        ...


class PackedMask:
    """The visible keys of each query of a pack, as each kernel needs them. Masks are built on demand, once per window.

    `read` are the tokens, in order, whose last hidden states will be read; all by default. Entries after the first
    `num_read` are copies of the last one.
    """

    attend_new: Callable[..., Tensor] | None = None

    def __init__(self, pack: Pack, read: Tensor | None = None, num_read: int | None = None):
        self.read: slice | Tensor = slice(None) if read is None else read
        self.num_read = num_read
        self.end_T = pack.end_T
        self.position_T = pack.position_T
        self.num_tokens = pack.num_tokens
        self._pack = pack
        self._masks: dict[tuple[int | None, torch.dtype], list[Tensor | None]] = {}
        self._blocks: dict[int | None, object] = {}

    def sequences_T(self) -> Tensor:
        """Return the number of sequences that each token is part of, int64; 0 for padding."""
        last_S, index_T = self._pack.last_S.sort().values, torch.arange(len(self.end_T), device=self.end_T.device)
        # The sequences whose last token sees it.
        return torch.searchsorted(last_S, self.end_T) - torch.searchsorted(last_S, index_T)

    def dense(self, window: int | None) -> Tensor:
        """Return the dense attention mask, bool (queries, keys). Reference for tests."""
        index_T = torch.arange(len(self.end_T), device=self.end_T.device)
        visible = (index_T[None, :] <= index_T[:, None]) & (index_T[:, None] < self.end_T[None, :])
        if window is not None:
            visible &= self.position_T[:, None] - self.position_T[None, :] < window
        return visible

    @functools.cached_property
    def nodes(self) -> list[Segment]:
        """The pack, split where visibility changes: at the start of every node of every tree. Padding is one node.

        Raises RuntimeError while a CUDA graph is captured, which would have the nodes of this pack."""
        if self.end_T.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("this model's attention is computed node by node")
        total, width = self.num_tokens, len(self.end_T)
        cuts = self._pack.nodes
        nodes, above = [], []
        for (start, end), (stop, _) in pairwise([*cuts, (total, total)]):
            while above and above[-1][0] <= start:
                above.pop()
            before = tuple(run for _, run in above)
            nodes.append(Segment(start, stop, before, seen=sum(run.stop - run.start for run in before)))
            above.append((end, slice(start, stop)))
        return [*nodes, Segment(total, width, (), 0)] if total < width else nodes

    def masks(self, window: int | None, dtype: torch.dtype) -> list[Tensor | None]:
        """Return a mask per node to add to the logits, in `dtype`, so that no layer has to convert a bool mask."""
        if (window, dtype) not in self._masks:
            self._masks[window, dtype] = [_mask_of(node, self.position_T, window, dtype) for node in self.nodes]
        return self._masks[window, dtype]

    def blocks(self, window: int | None):
        """Return FlexAttention's BlockMask for the complete pack."""
        if window not in self._blocks:
            self._blocks[window] = flex_block_mask(self.end_T, self.position_T, window)
        return self._blocks[window]

    @functools.cached_property
    def paths(self) -> Paths | None:
        """The keys of the nodes' paths, if FlashAttention 4 can be used and is faster."""
        return Paths.of(self.nodes, self.end_T.device) if has_flash_attention() and pays(self.nodes) else None

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        """Return the attention of the pack's tokens to one another."""
        if query.is_cuda and suits_flex(query, how.dropout):
            if suits_paths(query.shape[-1], how.softcap) and self.paths is not None:
                return self.paths.attend(query, key, value, how.scaling, how.window)
            grouped = key.shape[1] != query.shape[1]
            return flex_attend(query, key, value, self.blocks(how.window), how.scaling, how.softcap, grouped)
        if query.device.type == "cpu" and query.dtype == torch.bfloat16:
            # The backward pass of PyTorch's attention takes three to four times as long in bfloat16 as in float32.
            return _by_node(query.float(), key.float(), value.float(), self, how).to(query.dtype)
        return _by_node(query, key, value, self, how)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packed: Visible | None = None,
    **_unused,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query (1, H, T, d), key and value (1, H_kv, T, d) -> output (1, T, H, d).

    `_unused` accepts the arguments of other implementations (output_attentions, settings of a cache).
    """
    if packed is None:
        raise ModelError(
            "this model's attention is set to `packed`, which needs a pack: score through posttrain.scoring, "
            'or call model.set_attn_implementation("sdpa") before using it directly'
        )
    how = How(query.shape[-1] ** -0.5 if scaling is None else scaling, dropout, sliding_window, softcap)
    return packed.attend(module, query, key, value, how).transpose(1, 2), None


AttentionInterface.register(NAME, packed_attention)


def _by_node(query, key, value, packed, how):
    """Attention of each node's tokens to the node and its ancestors, without products that a mask would discard."""
    attend = _sdpa if how.softcap is None else _eager
    nodes = packed.nodes
    sizes = [node.stop - node.start for node in nodes]
    queries, keys, values = (tensor.split(sizes, dim=2) for tensor in (query, key, value))
    number = {node.start: i for i, node in enumerate(nodes)}
    parts = []
    masks = packed.masks(how.window, query.dtype)
    for node, q, k, v, mask in zip(nodes, queries, keys, values, masks, strict=True):
        if node.before:
            ancestors = [number[part.start] for part in node.before]
            k = torch.cat([keys[i] for i in ancestors] + [k], dim=2)
            v = torch.cat([values[i] for i in ancestors] + [v], dim=2)
        parts.append(attend(q, k, v, mask, how))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _mask_of(node: Segment, position_T: Tensor, window: int | None, dtype: torch.dtype) -> Tensor | None:
    """Return a mask to add to the logits of the keys of a node's ancestors, then its own; None: a causal mask."""
    length, seen = node.stop - node.start, node.seen
    if not seen and (window is None or length <= window):
        return None
    own = torch.ones(length, seen + length, dtype=torch.bool, device=position_T.device).tril(seen)
    if window is not None:
        query = position_T[node.start : node.stop]
        key = torch.cat([position_T[part] for part in node.before] + [query])
        own &= query[:, None] - key[None, :] < window
    return torch.zeros_like(own, dtype=dtype).masked_fill_(~own, -torch.inf)


def _sdpa(q, k, v, mask, how):
    grouped = k.shape[1] != q.shape[1]
    if grouped and q.is_cuda and (mask is not None or q.dtype == torch.float32 or lacks_bfloat16()):
        # These cases need the memory-efficient kernel, which lacks grouped heads: without copies of the heads, torch
        # would compute the full matrix of scores.
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        grouped = False
    return F.scaled_dot_product_attention(
        q, k, v, mask, how.dropout, is_causal=mask is None, scale=how.scaling, enable_gqa=grouped
    )


def _eager(q, k, v, mask, how):
    """Plain attention with capped logits: softcap · tanh(logits / softcap), before the mask (Gemma 2, section 2)."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    logits = q @ k.transpose(-1, -2) * how.scaling
    logits = how.softcap * torch.tanh(logits / how.softcap)
    if mask is None:
        mask = torch.full((q.shape[2], k.shape[2]), -torch.inf, dtype=q.dtype, device=q.device).triu(1)
    weights = (logits + mask).softmax(-1, dtype=torch.float32).to(q.dtype)
    return F.dropout(weights, how.dropout) @ v


def width_step(device: torch.device, tokens_per_pack: int) -> int | None:
    """Return the multiple to which packs are padded: on a GPU FlexAttention's block, so that layers need no padding; on
    a CPU whose products cache every shape (models/matmul.py) a 64th of the budget, in complete ROWS; otherwise None."""
    if device.type == "cuda":
        return BLOCK
    return -(-tokens_per_pack // 64 // ROWS) * ROWS if device.type == "cpu" and ONEDNN else None


# FlexAttention (arXiv 2412.05496). One compilation with dynamic shapes serves every width, with the kernels of a fixed
# width, because tokens are padded to complete blocks here. Padding tokens see only themselves and are cut off later.


def suits_flex(query: Tensor, dropout: float) -> bool:
    """Whether FlexAttention is used: on CUDA, in 16 bits, without attention dropout, with heads of at least NARROWEST,
    and if kernels can be compiled. In float32, `scaled_dot_product_attention` is exact and its blocks fit."""
    on_gpu = query.is_cuda and query.dtype != torch.float32
    return on_gpu and not dropout and query.shape[-1] >= NARROWEST and lacking_for_triton() is None


def suits_paths(head: int, softcap: float | None) -> bool:
    """Whether FlashAttention 4 is used for heads of this size and such a cap of the logits, in 16 bits."""
    return head in HEADS and softcap is None


@functools.cache
def lacking_for_triton() -> str | None:
    """Return what is missing to compile kernels for a GPU, or None if nothing is missing."""
    if lacks_bfloat16():
        return "this GPU's compute capability is below 8.0"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if os.name == "posix" and compiler is None:
        return "there is no C compiler (cc, gcc or clang, or the one that CC names), which Triton needs"
    return None


@functools.cache
def announce_without_flex() -> None:
    """Warn once if attention runs without FlexAttention."""
    if why := lacking_for_triton():
        log.warning("attention runs without FlexAttention, which would be faster: %s", why)


def flex_width(tokens: int) -> int:
    """Return the padded number of tokens: complete blocks, at least two, because torch compiles size 1 separately."""
    return max(2, -(-tokens // BLOCK)) * BLOCK


def flex_block_mask(end_T: Tensor, position_T: Tensor, window: int | None):
    """Return which keys each query sees, as a BlockMask of width `flex_width(T)`."""
    total = flex_width(len(end_T))
    index_T = torch.arange(total, dtype=torch.int32, device=end_T.device)
    # A padding token sees itself, because the softmax of a row that sees nothing would be NaN.
    end, position = index_T + 1, torch.zeros_like(index_T)
    end[: len(end_T)], position[: len(end_T)] = end_T, position_T
    # `visible` refers only to tensors, because a captured number would cause a recompilation for each window.
    until = position + (total if window is None else window)

    def visible(b, h, q, k):
        return (k <= q) & (q < end[k]) & (position[q] < until[k])

    return _block_mask_maker(end_T.device.type)(visible, None, None, total, total, end_T.device)


def flex_attend(
    query: Tensor, key: Tensor, value: Tensor, blocks, scaling: float, softcap: float | None, grouped: bool
) -> Tensor:
    """query (1, H, T, d), key and value (1, H_kv, T, d) -> (1, H, T, d). The BlockMask has width `flex_width(T)`."""
    tokens = query.shape[2]
    missing = flex_width(tokens) - tokens
    if missing:
        query, key, value = (F.pad(x, (0, 0, 0, missing)) for x in (query, key, value))

    most = softcap or 1.0

    def cap(score, b, h, i, j):
        return most * torch.tanh(score / most)

    change = None if softcap is None else cap
    options = dict(_options_on(query.device, query.shape[-1]))
    out = _compiled()(query, key, value, change, blocks, scale=scaling, enable_gqa=grouped, kernel_options=options)
    return out[:, :, :tokens]


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return _with_dynamic_sizes(flex_attention)


@functools.cache
def _block_mask_maker(device_type: str) -> Callable[..., Any]:
    """Return create_block_mask, compiled on a GPU so that no (width, width) tensor is created in between."""
    from torch.nn.attention.flex_attention import create_block_mask

    return _with_dynamic_sizes(create_block_mask) if device_type == "cuda" else create_block_mask


def _with_dynamic_sizes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile the function for all sizes. The scale and cap of a layer's logits are constants of its kernel."""
    from torch._dynamo import config

    config.specialize_float = True
    # Beyond its limit of recompilations, torch would silently compute the full matrix of scores.
    config.fail_on_recompile_limit_hit = True
    return torch.compile(function, dynamic=True)


@functools.cache
def _options_on(device: torch.device, head: int) -> dict[str, Any]:
    # The compiler does not know that a dynamic width is a multiple of blocks, and would check every block.
    options: dict[str, Any] = {"IS_DIVISIBLE": True}
    if device.type == "cuda":
        options |= flex_blocks_for(head, torch.cuda.get_device_properties(device).shared_memory_per_block_optin)
    return options


def flex_blocks_for(head: int, shared: int) -> dict[str, int]:
    """Block sizes for FlexAttention's 16-bit kernels with `shared` bytes of shared memory; empty if the defaults fit.

    The forward kernel keeps M queries and streams N keys and values. The backward kernel keeps a block of keys and
    values, or of queries and output gradients, and streams the others. Heads are padded to a power of two.
    """
    wide = 1 << (head - 1).bit_length()
    if shared >= OWN_BLOCKS_BYTES and head in (16, 32, 64, 128):
        return {}
    rows = [(128, 64, 2), (64, 64, 2), (64, 32, 2), (64, 32, 1), (32, 32, 1), (16, 16, 1)]
    room = shared * 9 // 10 // (2 * wide)  # rows of a head that fit, with a tenth left for the kernel itself
    m, n, stages = next((r for r in rows if r[0] + 2 * r[1] * r[2] <= room), rows[-1])
    kept, streamed, back_stages = next((r for r in rows if 2 * r[0] + 2 * r[1] * r[2] <= room), rows[-1])
    # PyTorch's defaults for heads of 128: twice as many warps for blocks of 128 rows, as their sums fill registers.
    warps, back_warps = (8 if of >= 128 else 4 for of in (m, kept))
    forward = {"fwd_BLOCK_M": m, "fwd_BLOCK_N": n, "fwd_num_stages": stages, "fwd_num_warps": warps}
    backward = {"bwd_BLOCK_N1": kept, "bwd_BLOCK_M1": streamed, "bwd_BLOCK_M2": kept, "bwd_BLOCK_N2": streamed}
    return forward | backward | {"bwd_num_stages": back_stages, "bwd_num_warps": back_warps}
