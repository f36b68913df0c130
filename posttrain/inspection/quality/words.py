"""Texts as arrays of hashed words, and the hashes of their n-grams. Pure functions of numpy arrays.

A word is a run of letters and digits in lower case, without punctuation, as in GPT-3's appendix C (arXiv 2005.14165);
in Chinese, Japanese and Korean it is one character. Hashes are the same in every process.
"""

import re
import zlib
from collections.abc import Iterable

import numpy as np

Array = np.ndarray

EAST_ASIAN = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
WORD = re.compile(rf"[{EAST_ASIAN}]|[^\W_{EAST_ASIAN}]+")
PRIME = np.uint64(0x9E3779B97F4A7C15)
KNOWN_WORDS = 1_000_000  # hashes kept at a time


class _Hashes(dict[str, int]):
    """The hash of a word, computed once."""

    def __missing__(self, word: str) -> int:
        if len(self) >= KNOWN_WORDS:
            self.clear()
        value = self[word] = zlib.crc32(word.encode(errors="surrogatepass"))
        return value


_hashes = _Hashes()


def words_of(text: str) -> Array:
    """The hashes of a text's words in order, uint32."""
    return np.array([_hashes[word] for word in WORD.findall(text.lower())], np.uint32)


class Texts:
    """Many texts as one array of words. `starts` has one more entry than there are texts."""

    def __init__(self, texts: Iterable[Array]):
        parts = list(texts)
        self.words: Array = np.concatenate([np.zeros(0, np.uint32), *parts])
        self.starts: Array = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> Array:
        return self.words[self.starts[index] : self.starts[index + 1]]

    @property
    def lengths(self) -> Array:
        return np.diff(self.starts)


def mixed(value: Array) -> Array:
    """A bijection of 64 bits whose output bits depend on all input bits (SplitMix64's last step)."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def ngrams(words: Array, n: int) -> Array:
    """The hash of the n words from each position on, uint64; none for a text of fewer than n words."""
    if len(words) < n:
        return np.zeros(0, np.uint64)
    total = np.zeros(len(words) - n + 1, np.uint64)
    for offset in range(n):
        total = total * PRIME + words[offset : len(words) - n + 1 + offset]
    return mixed(total)


def ngrams_of_each(texts: Texts, among: Array, n: int) -> tuple[Array, Array]:
    """The n-grams of several texts one after the other, and their number in each; none across two texts."""
    parts = [texts[int(index)] for index in among]
    every = ngrams(np.concatenate([np.zeros(0, np.uint32), *parts]), n)
    lengths = np.array([len(part) for part in parts], np.int64)
    ends = np.repeat(np.cumsum(lengths), lengths)  # for each word, where its text ends
    inside = np.arange(len(ends)) + n <= ends
    return every[inside[: len(every)]], np.maximum(lengths - n + 1, 0)


def shingles(words: Array, n: int) -> Array:
    """The n-grams of a text, sorted and each once; of a shorter text, the one hash of the whole."""
    return np.unique(ngrams(words, min(n, len(words)))) if len(words) else np.zeros(0, np.uint64)


def jaccard(first: Array, second: Array) -> float:
    """Intersection over union of two sorted sets; 0 for two empty ones."""
    both = len(np.intersect1d(first, second, assume_unique=True))
    union = len(first) + len(second) - both
    return both / union if union else 0.0
