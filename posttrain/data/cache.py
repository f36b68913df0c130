"""Tokenised rows on disk: an Arrow file and its metadata, in a folder named after the hash of its inputs.

The hash of the rows identifies a run's data; it does not change when only the code changes. The folder is created by a
single rename, so it is either complete or absent; a damaged file is detected by its hash and rebuilt.
"""

import contextlib
import hashlib
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import TypeAdapter
from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError
from posttrain.base.files import LEFTOVER, put_folder, sha256_of, take_away
from posttrain.base.log import log
from posttrain.data.report import Reading

CODE_VERSION = 12  # increase it when the same rows and settings give different tokens
LEFTOVER_SECONDS = 86_400
ATTEMPTS = 2  # two runs may find an entry damaged; one of them may then remove what the other has just rebuilt

DERIVED = ("heads", "rejected_heads")  # columns computed from the others, so not needed to identify the data
IF_ANY = ("weights", "chosen_spans", "rejected_spans")  # rows without these keep the hash of earlier versions


def key_of(facts: dict[str, Any]) -> str:
    """The folder name for the tokens of rows and settings: SHA-256 of these `facts` as JSON and of the code version."""
    return digest_of({"code": CODE_VERSION, **facts})


def digest_of(facts: dict[str, Any]) -> str:
    """SHA-256 of facts, as JSON."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode(errors="surrogatepass")).hexdigest()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of what determines tokenisation: the serialised backend, special tokens and template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        vocabulary = backend.to_str()
    else:
        vocabulary = f"{type(tokenizer).__qualname__} {sorted(tokenizer.get_vocab().items())}"
    whole = f"{vocabulary}{tokenizer.special_tokens_map} {tokenizer.chat_template}"
    return hashlib.sha256(whole.encode(errors="surrogatepass")).hexdigest()


class Writer:
    """Writes rows to an Arrow file, batch by batch."""

    def __init__(self, path: Path, schema: pa.Schema):
        self.schema = schema
        self.sink = pa.OSFile(str(path), "wb")
        self.file = pa.ipc.new_file(self.sink, self.schema)
        self._hashes: dict[str, Any] = defaultdict(hashlib.sha256)

    def write(self, rows: list[dict[str, Any]]) -> None:
        if not rows:
            return
        batch = pa.RecordBatch.from_pylist(rows, schema=self.schema)
        self.file.write_batch(batch)
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            if name in IF_ANY:
                has_some = pa.array([bool(length) for length in column.value_lengths().to_pylist()])
                if any(has_some.to_pylist()):
                    self._hash("weighed" if name == "weights" else f"{name} rows", batch.column("row").filter(has_some))
                    self._hash(name, column.filter(has_some))
            elif name not in DERIVED:
                self._hash(name, column)

    def content(self) -> str:
        """SHA-256 of the rows written, however they were batched."""
        return digest_of({name: column.hexdigest() for name, column in self._hashes.items()})

    def _hash(self, name: str, column: pa.Array) -> None:
        if pa.types.is_string(column.type):
            texts = [text.encode(errors="surrogatepass") for text in column.to_pylist()]
            self._hash(f"{name} lengths", pa.array(list(map(len, texts))))
            self._hashes[name].update(b"".join(texts))
        elif pa.types.is_list(column.type):
            self._hash(f"{name} lengths", column.value_lengths())
            self._hash(name + " values", column.flatten())
        else:
            self._hashes[f"{name} nulls"].update(column.is_null().to_numpy(zero_copy_only=False).tobytes())
            self._hashes[name].update(column.drop_null().to_numpy(zero_copy_only=False).tobytes())

    def close(self) -> None:
        self.file.close()
        self.sink.close()


def cached(
    folder: Path, key: str, schema: pa.Schema, build: Callable[[Writer], Reading], file: str = "rows.arrow"
) -> tuple[pa.Table, Reading, str, str | None]:
    """Return the memory-mapped table of a key, with rows of this schema; it is built if it is missing.

    Also returns the `Reading`, the hash of the rows, and a note if a damaged table was rebuilt. Raises DataError if
    the folder cannot be used.
    """
    entry = folder / "data" / key
    note = None
    try:
        for attempt in range(ATTEMPTS):
            if entry.exists():
                try:
                    return *_load(entry, file), note
                except _DamagedError as damage:
                    try:
                        take_away(entry)
                    except OSError:  # another run removed it, or it was renamed and is now a leftover
                        if entry.exists():
                            raise
                    if attempt == 0:
                        note = f"the cached tokens in {entry} were damaged ({damage}) and have been rebuilt"
                        log.warning(note)
            entry.parent.mkdir(parents=True, exist_ok=True)
            _clean(entry.parent)
            # another run may have built the same entry meanwhile
            put_folder(entry, lambda work: _write(work, file, schema, build), replace=False)
        return *_load(entry, file), note
    except _DamagedError as error:
        raise DataError(f"the data cache in {folder} does not return the data that was written ({error})") from error
    except OSError as error:
        raise DataError(
            f"the data cache in {folder} cannot be used: {error.strerror or error}. "
            "Set POSTTRAIN_CACHE to another folder"
        ) from error


class _DamagedError(Exception):
    pass


def _load(entry: Path, file: str) -> tuple[pa.Table, Reading, str]:
    rows = entry / file
    try:
        facts = json.loads((entry / "facts.json").read_text())
        if sha256_of(rows) != facts["sha256"]:
            raise _DamagedError("its hash has changed")
        table = pa.ipc.open_file(pa.memory_map(str(rows))).read_all()
        return table, TypeAdapter(Reading).validate_python(facts["reading"]), facts["content"]
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise _DamagedError(str(error)) from error


def _write(folder: Path, file: str, schema: pa.Schema, build: Callable[[Writer], Reading]) -> None:
    with contextlib.closing(Writer(folder / file, schema)) as writer:
        reading = build(writer)
    facts = {"sha256": sha256_of(folder / file), "content": writer.content(), "reading": asdict(reading)}
    (folder / "facts.json").write_text(json.dumps(facts))


def _clean(folder: Path) -> None:
    """Remove the unfinished entries of killed runs."""
    for work in folder.iterdir():
        if LEFTOVER.fullmatch(work.name):
            with contextlib.suppress(FileNotFoundError):  # another run has just renamed it
                if time.time() - work.stat().st_mtime > LEFTOVER_SECONDS:
                    shutil.rmtree(work, ignore_errors=True)
