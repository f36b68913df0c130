"""`posttrain grade`: grades the completions of a file as in training, in the order of its rows."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from posttrain.base.console import PlainConsole, progress, text_table
from posttrain.base.errors import DataError, RewardError
from posttrain.base.words import counted
from posttrain.config import TagsConfig
from posttrain.data.readers import Record, read_files, type_name
from posttrain.data.report import MALFORMED_SHARE, Malformed, list_malformed
from posttrain.grading.pool import DEADLINE_S, Pool
from posttrain.grading.verdict import VERDICTS, Grade, GradeRequest
from posttrain.rewards.parts import CLASSES
from posttrain.rewards.python import RewardFunction
from posttrain.rewards.rules import NEEDS_ANSWER, RULES, modules_of, options_of, prove
from posttrain.runs.files import ready_to_write, save_rows


def grade_file(
    file: Path,
    output: Path,
    reward: str,
    completion_column: str,
    answer_column: str,
    deadline: float = DEADLINE_S,
    workers: int | None = None,
    overwrite: bool = False,
) -> Counter[str]:
    """Grade every row of `file` and write the rows with their grades to `output` as JSONL; returns counts by verdict.

    A row that cannot be read keeps its position, with `error` and no verdict. `file` is never overwritten; an existing
    `output` is overwritten only with `overwrite`. Raises RewardError for an unknown reward or a grader that fails the
    known pairs, and DataError if a column is missing or more than 1 % of the rows cannot be read.
    """
    if reward not in RULES and ":" not in reward:
        near = get_close_matches(reward, RULES, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; choose one of {', '.join(RULES)}, or module:function"
        raise RewardError(f"there is no reward {reward}{hint}")
    ready_to_write(output, (file,), overwrite)
    records, problems = list(read_files((file,))), dict[int, str]()
    completions: dict[int, str] = {}
    for record in records:
        text = _text(record, completion_column)
        if text is not None:
            completions[record.row] = text
        elif record.value is None:
            problems[record.row] = record.problem or "the row cannot be read"
        else:
            kind = type_name(record.value.get(completion_column))
            problems[record.row] = f"{completion_column} must be a string, not {kind}"
    needed = [("completion", completion_column, "completions"), ("answer", answer_column, "right answers")]
    _check_columns(file, needed if reward in NEEDS_ANSWER else needed[:1], records, problems)
    readable = [record for record in records if record.row in completions]
    texts, answers = list(completions.values()), [_text(record, answer_column) for record in readable]
    if reward in RULES:
        grades = _by_rule(reward, texts, answers, deadline, workers)
    else:
        grades = _by_function(reward, readable, texts, answers)
    graded = dict(zip(completions, grades, strict=True))
    save_rows(output, (_row(record, graded.get(record.row), problems.get(record.row)) for record in records))
    _summary(reward, grades, len(problems), PlainConsole())
    return Counter(grade.verdict for grade in grades)


def _check_columns(
    file: Path, needed: Sequence[tuple[str, str, str]], records: Sequence[Record], problems: Mapping[int, str]
) -> None:
    """Raise DataError if a column is missing, or if too many rows have a problem."""
    rows = [record.value for record in records if record.value is not None]
    names = ", ".join(rows[0]) if rows else "no columns"
    for name, column, content in needed:
        if not any(column in row for row in rows):
            raise DataError(
                f"{file} has no column {column} with the {content}: it has {names}; name it with --{name}-column"
            )
    if len(problems) > MALFORMED_SHARE * len(records):
        unread = [Malformed(r.file, r.line, problems[r.row], r.row) for r in records if r.row in problems]
        raise DataError(
            f"{len(unread)} of {len(records)} rows of {file} cannot be graded, more than "
            f"{MALFORMED_SHARE:.0%}:\n{list_malformed(unread)}"
        )


def _by_rule(
    reward: str, completions: Sequence[str], answers: Sequence[str | None], deadline: float, workers: int | None
) -> list[Grade]:
    tags, console = TagsConfig(), PlainConsole(stderr=True)
    pairs, options = zip(completions, answers, strict=True), options_of(reward, tags)
    jobs = [GradeRequest(RULES[reward], completion, answer, options) for completion, answer in pairs]
    with Pool(workers, deadline, modules=modules_of([reward])) as pool:
        prove(pool, reward, tags)
        isolation = ", ".join(pool.isolation) or "no isolation on this platform"
        console.print(f"{pool.workers} workers, each with {isolation}")
        return list(progress(pool.stream(jobs), "grading", len(jobs), console))


def _by_function(
    name: str, records: Sequence[Record], completions: Sequence[str], answers: Sequence[str | None]
) -> list[Grade]:
    """Grades from a function's scores: a score above 0 counts as correct; None gives the verdict `not_applicable`."""
    rows = [record.value or {} for record in records]
    arguments: dict[str, list[Any]] = {key: [row.get(key) for row in rows] for key in dict.fromkeys(chain(*rows))}
    arguments["completions"] = list(completions)
    arguments["prompts"] = arguments.get("prompt", [""] * len(records))
    arguments["answer"] = list(answers)
    with closing(RewardFunction(name)) as function:
        return [
            Grade("not_applicable" if score is None else "correct" if score > 0 else "wrong", score)
            for score in function(arguments)
        ]


def _text(record: Record, column: str) -> str | None:
    """A column's value as a string; numbers, which answers often are, keep their JSON spelling."""
    value = (record.value or {}).get(column)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value)
    return value if isinstance(value, str) else None


def _row(record: Record, grade: Grade | None, problem: str | None) -> dict[str, Any]:
    row = dict(record.value or {})
    if grade is None:
        return row | {"error": f"line {record.line}: {problem}"}
    row |= {"verdict": grade.verdict, "score": grade.score, "extracted": grade.extracted}
    row |= {"seconds": round(grade.seconds, 6)}
    row |= {"parts": dict(grade.parts), "format_and_answer": grade.format_and_answer} if grade.parts else {}
    return row | ({"reason": grade.reason} if grade.reason else {})


def _summary(reward: str, grades: Sequence[Grade], unread: int, console: Console) -> None:
    title = f"{counted(len(grades), 'completion')} by {reward}"
    table = text_table("verdict", "rows", "share", left=("verdict",), title=title)
    counts = Counter(grade.verdict for grade in grades)
    for verdict in (*VERDICTS, *("not_applicable",) * ("not_applicable" in counts)):
        table.add_row(verdict, str(counts[verdict]), f"{counts[verdict] / len(grades):.1%}")
    console.print(table)
    scores = [grade.score for grade in grades if grade.score is not None]
    if scores:
        console.print(f"mean score {sum(scores) / len(scores):.4f} over {len(scores)} with a verdict")
    seconds = sorted(grade.seconds for grade in grades)
    if seconds[-1] > 0:
        console.print(f"seconds per completion: median {seconds[len(seconds) // 2]:.4f}, slowest {seconds[-1]:.2f}")
    classes = Counter(grade.format_and_answer for grade in grades if grade.parts)
    if classes:
        console.print("format and answer, " + ", ".join(f"{name}: {classes[name]}" for name in CLASSES))
    if unread:
        console.print(f"{counted(unread, 'row')} could not be read: see their `error` field")
