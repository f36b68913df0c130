"""A prepared data set as plain values, for programs: counts, lengths, what was dropped, and rows token by token."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from posttrain.batch import Example
from posttrain.data.dataset import Dataset
from posttrain.data.explore import Branch, Selection, nodes_of, parts_shown, selected, sets_of
from posttrain.data.prepare import Prepared
from posttrain.data.report import Lengths
from posttrain.pieces import CHARACTER, pieces

BINS = 40  # of a histogram of lengths


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
