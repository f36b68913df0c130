"""The batch that every method uses: trees of token ids laid flat, with a few facts per token.

Shape letters, used as suffixes on tensors everywhere:
    T  physical tokens: the model's input, trees laid one after another, depth first
    N  scored tokens: the targets whose log-probability is computed
    U  physical tokens that predict one or several targets
    S  sequences: paths from a root to a leaf (a completion with its prompt)
    G  groups: the prompts of a rollout, each with its completions
    R  trained tokens of a rollout, completion after completion; a pack's scored tokens are some of them
    P  preference pairs    V  vocabulary    D  hidden size    H  heads    B, L  rows and columns of a padded batch

(Engines use different letters: posttrain/engines/cache.py.)

A preference pair is a tree with two leaves. A GRPO group is a tree with one leaf per completion. An SFT example is a
tree with a single leaf. A prompt's tokens are computed once for all completions in the pack, even if these belong to
several examples. One vector defines which keys a query sees:

    key k is visible to query q   <=>   k <= q < end_T[k]

A prompt token's `end` is the end of its whole tree; a completion token's `end` is the end of that completion. So one
vector, `end_T`, defines causality, document boundaries and prompt sharing, for trees of any depth.

`fewest` and `equal` assign examples to packs. Within a pack, examples with the same root share its tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

HAVE_SEGMENTS = ("cpu", "cuda")  # devices on which PyTorch has segment_reduce


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a tree of token ids; a sequence is a path from the root to a leaf.

    `trained` selects the tokens that are targets: one bool for all, or one per token. The first token of a root is
    never scored, because no token before it could predict it.
    """

    tokens: Sequence[int] | np.ndarray
    trained: Sequence[bool] | np.ndarray | bool = False
    children: tuple[Node, ...] = ()
    weights: np.ndarray | None = None  # SFT: loss weights of the tokens; None: all 1


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a data set. Its trees always share a pack, so that a loss sees all its sequences at once."""

    trees: tuple[Node, ...]
    row: int
    margin: float | None = None  # reward models: how much better chosen is than rejected
    tie: bool = False  # reward models: neither completion is better
    label: bool | None = None  # KTO: whether the completion is desirable
    facts: Mapping[str, Any] | None = None  # online methods: `prompt` as in the data, `answer`, the row's `columns`
    source: int | None = None  # index of the row's source in a list of several sources


@dataclass(frozen=True, slots=True)
class Pack:
    """A flat batch of T physical tokens, N scored tokens, S sequences. Index tensors are int64, all on one device."""

    tokens_T: Tensor
    position_T: Tensor  # depth in the tree: the token's position in its sequence
    end_T: Tensor  # key k is visible to query q <=> k <= q < end_T[k]
    source_N: Tensor  # physical token whose hidden state predicts the target
    target_N: Tensor  # the target's token id
    sequence_N: Tensor  # the sequence that owns the target; ascending
    read_U: Tensor  # the physical tokens among the sources, each once, ascending
    where_N: Tensor  # the index of a target's source in read_U
    length_S: Tensor  # scored tokens of each sequence
    last_S: Tensor  # last physical token of each sequence
    group_S: Tensor  # index of the example (in the list given to `pack`) that owns the sequence
    groups: tuple[int, ...]  # group_S as Python integers, so that reading them does not wait for a GPU
    tree_start: tuple[int, ...]  # physical start of every tree, and the end of the last tree
    nodes: tuple[tuple[int, int], ...]  # start and `end` of each run of tokens that see the same earlier tokens
    longest: int  # number of physical tokens of the longest sequence
    weight_N: Tensor | None = None  # SFT: loss weights of the targets, float32; None: all 1

    @property
    def num_tokens(self) -> int:
        """The number of physical tokens without padding."""
        return self.tree_start[-1]

    @property
    def num_sequences(self) -> int:
        return len(self.last_S)

    def sum_by_sequence(self, value_N: Tensor) -> Tensor:
        """Sum a value per scored token over each sequence: (N) -> (S), floating point."""
        return sum_segments(value_N, self.length_S)

    def pairs(self, value_S: Tensor) -> tuple[Tensor, Tensor]:
        """Split a value per sequence into those of chosen and of rejected completions (P each), which alternate."""
        return value_S[0::2], value_S[1::2]

    @property
    def pair_groups(self) -> tuple[int, ...]:
        """The index of the example that owns each pair."""
        return self.groups[0::2]

    @property
    def is_chosen_N(self) -> Tensor:
        """Whether a scored token belongs to a pair's chosen completion, bool."""
        return self.sequence_N % 2 == 0

    def with_targets(self, kept_N: Tensor) -> Pack:
        """Return the same pack with only the targets that `kept_N`, bool, selects."""
        source_N, sequence_N = self.source_N[kept_N], self.sequence_N[kept_N]
        read_U, where_N = source_N.unique(return_inverse=True)
        return replace(
            self,
            source_N=source_N,
            target_N=self.target_N[kept_N],
            sequence_N=sequence_N,
            read_U=read_U,
            where_N=where_N,
            length_S=torch.bincount(sequence_N, minlength=self.num_sequences),
            weight_N=None if self.weight_N is None else self.weight_N[kept_N],
        )

    def to(self, device: torch.device | str) -> Pack:
        """Return the same pack on `device`. Its index tensors are sent to a GPU in one asynchronous copy."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        weight_N = values.pop("weight_N")  # float32, unlike the other tensors
        weight_N = None if weight_N is None else sent(weight_N, device).to(device)
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        if torch.device(device).type == "cuda" and not self.tokens_T.is_cuda:
            whole = sent(torch.cat([*tensors.values()]), device)
            moved = whole.split([len(tensor) for tensor in tensors.values()])
            return replace(self, weight_N=weight_N, **dict(zip(tensors, moved, strict=True)))
        return replace(self, weight_N=weight_N, **{name: tensor.to(device) for name, tensor in tensors.items()})

    def seen_ST(self) -> Tensor:
        """Return which physical tokens belong to each sequence (those that its last token sees), bool (S, T)."""
        index_T = torch.arange(len(self.tokens_T), device=self.tokens_T.device)
        return (index_T <= self.last_S[:, None]) & (self.last_S[:, None] < self.end_T)


def sent(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return the tensor on `device`. It is sent to a GPU by an asynchronous copy from page-locked memory."""
    if torch.device(device).type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def physical_length(tree: Node, keep_last: bool = False) -> int:
    """Count a tree's physical tokens in a pack: nodes once, leaves without their last token unless `keep_last`."""
    if tree.children:
        return len(tree.tokens) + sum(physical_length(child, keep_last) for child in tree.children)
    return len(tree.tokens) if keep_last else max(len(tree.tokens) - 1, 0)


def pack(
    examples: Sequence[Example],
    tokens_per_pack: int,
    keep_last: bool = False,
    pad_to: int | None = None,
    ranks: int = 1,
) -> list[Pack]:
    """Pack examples by first-fit-decreasing into packs of at most `tokens_per_pack` physical tokens.

    The fullest pack comes first: at its memory peak no gradients exist yet, and later packs fit into the memory that
    it frees. Within a pack, one-tree examples with equal roots (several rows of one prompt) share the root and are
    adjacent. Apart from that, examples keep the order of the list.

    The last token of a sequence predicts nothing and is not fed to the model, except with `keep_last`: reward models
    read its hidden state. `pad_to` pads every pack to a multiple of this number with tokens that see only themselves,
    so that compiled kernels see few shapes. With several `ranks`, packs are equally full and their number is a
    multiple of `ranks`, so that each rank can take an equal share (every `ranks`-th pack).

    Raises ValueError if an example is longer than `tokens_per_pack`, because its loss needs the whole example at once.
    """
    lengths = [sum(physical_length(tree, keep_last) for tree in example.trees) for example in examples]
    for example, length in zip(examples, lengths, strict=True):
        if length > tokens_per_pack:
            raise ValueError(
                f"row {example.row} takes {length} tokens, more than tokens_per_pack {tokens_per_pack}: raise "
                "training.tokens_per_pack or lower data.max_length"
            )
    roots = [_root(example, index) for index, example in enumerate(examples)]
    items = Items(lengths, roots, [len(example.trees[0].tokens) for example in examples])
    bins, room = equal(items, tokens_per_pack, ranks) if ranks > 1 else fewest(items, tokens_per_pack)
    fullest_first = sorted(zip(room, bins, strict=True), key=itemgetter(0))
    return [_Layout(keep_last).build(_in_order(held, examples), pad_to or 1) for _, held in fullest_first]


def _root(example: Example, index: int) -> Hashable:
    """Return a key that is equal for examples that may share their root: its tokens, and which of them are trained."""
    root = example.trees[0]
    if len(example.trees) > 1 or not root.children:
        return index
    ids = np.asarray(root.tokens, np.int64)
    return ids.tobytes(), np.broadcast_to(np.asarray(root.trained, bool), ids.shape).tobytes()


def _in_order(held: dict[Hashable, list[int]], examples: Sequence[Example]) -> list[list[tuple[int, Example]]]:
    """Return a pack's examples with their indices, grouped by root. Groups have the order of their first examples."""
    return [[(i, examples[i]) for i in members] for members in sorted(sorted(members) for members in held.values())]


class _Layout:
    """Collects one pack's arrays while trees are walked depth first."""

    def __init__(self, keep_last: bool):
        self.keep_last, self.length, self.deepest = keep_last, 0, 0
        self.tokens: list[np.ndarray] = []
        self.position: list[np.ndarray] = []
        self.spans: list[tuple[int, int, int]] = []  # (start, stop, end): tokens start..stop have this `end`
        self.source: list[np.ndarray] = []
        self.target: list[np.ndarray] = []
        self.weight: list[np.ndarray | None] = []
        self.scored: list[int] = []
        self.last: list[int] = []
        self.group: list[int] = []

    def build(self, members: Sequence[Sequence[tuple[int, Example]]], pad_to: int) -> Pack:
        tree_start = [0]
        for sharing in members:
            trees = sharing[0][1].trees
            if len(sharing) > 1:
                children = [child for _, example in sharing for child in example.trees[0].children]
                trees = (replace(trees[0], children=tuple(children)),)
            for tree in trees:
                self.lay(tree, depth=0, previous=None, path=())
                tree_start.append(self.length)
            for group, example in sharing:
                self.group += [group] * sum(map(_leaves, example.trees))
        padding = -self.length % pad_to
        end = np.empty(self.length + padding, np.int64)
        for start, stop, node_end in self.spans:
            end[start:stop] = node_end
        end[self.length :] = np.arange(self.length, self.length + padding) + 1
        zeros = np.zeros(padding, np.int64)
        source = _joined(self.source)
        read, where = np.unique(source, return_inverse=True)
        position = _joined([*self.position, zeros])
        cut = (end[1 : self.length] != end[: self.length - 1]) | (np.diff(position[: self.length]) != 1)
        starts = [0, *(np.flatnonzero(cut) + 1).tolist()]
        return Pack(
            tokens_T=torch.from_numpy(_joined([*self.tokens, zeros])),
            position_T=torch.from_numpy(position),
            end_T=torch.from_numpy(end),
            source_N=torch.from_numpy(source),
            target_N=torch.from_numpy(_joined(self.target)),
            sequence_N=torch.from_numpy(np.repeat(np.arange(len(self.scored)), self.scored)),
            read_U=torch.from_numpy(read),
            where_N=torch.from_numpy(where),
            length_S=torch.tensor(self.scored, dtype=torch.int64),
            last_S=torch.tensor(self.last, dtype=torch.int64),
            group_S=torch.tensor(self.group, dtype=torch.int64),
            groups=tuple(self.group),
            tree_start=tuple(tree_start),
            nodes=tuple(zip(starts, end[starts].tolist(), strict=True)),
            longest=self.deepest,
            weight_N=self._weights(),
        )

    def _weights(self) -> Tensor | None:
        if all(weight is None for weight in self.weight):
            return None
        pairs = zip(self.weight, self.target, strict=True)
        weights = [np.ones(len(target)) if weight is None else weight for weight, target in pairs]
        return torch.from_numpy(np.concatenate(weights).astype(np.float32))

    def lay(self, node: Node, depth: int, previous: int | None, path: tuple[tuple, ...]) -> None:
        """Append `node` and its descendants. `previous`: the physical token before the node. `path`: the scored
        (source, target, weight) arrays of its ancestors, which every leaf copies."""
        ids = np.asarray(node.tokens, np.int64)
        start = self.length
        fed = len(ids) if node.children or self.keep_last else max(len(ids) - 1, 0)
        self.tokens.append(ids[:fed])
        self.position.append(np.arange(depth, depth + fed))
        self.length += fed
        self.deepest = max(self.deepest, depth + fed)

        trained = np.broadcast_to(np.asarray(node.trained, bool), ids.shape)
        if trained.any():
            source = np.arange(start - 1, start + len(ids) - 1)
            source[0] = -1 if previous is None else previous
            chosen = trained & (source >= 0)
            path = (*path, (source[chosen], ids[chosen], None if node.weights is None else node.weights[chosen]))

        last = start + fed - 1 if fed else previous
        for child in node.children:
            self.lay(child, depth + len(ids), last, path)
        if not node.children:
            if last is None:
                raise ValueError(
                    "a sequence of fewer than two tokens has nothing to score: the data layer refuses such rows"
                )
            self.source += [source for source, _, _ in path]
            self.target += [target for _, target, _ in path]
            self.weight += [weight for _, _, weight in path]
            self.scored.append(sum(len(target) for _, target, _ in path))
            self.last.append(last)
        self.spans.append((start, start + fed, self.length))


def _leaves(tree: Node) -> int:
    return sum(map(_leaves, tree.children)) or 1


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *arrays])


def sequences(tree: Node) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield every path of a tree as (token ids, mask of trained tokens), to evaluate sequences one by one."""
    ids = np.asarray(tree.tokens, np.int64)
    trained = np.broadcast_to(np.asarray(tree.trained, bool), ids.shape)
    if not tree.children:
        yield ids, trained
    for child in tree.children:
        for tail_ids, tail_trained in sequences(child):
            yield np.concatenate([ids, tail_ids]), np.concatenate([trained, tail_trained])


def sum_segments(value_N: Tensor, length_S: Tensor) -> Tensor:
    """Sum consecutive segments of lengths `length_S`, which add up to N: (N) -> (S), floating point.

    Values are added in a fixed order, so results are reproducible bit for bit even on a GPU, unlike with `index_add`.
    """
    if value_N.device.type not in HAVE_SEGMENTS:
        sequence_N = torch.arange(len(length_S), device=length_S.device).repeat_interleave(length_S)
        return value_N.new_zeros(len(length_S)).index_add(0, sequence_N, value_N)
    if not value_N.is_cuda and int(length_S.sum()) != len(value_N):  # on a GPU this check would wait for the device
        raise ValueError(f"lengths add up to {int(length_S.sum())}, but there are {len(value_N)} values")
    return torch.segment_reduce(value_N, "sum", lengths=length_S, unsafe=True)  # unsafe: does not wait for a GPU


@dataclass(frozen=True, slots=True)
class Items:
    """What packing knows of each example: its length in tokens, the key of its root, and the root's length."""

    lengths: Sequence[int]
    roots: Sequence[Hashable]
    shared: Sequence[int]


# The indices of each pack's examples, by root; and the number of free tokens of each pack.
Bins = tuple[list[dict[Hashable, list[int]]], list[int]]


def fewest(items: Items, tokens: int) -> Bins:
    """Fill packs of at most `tokens`, longest example first. An example goes into the first pack with room that has
    its root, otherwise into the first pack with room, otherwise into a new pack."""
    return _filled(items, tokens, 0, keep_roots=False)


def equal(items: Items, tokens: int, ranks: int) -> Bins:
    """Fill packs equally. Their number is that of `fewest`, rounded up to a multiple of `ranks`."""
    count = -(-len(fewest(items, tokens)[0]) // ranks) * ranks
    candidates = [_filled(items, tokens, count, keep_roots) for keep_roots in (True, False)]
    # Fewest packs first, then the most room in the fullest pack.
    return max(candidates, key=lambda bins: (-max(len(bins[0]), count), min(bins[1], default=0)))


def _filled(items: Items, tokens: int, count: int, keep_roots: bool) -> Bins:
    """Fill packs of at most `tokens`. With a `count`, start with that many packs and put each example into the emptiest
    one. With `keep_roots`, keep examples of one root together, and place the roots with the most tokens first."""
    order = [(-length, index) for index, length in enumerate(items.lengths)]
    if keep_roots:
        first: dict[Hashable, int] = {}
        size: dict[Hashable, int] = {}
        for index, (length, root, shared) in enumerate(zip(items.lengths, items.roots, items.shared, strict=True)):
            first.setdefault(root, index)
            size[root] = size.get(root, shared) + length - shared
        order = [(-size[root], first[root], *key) for root, key in zip(items.roots, order, strict=True)]
    bins: list[dict[Hashable, list[int]]] = [{} for _ in range(count)]
    room = [tokens] * count
    for index in sorted(range(len(order)), key=order.__getitem__):
        length, root = items.lengths[index], items.roots[index]
        needed = [length - items.shared[index] * (root in held) for held in bins]
        fitting = [b for b, free in enumerate(room) if needed[b] <= free]
        if not fitting:
            b = len(bins)
            bins.append({})
            room.append(tokens)
            needed.append(length)
        elif count:
            b = max(fitting, key=lambda b: (keep_roots and root in bins[b], room[b] - needed[b]))
        else:
            b = min(fitting, key=needed.__getitem__)  # the first pack that has the root, otherwise the first pack
        bins[b].setdefault(root, []).append(index)
        room[b] -= needed[b]
    used = [b for b, held in enumerate(bins) if held]
    return [bins[b] for b in used], [room[b] for b in used]
