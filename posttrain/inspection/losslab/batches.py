"""The batch of a step: completions from `rollouts.sqlite`, or rows of the data in the order of the seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.base.errors import RunError
from posttrain.base.words import counted
from posttrain.batch import Example, Node
from posttrain.data import Prepared
from posttrain.inspection.losslab.weights import finished_steps
from posttrain.rewards.compose import CompletionReward
from posttrain.rollout import Rollout, SampledCompletion
from posttrain.runs.folder import read_facts
from posttrain.runs.stored_rollouts import StoredRun, of_trained, trained_tokens
from posttrain.training.job import Job, data_of
from posttrain.training.loop import epoch_order, place_of


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A stored step: its rollout, and log-probabilities of its tokens (R) before the step and at its last update.

    Both are the engine's outside of the run's loss.
    """

    rollout: Rollout
    old_R: Tensor
    new_R: Tensor

    def __str__(self) -> str:
        completions = counted(len(self.rollout.completions), "completion")
        return f"{completions} of {counted(len(self.rollout.prompts), 'prompt')}"


def stored_step(folder: Path, step: int) -> StoredStep:
    """Read a step from `rollouts.sqlite`. Raises RunError if it is not there, or damaged."""
    with StoredRun(folder) as stored:
        stored.require(step)
        prompts, rows = stored.prompts(step), stored.rollouts(step)
    _check(folder, step, prompts, rows)
    examples = [Example((Node(one["tokens"]),), row=one["row"], facts=one["facts"]) for one in prompts]
    completions = [
        SampledCompletion(
            row["prompt_index"],
            row["tokens"].tolist(),
            of_trained(row)["sampler_logprobs"].tolist(),
            row["completion"],
            row["finish_reason"],
            row["version"],
            CompletionReward(row["reward"]),
            trained_tokens(row).tolist(),
        )
        for row in rows
    ]
    return StoredStep(Rollout(examples, completions), _flat(rows, "old_logprobs"), _flat(rows, "new_logprobs"))


def _check(folder: Path, step: int, prompts: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise RunError unless every completion has a prompt, tokens, and a number of each kind per token."""
    for row in rows:
        size = None if row["tokens"] is None else len(row["tokens"])
        arrays = [row[name] for name in ("sampler_logprobs", "old_logprobs", "new_logprobs")]
        whole = size and arrays[0] is not None and all(one is None or len(one) == size for one in arrays)
        if not whole or row["prompt_index"] >= len(prompts):
            raise RunError(
                f"{folder / 'rollouts.sqlite'}: completion {row['rollout_index']} of prompt {row['prompt_index']} of "
                f"step {step} is damaged; choose another step"
            )


def _flat(rows: Sequence[Mapping[str, Any]], name: str) -> Tensor:
    each = [row["sampler_logprobs"] if row[name] is None else row[name] for row in map(of_trained, rows)]
    return torch.from_numpy(np.concatenate(each).astype(np.float32))


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step, the data that they are from, and the example before them in their epoch."""

    examples: list[Example]
    data: Prepared
    previous: Example

    def __str__(self) -> str:
        return f"{counted(len(self.examples), 'row')} of the training data"


def rows_of(job: Job, folder: Path, step: int) -> Rows:
    """The rows of a step: their order is a function of seed and epoch. Raises RunError if the data has changed."""
    done = finished_steps(folder)
    if step > done:
        raise RunError(f"{folder} has made {counted(done, 'step')}: there is no step {step}")
    data = data_of(job.config, job.model, job.tokenizer)
    before = read_facts(folder)["provenance"].get("dataset_fingerprint")
    if before is not None and data.fingerprint != before:
        raise RunError(
            f"the training data differs from the data that {folder} was trained on (another file, split, template or "
            f"tokenizer: restore it), so the rows of step {step} are not known"
        )
    epoch, place = place_of(job.config, len(data.train), step)
    order = epoch_order(job.config, len(data.train), epoch)
    return Rows([data.train[int(row)] for row in order[place]], data, data.train[int(order[place.start - 1])])
