"""The items of a suite: rows as questions with their answers."""

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.base.errors import DataError, RewardError
from posttrain.base.files import path_of
from posttrain.base.words import counted
from posttrain.config.schema.suite import SuiteConfig
from posttrain.data.readers import Record
from posttrain.data.report import MALFORMED_SHARE, Malformed, list_malformed
from posttrain.data.sources import open_source
from posttrain.rewards.python import call_function

FIELD = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Item:
    """One question. `position` is its index in the whole suite, on which its random numbers depend."""

    position: int
    id: str
    group: str
    prompt: str | list[dict[str, str]]
    gold: str | None
    options: Mapping[str, Any]  # arguments of the rule
    fields: Mapping[str, Any]  # the row, with the suite's own fields
    problem: str | None = None  # why it cannot be asked


@dataclass(frozen=True, slots=True)
class Items:
    """The chosen items of a suite. `partial` describes the part chosen, as in "10 of 57 subjects"; None: the whole."""

    suite: SuiteConfig
    items: tuple[Item, ...]
    available: int  # items in the data
    partial: str | None
    digest: str  # of the data and the settings of the questions


def load_items(suite: SuiteConfig, max_rows: int | None = None) -> Items:
    """Read a suite's items; with `max_rows`, at most that many, evenly spread. Pairs are read when they are scored.

    A row without the suite's fields becomes an item with a `problem`. Raises DataError if the source cannot be read, or
    if more than 1 % of its rows have a problem.
    """
    if suite.kind == "preference":
        return Items(suite, (), 0, None, "")
    records = list(records_of(suite, suite.split))
    if not records:
        raise DataError(f"suite {suite.name}: {suite.source} has no rows")
    columns = {name for record in records for name in record.value or ()}
    shots = _shots(suite) if suite.shots else {}
    items = [_item(suite, record, columns, shots) for record in records]
    bad = [
        Malformed(record.file, record.line, item.problem, record.row)
        for record, item in zip(records, items, strict=True)
        if item.problem
    ]
    if len(bad) > MALFORMED_SHARE * len(records):
        shown = ", ".join(next((record.value for record in records if record.value), {}))
        raise DataError(
            f"suite {suite.name}: {len(bad):,} of {counted(len(records), 'row')} of {suite.source} cannot be asked, "
            f"which is over {MALFORMED_SHARE:.0%} (it has the columns {shown or 'none'}):\n{list_malformed(bad)}"
        )
    names = [name for name in FIELD.findall(str(suite.prompt)) if name != "shots"]
    if names and not {*names} & {*columns, *suite.columns}:
        raise DataError(
            f"suite {suite.name}: the prompt names {', '.join(names)}, but the rows of {suite.source} have "
            f"{', '.join(sorted(columns))}: correct the prompt, or map the columns with `columns`"
        )
    most = min(max_rows or len(items), len(items))
    chosen = [items[index * len(items) // most] for index in range(most)]
    twice, times = Counter(item.id for item in chosen).most_common(1)[0]
    if times > 1:
        raise DataError(f"suite {suite.name}: two items have the {suite.id or 'id'} {twice}")
    digest = hashlib.sha256(json.dumps(suite.choices).encode())
    for item in chosen:
        facts = [item.id, item.group, item.prompt, item.gold, item.options]
        digest.update(json.dumps(facts, sort_keys=True, default=str).encode())
    partial, groups = list[str](), len({item.group for item in items})
    if suite.groups is not None and groups < suite.groups:
        partial.append(f"{groups} of {suite.groups} {(suite.group or 'group').replace('_', ' ')}s")
    if len(chosen) < len(items):
        partial.append(f"{len(chosen):,} of {len(items):,} items")
    elif suite.items is not None and len(items) < suite.items and not partial:
        partial.append(f"{len(items):,} of {suite.items:,} items")
    return Items(suite, tuple(chosen), len(items), ", ".join(partial) or None, digest.hexdigest())


def fields_of(suite: SuiteConfig, row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row, and the fields that the suite derives from them."""
    fields = dict(row)
    for name, alternatives in suite.columns.items():
        for column in alternatives:
            template = FIELD.findall(column)
            if all(part in row for part in template or [column]):
                fields[name] = fill(column, row) if template else row[column]
                break
    return fields


def fill(template: str, fields: Mapping[str, Any]) -> str:
    """The string with every `{name}` of a field replaced by its value; other braces are left unchanged."""
    return FIELD.sub(lambda match: _text(fields[match[1]]) if match[1] in fields else match[0], template)


def text_of(prompt: str | Sequence[Mapping[str, str]]) -> str:
    """A prompt for display: the string, or the content of the last message."""
    return prompt if isinstance(prompt, str) else str(prompt[-1].get("content", ""))


def pair_text(row: Mapping[str, Any], columns: Mapping[str, str] | None = None) -> str:
    """A preference pair as a string, which also identifies it; the whole row if it has none of the columns."""
    names = {name: (columns or {}).get(name, name) for name in ("prompt", "chosen", "rejected")}
    parts = {name: row[column] for name, column in names.items() if column in row} or row
    return "\n\n".join(
        f"{name}: {part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)}"
        for name, part in parts.items()
    )


def records_of(suite: SuiteConfig, split: str) -> Iterator[Record]:
    """The rows of a suite's source, readable or not."""
    try:
        if suite.rows is None:
            yield from open_source(suite.source, split, None, 0, lambda working, answer: working).read()
            return
        rows = call_function(suite.rows, suite.source, split)
    except DataError as error:
        if path_of(suite.source).exists():
            raise
        raise DataError(f"suite {suite.name}: {error}; or give its rows as a file, with --data FILE") from error
    except RewardError as error:
        raise DataError(f"suite {suite.name}: rows: {error}") from error
    if not isinstance(rows, Iterable):
        raise DataError(f"suite {suite.name}: rows: {suite.rows} returned {type(rows).__name__}; it must yield dicts")
    for row, value in enumerate(rows):
        if isinstance(value, Record):
            yield value
        elif isinstance(value, Mapping):
            yield Record(row, suite.source, row + 1, dict(value))
        else:
            problem = f"{suite.rows} yielded {type(value).__name__}, not a dict"
            yield Record(row, suite.source, row + 1, None, problem)


def _item(suite: SuiteConfig, record: Record, columns: Collection[str], shots: Mapping[str, str]) -> Item:
    fields = fields_of(suite, record.value or {})
    group = _group(suite, fields)
    problem = record.problem or _lacking(suite, fields, columns)
    if suite.shots and not problem and group not in shots:
        examples = counted(suite.shots, "worked example")
        problem = f"{suite.shots_split} has fewer than {examples} of {group or 'the suite'}"
    fields["shots"] = shots.get(group, "")
    identity = _text(fields[suite.id]) if suite.id and suite.id in fields else str(record.row)
    if problem:
        return Item(record.row, identity, group, "", None, {}, fields, problem)
    prompt: str | list[dict[str, str]] = (
        fill(suite.prompt, fields)
        if isinstance(suite.prompt, str)
        else [{key: fill(value, fields) for key, value in message.items()} for message in suite.prompt]
    )
    gold = None if suite.answer is None else _text(fields[suite.answer])
    options = {name: fields.get(column) for name, column in suite.options.items()}
    return Item(record.row, identity, group, prompt, gold, options, fields)


def _group(suite: SuiteConfig, fields: Mapping[str, Any]) -> str:
    value = fields.get(suite.group) if suite.group else None
    return "" if value is None else _text(value)


def _lacking(suite: SuiteConfig, fields: Mapping[str, Any], columns: Collection[str]) -> str | None:
    """Why the row cannot be asked, or None. `{name}` in the prompt is a field if the suite or any row has it."""
    wanted = [*FIELD.findall(str(suite.prompt)), *suite.options.values(), *([suite.answer] if suite.answer else [])]
    known = {*suite.columns, *suite.options.values(), suite.answer, *columns}
    missing = [name for name in dict.fromkeys(wanted) if name in known and fields.get(name) is None]
    if not missing:
        return None
    sought = [column for name in missing for column in suite.columns.get(name, (name,))]
    return f"the row has no {' or '.join(sought)}"


def _text(value: Any) -> str:
    """A value as a string: whole numbers without `.0`, lists with commas."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return value if isinstance(value, str) else str(value)


def _shots(suite: SuiteConfig) -> dict[str, str]:
    """The worked examples of each group that has enough of them: the prompt after `{shots}`, and the answer."""
    if suite.rows is None and path_of(suite.source).is_file():
        raise DataError(
            f"suite {suite.name}: {suite.source} is one file, whose questions cannot also be worked examples: give a "
            f"folder with the splits {suite.split} and {suite.shots_split}, or set shots to 0"
        )
    body = str(suite.prompt).partition("{shots}")[2]
    examples: dict[str, list[str]] = defaultdict(list)
    for record in records_of(suite, suite.shots_split):
        fields = fields_of(suite, record.value or {})
        group = _group(suite, fields)
        if len(examples[group]) < suite.shots and (not suite.answer or fields.get(suite.answer) is not None):
            answer = _text(fields[suite.answer]) if suite.answer else ""
            end = suite.choices[int(answer)] if suite.choices and answer.isdecimal() else f" {answer}"
            examples[group].append(f"{fill(body, fields)}{end}\n\n")
    return {group: "".join(shots) for group, shots in examples.items() if len(shots) == suite.shots}
