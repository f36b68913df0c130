"""`posttrain generate`: completions of the prompts of a file, in its order, each row with all its fields."""

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from posttrain.base.progress import counter
from posttrain.base.threads import sharing_cores
from posttrain.config import DataConfig, DevicesConfig, ModelConfig
from posttrain.config.schema.rollout import RolloutConfig
from posttrain.data.prompts import Prompt, prompts_of
from posttrain.data.readers import read_files
from posttrain.data.report import Malformed
from posttrain.engines import Completion, Engine, Sampling, make_engine, seed_of, stop_token_ids, text_of
from posttrain.evaluation.answering import too_long
from posttrain.models.devices import compute_dtype, take_device
from posttrain.models.load import load_model, load_tokenizer
from posttrain.rollout import sampling_of
from posttrain.runs.files import ready_to_write, save_rows

log = logging.getLogger("posttrain")


@dataclass(frozen=True, slots=True)
class Generated:
    """Counts of a generated file."""

    prompts: int
    completions: int
    tokens: int
    truncated: int  # completions that reached the length limit
    seconds: float


@sharing_cores()
def generate(
    model: ModelConfig,
    file: Path,
    output: Path,
    data: DataConfig,
    rollout: RolloutConfig,
    devices: DevicesConfig,
    num_generations: int,
    seed: int,
    overwrite: bool = False,
    behavior_version: int = 2,
) -> Generated:
    """Sample completions for every row of `file` and write the rows with their `completions` to `output` as JSONL.

    A completion has `text` (as for rewards: without special tokens), `token_ids`, `logprobs` and `finish_reason`. A row
    without a usable prompt keeps its place, with `error`. A row's completions depend only on the seed and its number.
    Prompts are written by the rules of `behavior_version`. Input files are never overwritten, an existing `output`
    only with `overwrite`.
    """
    ready_to_write(output, (file, Path(model.path)), overwrite)
    device = take_device(devices)
    tokenizer = load_tokenizer(model)
    records = list(read_files((file,)))
    prompts = prompts_of(records, data, tokenizer, str(file), behavior_version)
    policy = load_model(model, "lm", compute_dtype(model, device), device)
    sampling = sampling_of(rollout, num_generations, stop_token_ids(policy, tokenizer, data.template != "none"), seed)
    prompts = [too_long(prompt, policy) or prompt for prompt in prompts]
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
            row["completions"] = [as_json(done, sampling, tokenizer, prompt) for done in sampled[prompt.row]]
        rows.append(row)
    save_rows(output, rows)
    if len(good) < len(records):
        log.warning(
            "%d of %d rows have no usable prompt: see their field `error`", len(records) - len(good), len(records)
        )
    found = [completion for group in sampled.values() for completion in group]
    return Generated(
        prompts=len(good),
        completions=len(found),
        tokens=sum(len(completion.tokens) for completion in found),
        truncated=sum(completion.finish_reason == "length" for completion in found),
        seconds=seconds,
    )


def generate_all(
    engine: Engine, prompts: Sequence[Prompt], sampling: Sampling, what: str
) -> dict[int, list[Completion]]:
    """The completions of each prompt, by its row; random streams are by row, so batching does not change them."""
    seeds = [seed_of(sampling.seed, prompt.row) for prompt in prompts]
    with counter(what, len(prompts)) as count:
        groups = engine.generate(
            [prompt.tokens for prompt in prompts], sampling, seeds=seeds, finished=lambda *_: count()
        )
    return {prompt.row: group for prompt, group in zip(prompts, groups, strict=True)}


def as_json(
    completion: Completion, sampling: Sampling, tokenizer: PreTrainedTokenizerBase, prompt: Prompt
) -> dict[str, Any]:
    return {
        "text": text_of(completion, sampling.stop_token_ids, tokenizer, prompt.tokens),
        "token_ids": completion.tokens,
        "logprobs": completion.logprobs,
        "finish_reason": completion.finish_reason,
    }
