"""Search over a local corpus as an environment, by SQLite's full-text index (FTS5, ranked by BM25)."""

import contextlib
import hashlib
import json
import re
import sqlite3
from pathlib import Path
from typing import Any

from posttrain.base.files import beside
from posttrain.environments import Environment

CHARACTERS = 1_000  # of a passage in a result


class Search(Environment):
    """Finds passages in `corpus`, a JSONL file with a string in the column `text` and, if it is there, `title`.

    The index is kept beside the file (`CORPUS.….fts5`), and made again when the file changes. There is no reward: grade
    the reply.
    """

    def __init__(self, corpus: str, results: int = 3, text: str = "text", title: str = "title"):
        self._results = results
        self._index = _index_of(Path(corpus), text, title).absolute().as_uri()

    def reset(self, **row: Any) -> None:
        self.queries: list[str] = []

    def search(self, query: str) -> str:
        """
        Search the documents, and return the passages that fit best.

        Args:
            query: words that the passages should have
        """
        self.queries.append(query)
        words = " OR ".join(f'"{word}"' for word in dict.fromkeys(re.findall(r"\w+", query)))
        if not words:
            raise ValueError("the query has no words")
        with contextlib.closing(sqlite3.connect(f"{self._index}?mode=ro", uri=True)) as index:
            found = index.execute(
                "SELECT title, text FROM passages WHERE passages MATCH ? ORDER BY rank, rowid LIMIT ?",
                (words, self._results),
            ).fetchall()
        passages = [f"{f'{title}: ' if title else ''}{text[:CHARACTERS]}" for title, text in found]
        return "\n\n".join(f"[{number}] {passage}" for number, passage in enumerate(passages, 1)) or "nothing found"


def _index_of(corpus: Path, text: str, title: str) -> Path:
    """The index of a file, whose name depends on the columns and on the file's size and time. Raises ValueError, with
    the line, for a row without a text; OSError if it cannot be written."""
    facts = corpus.stat()
    stamp = hashlib.sha256(json.dumps([facts.st_size, facts.st_mtime_ns, text, title]).encode()).hexdigest()[:12]
    index = corpus.with_name(f"{corpus.name}.{stamp}.fts5")
    if index.is_file():
        return index
    temporary = beside(index, "tmp")
    try:
        with contextlib.closing(sqlite3.connect(temporary)) as made, made:
            made.execute("CREATE VIRTUAL TABLE passages USING fts5(title, text, tokenize='porter unicode61')")
            with corpus.open(encoding="utf-8") as lines:
                passages = (_passage(corpus, number, line, text, title) for number, line in enumerate(lines, 1))
                made.executemany("INSERT INTO passages VALUES (?, ?)", filter(None, passages))
        temporary.replace(index)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return index


def _passage(corpus: Path, number: int, line: str, text: str, title: str) -> tuple[str, str] | None:
    """Title and text of a line; None of a blank one."""
    if not line.strip():
        return None
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{corpus} line {number} is not JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get(text), str):
        raise ValueError(f"{corpus} line {number} has no string in the column {text}")
    return str(row.get(title) or ""), row[text]
