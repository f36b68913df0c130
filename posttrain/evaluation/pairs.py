"""Preference pairs as a suite: how often a model scores the chosen completion above the rejected one.

The score is a reward model's reward, a policy's implicit reward beta (log pi - log pi_ref) (Rafailov et al. 2023, arXiv
2305.18290) or, without a reference, the policy's log-probability per token.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from math import isfinite
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.base.console import progress
from posttrain.base.errors import ModelError
from posttrain.batch import Example, Pack
from posttrain.config import DataConfig, ModelConfig
from posttrain.config.options import EvalOptions
from posttrain.config.schema.suite import SuiteConfig
from posttrain.data import Dataset, prepare
from posttrain.evaluation.answering import Found, Reply, template_of
from posttrain.evaluation.items import Item, Items, pair_text, records_of
from posttrain.grading.verdict import Grade
from posttrain.models.devices import compute_dtype
from posttrain.models.families import positions_of
from posttrain.models.load import check_embeddings, load_model, load_tokenizer
from posttrain.runs.inputs import content_of
from posttrain.scoring import RewardScorer, Scorer, of_sequences

PACK_TOKENS, BATCH = 8192, 64
PAIRS = 16  # pairs in a batch of --num-batches
BETA = 0.1  # of the implicit reward
LONGEST = 4096  # maximum tokens of a sequence; fewer if the model has fewer positions

Scored = tuple[PreTrainedModel, PreTrainedTokenizerBase]  # a model, which may be a reward model, and its tokenizer
Margins = Callable[[Sequence[Example]], list[float]]


def pair_facts(model: ModelConfig, suite: SuiteConfig, options: EvalOptions, content: str) -> dict[str, Any]:
    """The facts that identify an evaluation of pairs."""
    reference = _reference(model, options)
    return {
        "model": content,
        "items": hashlib.sha256(json.dumps(pair_texts(suite)).encode()).hexdigest(),
        "pairs": [options.num_batches, PAIRS, options.max_rows, options.seed],
        "columns": {name: list(columns) for name, columns in suite.columns.items()},
        "template": suite.template,
        "system prompt": suite.system_prompt,
        "reference": None if reference is None else [content_of(reference), BETA],
        "dtype": model.dtype,
    }


class Preferred:
    """Answers with the margins of a reward model's or a policy's scores: right if chosen is above rejected. `items` are
    the pairs that are scored, `sampling` the facts for the summary."""

    def __init__(self, model: ModelConfig, scored: Scored, suite: SuiteConfig, options: EvalOptions, digest: str):
        loaded, tokenizer = scored
        self._dataset, self._reasons, read = pairs_for(model, scored, suite, options)
        reference, other, device = _reference(model, options), None, loaded.device
        self.sampling: dict[str, Any] = {"reference": options.reference}
        if reference is not None and not is_classifier(loaded):
            other, self.sampling["beta"] = load_model(reference, "lm", compute_dtype(reference, device), device), BETA
            check_embeddings(other, tokenizer, reference.path)
        self._margins, self.prompts = margins_by(loaded, other), pair_texts(suite)
        if options.num_batches is not None:
            sampled = np.random.default_rng(options.seed).integers(read, size=options.num_batches * PAIRS)
            part = f"{options.num_batches} batches of {PAIRS} pairs of {read:,}, with replacement"
            self._samples = Counter(sampled.tolist())  # how often each row is scored
        else:
            most = min(options.max_rows or read, read)
            part = f"{most:,} of {read:,} items" if most < read else None
            self._samples = Counter(index * read // most for index in range(most))  # evenly spread rows
        items = (Item(row, str(row), "", self.prompts[row], None, {}, {}) for row in self._samples)
        self.items = Items(suite, tuple(items), read, part, digest)

    def __call__(self, items: Sequence[Item], found: Found) -> None:
        index_of = {row: index for index, row in enumerate(self._dataset.rows.tolist())}
        lengths = {row: int(self._dataset.lengths[index]) for row, index in index_of.items()}
        left = sorted(items, key=lambda item: -lengths.get(item.position, 0))  # longest first
        for start in range(0, len(left), BATCH):
            block, began = left[start : start + BATCH], time.perf_counter()
            rows = [item.position for item in block if item.position in index_of]
            margins = self._margins([self._dataset[index_of[row]] for row in rows])
            grades, seconds = dict(zip(rows, map(_grade, margins), strict=True)), time.perf_counter() - began
            for row, item in ((item.position, item) for item in block):
                grade, samples = grades.get(row) or Grade("ungraded", reason=self._reasons.get(row)), self._samples[row]
                found(item, [Reply("", seconds=seconds / len(block) / samples, grade=grade)] * samples)


def pairs_for(
    model: ModelConfig, scored: Scored, suite: SuiteConfig, options: EvalOptions
) -> tuple[Dataset, dict[int, str], int]:
    """The pairs that fit the model, the reasons why other rows cannot be scored, by row, and the number of rows.

    Raises ModelError if the tokenizer does not fit the model, or if the reference has another tokenizer."""
    loaded, tokenizer = scored
    check_embeddings(loaded, tokenizer, model.path)
    reference = None if is_classifier(loaded) else _reference(model, options)
    if reference is not None and _vocabulary(load_tokenizer(reference)) != _vocabulary(tokenizer):
        raise ModelError(
            f"--reference {reference.path} has a different tokenizer from the policy, so their log-probabilities are "
            "those of different tokens: give the model that the policy was trained from"
        )
    longest = min(positions_of(loaded.config) or LONGEST, LONGEST)
    data = DataConfig(
        source=suite.source,
        split=suite.split if not Path(suite.source).expanduser().is_file() else "train",
        columns=_columns(suite),
        template=template_of(suite, tokenizer),
        chat_template_kwargs=suite.chat_template_kwargs,
        system_prompt=suite.system_prompt,
        shuffle=False,
        max_length=longest,
        max_prompt_length=None,
        overlong="drop",
    )
    prepared = prepare(data, tokenizer, "pair")
    reasons = {bad.row: bad.reason for bad in prepared.report.malformed}
    too_long = f"a pair is too long: a completion with its prompt has over {longest:,} tokens"
    missing = set(range(prepared.report.read)) - set(prepared.train.rows.tolist())
    return prepared.train, dict.fromkeys(missing, too_long) | reasons, prepared.report.read


def _reference(model: ModelConfig, options: EvalOptions) -> ModelConfig | None:
    return None if options.reference is None else ModelConfig(path=options.reference, dtype=model.dtype)


def _vocabulary(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    """The vocabulary without added tokens, such as a pad token of the trained model."""
    added = cast(dict[str, int], cast(Any, tokenizer).get_added_vocab())
    return {token: id for token, id in tokenizer.get_vocab().items() if token not in added}


def pair_texts(suite: SuiteConfig) -> dict[int, str]:
    """The pairs for display, by row."""
    return {record.row: pair_text(record.value or {}, _columns(suite)) for record in records_of(suite, suite.split)}


def _columns(suite: SuiteConfig) -> dict[str, str]:
    return {name: columns[0] for name, columns in suite.columns.items()}


def _grade(margin: float) -> Grade:
    if not isfinite(margin):
        return Grade("ungraded", reason="the model's scores are not finite")
    return Grade("correct" if margin > 0 else "wrong", float(margin > 0), f"{margin:+.6g}")


def margins_by(model: PreTrainedModel, reference: PreTrainedModel | None = None) -> Margins:
    """The function for margins of a reward model's rewards, of implicit rewards or, without a reference, of a policy's
    mean log-probabilities per token."""
    rewards = is_classifier(model)
    scorer = RewardScorer(model) if rewards else Scorer(model)
    theirs = None if rewards or reference is None else Scorer(reference)

    def per_sequence(packed: Pack) -> list[float]:
        scores = scorer(packed)
        if isinstance(scores, torch.Tensor):
            return scores.tolist()
        if theirs is None:
            return (packed.sum_by_sequence(scores.logprob_N) / packed.length_S).tolist()
        return (BETA * packed.sum_by_sequence(scores.logprob_N - theirs(packed).logprob_N)).tolist()

    def margins(examples: Sequence[Example]) -> list[float]:
        scored = of_sequences(examples, per_sequence, model.device, PACK_TOKENS, rewards)
        return [chosen - rejected for chosen, rejected in scored]

    return margins


def margins_of(model: PreTrainedModel, examples: Iterable[Example], count: int, what: str) -> list[float]:
    """The margins of `count` pairs, which are read and scored batch by batch."""
    margins, rest = margins_by(model), iter(examples)
    batches = (list(islice(rest, BATCH)) for _ in progress(range(0, count, BATCH), what))
    return [margin for batch in batches for margin in margins(batch)]


def is_classifier(loaded: PreTrainedModel) -> bool:
    return type(loaded).__name__.endswith("ForSequenceClassification")
