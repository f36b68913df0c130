"""What the losses of a step are computed on: its weights, and its batch of stored completions or rows of the data."""

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
from posttrain.config import RunConfig
from posttrain.data import Prepared
from posttrain.rewards.compose import CompletionReward
from posttrain.rollout import Rollout, SampledCompletion
from posttrain.runs.checkpoint import list_checkpoints, verify
from posttrain.runs.files import load_tensors, restore_rng
from posttrain.runs.folder import check_run_folder, is_locked, read_facts
from posttrain.runs.inputs import REFERENCES, START, content_of, models_of, recorded, run_settings
from posttrain.runs.metrics import read_metrics
from posttrain.runs.stored_rollouts import StoredRun, of_trained, trained_tokens
from posttrain.training.job import Job, data_of
from posttrain.training.loop import epoch_order, place_of
from posttrain.training.state import Saved, State, problems_of


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights that gradients are computed with. `checkpoint` None is the model before training."""

    step: int  # the step that the lab is about
    checkpoint: Path | None
    state: State  # of the loop, with these weights
    skipped: tuple[str, ...] = ()  # damaged checkpoints that are nearer

    @property
    def exact(self) -> bool:
        """Whether the step began with these weights."""
        return self.state.step == self.step - 1

    @property
    def name(self) -> str:
        return "the initial model" if self.checkpoint is None else self.checkpoint.name

    def __str__(self) -> str:
        if self.exact:
            return f"{self.name}, which step {self.step} began with"
        return f"{self.name}: nearest before step {self.step}, as there is no checkpoint-{self.step - 1}"

    def restore_generators(self, device: torch.device) -> None:
        """Set the random generators, which dropout reads, to the checkpoint's; without one they are as at the start."""
        if self.checkpoint is not None:
            restore_rng(load_tensors(self.checkpoint / "rng.safetensors"), Saved.read(self.checkpoint).rng, device)


def weights_for(folder: Path, step: int) -> Weights:
    """The weights that a step began with, or else the nearest earlier ones. Damaged checkpoints are skipped."""
    skipped = []
    for path in reversed(list_checkpoints(folder)):
        if step_of(path) >= step:
            continue
        if problems := verify(path) or problems_of(path):
            skipped.append(f"{path.name} is damaged ({'; '.join(problems)})")
            continue
        return Weights(step, path, Saved.read(path).loop, tuple(skipped))
    return Weights(step, None, State(), tuple(skipped))


def settings_of(folder: Path) -> RunConfig:
    """The settings of a run that is not active, with the current paths of its models.

    Raises RunError for a folder without a run, an active run, or models that have changed since.
    """
    nested = sorted(path.parent.name for path in folder.glob("*/run.json"))
    if nested and not (folder / "run.json").is_file():
        raise RunError(f"{folder} has several runs: name one of them ({', '.join(str(folder / n) for n in nested)})")
    check_run_folder(folder)
    if is_locked(folder):
        raise RunError(
            f"{folder} is active: its training needs the memory and the cores, and deletes checkpoints. Wait for its "
            "end, or stop it (Ctrl-C) and resume it later"
        )
    config = run_settings(folder)
    read, now = recorded(folder), models_of(config)
    for setting in (START, *REFERENCES):
        if setting in read and setting in now and read[setting]["content"] != (found := content_of(now[setting])):
            raise RunError(
                f"{now[setting].path} ({setting}) is another model than the one that {folder} was trained with: it was "
                f"{read[setting]['content']}, and now it is {found}. Restore the former model"
            )
    return config


def finished_steps(folder: Path) -> int:
    """The number of steps that the run has made, by its metrics and its checkpoints."""
    lines = [line["step"] for line in read_metrics(folder) if "loss" in line]
    return max([0, *lines, *map(step_of, list_checkpoints(folder))])


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def logged(folder: Path, step: int) -> dict[str, Any] | None:
    """The step's own line of metrics; None if it is a mean over several steps."""
    lines = [line for line in read_metrics(folder) if "loss" in line]
    before = max((line["step"] for line in lines if line["step"] < step), default=0)
    return next((line for line in lines if line["step"] == step and before == step - 1), None)


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
