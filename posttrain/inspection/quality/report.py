"""The findings about a run's rows, as tables for the terminal and as JSON."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from posttrain.base.words import counted
from posttrain.data import Prepared
from posttrain.inspection.quality.contamination import COVERED, Contamination
from posttrain.inspection.quality.duplicates import NEAR, SHINGLE, groups_of, near_groups
from posttrain.inspection.quality.noise import CONFIDENT, LabelNoise
from posttrain.inspection.quality.noise import summary as noise_summary
from posttrain.inspection.quality.preferences import LengthBias, length_bias
from posttrain.inspection.quality.texts import MOST_WORDS, Corpus
from posttrain.inspection.quality.words import Array, Texts

SHOWN = 3  # examples on a line
LISTED = 10  # rows of a list
WIDEST = 34  # `validation: prompt in train, exact`


@dataclass(frozen=True, slots=True)
class Line:
    """A kind of duplicate: `rows` of `among` rows, as (row, the earlier row)."""

    what: str
    rows: tuple[tuple[str, str], ...]
    among: int


def duplicates(corpus: Corpus) -> list[Line]:
    """Training rows that repeat an earlier one, pairs with opposite labels, and validation rows in training."""
    # In this order the first of a group is a training row, if it has one.
    whole_index = np.argsort(corpus.sets, kind="stable")
    prompt_index = whole_index[corpus.prompts.lengths[whole_index] > 0]
    kinds = (
        ("prompt", prompt_index, _both(corpus.prompts, corpus.prompt_keys, prompt_index)),
        ("row", whole_index, _both(corpus.rows, corpus.row_keys, whole_index)),
    )
    lines = []
    for what, index, (exact, near) in kinds:
        train = corpus.sets[index] == 0
        again = np.flatnonzero(train & (exact != np.arange(len(exact))))
        nearly = np.flatnonzero(train & (near != np.arange(len(near))) & (exact == np.arange(len(exact))))
        for kind, found, first in (("exact", again, exact), ("near", nearly, near)):
            pairs = tuple((corpus.label(int(index[one])), corpus.label(int(index[first[one]]))) for one in found)
            lines.append(Line(f"{what}, {kind} duplicate", pairs, int(train.sum())))
    lines += _opposite(corpus)
    for number, name in enumerate(corpus.names[1:], 1):
        for what, index, (exact, near) in kinds:
            for kind, groups in (("exact", exact), ("near", near)):
                lines.append(_overlap(corpus, index, groups, number, f"{name}: {what} in train, {kind}"))
    return lines


def _both(texts: Texts, keys: Array, index: Array) -> tuple[Array, Array]:
    """Groups of equal and of near texts among `index`; members are places in it."""
    chosen = Texts(texts[int(one)] for one in index)
    exact = groups_of(keys[index])
    return exact, near_groups(chosen, exact)


def _opposite(corpus: Corpus) -> Iterator[Line]:
    """Pairs of which an earlier one has the same prompt and replies with the other label."""
    first: dict[int, int] = {}
    found = []
    for index in np.flatnonzero(corpus.sets == 0).tolist():
        if corpus.is_pair[index]:
            if (other := first.get(int(corpus.turned_keys[index]))) is not None:
                found.append((corpus.label(index), corpus.label(other)))
            first.setdefault(int(corpus.row_keys[index]), index)
    if corpus.is_pair.any():
        yield Line("pair with opposite labels", tuple(found), int((corpus.is_pair & (corpus.sets == 0)).sum()))


def _overlap(corpus: Corpus, index: Array, groups: Array, number: int, what: str) -> Line:
    """The rows of a validation set whose group has a training row. (`near` includes `exact`.)"""
    trains: dict[int, int] = {}
    for place in np.flatnonzero(corpus.sets[index] == 0).tolist():
        trains.setdefault(int(groups[place]), place)
    mine = np.flatnonzero(corpus.sets[index] == number).tolist()
    found = [(one, trains[int(groups[one])]) for one in mine if int(groups[one]) in trains]
    rows = tuple((corpus.label(index[one]), corpus.label(index[other])) for one, other in found)
    return Line(what, rows, len(mine))


def bias_of(prepared: Prepared, corpus: Corpus) -> LengthBias | None:
    """The length bias of the training pairs in tokens, without ties; None if there are none."""
    train = prepared.train
    if prepared.kind != "pair" or train.ties.all():
        return None
    inside = corpus.sets == 0
    prompts = dict(zip(corpus.numbers[inside].tolist(), corpus.prompt_keys[inside].tolist(), strict=True))
    _, once = np.unique(train.rows, return_index=True)
    once = once[~train.ties[once]]
    keys = [prompts.get(row, -1 - row) for row in train.rows[once].tolist()]
    return length_bias(train.view[once, 3], train.view[once, 4], keys)


@dataclass(frozen=True, slots=True)
class Quality:
    """All findings. `missing` are suites that were not checked, with the reason."""

    corpus: Corpus
    duplicates: Sequence[Line]
    contamination: Sequence[Contamination]
    missing: Mapping[str, str]
    n: int
    bias: LengthBias | None
    noise: LabelNoise | None
    pairs: Sequence[int]  # row numbers of `noise`
    margins: Sequence[float]

    def as_json(self) -> dict[str, Any]:
        """Everything, with all rows."""
        noise = self.noise
        return {
            "rows": {name: int((self.corpus.sets == i).sum()) for i, name in enumerate(self.corpus.names)},
            "words": len(self.corpus.rows.words),
            "only_first_rows_of": self.corpus.cut,
            "near": {"jaccard": NEAR, "words": SHINGLE},
            "duplicates": {one.what: {"of": one.among, "rows": one.rows} for one in self.duplicates},
            "contamination": {
                one.name: {name: getattr(one, name) for name in ("checked", "short", "unread", "copies", "hits")}
                for one in self.contamination
            },
            "ngram": self.n,
            "suites_not_checked": dict(self.missing),
            "notes": list(self.notes()),
            "length_bias": None if self.bias is None else asdict(self.bias),
            "label_noise": None
            if noise is None
            else {
                "pairs": noise.pairs,
                "rate": noise.rate,
                "interval": [noise.low, noise.high],
                "temperature": noise.temperature,
                "disagree": noise.disagree,
                "contradicted": [
                    {"row": self.pairs[i], "margin": self.margins[i], "wrong": float(noise.wrong_P[i])}
                    for i in noise.contradicted.tolist()
                ],
            },
        }

    def show(self, console: Console) -> None:
        """Print the findings in tables of at most 80 columns."""
        names, sets = self.corpus.names, self.corpus.sets
        counts = ", ".join(f"{name} {int((sets == i).sum()):,}" for i, name in enumerate(names))
        console.print(f"data quality: {counts} rows, {len(self.corpus.rows.words):,} words", soft_wrap=False)
        for name in self.corpus.cut:
            console.print(f"only the first {MOST_WORDS:,} words of {name} are checked", soft_wrap=False)
        table = _table("duplicates", "rows", "share", "examples")
        for one in self.duplicates:
            share = len(one.rows) / one.among if one.among else 0.0
            table.add_row(one.what, f"{len(one.rows):,}", f"{share:.1%}", _examples(one.rows))
        console.print(table)
        if self.contamination:
            table = _table("questions in train", "checked", "shared", "copies", "examples")
            for one in self.contamination:
                copies = [f"{question} in {row}" for question, share, row in one.hits if share >= COVERED]
                cells = f"{one.checked:,}", f"{len(one.hits):,}", f"{one.copies:,}", "; ".join(copies[:SHOWN])
                table.add_row(one.name, *cells)
            console.print(table)
        for line in self.notes():
            console.print(line, soft_wrap=False)
        if self.noise is not None and len(self.noise.contradicted):
            self._show_contradicted(self.noise, console)

    def notes(self) -> Iterator[str]:
        """The findings that are sentences."""
        if self.contamination:
            yield f"shared: a {self.n}-gram of words with a training row; copies: {COVERED:.0%} of a question's words"
        short = {one.name: one.short for one in self.contamination if one.short}
        if short:
            which = ", ".join(f"{count:,} of {name}" for name, count in short.items())
            yield f"questions of fewer than 8 words, not checked: {which}"
        for one in self.contamination:
            if one.unread:
                yield f"{one.name}: {counted(one.unread, 'question')} cannot be read, not checked"
        if self.missing:
            yield f"suites not checked, since their data is not in the local cache: {', '.join(self.missing)}"
        if self.bias is not None:
            yield from _bias_lines(self.bias)
        if self.noise is not None:
            yield f"label noise: {noise_summary(self.noise)}"
            sure, many = len(self.noise.contradicted), self.noise.disagree
            yield (
                f"the reward model prefers the rejected reply in {many / self.noise.pairs:.1%} of the pairs, and with "
                f"a calibrated probability of {CONFIDENT:.0%} or more in {sure:,} ({sure / self.noise.pairs:.1%})"
            )

    def _show_contradicted(self, noise: LabelNoise, console: Console) -> None:
        table = _table("label contradicted", "margin", "turned")
        for index in noise.contradicted[:LISTED].tolist():
            table.add_row(f"row {self.pairs[index]}", f"{self.margins[index]:.3g}", f"{noise.wrong_P[index]:.0%}")
        console.print(table)
        if (more := len(noise.contradicted) - LISTED) > 0:
            console.print(f"and {counted(more, 'more row')}: --report FILE.json has all", soft_wrap=False)


def _bias_lines(bias: LengthBias) -> Iterator[str]:
    means = f"mean tokens of chosen {bias.chosen_mean:.0f}, of rejected {bias.rejected_mean:.0f}"
    longer = bias.longer
    if longer is None:
        yield f"length bias: none can be seen, all {bias.pairs:,} pairs have replies of equal length"
        return
    bounds = "" if longer.low is None else f" (95 % interval {longer.low:.1%} to {longer.high:.1%})"
    says = "which length alone does not predict"
    if longer.low is not None and longer.high is not None and not longer.low <= 0.5 <= longer.high:
        says = f"so {'longer' if longer.value > 0.5 else 'shorter'} replies tend to be preferred"
    equal = f", {bias.equal:,} of equal length not counted" if bias.equal else ""
    yield (
        f"length bias: the longer reply is chosen in {longer.value:.1%} of {longer.answers:,} pairs{bounds}{equal}, "
        f"{says}; AUC {bias.auc:.3f}, {means}"
    )


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold", min_width=WIDEST if first == "duplicates" else None)
    for name in others:
        if name == "examples":
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table


def _examples(rows: Iterable[tuple[str, str]]) -> str:
    """The first rows, each with the row that it repeats; several that repeat one are joined."""
    groups: dict[str, list[str]] = defaultdict(list)
    for one, other in rows:
        groups[other].append(one)
    return "; ".join(
        f"{other} = {', '.join(several[:SHOWN])}{' …' if len(several) > SHOWN else ''}"
        for other, several in list(groups.items())[:SHOWN]
    )
