"""Counts of a data set's rows (read, used, malformed, above the limits) and their lengths."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from posttrain.base.errors import DataError
from posttrain.base.files import table_beside
from posttrain.base.words import counted

MALFORMED_SHARE = 0.01  # maximum share of malformed rows; above it, reading the data is an error
MOST_UNREAD = 20  # maximum number of unread columns and keys that are listed
# Facts of a row above the length limits: its number over all sources; for a pair, the longer sequence and prompt.
OVERLONG = ("row", "tokens", "prompt_tokens")
WORDS = table_beside(__file__, "report.yaml")


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
    def of(cls, lengths: np.ndarray) -> "Lengths":
        """The statistics of an array of lengths; percentiles are lengths that occur in it."""
        if not len(lengths):
            return cls()
        p50, p90, p99 = np.percentile(lengths, [50, 90, 99], method="higher")
        return cls(float(lengths.mean()), int(p50), int(p90), int(p99), int(lengths.max()), int(lengths.sum()))

    def __str__(self) -> str:
        return f"mean {self.mean:,.0f}, P50 {self.p50:,}, P90 {self.p90:,}, P99 {self.p99:,}, max {self.max:,}"


@dataclass(slots=True, kw_only=True)
class Counts:
    """Numbers of rows of one source, or of all sources of a data set."""

    duplicates: int = 0  # rows with the tokens of an earlier row; they are used
    shifted: int = 0  # rows whose prompt has different tokens alone and before its completion
    identical: int = 0  # pairs whose two replies are the same; they are dropped
    unread: dict[str, int] = field(default_factory=dict)  # by the column or key that is not read
    untrained: int = 0  # rows whose messages all have the loss weight 0
    unwritten: dict[str, int] = field(default_factory=dict)  # by the part that the template omits
    users: int = 0  # rows of which turns of the user are trained on, too
    extracted: int = 0  # rows whose answer is only a part of the text in its column
    undesirable: int = 0  # rows with KTO's label for undesirable completions, which are trained on like all others


@dataclass(slots=True)
class Reading(Counts):
    """Findings of reading and tokenising one source, stored with its tokens in the cache."""

    format: str
    read: int = 0
    malformed: list[Malformed] = field(default_factory=list)


@dataclass(slots=True)
class Report(Counts):
    """Counts of one data set, before it is split. `tokens`: lengths of sequences before any limit; a pair has two."""

    name: str
    formats: tuple[str, ...]
    read: int
    used: int
    malformed: tuple[Malformed, ...]
    overlong_dropped: int
    overlong_truncated: int
    overlong_split: int  # documents split into chunks
    tokens: Lengths
    prompt_tokens: Lengths
    max_length: int
    max_prompt_length: int | None
    notes: tuple[str, ...] = field(default=())
    dropped: tuple[dict[str, int], ...] = field(default=())  # OVERLONG of the first of `overlong_dropped`
    rewarded: bool = False  # whether rewards receive every column

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
        return [*out, *self._counts(), *(f"  {row}" for row in self.malformed[:10]), *self._notes()]

    def findings(self) -> list[str]:
        """What is not read or not used as it is, one fact per line."""
        return [*self._counts(), *self._notes()]

    def _counts(self) -> list[str]:
        counts = {what: getattr(self, name) for name, what in WORDS["findings"].items()}
        counts["malformed, dropped"] = len(self.malformed)
        return [f"{counted(count, 'row')}{_share(count, self.read)} {what}" for what, count in counts.items() if count]

    def _notes(self) -> list[str]:
        return [*self._unread(), *self.warnings, *self.notes]

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
    return WORDS["lost"].get(name, f"write what the {name} says")


def _share(count: int, of: int) -> str:
    return f" ({count / of:.0%})" if count >= 0.01 * of else ""


def list_malformed(malformed: Iterable[Malformed]) -> str:
    """The first ten malformed rows, one per line."""
    return "\n".join(f"  {row}" for row in itertools.islice(malformed, 10))
