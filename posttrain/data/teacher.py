"""The prompts of a teacher: those of the training rows with its system prompt or a column that only it reads."""

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError
from posttrain.base.words import counted
from posttrain.config.schema.distill import DistillMethod
from posttrain.config.schema.run import RunConfig
from posttrain.data.kinds import Prompts
from posttrain.data.prepare import Options, Prepared, prepare
from posttrain.data.report import Malformed, list_malformed

Own = tuple[Mapping[int, np.ndarray], Sequence[Malformed]]  # prompts by row, and the rows that have none


def check_teacher(config: RunConfig, method: DistillMethod, prepared: Prepared, longest: int, own: Own | None) -> None:
    """Raise DataError if a training prompt has no prompt of the teacher's `own` that fits in `longest` tokens."""
    train = prepared.train
    examples = map(train.__getitem__, range(len(train)))
    if method.use_successful_as_teacher:
        given = ((one.row, (one.facts or {})["prompt"]) for one in examples)
        turns = {row: prompt for row, prompt in given if not isinstance(prompt, str)}
        if turns and "text" in prepared.report.formats:
            raise DataError(
                "method.use_successful_as_teacher writes a context into the last message of the user, but rows of "
                "format text have none: give the data a column prompt, or set data.template: none"
            )
        other = {row for row, prompt in turns.items() if prompt[-1]["role"] != "user"}
        _refuse_rows(other, "whose last message, which the teacher's replaces, is not the user's: remove")
    if own is None:
        return
    prompts, bad = own
    lost, known = {*train.rows.tolist()} - prompts.keys(), {*prepared.report.malformed}
    if lost and (unwritten := [malformed for malformed in bad if malformed not in known]):
        what = f"{counted(len(unwritten), 'training prompt')} cannot be written for the teacher; complete or remove"
        raise DataError(f"{what} such rows:\n{list_malformed(unwritten)}")
    if method.on_policy_fraction < 1:
        pairs = ((one.row, one.trees[0].children[0]) for one in examples)
        lost |= {row for row, reply in pairs if len(prompts.get(row, ())) + len(reply.tokens) > longest}
    _refuse_rows(
        lost,
        "for which the teacher's prompt leaves no room for the data's completion or one of "
        f"{config.completion_length:,} tokens, in {longest:,} (the smaller of training.tokens_per_pack and the model's "
        "positions): raise training.tokens_per_pack, or remove",
    )


def _refuse_rows(rows: Collection[int], why: str) -> None:
    if rows:
        listed = f"{', '.join(map(str, sorted(rows)[:10]))}{', …' * (len(rows) > 10)}"
        raise DataError(f"{counted(len(rows), 'prompt')} {why} the rows {listed} (counted from 0)")


def longest_fed(config: RunConfig, positions: int | None) -> int:
    """The most tokens of a sequence for a model with so many positions, in which the last token is not fed."""
    return min(config.training.tokens_per_pack, sys.maxsize if positions is None else positions + 1)


def teacher_prompts(
    config: RunConfig, tokenizer: PreTrainedTokenizerBase, method: DistillMethod, longest: int
) -> Own | None:
    """The tokens of the training prompts as a teacher reads them, with its system prompt and a column of the row, by
    row; and rows that have none. One whose prompt and completion have more than `longest` tokens is in neither. None if
    the teacher's prompts are the student's, or have what it samples."""
    if not method.prompts_teacher or method.use_successful_as_teacher:
        return None
    update: dict[str, Any] = {"max_prompt_length": None, "max_length": longest, "overlong": "drop", "validation": None}
    if not isinstance(sources := config.data.source, str):  # all rows of each, of which the run has a part
        update["source"] = tuple(source.model_copy(update={"weight": 1.0}) for source in sources)
    if method.teacher_system_prompt is not None:
        update["system_prompt"] = method.teacher_system_prompt
    context = None if (column := method.privileged_context) is None else (column, method.context_template)
    options = Options(
        completion_length=config.completion_length,
        seed=config.seed,
        behavior_version=config.behavior_version,
        refuse_malformed=False,
    )
    prepared = prepare(config.data.model_copy(update=update), tokenizer, Prompts(context=context), options)
    trees = {int(row): prepared.train[index].trees[0] for index, row in enumerate(prepared.train.rows)}
    return {row: np.asarray(tree.tokens) for row, tree in trees.items()}, prepared.report.malformed
