"""The nodes of a pack's trees, and attention over their paths by FlashAttention 4 (flash-attn-4, on Hopper).

FlashAttention 4 takes sequences of different lengths, but no trees. So the keys of every node's path are gathered, one
path after another, and a node's queries see the keys of its path up to themselves. This is faster than FlexAttention
where nodes are long, and slower where they are short: `pays` knows both from measurements.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.batch import sent

BLOCK = 128  # tokens of one block of FlexAttention's mask
HEADS = (64, 96, 128, 256)  # sizes for which FlashAttention 4 is used
STEP = 256  # tokens by which the sizes of packs for CUDA graphs differ, at least


def rounded(tokens: int, sizes: int) -> int:
    """Return the size to which so many tokens are padded. There are so many `sizes`, a power of two, between one and
    its double, all of them multiples of STEP."""
    step = max(STEP, (1 << tokens.bit_length() - 1) // sizes)
    return -(-tokens // step) * step


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of tokens that see the same earlier tokens: one call of the attention kernel."""

    start: int
    stop: int
    before: tuple[slice, ...]  # the physical tokens of the segment's ancestors, which all of its tokens see
    seen: int  # the number of the ancestors' tokens


@dataclass(frozen=True, slots=True)
class Paths:
    """The keys of the nodes' paths: G gathered keys of M nodes.

    So that a CUDA graph serves many packs, G, M and the longest path are rounded up: further nodes are empty, and
    further keys belong to no node.
    """

    numbers: Tensor  # int32; the following tensors, one after another
    query_M: Tensor  # start of each node's queries, and the end of the last
    key_M: Tensor  # start of each node's keys, and the end of the last
    token_G: Tensor  # the token of each gathered key; empty: every node is its own path
    order_G: Tensor  # the gathered keys, by their tokens
    copies_T: Tensor  # how often each token is gathered
    longest: int  # at least the keys of the longest path

    @classmethod
    def of(cls, nodes: Sequence[Segment], device: torch.device) -> Paths:
        sizes = np.zeros((2, 1 + max(16, 1 << (len(nodes) - 1).bit_length())), np.int64)
        sizes[0, 1 : len(nodes) + 1] = [node.stop - node.start for node in nodes]
        sizes[1, 1 : len(nodes) + 1] = [node.seen + node.stop - node.start for node in nodes]
        token = order = copies = np.empty(0, np.int64)
        if any(node.before for node in nodes):
            runs = (part for node in nodes for part in (*node.before, slice(node.start, node.stop)))
            token = np.concatenate([np.arange(run.start, run.stop) for run in runs])
            more = rounded(len(token), 4) - len(token)
            order = np.concatenate([np.argsort(token, kind="stable"), np.arange(more) + len(token)])
            token, copies = np.pad(token, (0, more)), np.bincount(token, minlength=nodes[-1].stop)
        parts = [*sizes.cumsum(1), token, order, copies]
        numbers = sent(torch.from_numpy(np.concatenate(parts).astype(np.int32)), device)
        query_M, key_M, token_G, order_G, copies_T = numbers.split([len(part) for part in parts])
        return cls(numbers, query_M, key_M, token_G, order_G, copies_T, 1 << int(sizes.max() - 1).bit_length())

    def gathered(self, x: Tensor) -> Tensor:
        """Keys or values of the pack's tokens, (1, H_kv, T, d) -> those of the paths, (G, H_kv, d)."""
        x = x[0].transpose(0, 1).contiguous()
        return Gathered.apply(x, self.token_G, self.order_G, self.copies_T) if len(self.token_G) else x

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float, window: int | None) -> Tensor:
        """query (1, H, T, d), key and value (1, H_kv, T, d) -> (1, H, T, d)."""
        q, k, v = query[0].transpose(0, 1).contiguous(), self.gathered(key), self.gathered(value)
        out = flash_attention()(
            q, k, v, cu_seqlens_q=self.query_M, cu_seqlens_k=self.key_M, max_seqlen_q=self.longest,
            max_seqlen_k=self.longest, softmax_scale=scaling, causal=True, deterministic=True,
            window_size=(None, None) if window is None else (window - 1, 0),
        )  # fmt: skip
        return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)[None]


class Gathered(torch.autograd.Function):
    """x[token_G] for x (T, H, d). The gradients of a token's copies are summed in float32, in their order. Those of
    keys that belong to no node, which the kernel leaves as they were in memory, come last and are not read."""

    @staticmethod
    def forward(ctx, x: Tensor, token_G: Tensor, order_G: Tensor, copies_T: Tensor) -> Tensor:
        ctx.save_for_backward(order_G, copies_T)
        return x.index_select(0, token_G)

    @staticmethod
    def backward(ctx, *grad_outputs):
        order_G, copies_T = ctx.saved_tensors
        grad = grad_outputs[0].index_select(0, order_G).float()
        sums = torch.segment_reduce(grad, "sum", lengths=copies_T, unsafe=True)
        return sums.to(grad_outputs[0].dtype), None, None, None


def pays(nodes: Sequence[Segment]) -> bool:
    """Whether FlashAttention 4 is faster for these nodes, by the milliseconds of a layer's forward and backward pass.

    Both lines are fitted to what one H200 took for 16 heads of 128 and four packs of 8,192 tokens (docs/gpu.md): one
    sequence, a pair, a prompt with eight completions, sixteen rows.
    """
    flash, flex = 0.47, 0.59
    for node in nodes:
        length, seen = node.stop - node.start, node.seen
        flash += 0.03 + 0.0425e-6 * length * (seen + length / 2)
        flex += 1.234e-3 * (length / BLOCK) * (seen / BLOCK + (length / BLOCK + 1) / 2)
    gathered = sum(node.seen + node.stop - node.start for node in nodes) if any(node.before for node in nodes) else 0
    return flash + 44e-6 * gathered < flex


@functools.cache
def has_flash_attention() -> bool:
    """Whether FlashAttention 4 can be used: a Hopper GPU, and posttrain[hopper]."""
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return is_hopper and all(importlib.util.find_spec(name) is not None for name in ("flash_attn", "flash_attn.cute"))


@functools.cache
def flash_attention() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    return flash_attn_varlen_func
