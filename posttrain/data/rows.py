"""The common form of rows of every format, checks of their strings and messages, and changes to their shape."""

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from posttrain.base.errors import DataError
from posttrain.base.files import table_beside
from posttrain.config.schema.data import variables
from posttrain.data.readers import type_name
from posttrain.data.render import WEIGHT, Arguments, Message, without

TEXT_LIMIT = 1_000_000  # characters in one string; a longer string is damaged, or a document to split
THINK = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
ROLES: dict[str, str] = table_beside(__file__, "roles.yaml")
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
MEDIA = ("image", "image_url", "images", "video", "videos", "audio", "audios")
KEPT = ("name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")
# Message keys that hold a loss weight: a number from 0 to 1, or true or false. Keys in MASKS mean the opposite.
WEIGHTS = ("weight", "loss_weight", "train", "training", "loss", "loss_mask", "loss_scale")
MASKS = ("mask", "masked")
DETAILS = ("train_detail", "training_detail")  # weights for parts of a message, which are not supported
MESSAGE_KEYS = frozenset(
    {"role", "content", "from", "value", "reasoning", "function_call", *KEPT, *WEIGHTS, *MASKS, *DETAILS}
)  # all message keys that are read
MESSAGES = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")  # fields that may hold messages
TRUTHS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

Turns = list[Message]


class RowError(Exception):
    """The reason why a row cannot be used; it is counted as malformed."""


class IdenticalError(RowError):
    """The two replies of a pair are the same; such rows are counted separately."""


class UntrainedError(RowError):
    """All messages of a row have the loss weight 0; such rows are counted separately."""


@dataclass(frozen=True, slots=True)
class Row:
    """One example before tokenisation: its parts are all strings, or all lists of messages.

    Without `prompt`, it is a document (a string) or a whole conversation (messages). With `rejected`, it is a pair,
    whose rejected reply may have a separate prompt.
    """

    prompt: str | Turns | None
    chosen: str | Turns
    rejected: str | Turns | None = None
    rejected_prompt: str | Turns | None = None
    margin: float | None = None
    tie: bool = False
    tools: list[Any] | None = None
    label: bool | None = None  # whether a single completion is desirable
    answer: str | None = None  # the reference answer for rewards, if the row has one
    train_history: bool = False  # train on replies in the prompt as on the completion, unless completion_only_loss
    variables: Mapping[str, Any] | None = None  # chat template variables for this row


Fields = Mapping[str, Any]


def is_undesirable(value: Fields) -> bool:
    """Whether a row has KTO's label for completions that a model should not learn to write."""
    return any(str(value.get(name)).strip().lower() in ("false", "no", "0", "0.0") for name in ("label", "kto_tag"))


def tidied(fields: Fields, structured: Collection[str], cells: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields in the form that is common to all file types. Object keys with a null value are removed,
    because typed columns give every object all keys of the column. JSON strings in `structured` fields are parsed.
    Blank strings in these fields and in `cells`, fields of a CSV file, become null."""
    tidy: dict[str, Any] = {}
    for name, value in fields.items():
        if not isinstance(value, str):
            value = _without_nulls(value)
        elif name in structured:
            value = parsed(value, name)
        elif name in cells:
            word = value.strip().lower()
            value = None if not word else TRUTHS.get(word, value) if name in ("label", "tie") else value
        tidy[name] = [*map(_renamed, value)] if name in MESSAGES and isinstance(value, list) else value
    return tidy


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _renamed(message: Any) -> Any:
    """A message with its reasoning and its function call under the keys that chat templates read."""
    if not isinstance(message, dict):
        return message
    named: dict[str, Any] = {}
    if isinstance(message.get("reasoning"), str) and "thinking" not in message:
        named["reasoning_content"] = message["reasoning"]
    if isinstance(message.get("function_call"), dict):
        named["tool_calls"] = [message["function_call"]]
    return {**named, **message}


def parsed(text: str, name: str) -> Any:
    """The value of a JSON string; None if it is blank. Raises RowError if it is not JSON."""
    try:
        return json.loads(text) if text.strip() else None
    except (ValueError, RecursionError):
        raise RowError(f"{name} must be JSON, not the string {text[:60]!r}") from None


def with_arguments(turns: Turns) -> Turns:
    """The messages with the arguments of tool calls as objects, even if the row has them as JSON strings."""
    return [{**turn, "tool_calls": _calls(turn["tool_calls"])} if "tool_calls" in turn else turn for turn in turns]


def _calls(value: Any) -> list[Any]:
    calls = parsed(value, "tool_calls") or [] if isinstance(value, str) else value
    calls = [calls] if isinstance(calls, dict) else calls
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RowError("tool_calls must be a list of objects with a name and arguments")
    return [_with_object(call) for call in calls]


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_object(call["function"])}
    arguments = call.get("arguments")
    if arguments is None:
        return {**call, "arguments": {}}
    if not isinstance(arguments, str):
        return call
    name = f"arguments of the tool call {str(call.get('name'))[:60]!r}"
    value = parsed(arguments, name)
    if not isinstance(value, dict | None):
        raise RowError(f"{name} must be an object, not {type_name(value)}: {arguments[:60]!r}")
    return {**call, "arguments": valid({} if value is None else Arguments(value, arguments), name)}


def with_weights(turns: Turns) -> Turns:
    """The messages with their weight keys replaced by `WEIGHT`: (key in the row, weight), unless the weight is 1."""
    weighted = []
    for turn in turns:
        flags, [rest] = turn.get(WEIGHT, {}), without([turn], WEIGHT)
        least, key = min(((_weight(key, value), key) for key, value in flags.items()), default=(1.0, ""))
        weighted.append({**rest, WEIGHT: (key, least)} if least != 1 else rest)
    return weighted


def _weight(key: str, value: object) -> float:
    if key in DETAILS:
        raise DataError(f"{key} weights parts of a message, which is not supported: remove it, or set weight")
    if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
        raise RowError(f"{key} of a message must be true, false or a number from 0 to 1, not {str(value)[:40]!r}")
    return 1.0 - value if key in MASKS else float(value)


def text_of(value: object, name: str) -> str:
    """Return a string for the tokenizer. Raises RowError if the value is not a string, is longer than a million
    characters, or contains NUL or lone surrogates."""
    if not isinstance(value, str):
        raise RowError(f"{name} must be a string, not {type_name(value)}")
    if len(value) > TEXT_LIMIT:
        raise RowError(f"{name} has {len(value):,} characters, above the limit of {TEXT_LIMIT:,} for one string")
    if "\0" in value:
        raise RowError(f"{name} contains NUL at character {value.index(chr(0)) + 1}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{name} is not valid Unicode: a lone surrogate at character {error.start + 1}") from None
    return value


def valid(value: Any, name: str) -> Any:
    """Return a value for templates and rewards unchanged. Raises RowError if it contains a lone surrogate."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise RowError(f"{name} is not valid Unicode: it contains a lone surrogate") from None
    return value


def field(fields: Fields, name: str) -> Any:
    """A required field. Raises RowError if it is missing or null."""
    value = fields.get(name)
    if value is None:
        raise RowError(f"{name} is {'null' if name in fields else 'missing'}")
    return value


def optional_text(fields: Fields, name: str) -> str:
    """A string field; empty if it is missing or null."""
    return "" if fields.get(name) is None else text_of(fields[name], name)


def number_or_text(value: object, name: str) -> str:
    """An answer as a string. Whole numbers lose their `.0`: some data sets write 142 as 142.0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return text_of(value, name)
    if isinstance(value, float) and not math.isfinite(value):
        raise RowError(f"{name} must be a finite number, not {value}")
    return str(int(value)) if value == int(value) else str(value)


def text_or_messages(value: object, name: str) -> str | Turns:
    """A string, or messages as `messages_of` returns them."""
    if not isinstance(value, str | list | dict):
        raise RowError(f"{name} must be a string or a list of messages, not {type_name(value)}")
    return text_of(value, name) if isinstance(value, str) else messages_of(value, name)


def messages_of(value: object, name: str) -> Turns:
    """Messages from `role`/`content` or ShareGPT's `from`/`value`; the content is a string or a list of parts."""
    items = [value] if isinstance(value, dict) else value
    if not isinstance(items, list):
        raise RowError(f"{name} must be a list of messages, not {type_name(value)}")
    if not items:
        raise RowError(f"{name} is an empty list of messages")
    return [_message(item, f"{name}[{index}]") for index, item in enumerate(items)]


def _message(item: object, where: str) -> Message:
    if not isinstance(item, dict):
        raise RowError(f"{where} must be a message, not {type_name(item)}")
    role_key, content_key = ("from", "value") if item.get("from") is not None else ("role", "content")
    name = item.get(role_key)
    role = ROLES.get(name, name) if isinstance(name, str) else name
    if role not in KNOWN_ROLES:
        raise RowError(f"{where} has the role {name!r}; known roles are {', '.join((*KNOWN_ROLES, *ROLES))}")
    kept = {key: valid(item[key], f"{where} {key}") for key in KEPT if item.get(key) is not None}
    if flags := {key: item[key] for key in (*WEIGHTS, *MASKS, *DETAILS) if item.get(key) not in (None, [])}:
        kept[WEIGHT] = valid(flags, f"{where} weights")
    content = item.get(content_key)
    if name == "function_call":
        return {"role": role, "content": "", "tool_calls": _tool_calls(content, where)}
    if isinstance(content, list):
        return {"role": role, **_parts(content, where), **kept}
    if content is None and "tool_calls" in kept:
        content = ""
    return {"role": role, "content": text_of(content, f"{where} {content_key}"), **kept}


def _parts(parts: list[Any], where: str) -> Message:
    """The parts of a content as fields of one message: joined text, reasoning and tool calls, named as in templates."""
    texts: list[str] = []
    message: Message = {}
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in MEDIA:
            raise DataError(f"{where} has a part of type {kind}: posttrain trains text models only")
        if not isinstance(part, dict) or kind not in ("text", "reasoning", "tool_call"):
            raise RowError(f"{where} has a part that is not text, reasoning or tool_call: {str(part)[:60]!r}")
        value = part.get("value") if part.get("text") is None else part["text"]
        if kind == "tool_call":
            message.setdefault("tool_calls", []).extend(_tool_calls(value, where))
        elif kind == "reasoning":
            message["reasoning_content"] = message.get("reasoning_content", "") + text_of(value, f"{where} reasoning")
        else:
            texts.append(text_of(value, f"{where} text"))
    return {"content": "".join(texts), **message}


def _tool_calls(value: object, where: str) -> list[dict[str, Any]]:
    """One call or a list of calls, as objects or JSON, in the form that chat templates read."""
    try:
        parts = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise RowError(f"{where} has a tool call that is not JSON") from None
    calls = []
    for call in parts if isinstance(parts, list) else [parts]:
        call = call["function"] if isinstance(call, dict) and isinstance(call.get("function"), dict) else call
        if not isinstance(call, dict) or "name" not in call:
            raise RowError(f"{where} has a tool call without a name")
        valid(call, f"{where} tool call")
        calls.append({"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}})
    return calls


def tools_of(value: object) -> list[Any] | None:
    """Tool descriptions, from a list, a single description, or the JSON of either; list items may also be JSON."""
    tools = parsed(value, "tools") if isinstance(value, str) else value
    if tools is None or tools in ([], {}):
        return None
    if not isinstance(tools, list | dict):
        raise RowError(f"tools must be a list, not {type_name(tools)}")
    listed = tools if isinstance(tools, list) else [tools]
    return valid([parsed(tool, "tools") if isinstance(tool, str) else tool for tool in listed], "tools")


VARIABLES = "chat_template_kwargs"  # column with chat template variables, in every format


def variables_of(value: object) -> dict[str, Any]:
    """Chat template variables from a mapping or its JSON string, without nulls. Raises RowError for names and values
    that a template cannot take."""
    with suppress(RowError):  # text that is not JSON is rejected below
        value = parsed(value, "") if isinstance(value, str) else value
    try:
        return variables({} if value is None else _without_nulls(value))
    except ValueError as error:
        raise RowError(f"chat_template_kwargs: {error}") from None


def as_turns(value: str | Turns, role: str) -> Turns:
    """A string as a list with one message of this role; a list of messages is returned unchanged."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def without_think(value: str | Turns) -> str | Turns:
    """Remove `<think>…</think>` from a string, or the thinking from the assistant's messages."""
    if isinstance(value, str):
        return THINK.sub("", value)
    return [
        {**bare, "content": THINK.sub("", turn["content"])} if turn["role"] == "assistant" else turn
        for turn, bare in zip(value, without(value, "reasoning_content", "thinking"), strict=True)
    ]


def in_messages(row: Row, change: Callable[[Turns], Turns]) -> Row:
    """The row with `change` applied to each of its lists of messages."""
    parts = {name: getattr(row, name) for name in ("prompt", "chosen", "rejected", "rejected_prompt")}
    return replace(row, **{name: change(value) for name, value in parts.items() if isinstance(value, list)})


def without_weights(row: Row, trainer: str) -> Row:
    """The row without message weights, for methods that do not support them. Raises DataError for a weight that would
    have an effect: any weight on a reply, and any except 0 on a prompt, which is not trained on."""
    for name in ("prompt", "rejected_prompt", "chosen", "rejected"):
        turns = getattr(row, name)
        for turn in turns if isinstance(turns, list) else ():
            key, weight = turn.get(WEIGHT, ("", 1.0))
            if weight != 1 and (weight != 0 or name in ("chosen", "rejected")):
                raise DataError(
                    f"a message of the {turn['role']} has {key} (a loss weight of {weight:g}), which {trainer} does "
                    "not support: only SFT weights messages. Remove the key or the row"
                )
    return in_messages(row, lambda turns: without(turns, WEIGHT))


def refuse_without_reply(row: Row) -> None:
    """Raise RowError if messages to train on have no assistant turn."""
    what = "the conversation" if row.prompt is None else "the completion" if row.rejected is None else "chosen"
    for name, turns in ((what, row.chosen), ("rejected", row.rejected)):
        if isinstance(turns, list) and all(turn["role"] != "assistant" for turn in turns):
            raise RowError(f"{name} has no assistant turn, so there is no reply to learn from")


def last_turn_as_completion(row: Row) -> Row:
    messages = row.chosen
    if isinstance(messages, str) or len(messages) < 2 or messages[-1]["role"] != "assistant":
        raise RowError(
            "completion_only_loss needs an assistant turn at the end of the conversation, after another turn"
        )
    return replace(row, prompt=messages[:-1], chosen=messages[-1:])


def as_prompt(row: Row) -> Row:
    """The row's prompt without its reply; for a conversation, everything before a final assistant turn."""
    if row.prompt is not None:
        return Row(row.prompt, "", tools=row.tools, answer=row.answer)
    turns = row.chosen
    if not isinstance(turns, str) and turns[-1]["role"] == "assistant":
        turns = turns[:-1]
    return Row(turns, "", tools=row.tools)


def with_system(row: Row, system: str, beside: bool = False) -> Row:
    """Prepend a system message, unless the conversation begins with one; with `beside`, unless it begins with this
    same message. A prompt string becomes the user's message."""
    message = {"role": "system", "content": system}

    def begin(value: Any) -> Any:
        turns = as_turns(value, "user")
        has_one = bool(turns) and (turns[0] == message if beside else turns[0]["role"] == "system")
        return turns if has_one else [message, *turns]

    if row.prompt is None:
        return replace(row, chosen=begin(row.chosen))
    other = None if row.rejected_prompt is None else begin(row.rejected_prompt)
    return replace(row, prompt=begin(row.prompt), rejected_prompt=other)
