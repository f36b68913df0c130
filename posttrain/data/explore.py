"""Shows a prepared data set, printed or as plain values: counts, lengths, and rows with their trained tokens marked."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError
from posttrain.base.pieces import CHARACTER, pieces
from posttrain.base.terminal import escaped, visible
from posttrain.batch import Example, Node
from posttrain.data.kinds import Dataset
from posttrain.data.prepare import Prepared
from posttrain.data.report import Lengths

SHADES = ("black on bright_green", "black on green")  # neighbouring trained tokens have different shades
PLAIN = ("dim", "default")
BINS = 40  # number of bins in a histogram of lengths
MOST_TOKENS = 400  # tokens shown per node; the middle of a longer node is omitted
Sort = Literal["row", "longest", "shortest"]


class Marks(NamedTuple):
    """The marks around trained tokens, and the symbols for line break and tab."""

    opening: str
    closing: str
    line: str
    tab: str


UNICODE, ASCII = Marks("⟦", "⟧", "↵", "→"), Marks("[[", "]]", "\\n", "\\t")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which examples are shown: `count` examples of set `of`, from number `first` in the order `sort`, or those of the
    data's row number `row`."""

    count: int = 3
    first: int = 0
    of: str = "train"
    sort: Sort = "row"
    row: int | None = None

    def indices(self, data: Dataset) -> list[int]:
        """Positions in the set; examples of equal length keep the set's order."""
        if self.row is not None:
            return np.flatnonzero(data.rows == self.row)[: self.count].tolist()
        order = np.arange(len(data))
        if self.sort != "row":
            order = np.argsort(data.lengths if self.sort == "shortest" else -data.lengths, kind="stable")
        return order[self.first : self.first + self.count].tolist()


def explore(prepared: Prepared, tokenizer: PreTrainedTokenizerBase, selection: Selection, console: Console) -> None:
    """Print counts and lengths, then the selected examples token by token. Trained tokens are marked by ⟦ and ⟧ ([[ and
    ]] if the output is not UTF-8) and, with colour, have a background in alternating shades."""
    shown, marks = overview(prepared, tokenizer, selection), UNICODE if console.encoding.startswith("utf") else ASCII
    for report in prepared.reports.values():
        for line in report.lines():
            console.print(Text(visible(line)), soft_wrap=False)
        console.print()
    table = Table(title="examples (a pair's prompt counted once)", title_justify="left", title_style="bold")
    for name in ("set", "rows", "tokens", "mean", "P50", "P90", "P99", "max"):
        table.add_column(name, justify="left" if name == "set" else "right")
    for name, sizes in shown["sets"].items():
        values = (sizes[key] for key in ("examples", "total", "mean", "p50", "p90", "p99", "max"))
        table.add_row(name, *(f"{value:,.0f}" for value in values))
    console.print(table)
    if selection.row is not None and selection.count and not shown["rows"]:
        console.print(f"{selection.of} has no example of row {selection.row}: it was dropped, or is in another set")
    if shown["rows"]:
        console.print()
        trained = (f"{marks.opening}trained{marks.closing}", SHADES[0])
        console.print(Text.assemble("Tokens: ", trained, f", the rest is context; {marks.line} is a line break."))
    for row in shown["rows"]:
        console.print()
        console.rule(f"row {row['row']}", align="left", characters="-")
        for part in row["parts"]:
            counts = f"{part['title']}: {part['tokens']:,} tokens, {part['trained']:,} trained"
            console.print(Text(counts, style="bold"))
            console.print(tokens_text(part, marks))
        if row["margin"] is not None:
            console.print(Text(f"margin: {row['margin']:g}", style="bold"))
        if row["tie"]:
            console.print(Text("a tie", style="bold"))


def tokens_text(part: Mapping[str, Any], marks: Marks = UNICODE) -> Text:
    """The tokens of a part as text, with marks around trained tokens, and control characters as symbols or escapes."""
    text, inside, number = Text(), False, 0
    for piece in part["pieces"]:
        if piece is None:
            text.append((marks.closing if inside else "") + f" ... {part['omitted']:,} tokens ... ")
            inside = False
            continue
        written, _, trained = piece
        if trained != inside:
            inside = trained
            text.append(marks.opening if inside else marks.closing)
        shown = "".join(c if c.isprintable() or c == "\n" else marks.tab if c == "\t" else escaped(c) for c in written)
        text.append(shown.replace("\n", f"{marks.line}\n"), style=(SHADES if inside else PLAIN)[number % 2])
        number += 1
    text.append(marks.closing if inside else "")
    return text


def overview(prepared: Prepared, tokenizer: PreTrainedTokenizerBase, selection: Selection) -> dict[str, Any]:
    """The output of `explore` as JSON values; docs/data.md lists the fields. Raises DataError for an unknown set."""
    sets = {"train": prepared.train, **prepared.validation}
    if selection.of not in sets:
        raise DataError(f"there is no set {selection.of!r}: choose one of {', '.join(sets)}")
    data = sets[selection.of]
    width = max(1, -(-(max(int(each.lengths.max()) for each in sets.values()) + 1) // BINS))
    return {
        "kind": prepared.kind,
        "width": width,
        "sets": {name: _lengths(each, width) for name, each in sets.items()},
        "reports": {n: {**asdict(each), "findings": each.findings()} for n, each in prepared.reports.items()},
        "shown": asdict(selection),
        "rows": [_row(data[index], tokenizer) for index in selection.indices(data)],
    }


def _lengths(data: Dataset, width: int) -> dict[str, Any]:
    """Physical tokens of a set's examples, and a histogram: `counts[i]` have i * width to (i + 1) * width - 1."""
    counts = np.bincount(data.lengths // width)
    return {"examples": len(data), **asdict(Lengths.of(data.lengths)), "counts": counts.tolist()}


def _row(example: Example, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    answer = (example.facts or {}).get("answer")
    facts = {"margin": example.margin, "tie": example.tie, "answer": None if answer is None else str(answer)}
    return {"row": example.row, "parts": parts_of(example, tokenizer), **facts}


def parts_of(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """The parts of an example in order, with a prompt before its replies."""
    names = {None: ("chosen", "rejected"), True: ("desirable",), False: ("undesirable",)}
    replies, parts = iter(names[example.label]), []
    for tree in example.trees:
        parts.append(_part("prompt" if tree.children else "sequence", tree, (), tokenizer))
        parts += [_part(next(replies), child, tree.tokens, tokenizer) for child in tree.children]
    return parts


def _part(title: str, node: Node, before: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """A node's tokens, which follow the tokens `before`. A sequence's first token is not a target: nothing predicts it.

    `pieces` has [text, ids, trained] for each token, or for the tokens of one character; null stands for the `omitted`
    tokens in the middle of a long part.
    """
    tokens, context = [int(token) for token in node.tokens], [int(token) for token in before]
    count, half = len(tokens), MOST_TOKENS // 2
    trained = np.broadcast_to(np.asarray(node.trained, bool), count).copy()
    if not context:
        trained[:1] = False
    shown: list[list[Any] | None] = []
    for start, end in [(0, count)] if count <= MOST_TOKENS else [(0, half), (count - half, count)]:
        shown += [None] if start else []
        for length, text in pieces(tokens[start:end], tokenizer, [*context, *tokens[:start]][-CHARACTER:]):
            shown.append([text, tokens[start : start + length], bool(trained[start])])
            start += length
    counts = {"tokens": count, "trained": int(trained.sum()), "omitted": max(0, count - MOST_TOKENS)}
    return {"title": title, **counts, "pieces": shown}
