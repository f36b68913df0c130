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

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError
from posttrain.data.render import FAILS, Message, Rendered, RenderRequest, rendering
from posttrain.data.turns import common_prefix

REPLY, THOUGHT = "7c0ffee", "5ca1ab1e"  # texts that no template has
QUESTION: Message = {"role": "user", "content": "a"}
SHOWN = 12  # tokens of an error on each side of a difference
CALL_ID = "abcdefgh"  # with a digit nine characters: some templates refuse other numbers of them
THINK = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call of a reply."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply in parts. Text that is not a complete tool call stays in `content`."""

    content: str
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    malformed: int = 0  # openings of tool calls without a readable call

    @property
    def message(self) -> Message:
        """The reply as a message of the assistant."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = tool_calls([(call.name, call.arguments) for call in self.calls])
        return message


def tool_calls(calls: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Tool calls of a message, from names and arguments."""
    return [
        {"type": "function", "id": f"{CALL_ID}{number % 10}", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]


Types = Mapping[str, Mapping[str, str]]  # the JSON type of each argument of each tool
Found = tuple[list[Call], int] | None  # calls, and where the text after them begins


class Grammar(Protocol):
    """How a template writes tool calls. Spaces between its parts may differ."""

    @property
    def opening(self) -> str:
        """The text before a call."""
        ...

    def read(self, text: str, at: int, types: Types) -> Found:
        """The calls of one opening; `at` is the position after it. None if no complete call is there."""
        ...


@dataclass(frozen=True, slots=True)
class JsonGrammar:
    """A call as JSON: an object with its name and its arguments, or a list of such objects; or the arguments alone, if
    the name is in the text before them, which ends in `middle`."""

    opening: str
    closing: str
    name: str = ""  # keys of the object
    arguments: str = ""
    middle: str | None = None

    def read(self, text: str, at: int, types: Types) -> Found:
        name = None
        if self.middle is not None:
            end = re.compile(rf"\s*(\S+?){_pattern(self.middle)}").match(text, at)
            if end is None:
                return None
            name, at = end[1], end.end()
        try:
            value, end = json.JSONDecoder().raw_decode(text, _spaces(text, at))
        except (ValueError, RecursionError):
            return None
        calls = self._calls(value) if name is None else [Call(name, value)] if isinstance(value, dict) else None
        after = _after(self.closing, text, end)
        return (calls, after) if calls and after is not None else None

    def _calls(self, value: Any) -> list[Call] | None:
        calls = []
        for item in value if isinstance(value, list) else [value]:
            item = item.get("function", item) if isinstance(item, dict) else {}
            name, arguments = (item.get(key) for key in (self.name, self.arguments)) if item else (None, None)
            arguments = _json(arguments) if isinstance(arguments, str) else {} if arguments is None else arguments
            if not isinstance(name, str) or not isinstance(arguments, dict):
                return None
            calls.append(Call(name, arguments))
        return calls


@dataclass(frozen=True, slots=True)
class TaggedGrammar:
    """A call as its name and, between tags, the names and values of its arguments: strings as they are, else JSON."""

    opening: str
    middle: str  # after the name
    before_key: str
    after_key: str
    after_value: str
    closing: str

    def read(self, text: str, at: int, types: Types) -> Found:
        ends = "|".join(map(_pattern, filter(None, (self.middle + self.before_key, self.middle + self.closing))))
        match = re.compile(rf"\s*(\S+?)(?={ends})").match(text, at)
        if match is None:
            return None
        name, arguments = match[1], dict[str, Any]()
        position = _after(self.middle, text, match.end())
        key = re.compile(rf"{_pattern(self.before_key)}\s*(\S+?){_pattern(self.after_key)}")
        padding = "\n" if self.after_key.endswith("\n") else ""
        while position is not None and (match := key.match(text, position)):
            begin = match.end() - (len(match[0]) - len(match[0].rstrip()))
            end = text.find(self.after_value.strip(), begin)
            if end < 0:
                return None
            value = text[begin:end]
            value = value.removeprefix(padding).removesuffix(padding) if padding else value
            arguments[match[1]] = _typed(value, types.get(name, {}).get(match[1]))
            position = end + len(self.after_value.strip())
        after = None if position is None else _after(self.closing, text, position)
        return ([Call(name, arguments)], after) if after is not None else None


@dataclass(frozen=True, slots=True)
class PythonGrammar:
    """A list of Python calls with keyword arguments."""

    opening: str
    closing: str

    def read(self, text: str, at: int, types: Types) -> Found:
        for end in (match.start() for match in re.finditer(re.escape(self.closing), text[at:])):
            try:
                tree = ast.parse(text[at : at + end].strip(), mode="eval").body
                items = tree.elts if isinstance(tree, ast.List) else [tree]
                calls = [
                    Call(
                        ast.unparse(item.func), {str(word.arg): ast.literal_eval(word.value) for word in item.keywords}
                    )
                    for item in items
                    if isinstance(item, ast.Call) and not item.args
                ]
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue  # the closing may be in a string
            if calls and len(calls) == len(items):
                return calls, at + end + len(self.closing)
        return None


def _pattern(literal: str) -> str:
    """A regular expression for a text whose spaces may differ."""
    return r"\s*" + r"\s*".join(map(re.escape, literal.split()))


def _after(literal: str, text: str, at: int) -> int | None:
    """Where the text after `literal` begins, which begins at `at` or after spaces; None if it does not."""
    match = re.compile(_pattern(literal)).match(text, at)
    return None if match is None else match.end()


def _spaces(text: str, at: int) -> int:
    """The position of the next character that is not a space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _typed(value: str, kind: str | None) -> Any:
    """An argument from its text and its JSON type: JSON, or as Python writes it. Without a type, what can be read."""
    if kind == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(value) if kind else value
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return value


# --- learning a template ----------------------------------------------------------------------------------------------

FIRST, SECOND = "alpha_probe", "beta_probe"  # names of tools
KEYS = ("first_key", "second_key")
VALUES = ("first value", 4711)


def _tool(name: str, types: Mapping[str, str]) -> dict[str, Any]:
    properties = {key: {"type": kind, "description": "an argument"} for key, kind in types.items()}
    schema = {"type": "object", "properties": properties, "required": [*types]}
    return {"type": "function", "function": {"name": name, "description": "a tool", "parameters": schema}}


PROBE_TYPES = {FIRST: {"first_key": "string", "second_key": "integer"}, SECOND: {"on": "boolean", "data": "object"}}
PROBE_TOOLS = [_tool(name, types) for name, types in PROBE_TYPES.items()]
ONE: list[tuple[str, dict[str, Any]]] = [(FIRST, dict(zip(KEYS, VALUES, strict=True)))]
TWO = [*ONE, (FIRST, {"first_key": "other value", "second_key": 5813})]
# What `parse` must read back before a template's calls are used.
PROOFS: tuple[list[tuple[str, dict[str, Any]]], ...] = (
    ONE,
    [(FIRST, {"first_key": 'say "ünï" 漢字 <b> {x} \\ it\'s', "second_key": -1})],
    [(FIRST, {"first_key": "12", "second_key": 12})],
    [(SECOND, {"on": True, "data": {"list": [1, 2.5, None, "true"], "empty": {}}})],
    [(SECOND, {})],
)


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
        self._types = {str(f["name"]): _types(f) for f in (tool.get("function", tool) for tool in tools)}
        thinking = _reply(reasoning_content=THOUGHT)
        opened, closed, thought = self._render(
            [[QUESTION], [QUESTION, _reply()], [QUESTION, thinking]], self.tools, opens=(True, False, False)
        )
        self._opened = _text(opened, "a question")
        self._end = _text(closed, "a reply").rpartition(REPLY)[2]  # the end of a turn of the assistant
        self._call_end, self._wrapper = self._end, ("", "")  # of a turn with tool calls; the text around all calls
        self._think = _thinking(self._opened, thought)
        self._grammar = self._learn() if self.tools else None

    def first(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation and of the opening of the next reply. Raises DataError if it is refused."""
        [whole] = self._render([messages], self.tools, opens=(True,))
        return self._ids(_text(whole, "the messages"))

    def bridge(self, ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """The tokens to append to `ids`, which end in a reply: its end of turn, unless it has one, the messages, and
        the opening of the next reply. Raises DataError if the template does not write messages after a reply."""
        names = [str(message.get("name") or FIRST) for message in messages if message["role"] == "tool"]
        reply = _reply(tool_calls=tool_calls([(name, {}) for name in names])) if names else _reply()
        answered = [
            {**message, "tool_call_id": f"{CALL_ID}{number % 10}"} if message["role"] == "tool" else message
            for number, message in enumerate(messages)
        ]
        talks = [[QUESTION, reply], [QUESTION, reply, *answered]]
        before, whole = map(_text, self._render(talks, self.tools, opens=(False, True)), ("a reply", "the messages"))
        if REPLY in before and REPLY in whole:
            before, whole = before.rpartition(REPLY)[2], whole.rpartition(REPLY)[2]
        end = self._call_end if names else self._end
        same = len(before)
        if not whole.startswith(before):  # the last turn may end otherwise
            end, same = "", same - len(end)
        if not whole.startswith(before[:same]):
            raise DataError(
                "the chat template writes a reply otherwise once messages follow it, so no tokens can be appended: "
                f"{self._differing(before, whole)}; choose another template with data.template"
            )
        added = self._ids(end + whole[same:])
        return added[_overlap(ids, added) :]

    def cut(self, text: str, most: int) -> str:
        """The text without what follows its first `most` tokens."""
        ids = self._ids(text)
        return text if len(ids) <= most else str(self.tokenizer.decode(ids[:most]))

    def is_lost(self, reply: Reply, messages: Sequence[Message]) -> bool:
        """Whether the template, when these messages follow a reply, omits what it wrote before: thinking, or tools."""
        given = _reply(**({"reasoning_content": THOUGHT} if reply.reasoning else {}))
        if reply.calls:
            given["tool_calls"] = tool_calls([(call.name, call.arguments) for call in reply.calls])
        answered = [{**m, "tool_call_id": f"{CALL_ID}0"} if m["role"] == "tool" else m for m in messages]
        talks = [[QUESTION], [QUESTION, given], [QUESTION, given, *answered]]
        start, before, whole = self._render(talks, self.tools, opens=(False, False, True))
        if start.error or before.error or whole.error:
            return False
        return not whole.text.startswith(start.text) or (THOUGHT in before.text and THOUGHT not in whole.text)

    def parse(self, ids: Sequence[int]) -> Reply:
        """A sampled reply in parts. What is not a complete tool call stays in the content."""
        text = self._decoded(ids)
        begin, end = self._think
        if begin and self._opened.rstrip().endswith(begin):
            text = begin + text
        reasoning = None
        if begin and text.lstrip().startswith(begin):
            reasoning, _, text = text.lstrip()[len(begin) :].partition(end)
            reasoning = self._plain(reasoning) or None
        calls, content, malformed = self._calls(text)
        return Reply(self._plain(content), reasoning, tuple(calls), malformed)

    def _calls(self, text: str) -> tuple[list[Call], str, int]:
        """The tool calls of a text, the text without them, and the number of openings without a complete call."""
        calls, kept, malformed, at = list[Call](), "", 0, 0
        grammar = self._grammar
        while grammar is not None:
            if grammar.opening:
                start = text.find(grammar.opening, at)
            else:  # a reply that is nothing but a call
                start = _spaces(text, 0) if at == 0 and text.lstrip()[:1] in ("{", "[") else -1
            if start < 0:
                break
            found = grammar.read(text, start + len(grammar.opening), self._types)
            if found is None:
                malformed += 1
                kept += text[at : start + max(1, len(grammar.opening))]
                at = start + max(1, len(grammar.opening))
                continue
            kept += text[at:start]
            calls += found[0]
            at = found[1]
        kept += text[at:]
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
        opened, single, double, after = self._render(talks, PROBE_TOOLS, opens=(True, False, False, False))
        start = _text(opened, "tools")
        if FIRST not in start:
            raise DataError("the chat template does not write tools: choose another with data.template")
        written = _text(single, "a tool call")
        written = written[common_prefix(start, written) :]
        again = "" if double.error else double.text[common_prefix(start, double.text) :]
        learned = _learned(written, again, self._end)
        if learned is not None:
            self._grammar, self._call_end = learned
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
        types, self._types = self._types, PROBE_TYPES
        try:
            replies = [_reply(content="", tool_calls=tool_calls(calls)) for calls in PROOFS]
            talks = [[QUESTION], *([QUESTION, reply] for reply in replies)]
            start, *done = self._render(talks, PROBE_TOOLS, opens=[True, *([False] * len(replies))])
            for calls, proof in zip(PROOFS, done, strict=True):
                text = _text(proof, "a tool call")[common_prefix(start.text, proof.text) :]
                if [(call.name, call.arguments) for call in self._calls(text)[0]] != calls:
                    return text
        finally:
            self._types = types
        return None

    def _render(
        self, talks: Sequence[Sequence[Message]], tools: list[Any] | None, opens: Sequence[bool] | None = None
    ) -> list[Rendered]:
        """The text of each conversation, with the opening of the next reply where `opens` is true."""
        opens = [False] * len(talks) if opens is None else opens
        jobs = [
            RenderRequest([*talk], tools, generate=opened, variables=self._variables)
            for talk, opened in zip(talks, opens, strict=True)
        ]
        with rendering(self.tokenizer, date=self._date) as renderer:
            return renderer.render(jobs)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _decoded(self, ids: Sequence[int]) -> str:
        """The text of a reply without its end of turn."""
        text = str(self.tokenizer.decode(list(ids)))
        for end in (self._call_end, self._end, str(self.tokenizer.eos_token or "")):
            token = end.strip()
            if token and text.rstrip().endswith(token):
                return text.rstrip().removesuffix(token)
        return text

    def _plain(self, text: str) -> str:
        """The text without special tokens and without spaces around it."""
        return re.sub("|".join(map(re.escape, self._special)), "", text).strip() if self._special else text.strip()

    @property
    def _special(self) -> list[str]:
        return [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]

    def _differing(self, left: str, right: str) -> str:
        """The tokens around the first difference of two texts."""
        one, other = self._ids(left), self._ids(right)
        at = common_prefix(one, other)
        shown = (str(self.tokenizer.decode(ids[max(0, at - SHOWN) : at + SHOWN])) for ids in (one, other))
        return " becomes ".join(map(repr, shown))


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


def _overlap(ids: Sequence[int], added: Sequence[int]) -> int:
    """How many of the first tokens of `added` `ids` end with."""
    most = min(len(ids), len(added))
    return next((n for n in range(most, 0, -1) if list(ids[len(ids) - n :]) == list(added[:n])), 0)


def _thinking(opened: str, thought: Rendered) -> tuple[str, str]:
    """The texts before and after the thinking of a reply: those of `<think>` unless the template has others."""
    if thought.error or THOUGHT not in thought.text or REPLY not in thought.text.rpartition(THOUGHT)[2]:
        return THINK
    before = thought.text.partition(THOUGHT)[0]
    begin = before[common_prefix(opened, before) :].strip() or (THINK[0] if before.rstrip().endswith(THINK[0]) else "")
    return begin, thought.text.rpartition(THOUGHT)[2].partition(REPLY)[0].strip()


def _learned(one: str, two: str, end: str) -> tuple[Grammar, str] | None:
    """The grammar of ONE and TWO as a template writes them, and the end of their turn; `end` is that of other turns."""
    for learn in (_json_grammar, _named_json_grammar, _tagged_grammar, _python_grammar):
        if learned := learn(one, two, end):
            return learned
    return None


def _parted(text: str, pieces: Sequence[str]) -> list[str] | None:
    """The texts before, between and after the pieces, which follow one another in it; None if one is missing."""
    parts = []
    for piece in pieces:
        part, found, text = text.partition(piece)
        if not found:
            return None
        parts.append(part)
    return [*parts, text]


def _common_suffix(left: str, right: str) -> str:
    size = common_prefix(left[::-1], right[::-1])
    return left[len(left) - size :]


def _ends(single: Sequence[str], double: Sequence[str] | None, end: str) -> tuple[str, str, str]:
    """The text before a call, after it, and the end of the turn. `single` are the texts before and after one call,
    `double` those before, between and after two."""
    before, after = single[0], single[-1]
    if double is None:  # one call is a turn
        closing = after.removesuffix(end)
        return before.strip(), closing.strip(), after[len(closing.rstrip()) :]
    # parts of tags that two different texts have in common belong to neither
    opening = _common_suffix(double[0], double[1]).lstrip("|> \n").rstrip()
    closing = double[1][: common_prefix(double[1], double[2])].lstrip().rstrip("<| \n")
    return opening, closing, after[after.find(closing) + len(closing) :]


def _values(text: str, fits: Callable[[Any], bool]) -> list[tuple[Any, int, int]]:
    """The JSON values in a text that fit, with the positions of their begin and end."""
    found, at = [], 0
    while (match := re.compile(r"[\[{]").search(text, at)) is not None:
        at = match.start() + 1
        try:
            value, end = json.JSONDecoder().raw_decode(text, match.start())
        except ValueError:
            continue
        if fits(value):
            found.append((value, match.start(), end))
            at = end
    return found


def _between(text: str, values: Sequence[tuple[Any, int, int]]) -> list[str]:
    """The texts before, between and after values."""
    starts, ends = [start for _, start, _ in values], [end for *_, end in values]
    return [text[a:b] for a, b in zip([0, *ends], [*starts, len(text)], strict=True)]


def _json_grammar(one: str, two: str, end: str) -> tuple[Grammar, str] | None:
    def is_call(value: Any) -> bool:
        return FIRST in json.dumps(value)

    found, twice = _values(one, is_call), _values(two, is_call)
    if len(found) != 1:
        return None
    call = found[0][0]
    call = call[0] if isinstance(call, list) else call
    call = call.get("function", call) if isinstance(call, dict) else {}
    name = next((key for key, value in call.items() if value == FIRST), None)
    arguments = next((key for key, value in call.items() if ONE[0][1] in (value, _json(str(value)))), None)
    if name is None or arguments is None:
        return None
    opening, closing, last = _ends(_between(one, found), _between(two, twice) if len(twice) == 2 else None, end)
    return JsonGrammar(opening, closing, name, arguments), last


def _named_json_grammar(one: str, two: str, end: str) -> tuple[Grammar, str] | None:
    def is_arguments(value: Any) -> bool:
        return value in [arguments for _, arguments in TWO]

    found, twice = _values(one, is_arguments), _values(two, is_arguments)
    if len(found) != 1 or FIRST not in (before := _between(one, found)[0]):
        return None
    middle = before.rpartition(FIRST)[2]

    def bare(parts: list[str]) -> list[str]:  # without the names
        return [*(part.removesuffix(FIRST + middle) for part in parts[:-1]), parts[-1]]

    double = bare(_between(two, twice)) if len(twice) == 2 else None
    opening, closing, last = _ends(bare(_between(one, found)), double, end)
    return (JsonGrammar(opening, closing, middle=middle), last) if opening and middle.strip() else None


def _tagged_grammar(one: str, two: str, end: str) -> tuple[Grammar, str] | None:
    def pieces(arguments: Mapping[str, Any]) -> list[str]:
        return [FIRST, *(str(piece) for pair in arguments.items() for piece in pair)]

    single = _parted(one, pieces(ONE[0][1]))
    double = _parted(two, [piece for _, arguments in TWO for piece in pieces(arguments)])
    if single is None:
        return None
    _, named, after_key, between, again, after = single
    before_key = _common_suffix(named, between)
    after_value = between[: len(between) - len(before_key)]
    if not (before_key.strip() and after_value.strip()) or again != after_key or not after.startswith(after_value):
        return None
    around = None if double is None else [double[0], double[5][len(after_value) :], double[10][len(after_value) :]]
    opening, closing, last = _ends([single[0], after[len(after_value) :]], around, end)
    middle = named[: len(named) - len(before_key)]
    if not opening:
        return None
    return TaggedGrammar(opening, middle, before_key, after_key, after_value, closing), last


def _python_grammar(one: str, two: str, end: str) -> tuple[Grammar, str] | None:
    match = re.search(rf"\[?{FIRST}\(first_key=(['\"])first value\1, ?second_key=4711\)\]?", one)
    if match is None:
        return None
    opening, closing = one[: match.start()].strip(), one[match.end() :].removesuffix(end)
    return (
        (PythonGrammar(opening, closing.strip()), one[match.end() + len(closing.rstrip()) :])
        if opening and closing.strip()
        else None
    )
