"""Rows in a method's shape: the last turn as completion, a prompt alone, a system message first."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from posttrain.base.errors import DataError
from posttrain.data.render import WEIGHT, without
from posttrain.data.rows import Row, RowError, Turns, as_turns, number_or_text


def in_messages(row: Row, change: Callable[[Turns], Turns]) -> Row:
    """The row with its messages changed."""
    parts = {name: getattr(row, name) for name in ("prompt", "chosen", "rejected", "rejected_prompt")}
    return replace(row, **{name: change(value) for name, value in parts.items() if isinstance(value, list)})


def without_weights(row: Row, method: str) -> Row:
    """The row for a method that weighs no messages. Raises DataError if it is not to train on a reply that the method
    trains on; a prompt is not trained on, as a weight of 0 says."""
    for name in ("prompt", "rejected_prompt", "chosen", "rejected"):
        turns = getattr(row, name)
        for turn in turns if isinstance(turns, list) else ():
            key, weight = turn.get(WEIGHT, ("", 1.0))
            if weight != 1 and (weight != 0 or name in ("chosen", "rejected")):
                raise DataError(
                    f"a message of the {turn['role']} has {key} (a loss weight of {weight:g}), which {method} cannot "
                    "honour: only SFT weighs messages. Remove the key or the row"
                )
    return in_messages(row, lambda turns: without(turns, WEIGHT))


def refuse_without_reply(row: Row) -> None:
    """Raise RowError for messages to train on without an assistant turn."""
    what = "the conversation" if row.prompt is None else "the completion" if row.rejected is None else "chosen"
    for name, turns in ((what, row.chosen), ("rejected", row.rejected)):
        if isinstance(turns, list) and all(turn["role"] != "assistant" for turn in turns):
            raise RowError(f"{name} has no turn of the assistant, so there is no reply to learn from")


def last_turn_as_completion(row: Row) -> Row:
    messages = row.chosen
    if isinstance(messages, str) or len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise RowError("completion_only_loss needs the conversation to end with an assistant's turn after another")
    return replace(row, prompt=messages[:-1], chosen=messages[-1:])


def as_prompt(row: Row) -> Row:
    """The prompt without its reply: a conversation up to its last assistant turn."""
    if row.prompt is not None:
        return Row(row.prompt, "", tools=row.tools, answer=row.answer)
    turns = row.chosen
    if not isinstance(turns, str) and turns[-1]["role"] == "assistant":
        turns = turns[:-1]
    return Row(turns, "", tools=row.tools)


def answer_beside(value: dict[str, Any]) -> str | None:
    answer = value.get("answer")
    return number_or_text(answer, "answer") or None if isinstance(answer, str | int | float) else None


def with_system(row: Row, system: str, beside: bool = False) -> Row:
    """Add a system message to the conversation, unless it has one; with `beside` unless it has this one. A prompt
    string becomes the user's message."""
    message = {"role": "system", "content": system}

    def begin(value: Any) -> Any:
        turns = as_turns(value, "user")
        has_one = bool(turns) and (turns[0] == message if beside else turns[0]["role"] == "system")
        return turns if has_one else [message, *turns]

    if row.prompt is None:
        return replace(row, chosen=begin(row.chosen))
    other = None if row.rejected_prompt is None else begin(row.rejected_prompt)
    return replace(row, prompt=begin(row.prompt), rejected_prompt=other)
