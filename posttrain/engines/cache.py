"""Keys and values of prompts and completions, and the attention of one new token of each completion to them.

A prompt's are computed and kept once, and all its completions read them there: with n completions and r query heads to
a head of keys, n·r queries meet them in one product. A completion's own are apart. Each part gives the largest logit m,
the sum z of 2^(logit - m), and the sum o of 2^(logit - m)·value; with M the larger m of the two,

    output = (o_1 2^(m_1 - M) + o_2 2^(m_2 - M)) / (z_1 2^(m_1 - M) + z_2 2^(m_2 - M))

is attention to both, without a copy of either. Logits are divided by ln 2 on the way, so that powers of 2 are those of
e: on a CPU they take a third of the time, and none longer where a power is nearly 0. Letters: R rows (live
completions), G groups (their prompts), K heads of keys and values, r query heads to each of them, n completions of a
group, d the size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from posttrain.batch import Pack
from posttrain.models.attention import How, PackedMask

LOG2_E = 1 / math.log(2)
SMALL_HEAD = 32  # of fewer numbers: keys lie number by number, which makes their products up to twice as fast on a CPU
HIDDEN = -1e30  # added to a logit that is not seen; finite, so that a part in which nothing is seen has no NaN


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's keys and values: prompts (G, K, columns, d), completions (R, K, columns, d)."""

    prompt_key: Tensor
    prompt_value: Tensor
    own_key: Tensor
    own_value: Tensor


class Cache:
    """The keys and values of every layer, allocated when a layer is first met.

    It begins as zeros, since what is not seen is multiplied by 0 and must be finite.
    """

    def __init__(self, groups: int, rows: int, members: int, prompt_columns: int, own_columns: int):
        self.groups, self.rows, self.members = groups, rows, members
        self.prompt_columns, self.own_columns = prompt_columns, own_columns
        self.layers: dict[int, Layer] = {}
        self.scratch: dict[tuple[str, torch.dtype], Tensor] = {}

    def layer(self, module: nn.Module, key: Tensor) -> Layer:
        """The layer of an attention module, for keys (1, K, T, d)."""
        index: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
        if index not in self.layers:
            heads, size = key.shape[1], key.shape[3]
            sides = ((self.groups, self.prompt_columns), (self.rows, self.own_columns))
            made = [key.new_zeros(count, heads, columns, size) for count, columns in sides for _ in range(2)]
            if size < SMALL_HEAD:
                made[::2] = [side.view(*side.shape[:2], size, -1).transpose(2, 3) for side in made[::2]]
            self.layers[index] = Layer(*made)
        return self.layers[index]

    def move_rows(self, source: Tensor, target: Tensor, columns: int) -> None:
        """Copy the first `columns` of the completions at `source` to the places `target`, int64 both."""
        for layer in self.layers.values():
            for side in (layer.own_key, layer.own_value):
                side[target, :, :columns] = side[source, :, :columns]

    def move_group(self, source: int, target: int, columns: int) -> None:
        """Copy a prompt's keys and values to another place."""
        for layer in self.layers.values():
            for side in (layer.prompt_key, layer.prompt_value):
                side[target, :, :columns] = side[source, :, :columns]

    def buffer(self, name: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """Memory to write into, of finite numbers.

        On a CPU it is kept from call to call: fresh pages cost more than the arithmetic on them. On a GPU allocation is
        cheap, and a recorded step needs memory of its own.
        """
        if like.device.type != "cpu":
            return like.new_zeros(*shape)
        size = 1
        for length in shape:
            size *= length
        held = self.scratch.get((name, like.dtype))
        if held is None or held.numel() < size:
            held = self.scratch[name, like.dtype] = like.new_zeros(size)
        return held[:size].view(*shape)


class Prefill(PackedMask):
    """A pack of prompts, whose keys and values go to the groups `slots`, one for each tree."""

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
class Part:
    """Attention to some of the keys, before it is divided: o, m, z of the module's docstring, float32."""

    out: Tensor
    highest: Tensor
    total: Tensor


class Decoding:
    """One new token of each live completion: its keys and values are written, and it attends to prompt and own ones.

    `column_R` is where the token's own keys go, `length_G` and `age_G` how long each group's prompt is and how many
    tokens its completions have (they begin together and stay of one age). `prompt_columns` and `own_columns` say how
    much of the cache is looked at. `ragged` says whether some of that is another's, or nobody's, and has to be hidden.
    """

    read = slice(None)

    def __init__(
        self,
        cache: Cache,
        group_R: Tensor,
        member_R: Tensor,
        column_R: Tensor,
        length_G: Tensor,
        age_G: Tensor,
        *,
        members: int,
        prompt_columns: int,
        own_columns: int,
        ragged: bool,
    ):
        self.cache = cache
        self.group_R, self.member_R, self.column_R = group_R, member_R, column_R
        self.length_G, self.age_G = length_G, age_G
        self.members, self.prompt_columns, self.own_columns = members, prompt_columns, own_columns
        self.ragged = ragged
        self.row_R = torch.arange(len(group_R), device=group_R.device)
        self._masks: dict[int | None, tuple[Tensor | None, Tensor | None]] = {}

    def masks(self, window: int | None) -> tuple[Tensor | None, Tensor | None]:
        """What is added to logits: prompt (G, 1, 1, prompt_columns), own (R, 1, 1, own_columns); None: all is seen."""
        if window is not None and not self.ragged and self.prompt_columns + self.own_columns <= window:
            window = None
        if window not in self._masks:
            if not self.ragged and window is None:
                self._masks[window] = (None, None)
            else:
                device = self.column_R.device
                prompt = torch.arange(self.prompt_columns, device=device)[None, :]
                own = torch.arange(self.own_columns, device=device)[None, :]
                prompt_seen = prompt < self.length_G[:, None]
                own_seen = own <= self.column_R[:, None]
                if window is not None:
                    prompt_seen &= (self.length_G + self.age_G - 1)[:, None] - prompt < window
                    own_seen &= self.column_R[:, None] - own < window
                masks = [torch.where(seen, 0.0, HIDDEN)[:, None, None, :] for seen in (prompt_seen, own_seen)]
                self._masks[window] = (masks[0], masks[1])
        return self._masks[window]

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: How) -> Tensor:
        layer = self.cache.layer(module, key)
        rows, heads, size = query.shape[2], key.shape[1], query.shape[3]
        query_RKrd = query[0].transpose(0, 1).reshape(rows, heads, -1, size)
        layer.own_key[self.row_R, :, self.column_R] = key[0].transpose(0, 1)
        layer.own_value[self.row_R, :, self.column_R] = value[0].transpose(0, 1)
        prompt_mask, own_mask = self.masks(how.window)
        own = self._own(layer, query_RKrd, own_mask, how)
        prompt = self._prompt(layer, query_RKrd, prompt_mask, how)
        highest = torch.maximum(own.highest, prompt.highest)
        own_share, prompt_share = (own.highest - highest).exp2_(), (prompt.highest - highest).exp2_()
        out = own.out * own_share + prompt.out * prompt_share
        out = out / (own.total * own_share + prompt.total * prompt_share)
        return out.to(query.dtype).reshape(1, rows, -1, size).transpose(1, 2)

    def _own(self, layer: Layer, query_RKrd: Tensor, mask: Tensor | None, how: How) -> Part:
        rows, columns = len(query_RKrd), self.own_columns
        key, value = layer.own_key[:rows, :, :columns], layer.own_value[:rows, :, :columns]
        return self._attend("own", query_RKrd, key, value, mask, how)

    def _prompt(self, layer: Layer, query_RKrd: Tensor, mask: Tensor | None, how: How) -> Part:
        """The queries of a group side by side, so that they meet its keys together; then back to rows."""
        groups, columns = len(self.length_G), self.prompt_columns
        _, heads, each, size = query_RKrd.shape
        query = self.cache.buffer("queries", (groups, heads, self.members, each, size), query_RKrd)
        query[self.group_R, :, self.member_R] = query_RKrd
        key, value = layer.prompt_key[:groups, :, :columns], layer.prompt_value[:groups, :, :columns]
        part = self._attend("prompt", query.view(groups, heads, -1, size), key, value, mask, how)

        def of_rows(x: Tensor) -> Tensor:
            return x.view(groups, heads, self.members, each, -1)[self.group_R, :, self.member_R]

        return Part(of_rows(part.out), of_rows(part.highest), of_rows(part.total))

    def _attend(self, name: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: How) -> Part:
        """query (N, K, q, d), key and value (N, K, L, d), of which the first two axes are as one; mask (N, 1, 1, L)."""
        count, heads, queries, size = query.shape
        columns = key.shape[2]
        key, value = key.flatten(0, 1), value.flatten(0, 1)
        query = query.reshape(count * heads, queries, size)
        scale = how.scaling * LOG2_E if how.softcap is None else how.scaling
        if query.dtype == torch.float32 and query.device.type == "cpu":
            scores = self.cache.buffer(name, (count * heads, queries, columns), query)
            torch.bmm(query * scale, key.transpose(1, 2), out=scores)
        else:
            scores = _product(query, key.transpose(1, 2)).mul_(scale)
        if how.softcap is not None:
            scores.div_(how.softcap).tanh_().mul_(how.softcap * LOG2_E)
        if mask is not None:
            scores.view(count, heads, queries, columns).add_(mask)
        highest = scores.amax(-1, keepdim=True)
        scores.sub_(highest).exp2_()
        total = scores.sum(-1, keepdim=True)
        out = _product(scores.to(value.dtype), value)
        return Part(*(x.view(count, heads, queries, -1) for x in (out, highest, total)))


def _product(a: Tensor, b: Tensor) -> Tensor:
    """A batched product with float32 results: logits in bfloat16 would be off by up to 1 in 256."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())
