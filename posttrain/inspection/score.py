"""`posttrain score`: log-probabilities or rewards of the rows of a file, in its order, each row with all its fields."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from posttrain.base.errors import DataError
from posttrain.base.progress import progress
from posttrain.base.threads import sharing_cores
from posttrain.batch import pack
from posttrain.config import DataConfig, DevicesConfig, ModelConfig
from posttrain.config.schema.base import KindName
from posttrain.data import prepare
from posttrain.data.readers import Record, read_files
from posttrain.models.attention import width_step
from posttrain.models.devices import compute_dtype, take_device
from posttrain.models.families import check_longest
from posttrain.models.load import check_embeddings, is_reward_model, load_model, load_tokenizer
from posttrain.runs.files import ready_to_write, save_rows
from posttrain.scoring import RewardScorer, Scorer

log = logging.getLogger("posttrain")

BATCH = 32  # rows per batch


@sharing_cores()
def score(
    model: ModelConfig,
    file: Path,
    output: Path,
    data: DataConfig,
    devices: DevicesConfig,
    tokens_per_pack: int,
    overwrite: bool = False,
) -> dict[str, float]:
    """Score every row of `file` and write the rows with their scores to `output` as JSONL; returns means.

    A causal model gives `logprob` (nats, summed over the completion) and `logprobs` (one per token), a reward model
    `reward`; rows with chosen and rejected have each twice (`chosen_logprob`, `rejected_logprob` …). A row that cannot
    be read keeps its place, with `error`. Input files are never overwritten, an existing `output` only with
    `overwrite`.
    """
    ready_to_write(output, (file, Path(model.path)), overwrite)
    reward = is_reward_model(model)
    device = take_device(devices)
    tokenizer = load_tokenizer(model)
    records = list(read_files((file,)))
    kind = _kind(records, data)
    prepared = prepare(data, tokenizer, kind)
    dataset = prepared.train
    problems = {bad.row: bad.reason for bad in prepared.report.malformed}
    loaded = load_model(model, "reward" if reward else "lm", compute_dtype(model, device), device)
    check_longest(loaded.config, prepared.longest)
    check_embeddings(loaded, tokenizer, model.path)
    scorer: RewardScorer | Scorer = RewardScorer(loaded) if reward else Scorer(loaded)

    scores: dict[int, list[dict[str, Any]]] = {}
    order = np.argsort(-dataset.lengths, kind="stable")
    starts = range(0, len(order), BATCH)
    for start in progress(starts, f"scoring {file.name}"):
        examples = [dataset[int(i)] for i in order[start : start + BATCH]]
        for packed in pack(examples, tokens_per_pack, reward, width_step(device, tokens_per_pack)):
            for group, values in zip(packed.group_S.tolist(), _values(scorer, packed.to(device)), strict=True):
                scores.setdefault(examples[group].row, []).append(values)

    names = ("chosen_", "rejected_") if kind == "pair" else ("",)
    rows, found = [], []
    for record in records:
        row = dict(record.value or {})
        if record.row in scores:
            for prefix, values in zip(names, scores[record.row], strict=True):
                row |= {prefix + key: value for key, value in values.items()}
            found.append(row)
        else:
            row["error"] = problems.get(record.row, "the row could not be read")
        rows.append(row)
    save_rows(output, rows)
    if len(found) < len(records):
        log.warning(
            "%d of %d rows could not be scored: see their field `error`", len(records) - len(found), len(records)
        )
    key = "reward" if reward else "logprob"
    means = {prefix + key: float(np.mean([row[prefix + key] for row in found])) for prefix in names}
    if kind == "pair":
        means["accuracy"] = float(np.mean([row[f"chosen_{key}"] > row[f"rejected_{key}"] for row in found]))
    return means


@torch.no_grad()
def _values(scorer: RewardScorer | Scorer, packed) -> Iterator[dict[str, Any]]:
    """The scores of each sequence of a pack."""
    if isinstance(scorer, RewardScorer):
        for value in scorer(packed).tolist():
            yield {"reward": value}
        return
    logprob_N = scorer(packed).logprob_N
    for logprobs in logprob_N.split(packed.length_S.tolist()):
        yield {"logprob": float(logprobs.sum()), "logprobs": logprobs.tolist()}


def _kind(records: list[Record], data: DataConfig) -> KindName:
    """Pairs if the rows have a chosen and a rejected completion by the settings' column names."""
    first = next((record.value for record in records if record.value is not None), None)
    if first is None:
        raise DataError(f"{records[0].file} has no readable row: {records[0].problem}")
    names = [data.columns.get(name, name) for name in ("chosen", "rejected")]
    return "pair" if all(name in first for name in names) else "sft"
