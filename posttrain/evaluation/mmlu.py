"""Rows of MMLU: its own CSV files, which have no header, or the hub's table."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.data.readers import Record
from posttrain.data.sources import open_source
from posttrain.errors import DataError

LETTERS = "ABCD"


def rows(source: str, split: str) -> Iterator[Record]:
    """The rows of a split with `id`, `subject`, `about`, `question`, `options`, `choices`, `letter`, `answer`.

    `source` is a folder with `{split}/{subject}_{split}.csv` or with these files themselves (question, A, B, C, D,
    letter), or a data set with the columns subject, question, choices and answer.
    """
    folder = Path(source).expanduser()
    files = sorted((folder / split).glob("*.csv")) or sorted(folder.glob(f"*_{split}.csv"))
    if not files:
        if folder.is_dir() and not any(folder.rglob("*.parquet")) and not any(folder.rglob("*.json*")):
            raise DataError(f"{source} has no {split}/SUBJECT_{split}.csv: give the folder that has dev/ and test/")
        yield from _of_table(source, split)
        return
    row = 0
    for path in files:
        subject, place = path.stem.removesuffix(f"_{split}"), 0
        with path.open(encoding="utf-8", newline="") as stream:
            for place, cells in enumerate(csv.reader(stream)):
                value, problem = None, None
                if len(cells) == 6 and cells[5].strip() in LETTERS and cells[5].strip():
                    value = _row(subject, place, cells[0], cells[1:5], LETTERS.index(cells[5].strip()))
                else:
                    problem = f"{len(cells)} cells, not a question, four options and a letter"
                yield Record(row, str(path), place + 1, value, problem)
                row += 1


def _of_table(source: str, split: str) -> Iterator[Record]:
    places: dict[str, int] = {}
    for record in open_source(source, split, None, 0, lambda working, answer: working).read():
        value = record.value
        if value is None or not {"subject", "question", "choices", "answer"} <= value.keys():
            problem = record.problem or "the row has no subject, question, choices and answer"
            yield Record(record.row, record.file, record.line, None, problem)
            continue
        choices = value["choices"] if isinstance(value["choices"], list) else json.loads(value["choices"])
        place = places[value["subject"]] = places.get(value["subject"], -1) + 1
        made = _row(value["subject"], place, value["question"], choices, int(value["answer"]))
        yield Record(record.row, record.file, record.line, made)


def _row(subject: str, place: int, question: str, choices: list[str], answer: int) -> dict[str, Any]:
    return {
        "id": f"{subject}/{place}",
        "subject": subject,
        "about": subject.replace("_", " "),
        "question": question,
        "choices": choices,
        "options": "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)),
        "letter": LETTERS[answer],
        "answer": answer,
    }
