"""Groups of equal and of nearly equal texts.

Nearly equal: the Jaccard index of their sets of word 5-grams is at least 0.8. Candidates come from MinHash (Broder
1997) with locality-sensitive hashing: 64 minima in 16 bands of 4, so that a pair at 0.8 is a candidate with probability
1 - (1 - 0.8^4)^16 = 0.9998. The index of candidates is then computed, so no pair is joined that is less alike.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from posttrain.inspection.quality.words import PRIME, Array, Texts, jaccard, mixed, ngrams_of_each, shingles

SHINGLE = 5  # words
NEAR = 0.8
BANDS, ROWS = 16, 4
BLOCK = 4_000  # texts hashed at a time
KEPT = 10_000  # sets of n-grams
NEIGHBOURS = 4  # texts of a bucket, in order of length, that each is compared with


def groups_of(values: Array) -> Array:
    """For each value the index of the first equal one."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    return first[inverse]


def near_groups(texts: Texts, same: Array) -> Array:
    """For each text the index of the first of its group. `same` has the groups of equal texts, which stay together.

    Groups are transitive. Texts without a word are in no group but their own.
    """
    parent = same.copy()
    alone = np.flatnonzero((same == np.arange(len(same))) & (texts.lengths > 0))

    @lru_cache(KEPT)
    def set_of(index: int) -> Array:
        return shingles(texts[index], SHINGLE)

    for one, other in _candidates(texts, alone):
        a, b = _root(parent, one), _root(parent, other)
        if a != b and jaccard(set_of(one), set_of(other)) >= NEAR:
            parent[max(a, b)] = min(a, b)
    return np.array([_root(parent, index) for index in range(len(parent))], np.int64)


def _root(parent: Array, index: int) -> int:
    while parent[index] != index:
        parent[index] = parent[parent[index]]
        index = int(parent[index])
    return int(index)


def _candidates(texts: Texts, among: Array) -> Iterator[tuple[int, int]]:
    """Pairs of texts that share a band of their signatures."""
    if not len(among):
        return
    bands = np.concatenate([_bands(texts, among[start : start + BLOCK]) for start in range(0, len(among), BLOCK)])
    lengths = texts.lengths[among]
    for band in bands.T:
        order = np.lexsort((lengths, band))
        value = band[order]
        for back in range(1, NEIGHBOURS + 1):
            for place in np.flatnonzero(value[back:] == value[:-back]):
                yield int(among[order[place]]), int(among[order[place + back]])


def _bands(texts: Texts, among: Array) -> Array:
    """Hashes of the bands of each text's MinHash signature, uint64 (texts, BANDS)."""
    every, counts = ngrams_of_each(texts, among, SHINGLE)
    parts = np.split(every, np.cumsum(counts)[:-1])
    for place in np.flatnonzero(counts == 0):
        parts[place] = shingles(texts[int(among[place])], SHINGLE)
    every, starts = np.concatenate(parts), np.cumsum([0, *map(len, parts)])[:-1]
    out = np.zeros((len(among), BANDS), np.uint64)
    for number in range(BANDS * ROWS):
        least = np.minimum.reduceat(mixed(every ^ mixed(np.array([number + 1], np.uint64))), starts)
        out[:, number // ROWS] = mixed(out[:, number // ROWS] * PRIME + least)
    return out
