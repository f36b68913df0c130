"""The rows of a run as words: prompts, replies and whole rows, for each set that trains or validates."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from posttrain.base.progress import progress
from posttrain.data import Prepared
from posttrain.data.rows import Row, Turns
from posttrain.inspection.quality.words import Array, Texts, words_of

MOST_WORDS = 20_000_000  # of a source, 80 MB; further rows are not checked, and the report says so


@dataclass(frozen=True, slots=True)
class Corpus:
    """Rows in order, of all sets. `sets` has the number of each row's set in `names`, of which the first is `train`.

    `prompt_keys` and `row_keys` are hashes of the exact strings; 0 for a row without a prompt. `turned_keys` are those
    of the pair with chosen and rejected exchanged. `cut` are the sources of which only the first rows were read.
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

    def __len__(self) -> int:
        return len(self.numbers)

    def label(self, index: int) -> str:
        """A row as the report names it: its number, with its set unless that is the training set."""
        name = self.names[self.sets[index]]
        return f"{'' if name == 'train' else name + ' '}{self.numbers[index]}"


def read_corpus(
    sources: Iterable[tuple[str, Iterable[tuple[int, Row]]]], prepared: Prepared, most_words: int = MOST_WORDS
) -> Corpus:
    """The rows that train or validate, by the split of `prepared`; those over a length limit are in neither."""
    names = ("train", *prepared.validation)
    split = "validation" in prepared.validation and "validation" not in prepared.reports  # from the training source
    held = set(prepared.validation["validation"].rows.tolist()) if split else set()
    used = {name: set(data.rows.tolist()) for name, data in {"train": prepared.train, **prepared.validation}.items()}
    found: list[tuple[int, int, bool]] = []
    prompts, wholes, keys, cut = [], [], [], []
    for source, rows in sources:
        words = 0
        for number, row in progress(rows, f"reading {source}"):
            name = "validation" if source == "train" and number in held else source
            if number not in used[name]:
                continue
            if words > most_words:
                cut.append(source)
                break
            prompt, replies = strings_of(row)
            prompt_words = words_of(prompt)
            prompts.append(prompt_words)
            wholes.append(np.concatenate([prompt_words, *map(words_of, replies)]))
            words += len(wholes[-1])
            found.append((names.index(name), number, row.rejected is not None))
            turned = (prompt, *reversed(replies)) if row.rejected is not None else ("",)
            keys.append((_key(prompt) if prompt else 0, _key(prompt, *replies), _key(*turned)))
    sets, numbers, is_pair = np.array(found, np.int64).reshape(-1, 3).T
    prompt_keys, row_keys, turned_keys = np.array(keys, np.uint64).reshape(-1, 3).T
    hashes, is_pair = (prompt_keys, row_keys, turned_keys), is_pair.astype(bool)
    return Corpus(names, sets, numbers, Texts(prompts), Texts(wholes), *hashes, is_pair, tuple(cut))


def strings_of(row: Row) -> tuple[str, tuple[str, ...]]:
    """The prompt of a row, "" if it has none, and its replies. System messages, which rows share, are dropped."""
    prompt, chosen = row.prompt, row.chosen
    if prompt is None and not isinstance(chosen, str) and len(chosen) > 1 and chosen[-1]["role"] == "assistant":
        prompt, chosen = chosen[:-1], chosen[-1:]
    replies = [chosen] + ([] if row.rejected is None else [row.rejected])
    return _string(prompt or ""), tuple(_string(reply) for reply in replies)


def _string(value: str | Turns) -> str:
    if isinstance(value, str):
        return value
    return "\n".join(str(turn["content"]) for turn in value if turn["role"] not in ("system", "developer"))


def _key(*parts: str) -> int:
    """64 bits of a hash of strings, with their borders; outer white space is ignored."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = part.strip().encode(errors="surrogatepass")
        digest.update(len(text).to_bytes(8, "little") + text)
    return int.from_bytes(digest.digest(), "little")
