"""The weights for a step: the checkpoint that the step began with, or the nearest earlier one, or the initial model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain.base.errors import RunError
from posttrain.config import RunConfig
from posttrain.runs.checkpoint import list_checkpoints, verify
from posttrain.runs.files import load_tensors, restore_rng
from posttrain.runs.folder import check_run_folder
from posttrain.runs.inputs import REFERENCES, START, content_of, models_of, recorded, run_settings
from posttrain.runs.lock import is_locked
from posttrain.runs.metrics import read_metrics
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
