"""The token ids of a conversation that grows: it is appended to, never rendered again.

    codec = Codec(tokenizer, tools)
    ids = codec.first(messages)                   the prompt of the first reply
    ids += sampled tokens                         as the model wrote them
    ids += codec.bridge(ids, [tool message])      the end of the turn if it is open, the new messages, the next opening

How a template writes the messages after a reply follows from two renderings of a short conversation, with the messages
and without: what the first has beyond the second is appended. How it writes tool calls follows from the rendering of
known ones, and `Codec` proves on others that `parse` reads them back. A reply is thus never written by the template, so
spaces, number formats and escapes that a rendering would change stay as they were sampled.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError
from posttrain.data.calls import (
    FIRST,
    ONE,
    PROBE_TOOLS,
    PROBE_TYPES,
    PROOFS,
    TWO,
    Call,
    Grammar,
    Types,
    call_id,
    learned,
    read_calls,
    tool_calls,
)
from posttrain.data.render import FAILS, Message, Rendered, RenderRequest, rendering
from posttrain.data.turns import common_prefix

REPLY, THOUGHT = "7c0ffee", "5ca1ab1e"  # texts that no template has
QUESTION: Message = {"role": "user", "content": "a"}
SHOWN = 12  # tokens of an error on each side of a difference
THINK = ("<think>", "</think>")


class RewrittenTurn(DataError):
    """A chat template that writes a reply otherwise once messages follow it."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply in parts. Text that is not a complete tool call stays in `content`."""

    content: str
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    malformed: int = 0  # openings of tool calls without a readable call
    thinks: bool = field(default=False, compare=False)  # whether it begins with a block of thinking, be it empty

    @property
    def message(self) -> Message:
        """The reply as a message of the assistant."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = tool_calls(self.calls)
        return message


class Codec:
    """Reads and extends the token ids of conversations that one template writes.

    `tools` are JSON schemas, `variables` those of the template, and `date` (YYYY-MM-DD) is the day that it writes.
    Raises DataError if the template writes no tools, or writes calls that cannot be read back.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        date: str | None = None,
    ):
        if tokenizer.chat_template is None:
            raise DataError("a conversation needs a chat template, and the tokenizer has none: set data.template")
        self.tokenizer, self.tools = tokenizer, [dict(tool) for tool in tools] or None
        self._variables, self._date = variables, date
        special = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        self._special = re.compile("|".join(map(re.escape, special)))
        self._types = {str(f["name"]): _types(f) for f in (tool.get("function", tool) for tool in tools)}
        thinking = _reply(reasoning_content=THOUGHT)
        opened, closed, thought = self._render([[QUESTION], [QUESTION, _reply()], [QUESTION, thinking]], self.tools)
        self._opened = _text(opened, "a question")
        self._end = _text(closed, "a reply").rpartition(REPLY)[2]  # the end of a turn of the assistant
        self._call_end, self._wrapper = self._end, ("", "")  # of a turn with tool calls; the text around all calls
        self._think = _thinking(self._opened, thought)
        self._grammar = self._learn() if self.tools else None
        # Whether thinking is omitted: by whether it is empty, and the roles of the messages that follow a reply.
        self._forgets: dict[tuple[bool | str, ...], bool] = {}

    def varied(self, variables: Mapping[str, Any]) -> "Codec":
        """A codec of the same template and tools with these variables too. Raises DataError as the class does."""
        return Codec(self.tokenizer, self.tools or (), {**(self._variables or {}), **variables}, self._date)

    def first(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation and of the opening of the next reply. Raises DataError if it is refused."""
        [whole] = self._render([[*messages]], self.tools)
        return self._ids(_text(whole, "the messages"))

    def bridge(self, ids: Sequence[int], messages: Sequence[Message], after: Reply | None = None) -> list[int]:
        """The tokens to append to `ids`, which end in a reply: its end of turn, unless it has one, the messages, and
        the opening of the next reply. Raises DataError if the template refuses the messages, RewrittenTurn if it writes
        the reply otherwise once they follow it, or leaves out the thinking, even empty, of the given reply (`after`).
        """
        names = [str(message.get("name") or FIRST) for message in messages if message["role"] == "tool"]
        reply = _reply(tool_calls=tool_calls([(name, {}) for name in names])) if names else _reply()
        answered = [
            {**message, "tool_call_id": call_id(number)} if message["role"] == "tool" else message
            for number, message in enumerate(messages)
        ]
        talks = [[QUESTION, reply], [QUESTION, reply, *answered]]
        before, whole = map(_text, self._render(talks, self.tools, opened=1), ("a reply", "the messages"))
        if REPLY in before and REPLY in whole:
            before, whole = before.rpartition(REPLY)[2], whole.rpartition(REPLY)[2]
        end = self._call_end if names else self._end
        same = len(before)
        if not whole.startswith(before):  # the last turn may end otherwise
            end, same = "", same - len(end)
        if not whole.startswith(before[:same]):
            one, other = self._ids(before), self._ids(whole)
            at = common_prefix(one, other)
            shown = (str(self.tokenizer.decode(ids[max(0, at - SHOWN) : at + SHOWN])) for ids in (one, other))
            raise RewrittenTurn(
                "the chat template writes a reply otherwise once messages follow it, so no tokens can be appended: "
                f"{' becomes '.join(map(repr, shown))}; choose another template with data.template"
            )
        if after is not None and after.thinks and self._forgotten(reply, answered, after.reasoning is None):
            raise RewrittenTurn(
                "the chat template removes the thinking of a reply once messages follow it, so these follow other "
                f"tokens than were sampled: {self._think[0]} … {self._think[1]} is left out; choose another template "
                "with data.template, or set rewritten_turns: fork or keep"
            )
        added = self._ids(end + whole[same:])
        most = min(len(ids), len(added))
        overlap = next((n for n in range(most, 0, -1) if list(ids[len(ids) - n :]) == added[:n]), 0)
        return added[overlap:]

    def _forgotten(self, reply: Message, messages: Sequence[Message], empty: bool) -> bool:
        """Whether the template leaves out the thinking of a reply that these messages follow, be it given apart or in
        the text of the reply; if the thinking is `empty`, its block."""
        key = empty, *(str(message["role"]) for message in messages)
        if key not in self._forgets:
            begin, end = self._think
            thinking = "" if empty else f"{THOUGHT}\n"
            within = {**reply, "content": f"{begin}\n{thinking}{end}\n\n{REPLY}"}
            apart = {**reply, "reasoning_content": thinking.strip()}
            done = self._render([[QUESTION, known, *messages] for known in (apart, within)], self.tools)
            before = [each.text.rpartition(REPLY)[0].rstrip() for each in done]
            self._forgets[key] = not any(text.endswith(end) if empty else THOUGHT in text for text in before)
        return self._forgets[key]

    def cut(self, text: str, most: int) -> str:
        """The text without what follows its first `most` tokens."""
        ids = self._ids(text)
        return text if len(ids) <= most else str(self.tokenizer.decode(ids[:most]))

    def parse(self, ids: Sequence[int]) -> Reply:
        """A sampled reply in parts. What is not a complete tool call stays in the content."""
        text = str(self.tokenizer.decode(list(ids)))
        ends = (end.strip() for end in (self._call_end, self._end, str(self.tokenizer.eos_token or "")))
        if turn_end := next((end for end in ends if end and text.rstrip().endswith(end)), ""):
            text = text.rstrip().removesuffix(turn_end)
        begin, end = self._think
        if begin and self._opened.rstrip().endswith(begin):
            text = begin + text
        thinks = bool(begin) and (text.lstrip().startswith(begin) or self._opened.rstrip().endswith(end))
        reasoning = None
        if begin and text.lstrip().startswith(begin):
            reasoning, _, text = text.lstrip()[len(begin) :].partition(end)
            reasoning = self._plain(reasoning) or None
        calls, content, malformed = self._read(text, self._types)
        return Reply(self._plain(content), reasoning, tuple(calls), malformed, thinks)

    def _read(self, text: str, types: Types) -> tuple[list[Call], str, int]:
        """The tool calls of a text, the text without them, and the number of openings without a complete call."""
        if self._grammar is None:
            return [], text, 0
        calls, kept, malformed = read_calls(text, self._grammar, types)
        if calls:
            for mark in filter(None, self._wrapper):
                kept = kept.replace(mark, "")
        return calls, kept, malformed

    def _learn(self) -> Grammar:
        """How the template writes calls, from its rendering of known ones; proven on others."""
        one, two, known = (
            _reply(content=text, tool_calls=tool_calls(calls)) for text, calls in (("", ONE), ("", TWO), (REPLY, ONE))
        )
        talks = [[QUESTION], [QUESTION, one], [QUESTION, two], [QUESTION, known]]
        opened, single, double, after = self._render(talks, PROBE_TOOLS)
        start = _text(opened, "tools")
        if FIRST not in start:
            raise DataError("the chat template does not write tools: choose another with data.template")
        written = _text(single, "a tool call")
        written = written[common_prefix(start, written) :]
        again = "" if double.error else double.text[common_prefix(start, double.text) :]
        found = learned(written, again, self._end)
        if found is not None:
            self._grammar, self._call_end = found
            whole = after.text.rpartition(REPLY)[2] if REPLY in after.text else ""
            begin, _, rest = whole.partition(self._grammar.opening) if self._grammar.opening else ("", "", "")
            found = self._grammar.read(rest, 0, PROBE_TYPES) if rest else None
            last = rest[found[1] :].removesuffix(self._call_end) if found else ""
            self._wrapper = (begin.strip(), last.strip())
            if (wrong := self._unread()) is None:
                return self._grammar
        else:
            wrong = written
        raise DataError(
            "the chat template writes tool calls in a form that cannot be read back, so replies with calls cannot be "
            f"told from others: {wrong[:200]!r}; choose another template with data.template"
        )

    def _unread(self) -> str | None:
        """The rendering of the first of PROOFS that is not read back; None if all are."""
        replies = [_reply(content="", tool_calls=tool_calls(calls)) for calls in PROOFS]
        start, *done = self._render([[QUESTION], *([QUESTION, reply] for reply in replies)], PROBE_TOOLS)
        for calls, proof in zip(PROOFS, done, strict=True):
            text = _text(proof, "a tool call")[common_prefix(start.text, proof.text) :]
            if self._read(text, PROBE_TYPES)[0] != calls:
                return text
        return None

    def _render(self, talks: list[list[Message]], tools: list[Any] | None, opened: int = 0) -> list[Rendered]:
        """The text of each conversation; number `opened` with the opening of the next reply."""
        jobs = [
            RenderRequest(talk, tools, generate=number == opened, variables=self._variables)
            for number, talk in enumerate(talks)
        ]
        with rendering(self.tokenizer, date=self._date) as renderer:
            return renderer.render(jobs)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _plain(self, text: str) -> str:
        """The text without special tokens and without spaces around it."""
        return self._special.sub("", text).strip()


def _reply(content: str = REPLY, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def _types(function: Mapping[str, Any]) -> dict[str, str]:
    """The JSON type of each argument of a tool."""
    properties = (function.get("parameters") or {}).get("properties") or {}
    return {key: str(value.get("type", "")) for key, value in properties.items() if isinstance(value, Mapping)}


def _text(rendered: Rendered, what: str) -> str:
    if rendered.error:
        raise DataError(f"the chat template refuses {what}: {rendered.error.removeprefix(FAILS)}")
    return rendered.text


def _thinking(opened: str, thought: Rendered) -> tuple[str, str]:
    """The texts before and after the thinking of a reply: those of `<think>` unless the template has others."""
    if thought.error or THOUGHT not in thought.text or REPLY not in thought.text.rpartition(THOUGHT)[2]:
        return THINK
    before = thought.text.partition(THOUGHT)[0]
    begin = before[common_prefix(opened, before) :].strip() or (THINK[0] if before.rstrip().endswith(THINK[0]) else "")
    return begin, thought.text.rpartition(THOUGHT)[2].partition(REPLY)[0].strip()
