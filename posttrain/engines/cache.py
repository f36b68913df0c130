"""Keys and values of prompts and completions, and the attention of one new token of each completion to them.

A prompt's are computed and kept once, and all its completions read them there: with n completions and r query heads to
a head of keys, n·r queries meet them in one product. A completion's own are apart. Each part gives the largest logit m,
the sum z of 2^(logit - m), and the sum o of 2^(logit - m)·value; with h the higher m of the two,

    output = (o_1 2^(m_1 - h) + o_2 2^(m_2 - h)) / (z_1 2^(m_1 - h) + z_2 2^(m_2 - h))

is attention to both, without a copy of either. Logits are divided by ln 2 on the way, so that powers of 2 are those of
e: on a CPU they take a third of the time, and none longer where a power is nearly 0. Letters: R rows (live
completions), G groups (their prompts), K heads of keys and values, r query heads to each of them, n completions of a
group, M places for the live ones of these, d the size of a head.
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
        self._scratch: Tensor | None = None

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

    def scratch(self, *shape: int) -> Tensor:
        """Memory to write into, until the next call: fresh pages would cost more than the arithmetic on them."""
        size = math.prod(shape)
        if self._scratch is None or self._scratch.numel() < size:
            self._scratch = torch.empty(size)
        return self._scratch[:size].view(shape)


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
    much of the cache is looked at. Where every prompt has `prompt_columns` tokens (`even_prompts`), and every live
    completion `own_columns` (`even_ages`), all of that is seen; elsewhere some is another's, or nobody's, and hidden.
    `group_R` and `member_R` are the place of a row among the queries to its prompt, and `row_GM` the row in each place;
    one that no row has repeats some other's query. An idle row may see what is left over there: nothing reads it.
    """

    read = slice(None)

    def __init__(
        self,
        cache: Cache,
        group_R: Tensor,
        member_R: Tensor,
        row_GM: Tensor,
        column_R: Tensor,
        length_G: Tensor,
        age_G: Tensor,
        *,
        prompt_columns: int,
        own_columns: int,
        even_prompts: bool,
        even_ages: bool,
    ):
        self.cache = cache
        self.group_R, self.member_R, self.row_GM, self.column_R = group_R, member_R, row_GM, column_R
        self.length_G, self.age_G = length_G, age_G
        self.prompt_columns, self.own_columns = prompt_columns, own_columns
        self.even_prompts, self.even_ages = even_prompts, even_ages
        self.row_R = torch.arange(len(group_R), device=group_R.device)
        self._masks: dict[int | None, tuple[Tensor | None, Tensor | None]] = {}
        self._places: dict[int, tuple[Tensor, Tensor]] = {}

    def masks(self, window: int | None) -> tuple[Tensor | None, Tensor | None]:
        """What is added to logits: prompt (G, 1, 1, prompt_columns), own (R, 1, 1, own_columns); None: all is seen."""
        if window is not None and self.prompt_columns + self.own_columns <= window:
            window = None
        if window not in self._masks:
            device = self.column_R.device
            prompt = torch.arange(self.prompt_columns, device=device)[None, :]
            own = torch.arange(self.own_columns, device=device)[None, :]
            prompt_seen = None if self.even_prompts else prompt < self.length_G[:, None]
            own_seen = None if self.even_ages else own <= self.column_R[:, None]
            if window is not None:
                near = (self.length_G + self.age_G - 1)[:, None] - prompt < window
                prompt_seen = near if prompt_seen is None else near & prompt_seen
                near = self.column_R[:, None] - own < window
                own_seen = near if own_seen is None else near & own_seen
            self._masks[window] = (_mask(prompt_seen), _mask(own_seen))
        return self._masks[window]

    def places(self, heads: int) -> tuple[Tensor, Tensor]:
        """For each (group, head, place) the (row, head) whose query lies there, and where each of these lies; flat."""
        if heads not in self._places:
            head_K = torch.arange(heads, device=self.group_R.device)
            query_GKM = self.row_GM[:, None, :] * heads + head_K[None, :, None]
            place_RK = (self.group_R[:, None] * heads + head_K) * self.row_GM.shape[1] + self.member_R[:, None]
            self._places[heads] = (query_GKM.flatten(), place_RK.flatten())
        return self._places[heads]

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
        total = own.total * own_share + prompt.total * prompt_share
        out = (own.out * (own_share / total)).addcmul_(prompt.out, prompt_share / total)
        return out.to(query.dtype).reshape(1, rows, -1, size).transpose(1, 2)

    def _own(self, layer: Layer, query_RKrd: Tensor, mask: Tensor | None, how: How) -> Part:
        rows, columns = len(query_RKrd), self.own_columns
        key, value = layer.own_key[:rows, :, :columns], layer.own_value[:rows, :, :columns]
        return self._attend(query_RKrd, key, value, mask, how)

    def _prompt(self, layer: Layer, query_RKrd: Tensor, mask: Tensor | None, how: How) -> Part:
        """The queries of a group side by side, so that they meet its keys together; then back to rows."""
        groups, columns = len(self.row_GM), self.prompt_columns
        rows, heads, each, size = query_RKrd.shape
        query_GKM, place_RK = self.places(heads)
        query = query_RKrd.reshape(rows * heads, each * size).index_select(0, query_GKM).view(groups, heads, -1, size)
        key, value = layer.prompt_key[:groups, :, :columns], layer.prompt_value[:groups, :, :columns]
        part = self._attend(query, key, value, mask, how)

        def of_rows(x: Tensor) -> Tensor:
            return x.view(len(query_GKM), -1).index_select(0, place_RK).view(rows, heads, each, -1)

        return Part(of_rows(part.out), of_rows(part.highest), of_rows(part.total))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: How) -> Part:
        """query (N, K, q, d), key and value (N, K, L, d), of which the first two axes are as one; mask (N, 1, 1, L)."""
        count, heads, queries, size = query.shape
        columns = key.shape[2]
        key, value = key.flatten(0, 1), value.flatten(0, 1)
        query = query.reshape(count * heads, queries, size)
        scale = how.scaling * LOG2_E if how.softcap is None else how.scaling
        if query.dtype == torch.float32 and query.device.type == "cpu":
            scores = self.cache.scratch(count * heads, queries, columns)
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


def _mask(seen: Tensor | None) -> Tensor | None:
    """What is added to logits (N, K, q, L) where (N, L) says which keys are seen."""
    return None if seen is None else torch.where(seen, 0.0, HIDDEN)[:, None, None, :]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """A batched product with float32 results: logits in bfloat16 would be off by up to 1 in 256."""
    if a.dtype == torch.float32:
        return torch.bmm(a, b)
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda else torch.bmm(a.float(), b.float())
