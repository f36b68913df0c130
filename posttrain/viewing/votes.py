"""Votes between two replies as preference rows, which `posttrain train` reads (docs/data.md)."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.store.atomic import cannot_write

_LOCK = threading.Lock()

Turns = Sequence[Mapping[str, str]]


def write_vote(file: Path, prompt: Turns, chosen: str, rejected: str, facts: Mapping[str, Any]) -> int:
    """Append a row with `prompt`, `chosen`, `rejected` and the facts; returns the number of rows in the file.

    A line that a full disk has cut short stays a line of its own. Raises RunError if it cannot be written.
    """
    reply = [{"role": "assistant", "content": text} for text in (chosen, rejected)]
    row = {"prompt": list(prompt), "chosen": reply[:1], "rejected": reply[1:], **facts}
    line = json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
    with _LOCK:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a+b") as rows:
                if rows.tell() and (rows.seek(-1, 2), rows.read(1))[1] != b"\n":
                    line = b"\n" + line
                rows.write(line)
                rows.seek(0)
                return sum(1 for _ in rows)
        except OSError as error:
            raise cannot_write(file, error) from error
