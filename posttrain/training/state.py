"""The loop's state in a checkpoint, and checks before resuming: settings that may change, and missing files."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from posttrain.base.errors import DamagedError, RunError
from posttrain.base.files import table_beside
from posttrain.base.log import log
from posttrain.base.redaction import redact
from posttrain.config import RunConfig, load
from posttrain.runs.checkpoint import saved_step
from posttrain.runs.files import flat, load_json
from posttrain.runs.inputs import recorded
from posttrain.runs.metrics import NAME as METRICS
from posttrain.runs.rollouts import NAME as ROLLOUTS

CHANGEABLE = table_beside(__file__, "changeable.yaml")  # the settings that a resumed run may change


@dataclass(slots=True)
class State:
    """The loop's state, apart from weights, optimizer and random generators."""

    step: int = 0
    num_tokens: int = 0
    order: int = 0  # CRC-32 of the row numbers trained on so far, in their order
    updates: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    evaluated: bool = False  # whether an evaluation was made at this step
    best: float | None = None
    best_loss: float | None = None  # the loss in the evaluation of `best`, on the same validation set, if measured
    evaluations_since_best: int = 0
    seconds: float = 0.0  # spent on steps and evaluations
    save_seconds: float = 0.0  # spent on saving checkpoints
    window: dict[str, float] = field(default_factory=dict)  # sums since the last log line
    window_steps: dict[str, int] = field(default_factory=dict)  # number of steps with the metric
    memory: dict[str, float] = field(default_factory=dict)  # the method's own state
    # With a curriculum (training/order.py). These lists are replaced, never changed, so that copies may share them.
    epoch: int = -1
    queue: list[int] = field(default_factory=list)  # the prompts that the epoch has still to sample, in order
    awake_from: list[int] = field(default_factory=list)  # by prompt: the first epoch in which it does not rest

    def take(self, metrics: Mapping[str, float]) -> None:
        """Add a step's metrics to the means of the next log line."""
        for name, value in metrics.items():
            self.window[name] = self.window.get(name, 0.0) + value
            self.window_steps[name] = self.window_steps.get(name, 0) + 1

    def means(self) -> dict[str, float]:
        """The means since the last log line; empty if all steps were skipped."""
        return {name: value / self.window_steps[name] for name, value in self.window.items()}

    def copy(self) -> State:
        """An independent copy."""
        return replace(self, window=dict(self.window), window_steps=dict(self.window_steps), memory=dict(self.memory))

    def as_json(self) -> dict[str, Any]:
        """The state for `from_json`, with null for NaN: a metric may be NaN although loss and gradient are finite."""
        window = {name: value if math.isfinite(value) else None for name, value in self.window.items()}
        return asdict(self) | {"window": window}

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> State:
        window = {name: math.nan if value is None else value for name, value in saved["window"].items()}
        facts: dict[str, Any] = {**saved, "window": window}
        return cls(**facts)


@dataclass(frozen=True, slots=True)
class Saved:
    """`state.json` of a checkpoint."""

    loop: State
    rng: dict[str, Any]  # the part that is not in rng.safetensors
    data: str  # the data's fingerprint
    total: int  # steps of the run
    tensors: int | None = None  # number of tensors in optimizer.safetensors; None in checkpoints of earlier versions

    def as_json(self) -> dict[str, Any]:
        """The content of `state.json`, for `read`."""
        return {**{field.name: getattr(self, field.name) for field in fields(self)}, "loop": self.loop.as_json()}

    @classmethod
    def read(cls, checkpoint: Path) -> Saved:
        """Read a checkpoint's `state.json`. Raises DamagedError if the file is invalid or belongs to another step."""
        try:
            facts = load_json(checkpoint / "state.json")
            saved = cls(**{**facts, "loop": State.from_json(facts["loop"])})
        except (RunError, TypeError, KeyError, AttributeError) as error:
            raise DamagedError(f"state.json: it is not the state of a run ({error})") from error
        step = saved_step(checkpoint)
        if saved.loop.step != step:
            raise DamagedError(f"state.json: it is the state of step {saved.loop.step}, not of step {step}")
        return saved


def problems_of(checkpoint: Path) -> list[str]:
    """Problems that prevent resuming from a checkpoint with intact files, as far as can be told without loading it."""
    try:
        Saved.read(checkpoint)
    except DamagedError as error:
        return [str(error)]
    return [] if (checkpoint / "config.yaml").is_file() else ["config.yaml: missing"]


def run_folder_of(path: Path) -> Path:
    """`path` if it is a run folder, or the run folder that contains the checkpoint `path`."""
    for folder in (path, path.parent):
        if (folder / "run.json").is_file():
            return folder
    raise RunError(f"{path} is neither a run folder nor a checkpoint in one")


def as_started(config: RunConfig, folder: Path) -> RunConfig:
    """The settings with the behavior_version of the runs in `folder`, unless the settings set it themselves."""
    if "behavior_version" in config.model_fields_set or not (folder / "config.yaml").is_file():
        return config
    version = load(folder / "config.yaml").stages[0].config.behavior_version
    return config.model_copy(update={"behavior_version": version})


def as_trained(config: RunConfig, folder: Path) -> RunConfig:
    """The settings, with the excluded rows of the run in `folder`, which may have started with different stages."""
    saved = load(folder / "config.yaml").config.data.excluded
    if saved == config.data.excluded:
        return config
    log.warning("%s started with other rows held out by the stages, and still excludes those (data.excluded)", folder)
    return config.model_copy(update={"data": config.data.model_copy(update={"excluded": saved})})


def saved_settings(folder: Path, config: RunConfig) -> RunConfig:
    """`config` adapted for resuming the run in `folder`: with the model, name and parent folder of that run."""
    saved = load(folder / "config.yaml").config
    name = saved.models[0].folder_name
    own = [model for model in config.models if model.folder_name == name]
    if not own:
        raise RunError(f"{folder} is a run of the model {name}, which is not in the given config")
    config = as_trained(as_started(config, folder), folder)
    return config.model_copy(update={"models": (own[0],), "name": saved.name, "output_dir": saved.output_dir})


def refuse_changes(checkpoint: Path, config: RunConfig) -> None:
    """Raise RunError if the settings differ from the checkpoint's in anything that changes the run's results.

    Models that the run has read are compared by content: their paths may differ.
    """
    by_content = recorded(run_folder_of(checkpoint))
    saved = flat(redact(load(checkpoint / "config.yaml").config.model_dump(mode="json")), lists=True)
    now = flat(redact(config.model_dump(mode="json")), lists=True)
    changed = [
        f"{path}: {saved.get(path)} -> {now.get(path)}"
        for path in sorted(saved.keys() | now.keys())
        if saved.get(path) != now.get(path)
        and path not in by_content
        and not any(path == allowed or path.startswith(f"{allowed}.") for allowed in CHANGEABLE)
    ]
    if changed:
        raise RunError(
            f"{checkpoint} was made with different settings ({'; '.join(changed)}). A resumed run may change step and "
            "epoch counts, logging, saving and evaluation intervals, devices, where vLLM runs, and the memory settings "
            "(training.tokens_per_pack, training.gradient_checkpointing); for anything else start a new run"
        )


def refuse_fewer_steps(checkpoint: Path, config: RunConfig) -> None:
    """Raise RunError if the checkpoint's step is beyond the requested number of steps."""
    step, limit = saved_step(checkpoint), config.training.max_steps
    if limit is not None and step > limit:
        raise RunError(
            f"{checkpoint} is at step {step}, beyond training.max_steps = {limit}: raise it, or start a new run"
        )


def report_lost(folder: Path, checkpoint: Path, config: RunConfig, lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a warning for each file that the run wrote before this checkpoint and that is now missing.

    `lines`: the metrics that still exist.
    """
    state = Saved.read(checkpoint).loop
    unlogged = max(state.window_steps.values(), default=0) + state.skipped
    if not (folder / METRICS).exists() and state.step > unlogged:
        yield (
            f"{folder / METRICS} is missing: the metrics up to step {state.step} are lost; curves and report will "
            "start after it. Training does not need them"
        )
    names = {name for line in lines if line["step"] <= state.step for name in line}
    rewarded = any(name.startswith("eval_") and name.endswith("reward") for name in names)
    sampled = state.step > 0 if config.method.samples_completions else rewarded
    if config.rollout.save and sampled and not (folder / ROLLOUTS).exists():
        yield (
            f"{folder / ROLLOUTS} is missing: the completions up to step {state.step} are lost, and `posttrain "
            "rollouts`, `why` and `regrade` will only show later ones. Training does not need them"
        )


def total_steps(config: RunConfig, rows: int) -> int:
    """The number of steps of a run over this number of training examples."""
    training = config.training
    return training.max_steps or math.ceil(training.num_train_epochs * math.ceil(rows / training.batch_size))


def memory_settings(config: RunConfig) -> str:
    """Advice on settings that lower the memory use of a run with this method, the most useful first."""
    method, training = config.method, config.training
    lower = [f"training.tokens_per_pack ({training.tokens_per_pack:,})"]
    if method.samples_completions:
        lower.append(f"rollout.max_completion_length ({config.rollout.max_completion_length:,})")
        lower.append(f"method.num_generations ({method.completions_per_prompt:,})")
    lower.append(f"data.max_length ({config.data.max_length:,})")
    lower.append(f"training.batch_size ({training.batch_size:,})")
    others = []
    if training.gradient_checkpointing is not True:
        others.append("set training.gradient_checkpointing=true")
    if training.cuda_graphs and torch.cuda.is_available():
        others.append("set training.cuda_graphs=false")
    if any(model.lora is None for model in config.models):
        others.append("train adapters only (model.lora=true)")
    if any(reward.loads_model for reward in config.rewards):
        others.append("use a smaller reward model")
    rest = f"; or {', or '.join(others)}" if others else ""
    return f"Lower {', then '.join(lower)}{rest}"


def smaller_packs(config: RunConfig, folder: Path) -> str:
    """Advice when memory ran out: the command that resumes `folder` with half as many tokens per pack.

    A pack must have room for the longest example. If it cannot be smaller, the advice is gradient checkpointing.
    """
    now, least = config.training.tokens_per_pack, config.longest_example
    command = ["posttrain", "train", "--resume", str(folder)]
    if now > least:
        command += ["--tokens-per-pack", str(max(now // 2, least))]
    elif config.training.gradient_checkpointing is not True:
        command += ["--gradient-checkpointing", "true"]
    else:
        return "packs are as small as data.max_length allows: start a new run with a lower data.max_length"
    return f"To resume with less memory: {shlex.join(command)}"
