"""Counts of a data set's rows (read, used, malformed, above the limits) and their lengths."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from posttrain.base.errors import DataError
from posttrain.base.words import counted

MALFORMED_SHARE = 0.01  # maximum share of malformed rows; above it, reading the data is an error
MOST_UNREAD = 20  # maximum number of unread columns and keys that are listed
# Facts of a row above the length limits: its number over all sources; for a pair, the longer sequence and prompt.
OVERLONG = ("row", "tokens", "prompt_tokens")
LOST = {
    "tools": "write the tools",
    "thinking": "write the thinking of the last reply",
    "end of turn": "mark the end of the assistant's turn, so the model is not trained to stop there: move "
    "`{% endgeneration %}` after it, or remove the generation tags; turns are then located by rendering",
}


class MalformedError(DataError):
    """More than MALFORMED_SHARE of a source's rows are malformed."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """A row that could not be used."""

    file: str
    line: int
    reason: str
    row: int  # counted from 0 over all files of the source; a line may hold several rows

    def __str__(self) -> str:
        row = f" (row {self.row})" if self.row >= self.line else ""  # several rows on that line, or a later file
        return f"{self.file} line {self.line}{row}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Statistics of sequence lengths in tokens."""

    mean: float = 0.0
    p50: int = 0
    p90: int = 0
    p99: int = 0
    max: int = 0
    total: int = 0

    @classmethod
    def of(cls, lengths: np.ndarray) -> Lengths:
        """The statistics of an array of lengths; percentiles are lengths that occur in it."""
        if not len(lengths):
            return cls()
        p50, p90, p99 = np.percentile(lengths, [50, 90, 99], method="higher")
        return cls(float(lengths.mean()), int(p50), int(p90), int(p99), int(lengths.max()), int(lengths.sum()))

    def __str__(self) -> str:
        return f"mean {self.mean:,.0f}, P50 {self.p50:,}, P90 {self.p90:,}, P99 {self.p99:,}, max {self.max:,}"


@dataclass(slots=True)
class Reading:
    """Findings of reading and tokenising one source, stored with its tokens in the cache."""

    format: str
    read: int = 0
    malformed: list[Malformed] = field(default_factory=list)
    duplicates: int = 0
    shifted: int = 0
    identical: int = 0
    unread: dict[str, int] = field(default_factory=dict)  # number of rows by the column or key that is not read
    untrained: int = 0  # rows whose messages all have the loss weight 0
    unwritten: dict[str, int] = field(default_factory=dict)  # number of rows by the part that the template omits
    users: int = 0  # rows of which turns of the user are trained on, too

    @classmethod
    def from_json(cls, data: dict) -> Reading:
        return cls(**{**data, "malformed": [Malformed(**item) for item in data["malformed"]]})


@dataclass(frozen=True, slots=True)
class Report:
    """Counts of one data set, before it is split. `tokens`: lengths of sequences before any limit; a pair has two."""

    name: str
    formats: tuple[str, ...]
    read: int
    used: int
    malformed: tuple[Malformed, ...]
    duplicates: int  # rows with the tokens of an earlier row; they are used
    shifted: int  # rows whose prompt has different tokens alone and before its completion
    overlong_dropped: int
    overlong_truncated: int
    overlong_split: int  # documents split into chunks
    tokens: Lengths
    prompt_tokens: Lengths
    max_length: int
    max_prompt_length: int | None
    notes: tuple[str, ...] = field(default=())
    identical: int = 0  # pairs whose two replies are the same; they are dropped
    untrained: int = 0
    unwritten: Mapping[str, int] = field(default_factory=dict)  # number of rows by the part that the template omits
    dropped: tuple[dict[str, int], ...] = field(default=())  # OVERLONG of the first of `overlong_dropped`
    unread: dict[str, int] = field(default_factory=dict)  # number of rows by the column or key that is not read
    rewarded: bool = False  # whether rewards receive every column
    users: int = 0  # rows of which turns of the user are trained on, too

    def lines(self) -> list[str]:
        """The report in words, one fact per line, without counts of zero."""
        formats = ", ".join(dict.fromkeys(self.formats))
        out = [
            f"{self.name}: {counted(self.read, 'row')} read as {formats}, {counted(self.used, 'example')} used",
            f"tokens: {self.tokens} (limit {self.max_length:,})",
        ]
        if self.prompt_tokens.max:
            limit = "" if self.max_prompt_length is None else f" (limit {self.max_prompt_length:,})"
            out.append(f"prompt tokens: {self.prompt_tokens}{limit}")
        return [*out, *self.findings(), *(f"  {row}" for row in self.malformed[:10])]

    def findings(self) -> list[str]:
        """What is not read or not used as it is, one fact per line; malformed rows come last."""
        counts = {
            "over the length limit, dropped": self.overlong_dropped,
            "over the length limit, truncated": self.overlong_truncated,
            "documents over the length limit, split into chunks": self.overlong_split,
            "duplicates of an earlier row, used": self.duplicates,
            "whose prompt is tokenised differently with its completion than alone": self.shifted,
            "whose user turns are trained on, too, unless method.assistant_only_loss is true": self.users,
            "whose chosen and rejected are the same, dropped": self.identical,
            "with the loss weight 0 for everything to train on, dropped": self.untrained,
            "malformed, dropped": len(self.malformed),
        }
        dropped = [
            f"{counted(count, 'row')}{_share(count, self.read)} {what}" for what, count in counts.items() if count
        ]
        return [*self._unread(), *self.warnings, *self.notes, *dropped]

    @property
    def warnings(self) -> list[str]:
        """One sentence for each part of the rows that the template does not write."""
        return [
            f"{self.name}: in {counted(count, 'row')} the chat template does not {_lost(name)}"
            for name, count in self.unwritten.items()
        ]

    def _unread(self) -> Iterable[str]:
        for name, count in sorted(self.unread.items(), key=lambda item: -item[1])[:MOST_UNREAD]:
            readers = " (rewards in Python receive it)" if self.rewarded and "[]." not in name else ""
            yield f"not read: `{name}` in {count:,} of {counted(self.read, 'row')}{readers}"
        if len(self.unread) > MOST_UNREAD:
            yield f"not read: {len(self.unread) - MOST_UNREAD:,} more columns and keys"


def _lost(name: str) -> str:
    """A name from `posttrain.data.turns.unwritten`, in words."""
    if name.startswith("variable "):
        return f"read the {name} of chat_template_kwargs"
    return LOST.get(name, f"write what the {name} says")


def _share(count: int, of: int) -> str:
    return f" ({count / of:.0%})" if count >= 0.01 * of else ""


def list_malformed(malformed: Iterable[Malformed]) -> str:
    """The first ten malformed rows, one per line."""
    return "\n".join(f"  {row}" for row in itertools.islice(malformed, 10))
