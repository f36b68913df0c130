"""`posttrain grade`."""

from pathlib import Path
from typing import Annotated

import typer

from posttrain.base.terminal import say
from posttrain.cli.score import Overwrite

File = Annotated[Path, typer.Argument(help="JSONL, JSON, CSV or Parquet; also .gz.")]
Reward = Annotated[
    str,
    typer.Option(
        "--reward",
        help="math, gsm8k, r1_zero, question_only, check_answer, check_numbers, match_format_exactly, "
        "match_format_approximately; or module:function.",
    ),
]
AnswerColumn = Annotated[str, typer.Option("--answer-column", help="The column with the right answer.")]
CompletionColumn = Annotated[str, typer.Option("--completion-column", help="The column with the completion.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Where to write; default: FILE.graded.jsonl.")]
Deadline = Annotated[float, typer.Option("--deadline", help="Time limit of one completion, in seconds.")]
Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Processes; default: one per core, at most 8.")]


def grade(
    file: File,
    reward: Reward,
    answer_column: AnswerColumn = "answer",
    completion_column: CompletionColumn = "completion",
    output: Output = None,
    overwrite: Overwrite = False,
    deadline: Deadline = 2.0,
    workers: Workers = None,
) -> None:
    """Grade a file's completions in supervised worker processes, as in training.

    Rows keep their order and fields, with `verdict` (correct, wrong, timeout, crashed, bad_gold), `score`, `extracted`,
    `seconds`, and `parts` if a reward has some.
    """
    from posttrain.rewards.file import Columns, grade_file

    target = output or file.with_name(f"{file.name}.graded.jsonl")
    grade_file(file, target, reward, Columns(completion_column, answer_column), deadline, workers, overwrite)
    say(f"written: {target}")
