"""A prepared data set, printed or as plain values: counts, lengths, and rows token by token with the trained ones."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from posttrain.base.errors import DataError
from posttrain.base.terminal import escaped, visible
from posttrain.batch import Example, Node
from posttrain.data.dataset import Dataset
from posttrain.data.pieces import CHARACTER, pieces
from posttrain.data.prepare import Prepared
from posttrain.data.report import Lengths

SHADES = ("black on bright_green", "black on green")  # neighbouring trained tokens have different shades
PLAIN = ("dim", "default")
BINS = 40  # of a histogram of lengths
MOST_TOKENS = 400  # per node; the middle of a longer one is omitted
Sort = Literal["row", "longest", "shortest"]


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks around trained tokens, and the symbols of line break and tab."""

    opening: str
    closing: str
    line: str
    tab: str


UNICODE, ASCII = Marks("⟦", "⟧", "↵", "→"), Marks("[[", "]]", "\\n", "\\t")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which examples are shown: `count` of a set, from number `first` in this order; of the data's `row` alone."""

    count: int = 3
    first: int = 0
    of: str = "train"
    sort: Sort = "row"
    row: int | None = None

    def indices(self, data: Dataset) -> list[int]:
        """Positions in the set; equal lengths in the set's order."""
        if self.row is not None:
            return np.flatnonzero(data.rows == self.row)[: self.count].tolist()
        order = np.arange(len(data))
        if self.sort != "row":
            order = np.argsort(data.lengths if self.sort == "shortest" else -data.lengths, kind="stable")
        return order[self.first : self.first + self.count].tolist()


def sets_of(prepared: Prepared) -> dict[str, Dataset]:
    return {"train": prepared.train, **prepared.validation}


def selected(prepared: Prepared, selection: Selection) -> list[Example]:
    """Raises DataError for a set that there is not."""
    sets = sets_of(prepared)
    if selection.of not in sets:
        raise DataError(f"there is no set {selection.of!r}: it is one of {', '.join(sets)}")
    data = sets[selection.of]
    return [data[index] for index in selection.indices(data)]


def explore(prepared: Prepared, tokenizer: PreTrainedTokenizerBase, selection: Selection, console: Console) -> None:
    """Print counts and lengths, then the selected examples token by token.

    Trained tokens are marked by ⟦ and ⟧ ([[ and ]] if the output is not UTF-8); with colour they have a background, in
    alternating shades.
    """
    marks = UNICODE if console.encoding.startswith("utf") else ASCII
    for report in prepared.reports.values():
        for line in report.lines():
            console.print(Text(visible(line)), soft_wrap=False)
        console.print()
    console.print(_sizes(prepared))
    examples = selected(prepared, selection)
    if selection.row is not None and selection.count and not examples:
        console.print(f"{selection.of} has no example of row {selection.row}: it was dropped, or is in another set")
    if examples:
        console.print()
        trained = (f"{marks.opening}trained{marks.closing}", SHADES[0])
        console.print(Text.assemble("Tokens: ", trained, f", the rest is context; {marks.line} is a line break."))
    for example in examples:
        console.print()
        console.rule(f"row {example.row}", align="left", characters="-")
        for node in nodes_of(example):
            counts = f"{node.title}: {len(node.tokens):,} tokens, {node.trained.sum():,} trained"
            console.print(Text(counts, style="bold"))
            console.print(tokens_text(node, tokenizer, marks))
        if example.margin is not None:
            console.print(Text(f"margin: {example.margin:g}", style="bold"))
        if example.tie:
            console.print(Text("a tie", style="bold"))


def _sizes(prepared: Prepared) -> Table:
    """A line for each set: examples, physical tokens, and the lengths of examples."""
    table = Table(title="examples (a pair's prompt counted once)", title_justify="left", title_style="bold")
    for name in ("set", "rows", "tokens", "mean", "P50", "P90", "P99", "max"):
        table.add_column(name, justify="left" if name == "set" else "right")
    for name, data in sets_of(prepared).items():
        one = Lengths.of(data.lengths)
        values = (len(data), one.total, one.mean, one.p50, one.p90, one.p99, one.max)
        table.add_row(name, *(f"{value:,.0f}" for value in values))
    return table


@dataclass(frozen=True, slots=True)
class Branch:
    """A part of an example: its tokens, which are trained, and the tokens before it."""

    title: str
    tokens: list[int]
    trained: np.ndarray
    before: list[int]


def nodes_of(example: Example) -> Iterator[Branch]:
    """The parts of an example in order. The first token of a sequence is not trained: nothing predicts it."""
    names = {None: ("chosen", "rejected"), True: ("desirable",), False: ("undesirable",)}
    replies = iter(names[example.label])
    for tree in example.trees:
        root = _node("prompt" if tree.children else "sequence", tree, [])
        yield root
        for child in tree.children:
            yield _node(next(replies), child, root.tokens)


def _node(title: str, node: Node, before: list[int]) -> Branch:
    tokens = [int(token) for token in node.tokens]
    trained = np.broadcast_to(np.asarray(node.trained, bool), len(tokens)).copy()
    if not before:
        trained[:1] = False
    return Branch(title, tokens, trained, before)


def parts_shown(count: int) -> list[tuple[int, int]]:
    """Which of a node's tokens are shown: all, or the beginning and the end."""
    half = MOST_TOKENS // 2
    return [(0, count)] if count <= MOST_TOKENS else [(0, half), (count - half, count)]


def tokens_text(node: Branch, tokenizer: PreTrainedTokenizerBase, marks: Marks = UNICODE) -> Text:
    """A node's tokens as text, with marks around the trained ones."""
    count = len(node.tokens)
    text, inside, number = Text(), False, 0
    for start, end in parts_shown(count):
        if start:
            text.append((marks.closing if inside else "") + f" ... {count - MOST_TOKENS:,} tokens ... ")
            inside = False
        before = [*node.before, *node.tokens[:start]][-CHARACTER:]
        for length, piece in pieces(node.tokens[start:end], tokenizer, before):
            if node.trained[start] != inside:
                inside = not inside
                text.append(marks.opening if inside else marks.closing)
            text.append(_visible(piece, marks), style=(SHADES if inside else PLAIN)[number % 2])
            start, number = start + length, number + 1
    text.append(marks.closing if inside else "")
    return text


def _visible(text: str, marks: Marks) -> str:
    """The text with symbols at line breaks, and control characters as codes."""
    shown = "".join(c if c.isprintable() or c == "\n" else marks.tab if c == "\t" else escaped(c) for c in text)
    return shown.replace("\n", f"{marks.line}\n")


def overview(prepared: Prepared, tokenizer: PreTrainedTokenizerBase, selection: Selection) -> dict[str, Any]:
    """What `explore` prints, as values of JSON. docs/data.md has the fields."""
    sets = sets_of(prepared)
    width = max(1, -(-(max(int(data.lengths.max()) for data in sets.values()) + 1) // BINS))
    return {
        "kind": prepared.kind,
        "width": width,
        "sets": {name: _lengths(data, width) for name, data in sets.items()},
        "reports": {name: asdict(report) for name, report in prepared.reports.items()},
        "shown": asdict(selection),
        "rows": [_row(example, tokenizer) for example in selected(prepared, selection)],
    }


def _lengths(data: Dataset, width: int) -> dict[str, Any]:
    """Physical tokens of a set's examples, with a histogram: `counts[i]` have i * width tokens or more."""
    counts = np.bincount(data.lengths // width)
    return {"examples": len(data), **asdict(Lengths.of(data.lengths)), "counts": counts.tolist()}


def _row(example: Example, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    answer = (example.facts or {}).get("answer")
    return {
        "row": example.row,
        "parts": [_part(branch, tokenizer) for branch in nodes_of(example)],
        "margin": example.margin,
        "tie": example.tie,
        "answer": None if answer is None else str(answer),
    }


def _part(branch: Branch, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """`pieces` are [text, ids, trained] of each token, or of the tokens of one character; null stands for the
    `omitted` tokens in the middle of a long part."""
    found: list[list[Any] | None] = []
    shown = parts_shown(len(branch.tokens))
    for start, end in shown:
        if start:
            found.append(None)
        before = [*branch.before, *branch.tokens[:start]][-CHARACTER:]
        for length, text in pieces(branch.tokens[start:end], tokenizer, before):
            found.append([text, branch.tokens[start : start + length], bool(branch.trained[start])])
            start += length
    return {
        "title": branch.title,
        "tokens": len(branch.tokens),
        "trained": int(branch.trained.sum()),
        "omitted": len(branch.tokens) - sum(end - start for start, end in shown),
        "pieces": found,
    }
