"""Token maps and votes of the Chat page.

A map colours the tokens of a reply by the probabilities of one model or by the difference between two models. Votes
between two replies become preference rows, which `posttrain train` reads (docs/data.md).
"""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.base.errors import RunError
from posttrain.reports.markup import Child, Markup, el, join, number
from posttrain.runs.atomic import writing
from posttrain.serving.client import ScoredToken
from posttrain.ui.parts import seen

COLOURS = {  # colouring -> quantity, value that has the full colour, legend
    "difference": ("log-probability, B minus A (nats)", 2.0, "Blue: more likely under B. Orange: more likely under A."),
    "logprob": ("log-probability of A (nats)", 5.0, "Stronger: less likely."),
    "entropy": ("entropy of A (nats)", 3.0, "Stronger: less certain."),
}
_LOCK = threading.Lock()  # for the file of votes
Turns = Sequence[Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Cell:
    """A token of a reply with the numbers of model A and, if model B has the same tokens, of model B."""

    a: ScoredToken
    b: ScoredToken | None

    def value(self, colour: str) -> float | None:
        if colour == "entropy":
            return self.a.entropy
        if colour == "logprob" or self.a.logprob is None:
            return self.a.logprob
        return None if self.b is None or self.b.logprob is None else self.b.logprob - self.a.logprob


def cells(a: Sequence[ScoredToken], b: Sequence[ScoredToken] | None) -> list[Cell]:
    """The tokens with the numbers of both models. If B's tokens differ from A's, the numbers of B are omitted, because
    the models cannot be compared token by token."""
    same = b is not None and [token.id for token in a] == [token.id for token in b]
    return [Cell(token, b[at] if same and b is not None else None) for at, token in enumerate(a)]


def token_map(reply: Sequence[Cell], colour: str, names: Sequence[str]) -> Markup:
    """The reply with a coloured background for each token. A token under the pointer or the focus shows its numbers."""
    if colour == "difference" and not any(cell.b for cell in reply):
        colour = "logprob"
    title, full, legend = COLOURS[colour]
    known = [value for cell in reply if (value := cell.value(colour)) is not None]
    mean = f"mean {sum(known) / len(known):+.3f}" if known else ""
    tokens = [_token(cell, colour, full, names) for cell in reply]
    head = el("p", f"Colour: {title}. {mean} over {len(known):,} tokens. ", el("small", legend), class_="quiet")
    hint = el("span", "Point at a token for its numbers and the alternatives.", class_="card hint")
    return join([head, el("div", hint, *tokens, class_="tokens map")])


def _token(cell: Cell, colour: str, full: float, names: Sequence[str]) -> Markup:
    value = cell.value(colour)
    tone = "--for" if colour == "difference" and value is not None and value > 0 else "--against"
    much = 0 if value is None else round(min(1.0, abs(value) / full) * 70)
    tip = el("span", el("b", seen(cell.a.text)), *_lines(cell, names), class_="card", role="tooltip")
    style = f"--tone: var({tone}); --much: {much}"
    return el("span", seen(cell.a.text), tip, class_="piece", tabindex="0", style=style)


def _lines(cell: Cell, names: Sequence[str]) -> Iterator[Child]:
    for name, token in zip(names, (cell.a, cell.b) if cell.b else (cell.a,), strict=False):
        facts = f"log-probability {number(token.logprob)}, entropy {number(token.entropy)}"
        others = ", ".join(f"{seen(text).replace(chr(10), '')} {value:.2f}" for text, value in token.alternatives)
        yield el("span", f"{name}: {facts}")
        yield el("span", others, class_="quiet") if others else None


def undo_vote(file: Path, prompt: Turns, replies: Sequence[str]) -> int:
    """Remove the last row, if it is a vote on these replies. Returns the number of rows left; raises RunError if it is
    another's, or the file cannot be changed."""
    with _LOCK, writing(file):
        *lines, last = file.read_bytes().splitlines(keepends=True) if file.is_file() else [b""]
        row = json.loads(last) if last else {}
        texts = {reply["content"] for side in ("chosen", "rejected") for reply in row.get(side, [])}
        if row.get("prompt") != list(prompt) or texts != set(replies):
            raise RunError(f"The last row of {file} is not a vote on these replies: it is kept.")
        with file.open("r+b") as rows:
            rows.truncate(sum(map(len, lines)))
        return len(lines)


def write_vote(file: Path, prompt: Turns, chosen: str, rejected: str, facts: Mapping[str, Any]) -> int:
    """Append a row with `prompt`, `chosen`, `rejected` and the facts. Returns the number of rows in the file.
    If a full disk cut the last line short, the row starts on a new line. Raises RunError if it cannot be written."""
    reply = [{"role": "assistant", "content": text} for text in (chosen, rejected)]
    row = {"prompt": list(prompt), "chosen": reply[:1], "rejected": reply[1:], **facts}
    line = json.dumps(row, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
    with _LOCK, writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a+b") as rows:
            if rows.tell() and (rows.seek(-1, 2), rows.read(1))[1] != b"\n":
                line = b"\n" + line
            rows.write(line)
            rows.seek(0)
            return sum(1 for _ in rows)
