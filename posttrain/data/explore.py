"""Shows a prepared data set: counts, lengths, and rows token by token with the trained ones marked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from posttrain.batch import Example, Sample
from posttrain.data.dataset import Dataset
from posttrain.data.prepare import Prepared

SHADES = ("black on bright_green", "black on green")  # neighbouring trained tokens differ, so that each can be seen
PLAIN = ("dim", "default")
MOST_TOKENS = 400  # of one node; the middle of a longer one is left out


def explore(prepared: Prepared, tokenizer: PreTrainedTokenizerBase, rows: int, console: Console) -> None:
    """Print counts and lengths, then the first `rows` training examples token by token.

    Trained tokens stand between ⟦ and ⟧; where there is colour they have a background, and each token its own shade.
    """
    for report in prepared.reports.values():
        for line in report.lines():
            console.print(Text(line), soft_wrap=False)
        console.print()
    console.print(_sizes(prepared))
    if rows:
        console.print()
        console.print(Text.assemble("Tokens: ", ("⟦trained⟧", SHADES[0]), ", the rest is context; ↵ is a line break."))
    for index in range(min(rows, len(prepared.train))):
        example = prepared.train[index]
        console.print()
        console.rule(f"row {example.row}", align="left", characters="-")
        for title, node, tokens in _nodes(example):
            trained = int(np.broadcast_to(np.asarray(node.trained, bool), len(tokens)).sum())
            console.print(Text(f"{title}: {len(tokens):,} tokens, {trained:,} trained", style="bold"))
            console.print(tokens_text(node, tokenizer))
        if example.margin is not None:
            console.print(Text(f"margin: {example.margin:g}", style="bold"))
        if example.tie:
            console.print(Text("a tie", style="bold"))


def _sizes(prepared: Prepared) -> Table:
    """A line per set: examples, physical tokens, and the lengths of examples."""
    table = Table(title="examples (a pair's prompt counted once)", title_justify="left", title_style="bold")
    for name in ("set", "rows", "tokens", "mean", "P50", "P90", "P99", "max"):
        table.add_column(name, justify="left" if name == "set" else "right")
    sets: dict[str, Dataset] = {"train": prepared.train, **prepared.validation}
    for name, data in sets.items():
        p50, p90, p99 = np.percentile(data.lengths, [50, 90, 99], method="higher")
        values: Sequence[float] = (
            len(data),
            data.lengths.sum(),
            data.lengths.mean(),
            p50,
            p90,
            p99,
            data.lengths.max(),
        )
        table.add_row(name, *(f"{value:,.0f}" for value in values))
    return table


def _nodes(example: Example) -> Iterator[tuple[str, Sample, Sequence[int]]]:
    """Each node with what it is called."""
    names = {None: ("chosen", "rejected"), True: ("desirable",), False: ("undesirable",)}
    replies = iter(names[example.label])
    for tree in example.trees:
        yield ("prompt" if tree.children else "sequence"), tree, list(tree.tokens)
        for child in tree.children:
            yield next(replies), child, list(child.tokens)


def tokens_text(node: Sample, tokenizer: PreTrainedTokenizerBase) -> Text:
    """A node's tokens as text, the trained ones marked."""
    ids = [int(token) for token in node.tokens]
    trained = np.broadcast_to(np.asarray(node.trained, bool), len(ids))
    half = MOST_TOKENS // 2
    shown = list(range(len(ids))) if len(ids) <= MOST_TOKENS else [*range(half), *range(len(ids) - half, len(ids))]
    text, before = Text(), False
    for number, (index, piece) in enumerate(_pieces([ids[i] for i in shown], tokenizer)):
        at = shown[index]
        if len(ids) > MOST_TOKENS and index == half:
            text.append(("⟧" if before else "") + f" … {len(ids) - MOST_TOKENS:,} tokens … ")
            before = False
        if trained[at] != before:
            text.append("⟦" if trained[at] else "⟧")
        before = bool(trained[at])
        text.append(piece, style=SHADES[number % 2] if before else PLAIN[number % 2])
    text.append("⟧" if before else "")
    return text


def _pieces(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, str]]:
    """Each token's text, in order; bytes of one character that are apart come together with the last of them."""
    begin = 0
    for index in range(len(ids)):
        # the token before gives a decoder that strips a sequence's first space something else to strip
        with_before = tokenizer.decode(ids[max(begin - 1, 0) : index + 1], clean_up_tokenization_spaces=False)
        before = tokenizer.decode(ids[max(begin - 1, 0) : begin], clean_up_tokenization_spaces=False)
        piece = str(with_before)[len(str(before)) :]
        if piece.endswith("�") and index + 1 < len(ids) and index - begin < 4:
            continue
        yield begin, _visible(piece)
        begin = index + 1


def _visible(text: str) -> str:
    """Line breaks shown as well as made, control characters as their codes."""
    shown = "".join(c if c.isprintable() or c == "\n" else "→" if c == "\t" else f"\\x{ord(c):02x}" for c in text)
    return shown.replace("\n", "↵\n")
