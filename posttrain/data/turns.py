"""Locates the turns of a conversation in its rendered text, and finds parts that the template does not write.

A template is a program: it may trim a message, omit earlier thinking, close the last turn differently, or write the
system prompt into the last user message. So a message is located by rendering the conversation again with a different
text for this message: it lies where the two renderings differ.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from posttrain.data.render import Message, Rendered, Renderer, RenderRequest

Span = tuple[int, int]
TEXTS = ("content", "reasoning_content", "thinking", "instruction", "input")  # message fields that a template may write
MARKS = range(0xE100, 0xF8FF)  # private-use characters, one of which replaces a message's text
TOKEN_BEGINS = re.compile(r"[<\[|｜]+\Z")
BEFORE_TURNS = ("system", "developer")
# what a template may leave unwritten, apart from the text of a role
TOOLS, THINKING, VARIABLE, END = "tools", "thinking", "variable ", "end of turn"


@dataclass(frozen=True, slots=True)
class Part:
    """A conversation, its rendered text, and the ascending indices of the messages to locate."""

    job: RenderRequest
    text: str
    indices: Sequence[int]


@dataclass(frozen=True, slots=True)
class Endings:
    """Special tokens that may end a turn, and the tokenizer's stop token (empty if there is none)."""

    special: tuple[str, ...]
    stop: str

    def after(self, text: str, end: int, close: str | None) -> int:
        """The end of a turn whose text ends at `end`; `close` is the expected end-of-turn text, None if unknown."""
        if close is not None and text.startswith(close or self.stop, end):
            return end + len(close or self.stop)
        if close == "" or not self.special:
            return end
        match = re.compile(rf"\s*(?:{'|'.join(map(re.escape, self.special))})\n?").match(text, end)
        return match.end() if match else end


def locate(renderer: Renderer, parts: Sequence[Part], endings: Endings, old: bool = False) -> list[dict[int, Span]]:
    """Return the character span of each message, by index; messages that the template does not write are missing.

    An assistant turn begins after the opening that inference renders before it, or after the part of it that is
    written, and includes its end of turn. Other messages begin with their text. `old` is the rule of behavior_version
    1: a turn begins where the whole text differs from what inference renders before the turn.
    """
    done = iter(renderer.render([job for part in parts for index in part.indices for job in _jobs(part, index)]))
    out = []
    for part in parts:
        turns = [list(islice(done, len(_jobs(part, index)))) for index in part.indices]
        before = [part.job.messages[index - 1]["role"] if index else "" for index in part.indices]
        after_others = [turn for turn, role in zip(turns, before, strict=True) if role != "assistant"]
        # after a tool's turn there may be no opening
        openings = sorted({_opening(*turn[1:3]) for turn in after_others or turns}, key=len, reverse=True)
        spans, floor = dict[int, Span](), 0
        for index, turn in zip(part.indices, turns, strict=True):
            if span := _span(part, index, turn, floor, openings, endings, old):
                spans[index], floor = span, span[1]
        out.append(spans)
    return out


def _opening(opened: Rendered, before: Rendered) -> str:
    """The opening of the next reply, from renderings of a conversation with and without it."""
    same = opened.text[: common_prefix(opened.text, before.text)]
    # the texts may end in two special tokens that have a common prefix
    return opened.text[len(same if len(same) == len(before.text) else TOKEN_BEGINS.sub("", same)) :]


def _jobs(part: Part, index: int) -> list[RenderRequest]:
    """Requests for the renderings that locate a turn: the whole conversation with a mark as the turn's text; the
    messages before the turn, with and without its opening; the messages up to the marked turn, with the next opening;
    and, for a turn with tool calls, the whole conversation with the mark in place of the calls."""
    message, before, after = part.job.messages[index], [*part.job.messages[:index]], part.job.messages[index + 1 :]
    mark = _mark(part.text)
    upto = [*before, varied(message, mark)]
    plain = [[*before, {"role": message["role"], "content": mark}, *after]] if message.get("tool_calls") else []
    if all(message["role"] in BEFORE_TURNS for message in before):  # templates need a user turn first
        before.append({"role": "user", "content": mark})
    job = replace(part.job, spans=False)
    return [
        replace(job, messages=[*upto, *after]),
        replace(job, messages=before, generate=True),
        replace(job, messages=before, generate=False),
        replace(job, messages=upto, generate=True),
        *(replace(job, messages=messages) for messages in plain),
    ]


def _span(
    part: Part, index: int, turn: list[Rendered], floor: int, openings: Sequence[str], endings: Endings, old: bool
) -> Span | None:
    marked, opened, bare, closed, *plain = turn
    mark, whole, other = _mark(part.text), part.text, marked.text
    if marked.error or other == whole:
        return None
    head = common_prefix(whole, other)
    room = min(len(whole), len(other)) - head  # the longest possible common suffix
    tail = common_prefix(whole[len(whole) - room :][::-1], other[len(other) - room :][::-1])
    start = head = min([head, *(common_prefix(whole, done.text) for done in plain if not done.error)])
    if old:
        start = common_prefix(opened.text, whole)
    elif part.job.messages[index]["role"] == "assistant" and not opened.error:
        start = _after_opening(whole, floor, head, opened.text, _opening(opened, bare))
    if index + 1 == len(part.job.messages) and not part.job.generate:
        return start, len(whole)
    own = len(other.rpartition(mark)[2]) - tail  # characters after the mark that belong to the turn
    after = closed.text.rpartition(mark)[2][own:]
    close = next((after.removesuffix(opening) for opening in openings if after.endswith(opening)), None)
    return start, endings.after(whole, len(whole) - tail, None if closed.error else close)


def _after_opening(whole: str, floor: int, head: int, opened: str, opening: str) -> int:
    """The start of a turn's text, at most `head`: the end of what inference renders before the turn (`opened`, which
    ends in its `opening`). If `whole` differs there, the end of the longest part of either that it contains."""
    if whole.startswith(opened) and len(opened) <= head:
        return len(opened)
    window = whole[floor:head]
    size = _longest(len(opened), lambda n: opened[len(opened) - n :] in window)
    if size and size >= len(opening):
        return floor + window.rfind(opened[len(opened) - size :]) + size
    size = _longest(len(opening), lambda n: opening[:n] in window)
    return floor + window.rfind(opening[:size]) + size if size else head


def unwritten(renderer: Renderer, rendered: Sequence[tuple[RenderRequest, str]]) -> list[frozenset[str]]:
    """What the template does not write of each conversation: the roles of messages whose text or tool calls are
    missing, `tools`, and `thinking` of the last reply. A part is missing if changing it does not change the rendering.
    Earlier thinking is not reported, because templates omit it by design."""
    out: list[set[str]] = [set() for _ in rendered]
    changed: list[tuple[int, str, RenderRequest]] = []
    for n, (job, text) in enumerate(rendered):
        mark, messages = _mark(text), list(job.messages)
        job = replace(job, spans=False)
        if not _in_order(messages, text):
            for i, message in enumerate(messages):
                if message.get("content") or message.get("tool_calls"):
                    other = [*messages[:i], varied(message, mark), *messages[i + 1 :]]
                    changed.append((n, message["role"], replace(job, messages=other)))
        if job.tools:
            changed.append((n, TOOLS, replace(job, tools=None)))
        if other := _thinking_otherwise(messages[-1], text, mark):
            changed.append((n, THINKING, replace(job, messages=[*messages[:-1], other])))
    for (n, name, _), done in zip(changed, renderer.render([job for *_, job in changed]), strict=True):
        if done.text == rendered[n][1] and not done.error:
            out[n].add(name)
    return [*map(frozenset, out)]


def _thinking_otherwise(message: Message, text: str, mark: str) -> Message | None:
    """A reply with `mark` as its thinking; None if it has no thinking, or if `text` contains the thinking."""
    if message["role"] != "assistant":
        return None
    fields = {name: mark for name in ("reasoning_content", "thinking") if str(message.get(name) or "").strip()}
    if fields:
        thinking = str(message[next(iter(fields))])
    else:
        thinking, closed, reply = (message.get("content") or "").partition("</think>")
        before, opened, thinking = thinking.partition("<think>")
        if not (opened and closed and thinking.strip()):
            return None
        fields = {"content": before + opened + mark + closed + reply}
    return None if thinking.strip() in text else {**message, **fields}


def headers(renderer: Renderer, begin: str) -> tuple[str, ...]:
    """The headers of the roles: what the template writes between the previous turn (or the begin token) and the text
    of a message. The longest comes first; blank headers, and roles that the template rejects, are omitted."""
    mark = chr(MARKS[0])
    number = 4711  # text of the previous turn, which may begin differently as the last turn (Qwen3's empty thinking)
    question, reply = {"role": "user", "content": "a"}, {"role": "assistant", "content": str(number)}
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": number}}}]
    talks = [
        [{"role": "system", "content": mark}],
        [question, reply, {"role": "user", "content": mark}],
        [question, {**reply, "content": "", "tool_calls": calls}, {"role": "tool", "name": "f", "content": mark}],
    ]
    jobs = []
    for talk in talks:
        whole = [*talk, question] if len(talk) == 1 else talk
        before = talk[:-1] or [question]
        jobs += [RenderRequest(whole), RenderRequest(before, generate=True), RenderRequest(before)]
    done = iter(renderer.render(jobs))
    candidates: set[str] = set()
    for talk in talks:
        whole, opened, before = islice(done, 3)
        opening = _opening(opened, before)
        candidates.add(opening)
        earlier = opened.text.removesuffix(opening).rpartition(str(number))[2] if len(talk) > 1 else begin
        start = whole.text.partition(mark)[0].rpartition(str(number))[2]
        if mark in whole.text and start.startswith(earlier):
            candidates.add(start[len(earlier) :])
    return tuple(sorted((header for header in candidates if header.strip()), key=len, reverse=True))


def _in_order(messages: Sequence[Message], text: str) -> bool:
    """Whether the text contains every message, in order. If so, all are written and need no further rendering."""
    end = 0
    for message in messages:
        if message.get("tool_calls"):
            return False
        reply = (message.get("content") or "").rpartition("</think>")[2]  # earlier thinking is omitted by design
        apart = "instruction" in message and reply.strip() not in text  # an Alpaca row's two fields, written apart
        for piece in [message["instruction"], message.get("input") or ""] if apart else [reply]:
            start = text.find(piece.strip(), end)
            if start < 0:
                return False
            end = start + len(piece.strip())
    return True


def varied(message: Message, mark: str) -> Message:
    """The message with `mark` as the text of every field that has text, and as the arguments of tool calls."""
    calls = message.get("tool_calls") or []
    out = {
        name: mark
        if name in TEXTS and isinstance(value, str) and (value or (name == "content" and not calls))
        else value
        for name, value in message.items()
    }
    if calls and isinstance(calls, list):
        out["tool_calls"] = [_called_otherwise(call, mark) for call in calls]
    return out


def _called_otherwise(call: Any, mark: str) -> Any:
    """A tool call with `mark` as its arguments, of the same type."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _called_otherwise(call["function"], mark)}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        return {**call, "arguments": f'{{"{mark}": "{mark}"}}'}
    return {**call, "arguments": {mark: mark}} if isinstance(arguments, dict) else call


def common_prefix(left: Sequence, right: Sequence) -> int:
    """Number of leading items that two sequences have in common."""
    return _longest(min(len(left), len(right)), lambda n: left[:n] == right[:n])


def _longest(most: int, holds: Callable[[int], bool]) -> int:
    """The largest n up to `most` for which `holds(n)` is true; `holds` must be true for every smaller n."""
    return most if most and holds(most) else bisect_left(range(1, most + 1), True, key=lambda n: not holds(n))


def _mark(text: str) -> str:
    """A character of MARKS that does not occur in the text."""
    return next(mark for mark in map(chr, MARKS) if mark not in text)
