"""Questions of evaluation suites in the training rows, by shared n-grams of words.

A question's words are covered where one of its n-grams, 13 words as in GPT-3 (arXiv 2005.14165, appendix C), is in a
training row. Reported are the questions with any such n-gram, and those with 80 % of their words covered, the share
that Llama 2 calls contaminated (arXiv 2307.09288, appendix A.6): texts of one kind share phrases, copies share most
words. A question of 8 to 12 words is one n-gram; a shorter one is not checked.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from huggingface_hub import constants

from posttrain.base.errors import DataError, PosttrainError
from posttrain.base.paths import path_of
from posttrain.config.schema.suite import SuiteConfig
from posttrain.data.readers import read_files
from posttrain.evaluation.items import FIELD, load_items
from posttrain.evaluation.suite import find_suite, suite_names, with_settings
from posttrain.inspection.quality.texts import Corpus
from posttrain.inspection.quality.words import Array, Texts, ngrams, words_of

SUITE_FILES = (".yaml", ".yml")
LEAST_WORDS = 8  # of a question that is checked
COVERED = 0.8
NOT_OF_THE_QUESTION = ("shots", "about")
BLOCK_WORDS = 1_000_000  # of training rows compared at a time


@dataclass(frozen=True, slots=True)
class Questions:
    """The questions of a suite or a file, with their names; `unread` is the number of those that cannot be read."""

    name: str
    texts: tuple[str, ...]
    ids: tuple[str, ...]
    unread: int = 0


@dataclass(frozen=True, slots=True)
class Contamination:
    """What a suite shares with the training rows. `hits` are (question, share of its words covered, training row)."""

    name: str
    checked: int
    short: int  # of fewer than 8 words, not checked
    unread: int
    hits: tuple[tuple[str, float, str], ...] = field(default=())

    @property
    def copies(self) -> int:
        """Questions whose words are covered to 80 % or more."""
        return sum(share >= COVERED for _, share, _ in self.hits)


def questions_of(against: Sequence[str]) -> tuple[list[Questions], dict[str, str]]:
    """The questions of suites: `NAME`, `NAME=SOURCE` with other rows, or a file, whose strings are compared.

    Without any, every built-in suite whose data is in the hub's local cache; nothing is downloaded. Returns also the
    suites that are not checked, with the reason. Raises a PosttrainError for one that is named and cannot be read.
    """
    if against:
        return [_named(text) for text in against], {}
    found, missing = [], {}
    with _cache_only():
        for name in suite_names():
            suite = find_suite(name)
            if suite.kind == "preference" or name == "mmlu_logprob":  # pairs; the questions of mmlu again
                continue
            try:
                found.append(_of_suite(suite))
            except PosttrainError as error:
                missing[name] = str(error)
    return found, missing


@contextmanager
def _cache_only() -> Iterator[None]:
    """A context in which the hub's library uses its local cache alone."""
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def _named(text: str) -> Questions:
    name, equals, source = text.partition("=")
    path = path_of(text)
    if path.is_file() and path.suffix not in SUITE_FILES:
        records = list(read_files((path,)))
        good = [record for record in records if record.value is not None]
        texts = ["\n".join(_strings(record.value)) for record in good]
        return Questions(path.name, tuple(texts), tuple(str(one.row) for one in good), len(records) - len(good))
    if path.suffix and path.suffix not in SUITE_FILES and not equals and ":" not in text:
        raise DataError(f"--against {text}: there is no such file")
    suite = with_settings(find_suite(name), {"source": source} if equals else {})
    if suite.kind == "preference":
        raise DataError(f"--against {text}: {suite.name} has pairs, not questions; give a file of its rows")
    if equals and path_of(source).is_file():
        suite = with_settings(suite, {"split": "train"})  # a file has no other
    return _of_suite(suite)


def _strings(value: object) -> Iterator[str]:
    """The strings in a row, however deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _strings(one)


def _of_suite(suite: SuiteConfig) -> Questions:
    names = [name for name in FIELD.findall(str(suite.prompt)) if name not in NOT_OF_THE_QUESTION]
    every = load_items(suite).items
    items = [item for item in every if item.problem is None]
    # Without the instructions around the questions, which many training rows have, too.
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
        grams = ngrams(texts[index], size)
        places = [
            (place, row) for place, gram in enumerate(grams.tolist()) if (row := rows[size].get(gram)) is not None
        ]
        if places:
            covered = np.zeros(int(texts.lengths[index]), bool)
            for place, _ in places:
                covered[place : place + size] = True
            counts = np.bincount([row for _, row in places])
            hits.append((questions.ids[index], float(covered.mean()), corpus.label(int(counts.argmax()))))
    hits.sort(key=lambda hit: -hit[1])
    return Contamination(questions.name, len(checked), len(texts) - len(checked), questions.unread, tuple(hits))


def _rows_with(texts: Texts, sizes: dict[int, int], corpus: Corpus) -> dict[int, dict[int, int]]:
    """For each size of n-grams, the first training row that has each n-gram of the questions of that size."""
    found: dict[int, dict[int, int]] = {}
    train = np.flatnonzero(corpus.sets == 0)
    for size in sorted(set(sizes.values())):
        wanted = np.unique(np.concatenate([ngrams(texts[i], size) for i, one in sizes.items() if one == size]))
        found[size] = {}
        for rows in _blocks(train, corpus.rows.lengths):
            words = np.concatenate([corpus.rows[int(row)] for row in rows])
            owner = np.repeat(rows, corpus.rows.lengths[rows])
            grams = ngrams(words, size)
            place = np.minimum(np.searchsorted(wanted, grams), len(wanted) - 1)
            for hit in np.flatnonzero(wanted[place] == grams).tolist():
                if owner[hit] == owner[hit + size - 1]:
                    found[size].setdefault(int(grams[hit]), int(owner[hit]))
    return found


def _blocks(rows: Array, lengths: Array) -> Iterator[Array]:
    """Consecutive rows of about a million words."""
    if len(rows):
        cuts = np.cumsum(lengths[rows]) // BLOCK_WORDS
        yield from np.split(rows, np.flatnonzero(np.diff(cuts)) + 1)
