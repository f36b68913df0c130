"""The rows of a run as arrays of hashed words, and the hashes of their n-grams.

A word is a string of letters and digits in lower case, without punctuation, as in GPT-3 (arXiv 2005.14165, appendix C);
in Chinese, Japanese and Korean it is one character. Hashes are the same in every process.
"""

import hashlib
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from posttrain.base.console import progress
from posttrain.data import Prepared
from posttrain.data.holdout import mixed
from posttrain.data.rows import Row, Turns

Array = np.ndarray

EAST_ASIAN = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
WORD = re.compile(rf"[{EAST_ASIAN}]|[^\W_{EAST_ASIAN}]+")
PRIME = np.uint64(0x9E3779B97F4A7C15)
KNOWN_WORDS = 1 << 20  # hashes cached at a time
MOST_WORDS = 20_000_000  # words read of each source (80 MB); further rows are not checked, as the report says


@lru_cache(KNOWN_WORDS)
def _hash(word: str) -> int:
    return zlib.crc32(word.encode(errors="surrogatepass"))


def words_of(text: str) -> Array:
    """The hashes of a text's words in order, uint32."""
    return np.array([_hash(word) for word in WORD.findall(text.lower())], np.uint32)


class Texts:
    """Many texts as one array of words. `starts`: the index of each text's first word, and the total at the end."""

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


def ngrams(words: Array, n: int) -> Array:
    """The hash, uint64, of the n words that start at each position; empty for a text of fewer than n words."""
    if len(words) < n:
        return np.zeros(0, np.uint64)
    total = np.zeros(len(words) - n + 1, np.uint64)
    for offset in range(n):
        total = total * PRIME + words[offset : len(words) - n + 1 + offset]
    return mixed(total)


def ngrams_of_each(texts: Texts, among: Array, n: int) -> tuple[Array, Array]:
    """The n-grams of several texts, concatenated, and their number in each text. No n-gram spans two texts."""
    parts = [texts[int(index)] for index in among]
    every = ngrams(np.concatenate([np.zeros(0, np.uint32), *parts]), n)
    lengths = np.array([len(part) for part in parts], np.int64)
    ends = np.repeat(np.cumsum(lengths), lengths)  # for each word, where its text ends
    inside = np.arange(len(ends)) + n <= ends
    return every[inside[: len(every)]], np.maximum(lengths - n + 1, 0)


def shingles(words: Array, n: int) -> Array:
    """The distinct n-grams of a text, sorted; for a text of fewer than n words, one hash of all its words."""
    return np.unique(ngrams(words, min(n, len(words)))) if len(words) else np.zeros(0, np.uint64)


def jaccard(first: Array, second: Array) -> float:
    """Intersection over union of two sorted sets; 0 for two empty sets."""
    both = len(np.intersect1d(first, second, assume_unique=True))
    union = len(first) + len(second) - both
    return both / union if union else 0.0


@dataclass(frozen=True, slots=True)
class Corpus:
    """The rows of all sets, in order. `sets`: the index of each row's set in `names`, whose first entry is `train`.

    `prompt_keys` and `row_keys` hash the exact strings; a row without a prompt has the prompt key 0. `turned_keys` hash
    pairs with chosen and rejected exchanged. `cut` names sources of which only the first rows were read.
    """

    names: tuple[str, ...]
    sets: Array
    numbers: Array
    prompts: Texts
    rows: Texts
    prompt_keys: Array
    row_keys: Array
    turned_keys: Array
    is_pair: Array
    cut: tuple[str, ...]

    def label(self, index: int) -> str:
        """The name of a row in the report: its number, preceded by its set unless that is the training set."""
        name = self.names[self.sets[index]]
        return f"{'' if name == 'train' else name + ' '}{self.numbers[index]}"


def read_corpus(sources: Iterable[tuple[str, Iterable[tuple[int, Row]]]], prepared: Prepared) -> Corpus:
    """Read the training and validation rows, split as in `prepared`, without rows that exceed a length limit."""
    names = ("train", *prepared.validation)
    split = "validation" in prepared.validation and "validation" not in prepared.reports  # from the training source
    held = set(prepared.validation["validation"].rows.tolist()) if split else set()
    used = {name: set(data.rows.tolist()) for name, data in {"train": prepared.train, **prepared.validation}.items()}
    facts: list[tuple[int, int, bool]] = []  # set, row number, whether it is a pair
    prompts, wholes, keys, cut = [], [], [], []
    for source, rows in sources:
        words = 0
        for number, row in progress(rows, f"reading {source}"):
            name = "validation" if source == "train" and number in held else source
            if number not in used[name]:
                continue
            if words > MOST_WORDS:
                cut.append(source)
                break
            prompt, replies = strings_of(row)
            prompts.append(words_of(prompt))
            wholes.append(np.concatenate([prompts[-1], *map(words_of, replies)]))
            words += len(wholes[-1])
            facts.append((names.index(name), number, row.rejected is not None))
            turned = (prompt, *reversed(replies)) if row.rejected is not None else ("",)
            keys.append((_key(prompt) if prompt else 0, _key(prompt, *replies), _key(*turned)))
    sets, numbers, is_pair = np.array(facts, np.int64).reshape(-1, 3).T
    prompt_keys, row_keys, turned_keys = np.array(keys, np.uint64).reshape(-1, 3).T
    hashes, is_pair = (prompt_keys, row_keys, turned_keys), is_pair.astype(bool)
    return Corpus(names, sets, numbers, Texts(prompts), Texts(wholes), *hashes, is_pair, tuple(cut))


def strings_of(row: Row) -> tuple[str, tuple[str, ...]]:
    """The prompt of a row ("" if none) and its replies. System messages are dropped: many rows share the same one."""
    prompt, chosen = row.prompt, row.chosen
    if prompt is None and not isinstance(chosen, str) and len(chosen) > 1 and chosen[-1]["role"] == "assistant":
        prompt, chosen = chosen[:-1], chosen[-1:]
    replies = [chosen] + ([] if row.rejected is None else [row.rejected])
    return _string(prompt or ""), tuple(map(_string, replies))


def _string(value: str | Turns) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(str(turn["content"]) for turn in value if turn["role"] not in ("system", "developer"))


def _key(*parts: str) -> int:
    """A 64-bit hash of several strings and the boundaries between them; outer white space is ignored."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = part.strip().encode(errors="surrogatepass")
        digest.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(digest.digest(), "little")
