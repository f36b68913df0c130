"""The common form that every format turns its rows into, and the checks of texts and messages on the way."""

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

TEXT_LIMIT = 1_000_000  # characters of one text: longer ones are damage, or documents to be split
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
    """Why one row cannot be used; it is counted as malformed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One example before tokenisation, either all texts or all lists of messages.

    Without `prompt` it is a document (a text) or a whole conversation (messages). With `rejected` it is a pair, whose
    rejected reply may answer a prompt of its own.
    """

    prompt: str | Turns | None
    chosen: str | Turns
    rejected: str | Turns | None = None
    rejected_prompt: str | Turns | None = None
    margin: float | None = None
    tie: bool = False
    tools: list[Any] | None = None
    label: bool | None = None  # of single completions: desirable or not
    answer: str | None = None  # the right one, of rows that have it apart: what rewards compare with


Fields = Mapping[str, Any]


def text_of(value: object, name: str) -> str:
    """A text that a tokenizer can take. Raises RowError for other types, NUL, lone surrogates, a million characters."""
    if not isinstance(value, str):
        raise RowError(f"{name} must be a text, not {type_name(value)}")
    if len(value) > TEXT_LIMIT:
        raise RowError(f"{name} has {len(value):,} characters, over the limit of {TEXT_LIMIT:,} for one text")
    if "\0" in value:
        raise RowError(f"{name} contains NUL at character {value.index(chr(0)) + 1}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{name} is not valid Unicode: a lone surrogate at character {error.start + 1}") from None
    return value


def valid(value: Any, name: str) -> Any:
    """What templates and rewards are given as it is. Raises RowError for a lone surrogate anywhere inside."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise RowError(f"{name} is not valid Unicode: there is a lone surrogate in it") from None
    return value


def field(fields: Fields, name: str) -> Any:
    """A required field. Raises RowError when the row lacks it or has null there."""
    value = fields.get(name)
    if value is None:
        raise RowError(f"{name} is {'null' if name in fields else 'missing'}")
    return value


def optional_text(fields: Fields, name: str) -> str:
    """A text that may be missing or null, which is then empty."""
    return "" if fields.get(name) is None else text_of(fields[name], name)


def number_or_text(value: object, name: str) -> str:
    """An answer as text; data sets have whole numbers as 142.0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return text_of(value, name)
    if isinstance(value, float) and not math.isfinite(value):
        raise RowError(f"{name} must be a finite number, not {value}")
    return str(int(value)) if value == int(value) else str(value)


def messages_of(value: object, name: str) -> Turns:
    """Messages in one form, from `role`/`content` or ShareGPT's `from`/`value`, contents as texts or lists of parts."""
    items = [value] if isinstance(value, dict) else value
    if not isinstance(items, list):
        raise RowError(f"{name} must be a text or a list of messages, not {type_name(value)}")
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
        raise RowError(f"{where} has the role {given!r}: known are {', '.join((*KNOWN_ROLES, *ROLES))}")
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
    """A list of parts as one content: texts joined, reasoning and tool calls under the names that templates know."""
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
    """Tool descriptions, given as a list or as JSON text."""
    if value is None or value == "":
        return None
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise RowError("tools is a text that is not JSON") from None
    if not isinstance(tools, list):
        raise RowError(f"tools must be a list, not {type_name(tools)}")
    return valid(tools, "tools") or None


def as_turns(value: str | Turns, role: str) -> Turns:
    """A text as the one message of a role; messages as they are."""
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def without_think(value: str | Turns) -> str | Turns:
    """The text, or the assistant's messages, without `<think>…</think>`."""
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
