"""Questions whose replies must be readable: one that is not gets a second question in the same conversation."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from posttrain.base.words import counted
from posttrain.judges.client import JudgeClient, Message, Reply

log = logging.getLogger("posttrain")

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Asked(Generic[Value]):
    """What a judge says: `value` as read from `reply`, None if it did not answer or cannot be read."""

    value: Value | None
    reply: Reply


@dataclass(frozen=True, slots=True)
class Question:
    """A conversation that ends with the question, and its reply to come."""

    messages: tuple[Message, ...]
    future: Future[Reply]


def ask(client: JudgeClient, messages: Sequence[Message]) -> Question:
    return Question(tuple(messages), client.submit(messages))


def answers(
    client: JudgeClient,
    questions: Sequence[Question],
    read: Callable[[str], Value | None],
    wanted: str,
    title: str = "",
) -> list[Asked[Value]]:
    """The answers, in order. `wanted` says to the judge what a readable reply has; failures are logged by kind."""
    replies = client.gather([question.future for question in questions], title)
    found = [_read(reply, read) for reply in replies]
    again = {
        index: ask(client, _reminded(questions[index].messages, one.reply, wanted))
        for index, one in enumerate(found)
        if one.reply.failure == "unreadable"
    }
    for index, reply in zip(again, client.gather([question.future for question in again.values()]), strict=True):
        found[index] = _both(found[index].reply, _read(reply, read))
    _report(client, found)
    return found


def _read(reply: Reply, read: Callable[[str], Value | None]) -> Asked[Value]:
    value = None if reply.failure else read(reply.content)
    if value is not None or reply.failure:
        return Asked(value, reply)
    end = "…" + reply.content[-80:] if len(reply.content) > 80 else reply.content
    cut = " (cut off: raise max_tokens)" if reply.finish_reason == "length" else ""
    return Asked(None, replace(reply, failure="unreadable", reason=f"no verdict in {end!r}{cut}"))


def _reminded(messages: Sequence[Message], reply: Reply, wanted: str) -> list[Message]:
    said = {"role": "assistant", "content": reply.content or "(nothing)"}
    return [*messages, said, {"role": "user", "content": f"Your verdict is missing. Reply with {wanted} and no more."}]


def _both(first: Reply, second: Asked[Value]) -> Asked[Value]:
    """The second answer, at the cost of both."""
    costs = {
        name: getattr(first, name) + getattr(second.reply, name)
        for name in ("requests", "prompt_tokens", "completion_tokens", "seconds")
    }
    content = f"{first.content}\n{second.reply.content}" if second.reply.content else first.content
    return replace(second, reply=replace(second.reply, content=content, **costs))


def _report(client: JudgeClient, found: Sequence[Asked[Value]]) -> None:
    kinds = Counter(one.reply.failure for one in found if one.reply.failure)
    if kinds:
        first = next(one.reply for one in found if one.reply.failure)
        log.warning(
            "judge %s: no verdict on %d of %s (%s), e.g. %s",
            client.settings.model,
            kinds.total(),
            counted(len(found), "question"),
            ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
            first.reason,
        )
