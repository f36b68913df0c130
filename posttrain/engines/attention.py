"""Attention in the prefill, and attention of one new token per completion to the keys and values in the cache.

A prompt's keys and values are computed and stored once for all its completions: with n completions and r query heads
per key head, n·r queries are multiplied with them in one product. A completion's own keys and values are stored
separately. Each of the two parts gives the largest logit m, the sum z of 2^(logit - m), and the sum o of
2^(logit - m)·value. With h = max(m_1, m_2),

    output = (o_1 2^(m_1 - h) + o_2 2^(m_2 - h)) / (z_1 2^(m_1 - h) + z_2 2^(m_2 - h))

is the attention to both parts, without copying either. Logits are divided by ln 2 beforehand, so that powers of 2
replace powers of e. On a CPU, powers of 2 take a third of the time, even if the result is nearly 0.

Subtracting m keeps every power within the range of a float. This is seldom needed, and on a CPU finding and subtracting
m takes as long as the powers. So on a CPU, m is 0 as long as the sums of a layer show that this is valid (`_plain`).
Logits far below 0 are raised to a value whose power is negligible in the sum but not denormal, because denormal numbers
would slow down products. A layer whose sums fail the check is computed again with m, and with m in all later steps.

Letters: R rows (live completions), G groups (their prompts), K key heads, r query heads per key head, n completions of
a group, M slots for a group's live completions, d the size of a head.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from posttrain.batch import Pack
from posttrain.engines.cache import Cache, Layer, index_of
from posttrain.models.attention import How, PackedMask

LOG2_E = 1 / math.log(2)
PLAIN_SUMS = (2.0**-60, 2.0**90)  # range of sums for which m = 0 is valid, with values up to 2^37
LEAST = -110.0  # lower logits, including masked ones, are raised to this; each then adds at most 2^-50 of the sum
HIDDEN = -1e30  # added to a masked logit; finite, so that a fully masked part gives no NaN


class Prefill(PackedMask):
    """A pack of prompts. The keys and values of each tree are stored in the cache, in the group given by `slots`."""

    def __init__(self, pack: Pack, cache: Cache, slots: Sequence[int]):
        super().__init__(pack, pack.last_S)
        self.cache, self.slots, self.tree_start = cache, slots, pack.tree_start

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        layer = self.cache.layer(module, key)
        for slot, start, stop in zip(self.slots, self.tree_start[:-1], self.tree_start[1:], strict=True):
            layer.prompt_key[slot, :, : stop - start] = key[0, :, start:stop]
            layer.prompt_value[slot, :, : stop - start] = value[0, :, start:stop]
        return super().attend(module, query, key, value, how)


@dataclass(frozen=True, slots=True)
class Attended:
    """Attention to some of the keys, before the division: o, z and m as in the module's docstring, float32."""

    out: Tensor
    total: Tensor
    highest: Tensor | None  # None: m is 0


class Shape(NamedTuple):
    """The sizes of a step: those of the live completions, on a GPU rounded up so that few shapes occur."""

    rows: int  # the live rows, and possibly a few more
    groups: int
    members: int  # maximum number of live completions of a group
    prompt_columns: int  # columns of prompts that are read from the cache; unused ones are masked
    own_columns: int  # columns of completions that are read from the cache; unused ones are masked
    even_prompts: bool  # every prompt has `prompt_columns` tokens, so none is masked
    even_ages: bool  # every live completion has `own_columns` tokens, so none is masked


@dataclass(eq=False)
class Decoding:
    """A step of one new token per live completion: each stores its key and value, and attends to prompt and completion.

    An idle row may see leftovers of earlier completions. Nothing reads its result, but its sums also decide whether a
    layer needs m.
    """

    cache: Cache
    group_R: Tensor  # the group of each row
    member_R: Tensor  # the row's slot among the queries to its prompt
    row_GM: Tensor  # the row in each slot; an empty slot repeats another row's query
    column_R: Tensor  # the column of the new token's key in its completion
    length_G: Tensor  # number of tokens of each group's prompt
    age_G: Tensor  # number of tokens of each group's completions, which start together
    shape: Shape
    fused: bool = False  # whether models/kernels/decode.py computes norms, rotations and attention

    read = slice(None)

    def __post_init__(self) -> None:
        self.row_R = torch.arange(len(self.group_R), device=self.group_R.device)
        self.position_R, self.age_R = self.length_G[self.group_R] + self.column_R, self.column_R + 1
        self._masks: dict[int | None, tuple[Tensor | None, Tensor | None]] = {}
        self._query_slots: dict[int, tuple[Tensor, Tensor]] = {}

    def masks(self, window: int | None) -> tuple[Tensor | None, Tensor | None]:
        """Return the masks to add to logits, or None: prompt (G, 1, 1, prompt_columns), own (R, 1, 1, own_columns)."""
        shape = self.shape
        if window is not None and shape.prompt_columns + shape.own_columns <= window:
            window = None
        if window not in self._masks:
            device = self.column_R.device
            prompt = torch.arange(shape.prompt_columns, device=device)[None, :]
            own = torch.arange(shape.own_columns, device=device)[None, :]
            prompt_seen = None if shape.even_prompts else prompt < self.length_G[:, None]
            own_seen = None if shape.even_ages else own <= self.column_R[:, None]
            if window is not None:
                near = (self.length_G + self.age_G - 1)[:, None] - prompt < window
                prompt_seen = near if prompt_seen is None else near & prompt_seen
                near = self.column_R[:, None] - own < window
                own_seen = near if own_seen is None else near & own_seen
            self._masks[window] = (_mask(prompt_seen), _mask(own_seen))
        return self._masks[window]

    def query_slots(self, heads: int) -> tuple[Tensor, Tensor]:
        """Return the (row, head) of the query in each (group, head, slot), and the inverse, both as flat indices."""
        if heads not in self._query_slots:
            head_K = torch.arange(heads, device=self.group_R.device)
            query_GKM = self.row_GM[:, None, :] * heads + head_K[None, :, None]
            slot_RK = (self.group_R[:, None] * heads + head_K) * self.row_GM.shape[1] + self.member_R[:, None]
            self._query_slots[heads] = (query_GKM.flatten(), slot_RK.flatten())
        return self._query_slots[heads]

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        layer = self.cache.layer(module, key)
        rows, heads, size = query.shape[2], key.shape[1], query.shape[3]
        query_RKrd = query[0].transpose(0, 1).reshape(rows, heads, -1, size).to(layer.own_key.dtype)
        layer.own_key[self.row_R, :, self.column_R] = key[0].transpose(0, 1).to(layer.own_key.dtype)
        layer.own_value[self.row_R, :, self.column_R] = value[0].transpose(0, 1).to(layer.own_key.dtype)
        if self.fused:
            return self._fused(layer, query_RKrd, how).to(query.dtype).reshape(1, rows, -1, size).transpose(1, 2)
        out = None
        if query.device.type == "cpu" and not self.cache.still and index_of(module) not in self.cache.steep:
            out = _plain(*self._parts(layer, query_RKrd, how, shifted=False))
            if out is None:
                self.cache.steep.add(index_of(module))
        if out is None:
            out = _joined(*self._parts(layer, query_RKrd, how, shifted=True))
        return out.to(query.dtype).reshape(1, rows, -1, size).transpose(1, 2)

    @property
    def attend_new(self) -> Callable[..., Tensor] | None:
        return self._attend_new if self.fused else None

    def _attend_new(self, module, query, key, value, cos, sin, norms, how) -> Tensor:
        from posttrain.models.kernels.decode import enter  # needs Triton

        layer = self.cache.layer(module, key.transpose(1, 2))
        new = query[0], key[0], value[0], cos[0], sin[0]
        query_RKrd = enter(*new, norms, layer.own_key, layer.own_value, self.column_R)
        return self._fused(layer, query_RKrd, how).to(value.dtype).flatten(1)[None]

    def _fused(self, layer: Layer, query_RKrd: Tensor, how: How) -> Tensor:
        """Compute the attention with kernels, which read prompts and completions only up to their lengths."""
        from posttrain.models.kernels.decode import decode_attention  # needs Triton

        rows, (groups, _) = len(query_RKrd), self.row_GM.shape
        prompt = slice(groups), slice(None), slice(self.shape.prompt_columns)
        own = slice(rows), slice(None), slice(self.shape.own_columns)
        return decode_attention(
            query_RKrd,
            layer.prompt_key[prompt],
            layer.prompt_value[prompt],
            layer.own_key[own],
            layer.own_value[own],
            self.group_R,
            self.member_R,
            self.row_GM,
            self.length_G,
            self.row_R[:, None],
            self.column_R,
            self.age_R,
            self.position_R,
            how.scaling,
            how.softcap,
            how.window,
        )

    def _parts(self, layer: Layer, query_RKrd: Tensor, how: How, shifted: bool) -> tuple[Attended, Attended]:
        """Return the attention to a completion's own keys, and the attention to the keys of its prompt."""
        rows, columns = len(query_RKrd), self.shape.own_columns
        prompt_mask, own_mask = self.masks(how.window)
        key, value = layer.own_key[:rows, :, :columns], layer.own_value[:rows, :, :columns]
        own = self._attend(query_RKrd, key, value, own_mask, how, shifted)
        return own, self._prompt(layer, query_RKrd, prompt_mask, how, shifted)

    def _prompt(self, layer: Layer, query_RKrd: Tensor, mask: Tensor | None, how: How, shifted: bool) -> Attended:
        """Return each row's attention to its prompt. One product multiplies all queries of a group with its keys."""
        groups, columns = len(self.row_GM), self.shape.prompt_columns
        rows, heads, each, size = query_RKrd.shape
        query_GKM, slot_RK = self.query_slots(heads)
        query = query_RKrd.reshape(rows * heads, each * size).index_select(0, query_GKM).view(groups, heads, -1, size)
        key, value = layer.prompt_key[:groups, :, :columns], layer.prompt_value[:groups, :, :columns]
        part = self._attend(query, key, value, mask, how, shifted)

        def of_rows(x: Tensor) -> Tensor:
            return x.view(len(query_GKM), -1).index_select(0, slot_RK).view(rows, heads, each, -1)

        return Attended(of_rows(part.out), of_rows(part.total), None if part.highest is None else of_rows(part.highest))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: How, shifted: bool
    ) -> Attended:
        """Attend from query (N, K, q, d) to key and value (N, K, L, d), whose first two axes can be merged, with
        mask (N, 1, 1, L)."""
        count, heads, queries, size = query.shape
        columns = key.shape[2]
        key, value = key.flatten(0, 1), value.flatten(0, 1)
        query = query.reshape(count * heads, queries, size)
        scale = how.scaling * LOG2_E if how.softcap is None else how.scaling
        if query.dtype == torch.float32 and query.device.type == "cpu" and not self.cache.still:
            scores = self.cache.scratch(count * heads, queries, columns)
            torch.bmm(query * scale, key.transpose(1, 2), out=scores)
        else:
            scores = _product(query, key.transpose(1, 2)).mul_(scale)
        if how.softcap is not None:
            scores.div_(how.softcap).tanh_().mul_(how.softcap * LOG2_E)
        if mask is not None:
            scores.view(count, heads, queries, columns).add_(mask)
        highest = None
        if shifted:
            highest = scores.amax(-1, keepdim=True)
            scores.sub_(highest)
            highest = highest.view(count, heads, queries, 1)
        else:
            scores.clamp_(min=LEAST)
        total = scores.exp2_().sum(-1, keepdim=True).view(count, heads, queries, 1)
        return Attended(_product(scores, value).view(count, heads, queries, -1), total, highest)


def _joined(own: Attended, prompt: Attended) -> Tensor:
    """Return the attention to both parts, each with its m."""
    assert own.highest is not None and prompt.highest is not None
    highest = torch.maximum(own.highest, prompt.highest)
    own_share, prompt_share = (own.highest - highest).exp2_(), (prompt.highest - highest).exp2_()
    total = own.total * own_share + prompt.total * prompt_share
    return (own.out * (own_share / total)).addcmul_(prompt.out, prompt_share / total)


def _plain(own: Attended, prompt: Attended) -> Tensor | None:
    """Return the attention to both parts, computed with m = 0, or None if that is not valid."""
    total = own.total.add_(prompt.total)
    lowest, highest = total.aminmax()
    is_right = PLAIN_SUMS[0] <= lowest.item() and highest.item() <= PLAIN_SUMS[1]  # False for NaN
    return own.out.add_(prompt.out).div_(total) if is_right else None


def _mask(seen: Tensor | None) -> Tensor | None:
    """Return the mask to add to logits (N, K, q, L), from the visible keys (N, L)."""
    return None if seen is None else torch.where(seen, 0.0, HIDDEN)[:, None, None, :]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """A batched matrix product with float32 results, because logits in bfloat16 would be off by up to 1 in 256."""
    if b.is_cuda and b.dtype != torch.float32:
        return torch.bmm(a.to(b.dtype), b, out_dtype=torch.float32)
    return torch.bmm(a.float(), b.float())
