"""`posttrain generate` and `posttrain score`: copy the rows of a file, in order and with all fields, and add
completions of their prompts, or log-probabilities or rewards of their completions."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from posttrain.base.console import counter, progress
from posttrain.base.errors import DataError
from posttrain.base.log import log
from posttrain.base.threads import sharing_cores
from posttrain.base.words import counted
from posttrain.batch import Pack
from posttrain.config import DataConfig, DevicesConfig, ModelConfig
from posttrain.config.options import GenerateOptions
from posttrain.config.schema.base import KindName
from posttrain.config.schema.rollout import RolloutConfig
from posttrain.data import prepare
from posttrain.data.kinds import Prompts
from posttrain.data.prompts import Prompt, prompts_of
from posttrain.data.readers import Record, read_files
from posttrain.data.report import Malformed
from posttrain.distillation import Head
from posttrain.engines import Completion, Engine, Sampling, make_engine, seed_of, stop_token_ids, text_of
from posttrain.models.devices import compute_dtype, take_device
from posttrain.models.families import check_longest, positions_of
from posttrain.models.load import check_embeddings, is_reward_model, load_config, load_model, load_tokenizer
from posttrain.models.matmul import float32_weight
from posttrain.runs.files import ready_to_write, save_rows
from posttrain.sampler import sampling_of
from posttrain.scoring import RewardScorer, Scorer, of_sequences, scored_states, scores_in

BATCH = 32  # rows scored per batch
TOP_ROWS = 256  # tokens whose logits exist at a time


@sharing_cores()
def generate(
    model: ModelConfig,
    file: Path,
    output: Path,
    data: DataConfig,
    rollout: RolloutConfig,
    devices: DevicesConfig,
    options: GenerateOptions,
    behavior_version: int,
) -> str:
    """Sample completions for every row of `file` and write the rows with their `completions` to `output` as JSONL.

    A completion has `text` (as for rewards: without special tokens), `token_ids`, `logprobs` and `finish_reason`. A row
    without a usable prompt keeps its position and has an `error`. A row's completions depend only on the seed and the
    row's number. Prompts are rendered by the rules of `behavior_version`. Input files are never overwritten; an
    existing `output` is overwritten only with `options.overwrite`. Returns the counts and the speed in words.
    """
    ready_to_write(output, (file, Path(model.path)), options.overwrite)
    device, tokenizer = take_device(devices), load_tokenizer(model)
    records = list(read_files((file,)))
    prompts = prompts_of(records, data, tokenizer, str(file), behavior_version, positions_of(load_config(model)))
    policy = load_model(model, "lm", compute_dtype(model, device), device)
    stops = stop_token_ids(policy, tokenizer, data.template != "none")
    sampling = sampling_of(rollout, options.num_generations, stops, options.seed)
    good = [prompt for prompt in prompts if isinstance(prompt, Prompt)]
    with closing(make_engine(rollout.engine, policy, tokenizer, vllm=rollout.vllm)) as engine:
        began = time.perf_counter()
        sampled = generate_all(engine, good, sampling, f"generating for {file.name}")
        seconds = time.perf_counter() - began

    rows = []
    for record, prompt in zip(records, prompts, strict=True):
        row: dict[str, Any] = dict(record.value or {})
        if isinstance(prompt, Malformed):
            row["error"] = prompt.reason
        else:
            row["completions"] = [
                {
                    "text": text_of(one, sampling.stop_token_ids, tokenizer, prompt.tokens),
                    "token_ids": one.tokens,
                    "logprobs": one.logprobs,
                    "finish_reason": one.finish_reason,
                }
                for one in sampled[prompt.row]
            ]
        rows.append(row)
    save_rows(output, rows)
    _warn(len(records) - len(good), len(records), "have no usable prompt")
    completions = [completion for group in sampled.values() for completion in group]
    tokens = sum(len(completion.tokens) for completion in completions)
    truncated = sum(completion.finish_reason == "length" for completion in completions)
    return (
        f"{counted(len(completions), 'completion')} of {counted(len(good), 'prompt')}: {counted(tokens, 'token')} in "
        f"{seconds:.1f} s ({tokens / max(seconds, 1e-9):,.0f} per second), {truncated:,} reached the length limit"
    )


def _warn(bad: int, rows: int, problem: str) -> None:
    if bad:
        log.warning("%d of %d rows %s: see their `error` field", bad, rows, problem)


def generate_all(
    engine: Engine, prompts: Sequence[Prompt], sampling: Sampling, what: str
) -> dict[int, list[Completion]]:
    """The completions of each prompt, keyed by row. Each row has its own random stream, whatever the batching."""
    seeds = [seed_of(sampling.seed, prompt.row) for prompt in prompts]
    with counter(what, len(prompts)) as count:
        tokens = [prompt.tokens for prompt in prompts]
        groups = engine.generate(tokens, sampling, seeds=seeds, finished=lambda *_: count())
    return {prompt.row: group for prompt, group in zip(prompts, groups, strict=True)}


@sharing_cores()
def score(
    model: ModelConfig,
    file: Path,
    output: Path,
    data: DataConfig,
    devices: DevicesConfig,
    tokens_per_pack: int,
    overwrite: bool = False,
    top_logprobs: int = 0,
) -> dict[str, float]:
    """Score every row of `file` and write the rows with their scores to `output` as JSONL. Returns the means.

    A causal model adds `logprob` (nats, summed over the completion) and `logprobs` (one per token), a reward model
    `reward`. Rows with chosen and rejected have each score twice (`chosen_logprob`, `rejected_logprob` …). With
    `top_logprobs`, a causal model adds `teacher_logprobs` of the completion, as settings of distillation read them: its
    `token_ids`, and for each the `logprob_token_ids` and `logprobs` of so many most likely tokens. A row that cannot be
    read keeps its position and has an `error`. Input files are never overwritten; an existing `output` is
    overwritten only with `overwrite`.
    """
    ready_to_write(output, (file, Path(model.path)), overwrite)
    reward = is_reward_model(model)
    device, tokenizer = take_device(devices), load_tokenizer(model)
    records = list(read_files((file,)))
    kind = _kind(records, data)
    if top_logprobs and (reward or kind == "pair"):
        raise DataError("--top-logprobs needs a causal model and rows with one completion, which a student learns from")
    prepared = prepare(data, tokenizer, Prompts(with_completions=True) if top_logprobs else kind)
    dataset = prepared.train
    problems = {bad.row: bad.reason for bad in prepared.report.malformed}
    loaded = load_model(model, "reward" if reward else "lm", compute_dtype(model, device), device)
    check_longest(loaded.config, prepared.longest)
    check_embeddings(loaded, tokenizer, model.path)
    scorer: RewardScorer | Scorer = RewardScorer(loaded) if reward else Scorer(loaded)
    values_of = partial(_top, loaded, top_logprobs) if top_logprobs else partial(_values, scorer)

    scores: dict[int, list[dict[str, Any]]] = {}
    order = np.argsort(-dataset.lengths, kind="stable")
    for start in progress(range(0, len(order), BATCH), f"scoring {file.name}"):
        examples = [dataset[int(i)] for i in order[start : start + BATCH]]
        found = of_sequences(examples, values_of, device, tokens_per_pack, reward)
        scores |= {example.row: values for example, values in zip(examples, found, strict=True)}

    names = ("chosen_", "rejected_") if kind == "pair" else ("",)
    rows, scored = [], []
    for record in records:
        row = dict(record.value or {})
        if record.row in scores:
            for prefix, values in zip(names, scores[record.row], strict=True):
                row |= {prefix + key: value for key, value in values.items()}
            scored.append(row)
        else:
            row["error"] = problems.get(record.row, "the row could not be read")
        rows.append(row)
    save_rows(output, rows)
    _warn(len(records) - len(scored), len(records), "could not be scored")
    key = "reward" if reward else "logprob"
    means = {prefix + key: float(np.mean([row[prefix + key] for row in scored])) for prefix in names}
    if kind == "pair":
        means["accuracy"] = float(np.mean([row[f"chosen_{key}"] > row[f"rejected_{key}"] for row in scored]))
    return means


def _values(scorer: RewardScorer | Scorer, packed: Pack) -> Iterator[dict[str, Any]]:
    """The scores of each sequence of a pack."""
    if isinstance(scorer, RewardScorer):
        for value in scorer(packed).tolist():
            yield {"reward": value}
        return
    for logprobs in scorer(packed).logprob_N.split(packed.length_S.tolist()):
        yield {"logprob": float(logprobs.sum()), "logprobs": logprobs.tolist()}


def _top(model: nn.Module, count: int, packed: Pack) -> Iterator[dict[str, Any]]:
    """The log-probabilities of each sequence of a pack, and the `count` most likely tokens at each of its tokens."""
    hidden_N, head = scored_states(model, packed), Head.of(model)
    logprob_N, wide = scores_in(packed, model, hidden_N, 1.0).logprob_N, float32_weight(head.weight)
    count = min(count, len(head.weight))
    chunks = (head.log_probs(rows, wide)[0].topk(count) for rows in hidden_N.split(TOP_ROWS))
    values, ids = map(torch.cat, zip(*chunks, strict=True))
    parts = (part.split(packed.length_S.tolist()) for part in (logprob_N, packed.target_N, ids, values))
    for logprobs, *top in zip(*parts, strict=True):
        named = zip(("token_ids", "logprob_token_ids", "logprobs"), top, strict=True)
        found = {"logprob": float(logprobs.sum()), "logprobs": logprobs.tolist()}
        yield found | {"teacher_logprobs": {name: part.tolist() for name, part in named}}


def _kind(records: Sequence[Record], data: DataConfig) -> KindName:
    """`pair` if the first readable row has the columns of chosen and rejected (`data.columns`), otherwise `sft`."""
    first = next((record.value for record in records if record.value is not None), None)
    if first is None:
        raise DataError(f"{records[0].file} has no readable row: {records[0].problem}")
    names = [data.columns.get(name, name) for name in ("chosen", "rejected")]
    return "pair" if all(name in first for name in names) else "sft"
