"""Reads the rows of MMLU from its original CSV files, which have no header, or from the hub's table."""

import csv
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from posttrain.base.errors import DataError
from posttrain.base.files import path_of
from posttrain.data.readers import Record
from posttrain.data.sources import open_source
from posttrain.grading.extract import LETTERS


def rows(source: str, split: str) -> Iterator[Record]:
    """The rows of a split with `id`, `subject`, `about`, `question`, `options`, `choices`, `letter`, `answer`.

    `source` is a folder that contains `{split}/{subject}_{split}.csv` or these files directly (columns: question, A, B,
    C, D, letter), or a data set with the columns subject, question, choices and answer.
    """
    folder = path_of(source)
    files = sorted((folder / split).glob("*.csv")) or sorted(folder.glob(f"*_{split}.csv"))
    if not files:
        if folder.is_dir() and not any(folder.rglob("*.parquet")) and not any(folder.rglob("*.json*")):
            raise DataError(f"{source} has no {split}/SUBJECT_{split}.csv: give the folder that has dev/ and test/")
        yield from _of_table(source, split)
        return
    row = 0
    for path in files:
        subject = path.stem.removesuffix(f"_{split}")
        for number, cells in enumerate(_cells(path)):
            value, problem = None, f"{len(cells)} cells instead of a question, four options and a letter"
            if len(cells) == 6 and cells[5].strip() in tuple(LETTERS):
                value, problem = _row(subject, number, cells[0], cells[1:5], LETTERS.index(cells[5].strip())), None
            yield Record(row, str(path), number + 1, value, problem)
            row += 1


def _cells(path: Path) -> list[list[str]]:
    try:
        with path.open(encoding="utf-8", newline="") as stream:
            return list(csv.reader(stream))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _of_table(source: str, split: str) -> Iterator[Record]:
    numbers: Counter[str] = Counter()  # rows of each subject so far
    for record in open_source(source, split, None, 0, lambda working, answer: working).read():
        value, problem = None, record.problem
        try:
            if record.value is not None:
                subject, question = str(record.value["subject"]), record.value["question"]
                choices, answer = record.value["choices"], int(record.value["answer"])
                choices = choices if isinstance(choices, list) else json.loads(choices)
                if not 0 <= answer < len(choices):
                    raise ValueError(f"answer {answer} of {len(choices)} choices")
                numbers[subject] += 1
                value = _row(subject, numbers[subject] - 1, question, choices, answer)
        except (KeyError, ValueError, TypeError, IndexError) as error:
            problem = f"not a subject, a question, choices and the number of the right choice: {error}"
        yield Record(record.row, record.file, record.line, value, problem)


def _row(subject: str, number: int, question: str, choices: list[str], answer: int) -> dict[str, Any]:
    return {
        "id": f"{subject}/{number}",
        "subject": subject,
        "about": subject.replace("_", " "),
        "question": question,
        "choices": choices,
        "options": "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)),
        "letter": LETTERS[answer],
        "answer": answer,
    }
