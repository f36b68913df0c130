"""The common form of rows of every format, and the checks of their strings and messages."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from posttrain.data.readers import type_name
from posttrain.data.render import Message
from posttrain.errors import DataError

TEXT_LIMIT = 1_000_000  # characters of one string: longer ones are damaged, or documents to be split
THINK = re.compile(r"<think>.*?</think>\s*", re.DOTALL)
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "observation": "tool",
    "function_call": "assistant",
}
KNOWN_ROLES = ("system", "developer", "user", "assistant", "tool")
MEDIA = ("image", "image_url", "images", "video", "videos", "audio", "audios")
KEPT = ("name", "tool_calls", "tool_call_id", "reasoning_content", "thinking")

Turns = list[Message]


class RowError(Exception):
    """The reason why a row cannot be used; it is counted as malformed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One example before tokenisation, either all strings or all lists of messages.

    Without `prompt` it is a document (a string) or a whole conversation (messages). With `rejected` it is a pair, whose
    rejected reply may have its own prompt.
    """

    prompt: str | Turns | None
    chosen: str | Turns
    rejected: str | Turns | None = None
    rejected_prompt: str | Turns | None = None
    margin: float | None = None
    tie: bool = False
    tools: list[Any] | None = None
    label: bool | None = None  # of single completions: desirable or not
    answer: str | None = None  # the right answer, if the row has one: what rewards compare with


Fields = Mapping[str, Any]


def text_of(value: object, name: str) -> str:
    """A string for the tokenizer. Raises RowError for other types, NUL, lone surrogates, over a million characters."""
    if not isinstance(value, str):
        raise RowError(f"{name} must be a string, not {type_name(value)}")
    if len(value) > TEXT_LIMIT:
        raise RowError(f"{name} has {len(value):,} characters, over the limit of {TEXT_LIMIT:,} for one string")
    if "\0" in value:
        raise RowError(f"{name} contains NUL at character {value.index(chr(0)) + 1}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{name} is not valid Unicode: a lone surrogate at character {error.start + 1}") from None
    return value


def valid(value: Any, name: str) -> Any:
    """A value for templates and rewards, unchanged. Raises RowError for a lone surrogate anywhere inside."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise RowError(f"{name} is not valid Unicode: there is a lone surrogate in it") from None
    return value


def field(fields: Fields, name: str) -> Any:
    """A required field. Raises RowError if it is missing or null."""
    value = fields.get(name)
    if value is None:
        raise RowError(f"{name} is {'null' if name in fields else 'missing'}")
    return value


def optional_text(fields: Fields, name: str) -> str:
    """A string, empty if missing or null."""
    return "" if fields.get(name) is None else text_of(fields[name], name)


def number_or_text(value: object, name: str) -> str:
    """An answer as a string; data sets have whole numbers such as 142.0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return text_of(value, name)
    if isinstance(value, float) and not math.isfinite(value):
        raise RowError(f"{name} must be a finite number, not {value}")
    return str(int(value)) if value == int(value) else str(value)


def messages_of(value: object, name: str) -> Turns:
    """Messages from `role`/`content` or ShareGPT's `from`/`value`; a content is a string or a list of parts."""
    items = [value] if isinstance(value, dict) else value
    if not isinstance(items, list):
        raise RowError(f"{name} must be a string or a list of messages, not {type_name(value)}")
    if not items:
        raise RowError(f"{name} is an empty list of messages")
    return [_message(item, f"{name}[{index}]") for index, item in enumerate(items)]


def _message(item: object, where: str) -> Message:
    if not isinstance(item, dict):
        raise RowError(f"{where} must be a message, not {type_name(item)}")
    role_key, content_key = ("from", "value") if "from" in item else ("role", "content")
    given = item.get(role_key)
    role = ROLES.get(given, given) if isinstance(given, str) else given
    if role not in KNOWN_ROLES:
        raise RowError(f"{where} has the role {given!r}; known roles are {', '.join((*KNOWN_ROLES, *ROLES))}")
    kept = {key: valid(item[key], f"{where} {key}") for key in KEPT if item.get(key) is not None}
    content = item.get(content_key)
    if given == "function_call":
        return {"role": role, "content": "", "tool_calls": [_tool_call(content, where)]}
    if isinstance(content, list):
        return {"role": role, **_parts(content, where), **kept}
    if content is None and "tool_calls" in kept:
        content = ""
    return {"role": role, "content": text_of(content, f"{where} {content_key}"), **kept}


def _parts(parts: list[Any], where: str) -> Message:
    """A list of parts as one content: text joined, reasoning and tool calls by the names of chat templates."""
    texts: list[str] = []
    message: Message = {}
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in MEDIA:
            raise DataError(f"{where} has a part of type {kind}: posttrain trains text models only")
        if not isinstance(part, dict) or kind not in ("text", "reasoning", "tool_call"):
            raise RowError(f"{where} has a part that is not text, reasoning or tool_call: {str(part)[:60]!r}")
        value = part.get("text", part.get("value"))
        if kind == "tool_call":
            message.setdefault("tool_calls", []).append(_tool_call(value, where))
        elif kind == "reasoning":
            message["reasoning_content"] = message.get("reasoning_content", "") + text_of(value, f"{where} reasoning")
        else:
            texts.append(text_of(value, f"{where} text"))
    return {"content": "".join(texts), **message}


def _tool_call(value: object, where: str) -> dict[str, Any]:
    try:
        call = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise RowError(f"{where} has a tool call that is not JSON") from None
    if not isinstance(call, dict) or "name" not in call:
        raise RowError(f"{where} has a tool call without a name")
    valid(call, f"{where} tool call")
    return {"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}


def tools_of(value: object) -> list[Any] | None:
    """Tool descriptions, a list or a JSON string of one."""
    if value is None or value == "":
        return None
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise RowError("tools is a string that is not JSON") from None
    if not isinstance(tools, list):
        raise RowError(f"tools must be a list, not {type_name(tools)}")
    return valid(tools, "tools") or None


def as_turns(value: str | Turns, role: str) -> Turns:
    """A string as the only message of a role; messages unchanged."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def without_think(value: str | Turns) -> str | Turns:
    """The string, or the assistant's messages, without `<think>…</think>`."""
    if isinstance(value, str):
        return THINK.sub("", value)
    return [
        {
            **{k: v for k, v in m.items() if k not in ("reasoning_content", "thinking")},
            "content": THINK.sub("", m["content"]),
        }
        if m["role"] == "assistant"
        else m
        for m in value
    ]
