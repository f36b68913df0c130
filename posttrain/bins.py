"""Which pack each example goes into. Those with the same root (a prompt) share its tokens where they share a pack."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Items:
    """Examples as numbers: their tokens, what they may share, and how many tokens that is."""

    lengths: Sequence[int]
    roots: Sequence[Hashable]
    shared: Sequence[int]


# The examples of each pack by their root, and its free tokens.
Bins = tuple[list[dict[Hashable, list[int]]], list[int]]


def fewest(items: Items, tokens: int) -> Bins:
    """The longest example first, each into the first pack of `tokens` that has its root, else the first with room, else
    a new one."""
    return _filled(items, tokens, 0, keep_roots=False)


def equal(items: Items, tokens: int, ranks: int) -> Bins:
    """As many packs, or up to a multiple of `ranks`, equally full."""
    count = -(-len(fewest(items, tokens)[0]) // ranks) * ranks
    ways = [_filled(items, tokens, count, keep_roots) for keep_roots in (True, False)]
    # The way of as many packs whose fullest is the emptiest.
    return max(ways, key=lambda way: (-max(len(way[0]), count), min(way[1], default=0)))


def _filled(items: Items, tokens: int, count: int, keep_roots: bool) -> Bins:
    """With a `count`, that many packs are there from the start, and each example goes into the emptiest. With
    `keep_roots` so do all examples of one root, those that take the most tokens together first."""
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
            b = min(fitting, key=needed.__getitem__)  # the first that has the root, else the first
        bins[b].setdefault(root, []).append(index)
        room[b] -= needed[b]
    used = [b for b, held in enumerate(bins) if held]
    return [bins[b] for b in used], [room[b] for b in used]
