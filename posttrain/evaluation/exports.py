"""Evaluations in the file formats of other programs, written without those programs (docs/eval-export.md)."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.base.errors import ConfigError, RunError
from posttrain.evaluation import inspect_logs, lm_eval_samples
from posttrain.evaluation.records import COLUMNS, Answer, read_answers, read_summary
from posttrain.runs.atomic import cannot_write, write_file

EXPORTS = {"inspect": inspect_logs.files_of, "lm-eval": lm_eval_samples.files_of}
LONE = re.compile("[\ud800-\udfff]")


def export_evaluation(folder: Path, to: str, output: Path | None = None) -> list[Path]:
    """Write a finished evaluation in another program's format, into `output` (default: `folder/NAME`).

    Returns the files. An export of the same evaluation replaces the earlier one, file by file and atomically; other
    files of `output` stay.

    Raises ConfigError for an unknown format, and RunError if the evaluation is unfinished, or damaged, or if a file
    cannot be written.
    """
    if to not in EXPORTS:
        raise ConfigError(f"there is no export {to!r}: give {' or '.join(EXPORTS)}")
    summary = read_summary(folder)
    try:
        files = EXPORTS[to](summary, _by_evaluation(read_answers(folder), summary, folder))
    except KeyError as error:
        raise RunError(f"{folder}: summary.json is damaged, it lacks {error}: run the evaluation again") from error
    output = output or folder / to
    for name, text in files.items():
        path = output / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(path, error) from error
        write_file(path, text)
    return [output / name for name in files]


def _by_evaluation(answers: Sequence[Answer], summary: dict[str, Any], folder: Path) -> dict[str, list[Answer]]:
    """The answers of each suite and setting, by its key in the summary. Raises RunError if the two do not fit."""
    keys = {(about["suite"], about["setting"]): key for key, about in summary["suites"].items()}
    found: dict[str, list[Answer]] = {key: [] for key in summary["suites"]}
    for answer in answers:
        key = keys.get((answer.suite, answer.setting))
        if key is None:
            suite = f"{answer.suite} {answer.setting}".strip()
            raise RunError(f"{folder}: answers.jsonl has answers of {suite}, which summary.json lacks: evaluate again")
        found[key].append(_readable(answer))
    empty = [key for key, group in found.items() if not group]
    if empty:
        raise RunError(f"{folder}: answers.jsonl has no answer of {', '.join(empty)}: evaluate again")
    return found


def _readable(answer: Answer) -> Answer:
    """With U+FFFD for lone surrogates, which other readers of JSON refuse, even as escapes."""
    texts = {name: getattr(answer, name) for name in COLUMNS}
    return replace(answer, **{name: LONE.sub("\ufffd", text) for name, text in texts.items() if isinstance(text, str)})
