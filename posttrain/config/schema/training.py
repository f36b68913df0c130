"""The settings of optimisation, checkpoints, tracking and devices."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from posttrain.config.schema.base import Conflicts, Settings, setting
from posttrain.config.schema.types import (
    EVAL_METRIC,
    AboveZero,
    BelowOne,
    Folder,
    FolderName,
    Natural,
    NonNegative,
    OneOrMore,
    Positive,
)

# transformers' names, but for schedules that follow a metric.
Schedule = Literal[
    "cosine", "linear", "constant", "constant_with_warmup", "cosine_with_restarts", "cosine_with_min_lr",
    "cosine_warmup_with_min_lr", "polynomial", "inverse_sqrt", "warmup_stable_decay",
]  # fmt: skip


class TrainingConfig(Settings):
    """The optimisation."""

    batch_size: Positive = setting(16, "Number of examples (pairs, prompts) per step, over all devices.")
    tokens_per_pack: Positive = setting(
        8192, "Maximum tokens per pack, which determine memory and gradient accumulation."
    )
    learning_rate: NonNegative | None = setting(
        None, "Peak learning rate; null: the method's default for full fine-tuning or LoRA (see its page)."
    )
    lr_scheduler_type: Schedule = setting("cosine", "Schedule of the learning rate; constant has no warm-up.")
    lr_scheduler_kwargs: dict[str, int | float | str] = setting(
        {}, "Arguments of the schedule, by transformers' names, e.g. {min_lr_rate: 0.1} or {num_decay_steps: 100}."
    )
    warmup_steps: NonNegative = setting(
        0.03, "Number of warm-up steps, or a share of all if below 1; offline methods start at a rate of 0."
    )
    weight_decay: NonNegative = setting(0.0, "AdamW's weight decay.")
    adam_beta1: BelowOne = setting(0.9, "AdamW's beta1.")
    adam_beta2: BelowOne = setting(0.999, "AdamW's beta2.")
    adam_epsilon: AboveZero = setting(1e-8, "AdamW's epsilon.")
    max_grad_norm: NonNegative = setting(1.0, "Maximum norm of gradients, for clipping; 0: no clipping.")
    num_train_epochs: AboveZero = setting(1.0, "Number of passes over the data.")
    max_steps: Positive | None = setting(None, "Number of steps; overrides num_train_epochs.")
    optimizer: Literal["adamw", "adamw_8bit", "adamw_cpu_offload", "muon"] = setting(
        "adamw", "Optimizer; 8bit: of the moments; cpu_offload: all but the weights; muon: for layers' matrices."
    )
    loraplus_lr_ratio: AboveZero = setting(
        1.0, "Learning rate of LoRA's B matrices as a multiple of the others' (LoRA+), e.g. 16; 1: the same."
    )
    ema_decay: Annotated[AboveZero, Field(lt=1)] | None = setting(
        None, "Decay of a moving average (EMA) of the trained weights, saved as ema/, e.g. 0.99; null: none."
    )
    gradient_checkpointing: Literal["auto"] | bool = setting(
        "auto", "Whether to recompute activations in the backward pass: slower, less memory."
    )

    cuda_graphs: Literal["auto"] | bool = setting(
        "auto", "Whether a GPU replays a pack's passes as CUDA graphs; auto: where the model and the settings allow it."
    )

    def check(self) -> Conflicts:
        steps = self.warmup_steps
        if steps >= 1 and steps != int(steps):
            yield "warmup_steps", f"is {steps}; give a share below 1, or a whole number of steps"
        if self.lr_scheduler_kwargs and self.lr_scheduler_type in ("constant", "constant_with_warmup", "linear"):
            yield "lr_scheduler_kwargs", f"are not read by lr_scheduler_type: {self.lr_scheduler_type}; leave them out"
        if self.loraplus_lr_ratio != 1 and self.optimizer == "muon":
            yield "loraplus_lr_ratio", "cannot be combined with optimizer: muon, which moves all matrices equally"


class CheckpointConfig(Settings):
    """Checkpoints and the best model."""

    save_steps: Positive = setting(500, "Number of steps between checkpoints.")
    save_total_limit: Positive | None = setting(2, "Number of checkpoints to keep; null: all.")
    best_metric: Annotated[str, Field(pattern=EVAL_METRIC)] | None = setting(
        "auto", "Metric that selects best/; auto: the main one of reward models, and for early stopping; null: none."
    )
    best_direction: Literal["auto", "higher", "lower"] = setting(
        "auto", "Direction in which best_metric improves; auto: known for posttrain's metrics."
    )
    early_stopping_patience: Positive | None = setting(
        None, "Number of evaluations without a better best_metric before stopping; null: no stopping."
    )


class TrackingConfig(Settings):
    """Logging and trackers."""

    logging_steps: Positive = setting(10, "Number of steps between lines of metrics.")
    report_to: Annotated[tuple[Literal["tensorboard", "wandb", "trackio"], ...], OneOrMore] = setting(
        (), "Trackers that receive the metrics: any of tensorboard, wandb, trackio."
    )
    logging_dir: Folder | None = setting(
        None, "Folder for the files of tensorboard and wandb, grouped by run; null: the run folder."
    )
    project: FolderName = setting("posttrain", "Project of the run in wandb and trackio.")
    wandb_mode: Literal["auto", "online", "offline"] = setting(
        "auto", "Mode of wandb; auto: WANDB_MODE, or online with a key and offline without."
    )

    def check(self) -> Conflicts:
        named = set(self.report_to)
        if len(named) != len(self.report_to):
            yield "report_to", "names a tracker twice"
        read_by = {"logging_dir": ("tensorboard", "wandb"), "project": ("wandb", "trackio"), "wandb_mode": ("wandb",)}
        for field, readers in read_by.items():
            if not self.is_default(field) and named.isdisjoint(readers):
                yield field, f"is read by {' and '.join(readers)}, which report_to does not name"


DeviceType = Literal["auto", "cpu", "cuda", "mps"]
DEVICE_TYPES: tuple[DeviceType, ...] = get_args(DeviceType)


class DevicesConfig(Settings):
    """Devices to train on."""

    type: DeviceType = setting("auto", "Type of device; auto: the first available of cuda, mps, cpu.")
    ids: Annotated[tuple[Natural, ...], Field(min_length=1)] | None = setting(
        None, "Indices of the GPUs, e.g. [0]; several: a process for each; null: the visible ones."
    )
    strategy: Literal["auto", "ddp", "fsdp"] = setting(
        "auto",
        "What the processes share; ddp: the batch; fsdp (FSDP2): also weights, gradients and optimizer; auto: ddp.",
    )
    full_determinism: bool = setting(False, "Whether to use deterministic GPU kernels only; slower.")

    def check(self) -> Conflicts:
        if self.ids is not None and self.type not in ("auto", "cuda"):
            yield "ids", f"number GPUs, but type is {self.type}"
        if self.ids is not None and len(set(self.ids)) != len(self.ids):
            yield "ids", "name a GPU twice"
