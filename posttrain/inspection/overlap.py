"""Texts that appear twice: equal and nearly equal rows, and evaluation questions in the training rows.

Two rows are nearly equal if the Jaccard index of their sets of word 5-grams is at least 0.8. Candidates come from
MinHash (Broder 1997) with locality-sensitive hashing: 64 minima in 16 bands of 4, so that a pair at 0.8 is a candidate
with probability 1 - (1 - 0.8^4)^16 = 0.9998. The exact Jaccard index of each candidate pair is then computed, so only
pairs at 0.8 or above are grouped.

A word of a question is covered if it is in an n-gram (13 words, as in GPT-3, arXiv 2005.14165, appendix C) that a
training row also contains. The report counts the questions with any such n-gram, and those with 80 % or more of their
words covered, which Llama 2 calls contaminated (arXiv 2307.09288, appendix A.6): texts of one kind share phrases, but
copies share most words. A question of 8 to 12 words is one n-gram; shorter questions are not checked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from huggingface_hub import constants

from posttrain.base.errors import DataError, PosttrainError
from posttrain.base.files import path_of
from posttrain.base.imports import replaced
from posttrain.config.reading.interpolation import leaves
from posttrain.config.schema.suite import SuiteConfig
from posttrain.data.holdout import mixed
from posttrain.data.readers import read_files
from posttrain.evaluation.items import FIELD, load_items
from posttrain.evaluation.suite import find_suite, suite_names, with_settings
from posttrain.inspection.texts import PRIME, Array, Corpus, Texts, jaccard, ngrams, ngrams_of_each, shingles, words_of

SHINGLE = 5  # words of an n-gram
NEAR = 0.8
BANDS, ROWS = 16, 4
BLOCK = 4_000  # texts hashed at a time
KEPT = 10_000  # sets of n-grams cached
NEIGHBOURS = 4  # texts of its bucket, sorted by length, that each text is compared with

SUITE_FILES = (".yaml", ".yml")
LEAST_WORDS = 8  # minimum length of a question that is checked
COVERED = 0.8
NOT_OF_THE_QUESTION = ("shots", "about")
BLOCK_WORDS = 1_000_000  # words of training rows compared at a time


@dataclass(frozen=True, slots=True)
class Duplicates:
    """The rows with one kind of duplicate, as (row, earlier row). `among`: the number of rows compared."""

    what: str
    rows: tuple[tuple[str, str], ...]
    among: int


def duplicates(corpus: Corpus) -> Iterator[Duplicates]:
    """Find training rows that repeat an earlier row, pairs with opposite labels, and validation rows in training."""
    # In this order, the first row of a group is a training row if the group has one.
    whole_index = np.argsort(corpus.sets, kind="stable")
    prompt_index = whole_index[corpus.prompts.lengths[whole_index] > 0]
    kinds = (
        ("prompt", prompt_index, _both(corpus.prompts, corpus.prompt_keys, prompt_index)),
        ("row", whole_index, _both(corpus.rows, corpus.row_keys, whole_index)),
    )
    for what, index, (exact, near) in kinds:
        train, first = corpus.sets[index] == 0, np.arange(len(exact))
        again = np.flatnonzero(train & (exact != first))
        nearly = np.flatnonzero(train & (near != first) & (exact == first))
        for kind, members, groups in (("exact", again, exact), ("near", nearly, near)):
            rows = _labels(corpus, index, members, groups)
            yield Duplicates(f"{what}, {kind} duplicate", rows, int(train.sum()))
    yield from _opposite(corpus)
    for number, name in enumerate(corpus.names[1:], 1):
        for what, index, (exact, near) in kinds:
            mine = np.flatnonzero(corpus.sets[index] == number)
            for kind, groups in (("exact", exact), ("near", near)):  # near includes exact
                members = mine[corpus.sets[index[groups[mine]]] == 0]
                rows = _labels(corpus, index, members, groups)
                yield Duplicates(f"{name}: {what} in train, {kind}", rows, len(mine))


def _labels(corpus: Corpus, index: Array, members: Array, groups: Array) -> tuple[tuple[str, str], ...]:
    """Each of these rows, by its position in `index`, with the first row of its group."""
    return tuple((corpus.label(int(index[one])), corpus.label(int(index[groups[one]]))) for one in members)


def _both(texts: Texts, keys: Array, index: Array) -> tuple[Array, Array]:
    """For each text of `index`, the position in `index` of the first that is equal, and that is nearly equal."""
    _, first, inverse = np.unique(keys[index], return_index=True, return_inverse=True)
    exact = first[inverse]
    return exact, near_groups(Texts(texts[int(one)] for one in index), exact)


def _opposite(corpus: Corpus) -> Iterator[Duplicates]:
    """Pairs with the prompt and the replies of an earlier pair, but the opposite label."""
    first: dict[int, int] = {}
    rows = []
    for index in np.flatnonzero(corpus.sets == 0).tolist():
        if corpus.is_pair[index]:
            if (other := first.get(int(corpus.turned_keys[index]))) is not None:
                rows.append((corpus.label(index), corpus.label(other)))
            first.setdefault(int(corpus.row_keys[index]), index)
    if corpus.is_pair.any():
        among = int((corpus.is_pair & (corpus.sets == 0)).sum())
        yield Duplicates("pair with opposite labels", tuple(rows), among)


def near_groups(texts: Texts, same: Array) -> Array:
    """For each text, the index of the first text of its group. `same`: groups of equal texts, which are kept together.
    Groups are transitive. Texts without words are not compared."""
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
            for position in np.flatnonzero(value[back:] == value[:-back]):
                yield int(among[order[position]]), int(among[order[position + back]])


def _bands(texts: Texts, among: Array) -> Array:
    """Hashes of the bands of each text's MinHash signature, uint64 (texts, BANDS)."""
    every, counts = ngrams_of_each(texts, among, SHINGLE)
    parts = np.split(every, np.cumsum(counts)[:-1])
    for position in np.flatnonzero(counts == 0):
        parts[position] = shingles(texts[int(among[position])], SHINGLE)
    every, starts = np.concatenate(parts), np.cumsum([0, *map(len, parts)])[:-1]
    out = np.zeros((len(among), BANDS), np.uint64)
    for number in range(BANDS * ROWS):
        least = np.minimum.reduceat(mixed(every ^ mixed(np.array([number + 1], np.uint64))), starts)
        out[:, number // ROWS] = mixed(out[:, number // ROWS] * PRIME + least)
    return out


@dataclass(frozen=True, slots=True)
class Questions:
    """The questions of a suite or a file, with their ids. `unread`: the number of questions that cannot be read."""

    name: str
    texts: tuple[str, ...]
    ids: tuple[str, ...]
    unread: int = 0


@dataclass(frozen=True, slots=True)
class Contamination:
    """What a suite shares with the training rows. `hits`: (question, covered share of its words, training row)."""

    name: str
    checked: int
    short: int  # questions of fewer than 8 words, not checked
    unread: int
    hits: tuple[tuple[str, float, str], ...] = ()

    @property
    def copies(self) -> int:
        """The number of questions with 80 % or more of their words covered."""
        return sum(share >= COVERED for _, share, _ in self.hits)


def questions_of(against: Sequence[str]) -> tuple[list[Questions], dict[str, str]]:
    """Read the questions of suites (`NAME`, or `NAME=SOURCE` with other rows) or of files, whose strings are compared.

    If `against` is empty, read every built-in suite whose data is in the local hub cache; nothing is downloaded. Also
    returns the suites that are not checked, with reasons. Raises a PosttrainError if a named suite cannot be read.
    """
    if against:
        return [_named(text) for text in against], {}
    found, missing = [], {}
    with replaced(constants, "HF_HUB_OFFLINE", True):
        for name in suite_names():
            suite = find_suite(name)
            if suite.kind == "preference" or name == "mmlu_logprob":  # pairs, or the same questions as mmlu
                continue
            try:
                found.append(_of_suite(suite))
            except PosttrainError as error:
                missing[name] = str(error)
    return found, missing


def _named(text: str) -> Questions:
    name, equals, source = text.partition("=")
    path = path_of(text)
    if path.is_file() and path.suffix not in SUITE_FILES:
        records = list(read_files((path,)))
        good = [record for record in records if record.value is not None]
        texts = ["\n".join(leaf for leaf in leaves(record.value) if isinstance(leaf, str)) for record in good]
        return Questions(path.name, tuple(texts), tuple(str(one.row) for one in good), len(records) - len(good))
    if path.suffix and path.suffix not in SUITE_FILES and not equals and ":" not in text:
        raise DataError(f"--against {text}: there is no such file")
    suite = with_settings(find_suite(name), {"source": source} if equals else {})
    if suite.kind == "preference":
        raise DataError(f"--against {text}: {suite.name} has pairs, not questions; give a file of its rows")
    if equals and path_of(source).is_file():
        suite = with_settings(suite, {"split": "train"})  # the only split of a file
    return _of_suite(suite)


def _of_suite(suite: SuiteConfig) -> Questions:
    names = [name for name in FIELD.findall(str(suite.prompt)) if name not in NOT_OF_THE_QUESTION]
    every = load_items(suite).items
    items = [item for item in every if item.problem is None]
    # Without the instructions around the questions, which many training rows contain, too.
    texts = tuple("\n".join(str(item.fields.get(name, "")) for name in names) for item in items)
    return Questions(suite.name, texts, tuple(item.id for item in items), len(every) - len(items))


def contamination(questions: Questions, corpus: Corpus, n: int) -> Contamination:
    """Compare the questions with the training rows of `corpus` (prompts and replies)."""
    texts = Texts(map(words_of, questions.texts))
    checked = np.flatnonzero(texts.lengths >= LEAST_WORDS)
    sizes = {int(index): min(n, int(texts.lengths[index])) for index in checked}
    rows = _rows_with(texts, sizes, corpus)
    hits = []
    for index, size in sizes.items():
        grams = ngrams(texts[index], size).tolist()
        shared = [(at, row) for at, gram in enumerate(grams) if (row := rows[size].get(gram)) is not None]
        if shared:
            covered = np.zeros(int(texts.lengths[index]), bool)
            for at, _ in shared:
                covered[at : at + size] = True
            counts = np.bincount([row for _, row in shared])
            hits.append((questions.ids[index], float(covered.mean()), corpus.label(int(counts.argmax()))))
    hits.sort(key=lambda hit: -hit[1])
    return Contamination(questions.name, len(checked), len(texts) - len(checked), questions.unread, tuple(hits))


def _rows_with(texts: Texts, sizes: dict[int, int], corpus: Corpus) -> dict[int, dict[int, int]]:
    """For each n-gram size: the n-grams of the questions, by hash, with the first training row that contains each."""
    found: dict[int, dict[int, int]] = {}
    train = np.flatnonzero(corpus.sets == 0)
    cuts = np.flatnonzero(np.diff(np.cumsum(corpus.rows.lengths[train]) // BLOCK_WORDS)) + 1
    blocks = np.split(train, cuts) if len(train) else []
    for size in sorted(set(sizes.values())):
        wanted = np.unique(np.concatenate([ngrams(texts[i], size) for i, one in sizes.items() if one == size]))
        found[size] = {}
        for rows in blocks:
            words = np.concatenate([corpus.rows[int(row)] for row in rows])
            owner = np.repeat(rows, corpus.rows.lengths[rows])
            grams = ngrams(words, size)
            nearest = np.minimum(np.searchsorted(wanted, grams), len(wanted) - 1)
            for hit in np.flatnonzero(wanted[nearest] == grams).tolist():
                if owner[hit] == owner[hit + size - 1]:
                    found[size].setdefault(int(grams[hit]), int(owner[hit]))
    return found
