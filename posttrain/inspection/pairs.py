"""Pairs of completions as a suite: how often a model scores the chosen one above the rejected one.

A reward model by its rewards; a policy by its implicit reward beta (log pi - log pi_ref) (Rafailov et al. 2023, arXiv
2305.18290), or without a reference by its log-probability per token.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.batch import Example, Pack, pack
from posttrain.config import DataConfig, ModelConfig
from posttrain.config.schema.suite import SuiteConfig
from posttrain.data import Dataset, prepare
from posttrain.errors import DataError
from posttrain.evaluation.answering import template_of
from posttrain.evaluation.items import Item, Items, pair_text, records_of
from posttrain.evaluation.judging import UNGRADED
from posttrain.evaluation.records import Answer, EvaluationStore
from posttrain.evaluation.summary import summarise
from posttrain.models.attention import width_step
from posttrain.models.devices import compute_dtype
from posttrain.models.families import positions_of
from posttrain.models.load import check_embeddings, is_reward_model, load_model, load_tokenizer
from posttrain.progress import progress
from posttrain.scoring import RewardScorer, Scorer
from posttrain.training.inputs import content_of

PACK_TOKENS, BATCH = 8192, 64
LONGEST = 4096  # tokens of a sequence of a model without a limit of positions

Margins = Callable[[Sequence[Example]], list[float]]


@dataclass(frozen=True, slots=True)
class PairOptions:
    """`reference`: of a policy. `num_batches` batches of `batch_size` pairs are sampled with replacement; None: all."""

    reference: str | None = None
    beta: float = 0.1
    num_batches: int | None = None
    batch_size: int = 16
    max_rows: int | None = None
    seed: int = 0


def evaluate_pairs(
    model: ModelConfig,
    suite: SuiteConfig,
    options: PairOptions,
    device: torch.device,
    store: EvaluationStore,
    content: str,
) -> None:
    """Score the pairs of a suite and store an answer for each; `score` is 1 if chosen is above rejected, else 0."""
    reference = None if options.reference is None else ModelConfig(path=options.reference, dtype=model.dtype)
    facts: dict[str, Any] = {
        "model": content,
        "source": suite.source,
        "pairs": [options.num_batches, options.batch_size, options.max_rows, options.seed],
        "reference": None if reference is None else [content_of(reference), options.beta],
        "dtype": model.dtype,
    }
    records = records_of(suite, suite.source, suite.split)
    rows = {record.row: pair_text(record.value or {}, _columns(suite)) for record in records}
    facts["items"] = digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    key = suite.name
    if store.summary(key) is not None and store.facts(key) == facts:
        return
    tokenizer = load_tokenizer(model)
    loaded = load_model(model, "reward" if is_reward_model(model) else "lm", compute_dtype(model, device), device)
    check_embeddings(loaded, tokenizer, model.path)
    longest = min(positions_of(loaded.config) or LONGEST, LONGEST)
    dataset, reasons, read = _pairs(suite, tokenizer, longest)
    if reference is not None and not is_reward_model(model):
        other = load_model(reference, "lm", compute_dtype(reference, device), device)
        check_embeddings(other, tokenizer, reference.path)
        margins, sampling = _implicit(loaded, other, options.beta, device), {"beta": options.beta}
    else:
        margins, sampling = own_margins(loaded, device), {}
    store.start(key, facts)
    began, chosen = time.perf_counter(), _chosen(options, read)
    found = _margins_of(suite, dataset, reasons, chosen, margins)
    store.add(key, _answers(suite.name, chosen, rows, found, reasons))
    asked = tuple(_item(row) for row in dict.fromkeys(chosen))
    items = Items(suite, asked, read, _partial(options, chosen, read), digest)
    spent = time.perf_counter() - began
    stored = list(store.answers(key))
    store.finish(key, summarise(items, "", stored, 1, {**sampling, "reference": options.reference}, spent))


def _pairs(suite: SuiteConfig, tokenizer: PreTrainedTokenizerBase, longest: int) -> tuple[Dataset, dict[int, str], int]:
    """The pairs that fit the model, the reasons of rows that cannot be scored, and the number of rows."""
    data = DataConfig(
        source=suite.source,
        split=suite.split if not Path(suite.source).expanduser().is_file() else "train",
        columns=_columns(suite),
        template=template_of(suite, tokenizer),
        system_prompt=suite.system_prompt,
        shuffle=False,
        max_length=longest,
        max_prompt_length=None,
        overlong="drop",
    )
    prepared = prepare(data, tokenizer, "pair")
    reasons = {bad.row: bad.reason for bad in prepared.report.malformed}
    there = set(prepared.train.rows.tolist())
    for row in range(prepared.report.read):
        if row not in there:
            reasons.setdefault(row, f"a completion with its prompt has over {longest:,} tokens")
    return prepared.train, reasons, prepared.report.read


def _columns(suite: SuiteConfig) -> dict[str, str]:
    return {name: columns[0] for name, columns in suite.columns.items()}


def _chosen(options: PairOptions, read: int) -> list[int]:
    """The rows to score: all, evenly spread ones, or a sample with replacement."""
    if options.num_batches is not None:
        count = options.num_batches * options.batch_size
        return np.random.default_rng(options.seed).integers(read, size=count).tolist()
    most = min(options.max_rows or read, read)
    return [index * read // most for index in range(most)]


def _partial(options: PairOptions, chosen: Sequence[int], read: int) -> str | None:
    if options.num_batches is not None:
        return f"{options.num_batches} batches of {options.batch_size} pairs of {read:,}, with replacement"
    return f"{len(chosen):,} of {read:,} items" if len(chosen) < read else None


def _margins_of(
    suite: SuiteConfig, dataset: Dataset, reasons: dict[int, str], chosen: Sequence[int], margins: Margins
) -> dict[int, float]:
    """The margin of every chosen row that can be scored. Raises DataError if there is none."""
    index_of = {row: index for index, row in enumerate(dataset.rows.tolist())}
    rows = sorted({row for row in chosen if row in index_of}, key=lambda row: -dataset.lengths[index_of[row]])
    if not rows:
        raise DataError(
            f"suite {suite.name}: no pair of {suite.source} can be scored: {next(iter(reasons.values()), '')}"
        )
    found: dict[int, float] = {}
    for start in progress(range(0, len(rows), BATCH), f"{suite.name}: scoring pairs"):
        some = rows[start : start + BATCH]
        found |= zip(some, margins([dataset[index_of[row]] for row in some]), strict=True)
    return found


def _answers(
    suite: str, chosen: Sequence[int], texts: dict[int, str], margins: dict[int, float], reasons: dict[int, str]
) -> list[tuple[int, Answer]]:
    """An answer for each chosen row, with its place; a row that was sampled twice has two."""
    times: Counter[int] = Counter()
    answers = []
    for row in chosen:
        answers.append((row, _answer(suite, row, times[row], texts[row], margins.get(row), reasons.get(row))))
        times[row] += 1
    return answers


def _answer(suite: str, row: int, sample: int, text: str, margin: float | None, reason: str | None) -> Answer:
    verdict = UNGRADED if margin is None else "correct" if margin > 0 else "wrong"
    return Answer(
        suite=suite,
        setting="",
        item=str(row),
        sample=sample,
        group="",
        prompt=text,
        gold=None,
        completion="",
        extracted=None if margin is None else f"{margin:+.6g}",
        verdict=verdict,
        score=None if margin is None else float(margin > 0),
        format_and_answer="",
        tokens=0,
        finish_reason="",
        seconds=0.0,
        reason=reason if margin is None else None,
    )


def _item(row: int) -> Item:
    return Item(row, str(row), "", "", None, {}, {})


def own_margins(loaded: PreTrainedModel, device: torch.device) -> Margins:
    """Differences of rewards, or of mean log-probabilities per token."""
    scorer = RewardScorer(loaded) if is_classifier(loaded) else Scorer(loaded)

    def per_sequence(packed: Pack) -> torch.Tensor:
        if isinstance(scorer, RewardScorer):
            return scorer(packed)
        return packed.sum_by_sequence(scorer(packed).logprob_N) / packed.length_S

    return lambda examples: _margins(examples, per_sequence, device, is_classifier(loaded))


def _implicit(policy: PreTrainedModel, reference: PreTrainedModel, beta: float, device: torch.device) -> Margins:
    one, other = Scorer(policy), Scorer(reference)

    def per_sequence(packed: Pack) -> torch.Tensor:
        return beta * packed.sum_by_sequence(one(packed).logprob_N - other(packed).logprob_N)

    return lambda examples: _margins(examples, per_sequence, device, False)


@torch.no_grad()
def _margins(
    examples: Sequence[Example], per_sequence: Callable[[Pack], torch.Tensor], device: torch.device, reward: bool
) -> list[float]:
    """The score of chosen minus that of rejected, for each pair."""
    found: dict[int, list[float]] = {}
    for packed in pack(list(examples), PACK_TOKENS, reward, width_step(device, PACK_TOKENS)):
        for group, value in zip(packed.group_S.tolist(), per_sequence(packed.to(device)).tolist(), strict=True):
            found.setdefault(group, []).append(value)
    return [found[index][0] - found[index][1] for index in range(len(examples))]


def is_classifier(loaded: PreTrainedModel) -> bool:
    return type(loaded).__name__.endswith("ForSequenceClassification")
