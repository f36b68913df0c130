"""Inputs of the loss lab: a step's weights, its batch (stored completions or data rows), and the losses that fit the
batch. The run's own loss comes first; each other loss has the run's settings, or those of `--set`."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from posttrain.base.errors import ConfigError, RunError
from posttrain.base.words import counted
from posttrain.batch import Example, Node
from posttrain.config import RunConfig
from posttrain.config.reading.explain import did_you_mean, wrong_value
from posttrain.config.reading.fields import full
from posttrain.config.reading.files import parse_value
from posttrain.config.schema.base import SettingsConflict
from posttrain.config.schema.methods import METHODS, OWN, AnyMethod
from posttrain.environments.trajectory import Trajectory
from posttrain.rewards.parts import CompletionReward, RewardPart
from posttrain.rollout import Rollout, SampledCompletion
from posttrain.runs.checkpoint import list_checkpoints, step_of, verify
from posttrain.runs.folder import check_run_folder, is_locked, read_facts
from posttrain.runs.inputs import REFERENCES, START, content_of, models_of, recorded, run_settings
from posttrain.runs.metrics import read_metrics
from posttrain.runs.receipt import StoredPart
from posttrain.runs.stored_rollouts import StoredRun, of_trained, trained_tokens
from posttrain.training.job import Job, data_of
from posttrain.training.order import batch_of, epoch_order
from posttrain.training.state import Saved, State, problems_of

# The lab computes one update over the complete batch, which the reference scores in the lab.
ONE_UPDATE = dict.fromkeys(("num_iterations", "num_minibatches", "num_ppo_epochs"), 1)
ONE_UPDATE |= {"resampling_rounds": 0, "precompute_ref_log_probs": False}
# Settings that the lab cannot change: they choose the loss or other models, or act before or after the step.
FIXED = {
    *ONE_UPDATE,
    *("type", "loss_type", "loss_weights", "divergence"),
    *("ref_model", "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps"),
    *("teacher", "teacher_model_kind", "teacher_system_prompt", "teacher_prompt_template"),
    *("privileged_context", "use_successful_as_teacher", "success_reward_threshold"),
    *("teacher_logprobs", "on_policy_fraction"),
    *("num_generations", "completion_only_loss", "assistant_only_loss", "target_kl", "kl_horizon"),
}
EXTRAS = {"scale_rewards", "center_rewards_coefficient"}  # settings that add rows, unless `--set` is given


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights with which gradients are computed. `checkpoint` None: the model before training."""

    step: int  # the step that the lab examines
    checkpoint: Path | None
    state: State  # of the training loop at these weights
    skipped: tuple[str, ...] = ()  # damaged checkpoints nearer to the step

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


def weights_for(folder: Path, step: int) -> Weights:
    """The weights that a step began with, or the nearest earlier weights. Damaged checkpoints are skipped."""
    skipped = []
    for path in (path for path in reversed(list_checkpoints(folder)) if step_of(path) < step):
        problems = verify(path) or problems_of(path)
        if not problems:
            return Weights(step, path, Saved.read(path).loop, tuple(skipped))
        skipped.append(f"{path.name} is damaged ({'; '.join(problems)})")
    return Weights(step, None, State(), tuple(skipped))


def settings_of(folder: Path) -> RunConfig:
    """The settings of a run that is not active, with the current paths of its models.
    Raises RunError for a folder without a run, an active run, or models that have changed since training."""
    nested = sorted(path.parent.name for path in folder.glob("*/run.json"))
    if nested and not (folder / "run.json").is_file():
        raise RunError(f"{folder} has several runs: name one of them ({', '.join(str(folder / n) for n in nested)})")
    check_run_folder(folder)
    if is_locked(folder):
        raise RunError(
            f"{folder} is active: its training needs the memory and the cores, and deletes checkpoints. Wait until it "
            "ends, or stop it (Ctrl-C) and resume it later"
        )
    config = run_settings(folder, imports=True)
    before, now = recorded(folder), models_of(config)
    for setting in (START, *REFERENCES):
        if setting in before and setting in now and before[setting]["content"] != (content := content_of(now[setting])):
            raise RunError(
                f"{now[setting].path} ({setting}) is not the model that {folder} was trained with: it was "
                f"{before[setting]['content']} and is now {content}. Restore the original model"
            )
    return config


def logged_norm(folder: Path, step: int) -> float | None:
    """The logged gradient norm of this step; None if the step was logged only in a mean over several steps."""
    lines = [line for line in read_metrics(folder) if "loss" in line]
    before = max((line["step"] for line in lines if line["step"] < step), default=0)
    return next((line.get("grad_norm") for line in lines if line["step"] == step and before == step - 1), None)


@dataclass(frozen=True, slots=True)
class StoredStep:
    """A stored step: its rollout, and log-probabilities of its tokens (R) before the step and at its last update.
    Outside the run's loss, both are the engine's log-probabilities."""

    rollout: Rollout
    old_R: Tensor
    new_R: Tensor

    def __str__(self) -> str:
        completions = counted(len(self.rollout.completions), "completion")
        return f"{completions} of {counted(len(self.rollout.prompts), 'prompt')}"


def stored_step(folder: Path, step: int) -> StoredStep:
    """Read a step from `rollouts.sqlite`. Raises RunError if the step is missing or damaged."""
    with StoredRun(folder) as stored:
        stored.require(step)
        prompts, rows = stored.prompts(step), stored.rollouts(step)
    for row in rows:  # each needs a prompt, tokens, and one log-probability of each kind per token
        size = None if row["tokens"] is None else len(row["tokens"])
        arrays = [row[name] for name in ("sampler_logprobs", "old_logprobs", "new_logprobs")]
        whole = size and arrays[0] is not None and all(one is None or len(one) == size for one in arrays)
        if not whole or row["prompt_index"] >= len(prompts):
            raise RunError(
                f"{folder / 'rollouts.sqlite'}: completion {row['rollout_index']} of prompt {row['prompt_index']} of "
                f"step {step} is damaged; choose another step"
            )
    examples = [Example((Node(one["tokens"]),), row=one["row"], facts=one["facts"]) for one in prompts]
    completions = [
        SampledCompletion(
            row["prompt_index"],
            row["tokens"].tolist(),
            of_trained(row)["sampler_logprobs"].tolist(),
            row["completion"],
            row["finish_reason"],
            row["version"],
            CompletionReward(row["reward"], tuple(_part(name, part) for name, part in row["parts"].items())),
            trained_tokens(row).tolist(),
            Trajectory.restored(row["turns"], row["tokens"].tolist()) if row.get("turns") else None,
        )
        for row in rows
    ]
    return StoredStep(Rollout(examples, completions), _flat(rows, "old_logprobs"), _flat(rows, "new_logprobs"))


def _part(name: str, stored: Any) -> RewardPart:
    part = StoredPart.of(stored)
    return RewardPart(name, part.weight, part.value)


def _flat(rows: Sequence[Mapping[str, Any]], name: str) -> Tensor:
    each = [row["sampler_logprobs"] if row[name] is None else row[name] for row in map(of_trained, rows)]
    return torch.from_numpy(np.concatenate(each).astype(np.float32))


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step, and the example before them in their epoch."""

    examples: list[Example]
    previous: Example

    def __str__(self) -> str:
        return f"{counted(len(self.examples), 'row')} of the training data"


def rows_of(job: Job, folder: Path, step: int) -> Rows:
    """The rows of a step, found by seed and epoch. Raises RunError if the run has no such step or the data changed."""
    lines = [line["step"] for line in read_metrics(folder) if "loss" in line]
    done = max([0, *lines, *map(step_of, list_checkpoints(folder))])
    if step > done:
        raise RunError(f"{folder} has finished {counted(done, 'step')}: there is no step {step}")
    data = data_of(job.config, job.model, job.tokenizer)
    before = read_facts(folder)["provenance"].get("dataset_fingerprint")
    if before is not None and data.fingerprint != before:
        raise RunError(
            f"the training data differs from the data that {folder} was trained on (another file, split, template or "
            f"tokenizer: restore it), so the rows of step {step} are unknown"
        )
    epoch, positions = batch_of(job.config, len(data.train), step)
    order = epoch_order(job.config, data.train, epoch)
    return Rows([data.train[int(row)] for row in order[positions]], data.train[int(order[positions.start - 1])])


@dataclass(frozen=True, slots=True)
class Variant:
    """A loss with its settings: a row of the lab. `label`: the name, and the settings chosen for this loss."""

    name: str
    label: str
    method: AnyMethod


def variants(
    own: AnyMethod, losses: Sequence[str], settings: Mapping[str, Sequence[Any]]
) -> tuple[list[Variant], dict[str, str]]:
    """The rows of the lab for a run of method `own`, its own loss first; and the losses that do not fit, with reasons.

    `losses`: names; empty: all. Every combination of `settings` makes a row for each loss that reads them. Raises
    ConfigError for an unknown loss or setting, or a value out of range.
    """
    entries = [(name, changes) for name, changes in catalogue(own) if not settings or not (changes.keys() & EXTRAS)]
    names = list(dict.fromkeys(name for name, _ in entries))
    for name in losses:
        if name not in names:
            raise ConfigError(f"--loss {name}: {did_you_mean(name, names)} for a run of {own.type}")
    _refuse_unknown(settings, {changes["type"] for name, changes in entries if not losses or name in losses})
    first = own.model_copy(update={key: value for key, value in ONE_UPDATE.items() if hasattr(own, key)})
    shown = {key: getattr(own, key) for key in settings if own.reads(key)}
    rows = [Variant(own.loss_name, _label(own.loss_name, shown), first)]
    left_out: dict[str, str] = {}
    unread = set(settings)
    for name, changes in entries:
        if losses and name not in losses:
            continue
        for values in itertools.product(*settings.values()):
            chosen = dict(zip(settings, values, strict=True))
            adapted = _adapted(own, changes, chosen)
            if isinstance(adapted, str):
                left_out[_label(name, chosen)] = adapted
                continue
            method, read = adapted
            unread -= read.keys()
            if all(method != row.method for row in rows):
                extra = {key: value for key, value in changes.items() if key not in ("type", "loss_type", "divergence")}
                rows.append(Variant(name, _label(name, extra | read), method))
    for name in settings:
        if name in unread and not left_out:
            raise ConfigError(f"--set {name}: none of these losses reads it: {', '.join(losses or names)}")
    return rows, left_out


def parsed(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Parse repeated options `--set name=value,value`. Raises ConfigError for any other form."""
    settings: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not (equals and name.strip() and all(map(str.strip, values.split(",")))):
            raise ConfigError(f"--set {text}: write a setting of the method and its values, such as epsilon=0.1,0.2")
        each = [parse_value(value.strip(), f"--set {text}").values["value"] for value in values.split(",")]
        settings.setdefault(name.strip().removeprefix("method."), []).extend(each)
    return {name: list(dict.fromkeys(values)) for name, values in settings.items()}


def catalogue(own: AnyMethod) -> list[tuple[str, dict[str, Any]]]:
    """The names of the losses that fit the data of a run with the method `own`, with the settings that each changes."""
    losses = [
        (name, {"type": method.name(), **chosen})
        for method in sorted(METHODS.values(), key=lambda method: method.trains_values)
        if all(getattr(method, name) == getattr(own, name) for name in ("kind", "head", "needs_rewards"))
        and method.trains_values <= own.trains_values
        for name, chosen in method.losses(own)
    ]
    if own.loss_name not in dict(losses):  # a sum of losses
        losses.append((own.loss_name, own.model_dump(include={"type", "loss_type", "loss_weights"})))
    return losses


def _adapted(
    own: AnyMethod, changes: Mapping[str, Any], chosen: Mapping[str, Any]
) -> tuple[AnyMethod, dict[str, Any]] | str:
    """Return the settings of another loss, and those of `chosen` that it reads; or the reason why it does not fit.

    The settings are the run's. A setting that the run leaves at its method's default, or that the other loss does not
    read, is set to the other method's default.
    """
    group = cast(type[AnyMethod], (METHODS | OWN)[changes["type"]])
    values = _carried(own, group) | dict(changes)
    read = {key: value for key, value in chosen.items() if key in group.model_fields}
    forced = {key: value for key, value in ONE_UPDATE.items() if key in group.model_fields}
    while True:
        try:
            method = group.model_validate(values | read | forced)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            conflict = problem.get("ctx", {}).get("error")
            if not isinstance(conflict, SettingsConflict):
                name = str(problem["loc"][0])
                wrong = wrong_value(problem["input"], full(group.model_fields[name]))
                raise ConfigError(f"--set {name} {wrong}") from error
            unread = {path for path, _ in conflict.problems} - changes.keys() - {"num_generations"}
            if not unread & (read.keys() | values.keys()):
                return "; ".join(f"{path} {message}" for path, message in conflict.problems)
        else:
            unread = {key for key in read if not method.reads(key)}
            if not unread:
                return method, read
        for path in unread:
            read.pop(path, None)
            values.pop(path, None)


def _carried(own: AnyMethod, group: type[AnyMethod]) -> dict[str, Any]:
    """The run's settings that the other method also has."""
    names = own.own_names if group is not type(own) else {}
    defaults = type(own).model_fields
    carried = {}
    for name in group.model_fields:
        source = names.get(name, name)
        if source not in defaults or name in ("type", "loss_type"):
            continue
        value = getattr(own, source)
        if group is type(own) or value != defaults[source].default or name == "num_generations":
            carried[name] = value
    return carried


def _refuse_unknown(settings: Mapping[str, Sequence[Any]], types: set[str]) -> None:
    """Raise ConfigError for a setting that none of the methods has, or that the lab cannot change."""
    known = sorted({name for type in types for name in (METHODS | OWN)[type].model_fields} - FIXED)
    for name in settings:
        if name in FIXED:
            raise ConfigError(
                f"--set {name}: it chooses the loss (use --loss) or another model, or acts after the first update"
            )
        if name not in known:
            why = did_you_mean(name, known) if known else "these losses have no settings"
            raise ConfigError(f"--set {name}: {why}")


def _label(name: str, settings: Mapping[str, Any]) -> str:
    shown = (f"{key}={'null' if value is None else value}" for key, value in settings.items())
    return " ".join([name, *shown])
