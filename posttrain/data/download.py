"""Saves a data set of any source to a folder for offline use."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from posttrain.config.schema.datasets import name_of
from posttrain.data.readers import Record
from posttrain.data.saved import SavedSplit, save
from posttrain.data.sources import Files, layout_of, open_source, splits_of


def keep(
    source: str, folder: Path, splits: Sequence[str] | None = None, max_rows: int | None = None
) -> list[SavedSplit]:
    """Write the splits (by default all) of a `source` setting to a new folder."""
    known = layout_of(source)

    def rows() -> Iterator[tuple[str, Iterator[Record], str | None]]:
        for split in splits or splits_of(source):
            found = open_source(source, split, max_rows, 0, lambda working, answer: working)
            revision = _revision(found.paths[0]) if isinstance(found, Files) else None
            yield split, itertools.islice(found.read(), max_rows), revision

    return save(folder, rows(), {"source": source, "known": name_of(known), "repo": known.repo if known else None})


def _revision(path: Path) -> str | None:
    """The commit of a file in the hub's cache, `…/snapshots/{commit}/…`."""
    parts = path.parts
    return parts[parts.index("snapshots") + 1] if "snapshots" in parts[:-1] else None
