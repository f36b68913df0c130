"""The layout of a data set's rows: their format, set or inferred from the columns, and the column of each field."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from posttrain.base.errors import DataError
from posttrain.data.formats import FORMATS, Format
from posttrain.data.kind import Kind
from posttrain.data.render import PREFILL, WEIGHT, without
from posttrain.data.rows import (
    MESSAGE_KEYS,
    MESSAGES,
    Fields,
    Row,
    RowError,
    in_messages,
    optional_text,
    parsed,
    tidied,
    with_arguments,
    with_weights,
)
from posttrain.data.templates import Template

PART_KEYS = frozenset({"type", "text", "value"})  # keys of the parts of a message's content
STRUCTURED = ("messages", "conversations", "tools", "history")  # fields that are never plain text, so strings are JSON
CELLS = ("label", "margin", "tie", "answer")  # fields that are null if their cell in a CSV file is blank
PROMPTS = ("prompt", "problem")  # also null if blank, in formats that need one of them


@dataclass(frozen=True, slots=True)
class Layout:
    """A format, and the data set's column for each field of the format."""

    name: str
    columns: Mapping[str, str]  # the data's column of each field of the format
    filled: frozenset[str]  # columns with a value in at least one of the first rows

    def read(self, value: Fields, template: Template, cells: bool = False, behavior_version: int = 2) -> Row:
        """The row in its common form. `cells`: the row comes from a file whose values are all strings. Raises RowError
        if the row is malformed.

        `behavior_version` 1 keeps nulls and the think tags of solutions, does not parse the arguments of tool calls,
        treats a prompt's last message as a separate turn, and reads `system` in three formats only.
        """
        fields = {name: value[column] for name, column in self.columns.items() if column in value}
        if self.name == "preference" and fields.get("prompt") is None:
            fields.pop("prompt", None)  # as if the column were missing, unless one of the first rows has a prompt
            if self.columns.get("prompt") in self.filled:
                fields["prompt"] = None
        if behavior_version < 2:
            template = replace(template, strip_think=None)
            fields.pop("history", None)
            if not (self.name in ("preference", "sharegpt") or (self.name == "alpaca" and template.turns)):
                fields.pop("system", None)
        else:
            pairs = ("chosen", "rejected") if self.name == "sharegpt" else ()
            blank = CELLS if self.name == "preference" else (*CELLS, *PROMPTS)
            fields = tidied(fields, (*STRUCTURED, *pairs), blank if cells else ())
        if optional_text(fields, "system") and not template.turns:
            raise RowError("system is not empty, and data.template: none cannot write it: choose another template")
        row = FORMATS[self.name].read(fields, template)
        if behavior_version < 2:
            return in_messages(row, lambda turns: without(turns, PREFILL, WEIGHT))
        return in_messages(in_messages(row, with_arguments), with_weights)

    def takes_part(self, value: Fields, answer: str | None) -> bool:
        """Whether the answer is only a part of the text in its column, such as what follows ####."""
        column = self.columns.get("answer", "answer")
        whole = value.get(column if value.get(column) not in (None, "") else self.columns.get("solution", ""))
        return answer is not None and isinstance(whole, str) and whole.strip() != answer

    def unread(self, value: Fields) -> set[str]:
        """The columns of a row that have a value but are not read by the format; keys of messages as `column[].key`."""
        filled = {column for column, item in value.items() if item not in (None, "")}
        fields = {column: name for name, column in self.columns.items()}
        if self.name == "kto" and value.get(self.columns.get("messages", "")):  # `messages` replaces both
            fields = {column: name for column, name in fields.items() if name not in ("prompt", "completion")}
        keys: set[str] = set()
        for column in filled & fields.keys():
            messages = value[column]
            if isinstance(messages, str) and fields[column] in STRUCTURED:
                with suppress(RowError):  # counted as malformed
                    messages = parsed(messages, column)
            if fields[column] in MESSAGES and isinstance(messages, list | dict):
                keys |= {f"{column}[].{key}" for key in _unread(messages, MESSAGE_KEYS)}
        return filled - fields.keys() | keys


def _unread(items: Any, read: frozenset[str]) -> Iterator[str]:
    """Yield keys of messages, or of the parts of their content, that have a value but are not in `read`."""
    for item in items if isinstance(items, list) else [items]:
        for key, value in item.items() if isinstance(item, dict) else ():
            if value is not None and key not in read:
                yield key
            elif key in ("content", "value") and read is MESSAGE_KEYS and isinstance(value, list):
                yield from (f"{key}[].{part}" for part in _unread(value, PART_KEYS))


def find_layout(format: str, columns: dict[str, str], sample: list[dict], kind: Kind, where: str) -> Layout:
    """The layout of rows like those in `sample`; `columns` maps fields to the data's columns. Raises DataError, which
    lists the columns, if columns of the format are missing or no format fits."""
    present = {name: None for value in sample for name in value}
    for name in ("image", "images", "video", "videos", "audio", "audios"):
        if any(value.get(name) for value in sample):
            raise DataError(f"{where} has a column {name!r}: posttrain trains text models only")
    for name, column in columns.items():
        if column in present:
            continue
        if name in present and any(column in (*known.required, *known.optional) for known in FORMATS.values()):
            raise DataError(f"data.columns: write {{{column}: {name}}}: first the field, then the column of the data")
        near = get_close_matches(column, present, n=1) or ([name] if name in present else [])
        meant = f"did you mean {near[0]}? " if near else ""
        raise DataError(f"data.columns: {where} has no column {column!r} (for {name}); {meant}it has {_list(present)}")
    if format == "auto":
        kind.refuse_columns({*present, *columns}, sample, where)
        format = kind.format or _detect(columns, present, sample, kind, where)
    known = FORMATS[format]
    names = (*known.required, *known.optional)
    if unknown := [name for name in columns if name not in names]:
        raise DataError(f"data.columns: format {format} has no field {unknown[0]!r}; it has {_list(names)}")
    column_of = _resolve(known, columns, present)
    missing = [name for name in known.required if name not in column_of]
    if missing or (known.one_of and not any(column_of.get(name) in present for name in known.one_of)):
        lacking = _list(missing) if missing else " or ".join(known.one_of)
        raise DataError(
            f"{where} has no column {lacking}, which format {format} needs; it has {_list(present)}. "
            "Name your columns with data.columns, e.g. {" + f"{(missing or known.one_of)[0]}: YOUR_COLUMN" + "}"
            f"{_if_messages(present)}"
        )
    if kind.compares and not (known.pairs and all(column_of.get(name) in present for name in ("chosen", "rejected"))):
        raise DataError(
            f"{where} is read as {format}, which has no chosen and rejected: reward models and DPO need "
            f"preference pairs (its columns: {_list(present)})"
        )
    filled = frozenset(name for value in sample for name in value if value[name] is not None)
    return Layout(format, column_of, filled)


def _resolve(known: Format, columns: dict[str, str], present: Iterable[str]) -> dict[str, str]:
    """The column of each field of the format: as given in `columns`, or named like the field or an alias of it. A
    required field is omitted if its column is not in `present`; an optional field may appear in a later row."""
    named = [name for name in known.required if columns.get(name, name) in present]
    fields = {*present, *columns}
    aliases = {alias: name for alias, name in known.aliases.items() if alias in present and name not in fields}
    taken = set(columns.values())  # a column mapped to another field is not read under its own name too
    free = [name for name in (*named, *known.optional) if name in columns or name not in taken]
    column_of = {name: columns.get(name, name) for name in free if name not in aliases.values()}
    for alias, name in aliases.items():
        if alias not in column_of.values():
            column_of.setdefault(name, alias)
    return column_of


def _detect(columns: dict[str, str], present: Iterable[str], sample: list[dict], kind: Kind, where: str) -> str:
    """Infer the format from the columns; mapped columns count under the names of their fields."""
    names = {*present, *columns}
    if {"chosen", "rejected"} <= names and "conversations" not in names:
        chosen = [value.get(columns.get("chosen", "chosen")) for value in sample]
        transcripts = [isinstance(item, str) and item.lstrip().startswith("Human:") for item in chosen]
        return "hh" if "prompt" not in names and sum(transcripts) * 2 > len(transcripts) else "preference"
    if "conversations" in names:
        return "sharegpt"
    inferred = ["messages", "alpaca", "prompt_completion", "problem_answer", "text"]
    if kind.samples:  # a `prompt` column is used as it is, unless the answer comes from a solution
        inferred.insert(3 if "prompt" in names and "solution" not in names else 4, "prompt")
    for format in inferred:
        known = FORMATS[format]
        column_of = _resolve(known, columns, names)
        has_one = not known.one_of or {column_of.get(name) for name in known.one_of} & names
        if set(known.required) <= column_of.keys() and has_one:
            return format
    needs = "; ".join(
        f"{name}: {', '.join(known.required)}{' and ' + ' or '.join(known.one_of) if known.one_of else ''}"
        for name, known in FORMATS.items()
        if known.required
    )
    raise DataError(
        f"{where} has the columns {_list(present)}, which fit no format. Set data.format and data.columns; the formats "
        f"need: {needs}. For environments that give the messages in `reset`, set data.format: episode"
        f"{_if_messages(present)}"
    )


def _if_messages(present: Iterable[str]) -> str:
    if not ({"role", "content"} <= {*present} or {"from", "value"} <= {*present}):
        return ""
    of_json = "of a .json file with one object, the items of its list are the rows"
    return f". Each row is one message, not a conversation; {of_json}: put a single conversation in a list, [{{...}}]"


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
