"""Tool calls in the text of a reply: how a template writes them, learned from known ones, and reading them back.

`learned` gets the text of ONE call and of TWO as a template writes them, and finds the grammar: JSON with the name in
it, JSON after the name, tags around each argument, or Python. PROOFS are calls that a grammar must read back before its
use (codec.py). Names are bounded, so that a hostile reply takes no longer than its length allows.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

from posttrain.data.readers import json_or_text
from posttrain.data.turns import common_prefix

ATTEMPTS = 8  # closings of Python calls that are tried: the first ones may be in a string
NAME = r"\s*(\S{1,200}?)"  # of a tool or an argument: without a bound, each opening would scan the rest of the reply


class Call(NamedTuple):
    """A tool call of a reply."""

    name: str
    arguments: dict[str, Any]


def tool_calls(calls: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Tool calls of a message, from names and arguments."""
    return [
        {"type": "function", "id": call_id(number), "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]


def call_id(number: int) -> str:
    """The id of a message's call: nine letters and digits, since some templates refuse other ids."""
    return f"abcdefgh{number % 10}"


Types = Mapping[str, Mapping[str, str]]  # the JSON type of each argument of each tool
Found = tuple[list[Call], int] | None  # calls, and where the text after them begins


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
            end = re.compile(rf"{NAME}{_pattern(self.middle)}").match(text, at)
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
            item = item.get("function", item) if isinstance(item, dict) else None
            if not isinstance(item, dict):
                return None
            name, arguments = item.get(self.name), item.get(self.arguments)
            if isinstance(arguments, str):
                arguments = json_or_text(arguments)
            elif arguments is None:
                arguments = {}
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
        match = re.compile(rf"{NAME}(?={ends})").match(text, at)
        if match is None:
            return None
        name, arguments = match[1], dict[str, Any]()
        position = _after(self.middle, text, match.end())
        key = re.compile(rf"{_pattern(self.before_key)}{NAME}{_pattern(self.after_key)}")
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
        for end in (match.start() for match in islice(re.finditer(re.escape(self.closing), text[at:]), ATTEMPTS)):
            try:
                tree = ast.parse(text[at : at + end].strip(), mode="eval").body
                items = tree.elts if isinstance(tree, ast.List) else [tree]
                calls = [
                    Call(ast.unparse(item.func), {str(word.arg): _literal(word.value) for word in item.keywords})
                    for item in items
                    if isinstance(item, ast.Call) and not item.args
                ]
            except (SyntaxError, ValueError, RecursionError, MemoryError):
                continue  # the closing may be in a string
            if calls and len(calls) == len(items):
                return calls, at + end + len(self.closing)
        return None


# How a template writes tool calls; spaces between the parts may differ. `opening` is the text before a call, and `read`
# returns the calls of one opening, after which is the position `at`, or None if no complete call is there.
Grammar = JsonGrammar | TaggedGrammar | PythonGrammar


def read_calls(text: str, grammar: Grammar, types: Types) -> tuple[list[Call], str, int]:
    """The tool calls of a text, the text without them, and the number of openings without a complete call."""
    calls, kept, malformed, at = list[Call](), "", 0, 0
    size = max(1, len(grammar.opening))
    while True:
        if grammar.opening:
            start = text.find(grammar.opening, at)
        else:  # a reply that is nothing but a call
            start = _spaces(text, 0) if at == 0 and text.lstrip()[:1] in ("{", "[") else -1
        if start < 0:
            return calls, kept + text[at:], malformed
        found = grammar.read(text, start + len(grammar.opening), types)
        if found is None:
            malformed += 1
            kept += text[at : start + size]
            at = start + size
        else:
            kept += text[at:start]
            calls += found[0]
            at = found[1]


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


def _typed(value: str, kind: str | None) -> Any:
    """An argument from its text and its JSON type: JSON, or as Python writes it. Without a type, what can be read."""
    for read in () if kind == "string" else (json.loads, _literal) if kind else (json.loads,):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return read(value)
    return value


def _literal(source: str | ast.expr) -> Any:
    """The value of a Python literal as JSON has it. Raises ValueError for others, such as sets and `...`."""
    try:
        return json.loads(json.dumps(ast.literal_eval(source)))
    except TypeError as error:
        raise ValueError(str(error)) from None


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


def learned(one: str, two: str, end: str) -> tuple[Grammar, str] | None:
    """The grammar of ONE and TWO as a template writes them, and the end of their turn; `end` is that of other turns."""
    ways = (_json_grammar, _named_json_grammar, _tagged_grammar, _python_grammar)
    return next((found for learn in ways if (found := learn(one, two, end))), None)


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
    found, twice = (_values(text, lambda value: FIRST in json.dumps(value)) for text in (one, two))
    if len(found) != 1:
        return None
    call = found[0][0]
    call = call[0] if isinstance(call, list) else call
    call = call.get("function", call) if isinstance(call, dict) else {}
    name = next((key for key, value in call.items() if value == FIRST), None)
    arguments = next((key for key, value in call.items() if ONE[0][1] in (value, json_or_text(str(value)))), None)
    if name is None or arguments is None:
        return None
    opening, closing, last = _ends(_between(one, found), _between(two, twice) if len(twice) == 2 else None, end)
    return JsonGrammar(opening, closing, name, arguments), last


def _named_json_grammar(one: str, two: str, end: str) -> tuple[Grammar, str] | None:
    known = [arguments for _, arguments in TWO]
    found, twice = (_values(text, lambda value: value in known) for text in (one, two))
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
    opening, closing, last = _ends([one[: match.start()], one[match.end() :]], None, end)
    return (PythonGrammar(opening, closing), last) if opening and closing else None
