"""The settings of optimisation, checkpoints, tracking and devices."""

from typing import Annotated, Literal, get_args

from pydantic import Field

from posttrain.config.schema.base import (
    EVAL_METRIC,
    Float,
    Folder,
    FolderName,
    Int,
    OneOrMore,
    Positive,
    Problems,
    Settings,
)

WARMUP_STEPS = 0.03  # the default


class TrainingConfig(Settings):
    """The optimisation."""

    batch_size: Positive = Field(
        default=16, description="Number of examples (pairs, prompts) per step, over all devices."
    )
    tokens_per_pack: Positive = Field(
        default=8192, description="Maximum tokens per pack, which determine memory and gradient accumulation."
    )
    learning_rate: Annotated[Float, Field(ge=0)] | None = Field(
        default=None,
        description="Peak learning rate; null: the method's default for full fine-tuning or LoRA (see its page).",
    )
    lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup"] = Field(
        default="cosine", description="Schedule of the learning rate; constant has no warm-up."
    )
    warmup_steps: Annotated[Float, Field(ge=0)] = Field(
        default=WARMUP_STEPS,
        description="Number of warm-up steps, or a share of all if below 1; offline methods start at a rate of 0.",
    )
    weight_decay: Annotated[Float, Field(ge=0)] = Field(default=0.0, description="AdamW's weight decay.")
    adam_beta1: Annotated[Float, Field(ge=0, lt=1)] = Field(default=0.9, description="AdamW's beta1.")
    adam_beta2: Annotated[Float, Field(ge=0, lt=1)] = Field(default=0.999, description="AdamW's beta2.")
    adam_epsilon: Annotated[Float, Field(gt=0)] = Field(default=1e-8, description="AdamW's epsilon.")
    max_grad_norm: Annotated[Float, Field(ge=0)] = Field(
        default=1.0, description="Maximum norm of gradients, for clipping; 0: no clipping."
    )
    num_train_epochs: Annotated[Float, Field(gt=0)] = Field(default=1.0, description="Number of passes over the data.")
    max_steps: Positive | None = Field(default=None, description="Number of steps; overrides num_train_epochs.")
    optimizer: Literal["adamw", "adamw_8bit", "adamw_cpu_offload"] = Field(
        default="adamw",
        description="Optimizer; adamw_8bit: 8-bit moments; adamw_cpu_offload: all but the weights in CPU memory.",
    )
    gradient_checkpointing: Literal["auto"] | bool = Field(
        default="auto", description="Whether to recompute activations in the backward pass: slower, less memory."
    )

    def check(self, problems: Problems) -> None:
        steps = self.warmup_steps
        if steps >= 1 and steps != int(steps):
            problems.add("warmup_steps", f"is {steps}; give a share below 1, or a whole number of steps")


class CheckpointConfig(Settings):
    """Checkpoints and the best model."""

    save_steps: Positive = Field(default=500, description="Number of steps between checkpoints.")
    save_total_limit: Positive | None = Field(default=2, description="Number of checkpoints to keep; null: all.")
    best_metric: Annotated[str, Field(pattern=EVAL_METRIC)] | None = Field(
        default="auto",
        description="Metric that selects best/, e.g. eval_loss; auto: eval_accuracy for reward models; null: none.",
    )
    best_direction: Literal["auto", "higher", "lower"] = Field(
        default="auto", description="Direction in which best_metric improves; auto: known for posttrain's metrics."
    )
    early_stopping_patience: Positive | None = Field(
        default=None,
        description="Number of evaluations without a better best_metric before stopping; null: no stopping.",
    )


class TrackingConfig(Settings):
    """Logging and trackers."""

    logging_steps: Positive = Field(default=10, description="Number of steps between lines of metrics.")
    report_to: Annotated[tuple[Literal["tensorboard", "wandb", "trackio"], ...], OneOrMore] = Field(
        default=(), description="Trackers that receive the metrics: any of tensorboard, wandb, trackio."
    )
    logging_dir: Folder | None = Field(
        default=None, description="Folder for the files of tensorboard and wandb, grouped by run; null: the run folder."
    )
    project: FolderName = Field(default="posttrain", description="Project of the run in wandb and trackio.")
    wandb_mode: Literal["auto", "online", "offline"] = Field(
        default="auto", description="Mode of wandb; auto: WANDB_MODE, or online with a key and offline without."
    )

    def check(self, problems: Problems) -> None:
        named = set(self.report_to)
        if len(named) != len(self.report_to):
            problems.add("report_to", "names a tracker twice")
        readers_of = {
            "logging_dir": ("tensorboard", "wandb"),
            "project": ("wandb", "trackio"),
            "wandb_mode": ("wandb",),
        }
        for field, readers in readers_of.items():
            if not self.is_default(field) and named.isdisjoint(readers):
                problems.add(field, f"is read by {' and '.join(readers)}, which report_to does not name")


DeviceType = Literal["auto", "cpu", "cuda", "mps"]
DEVICE_TYPES: tuple[DeviceType, ...] = get_args(DeviceType)


class DevicesConfig(Settings):
    """Devices to train on."""

    type: DeviceType = Field(default="auto", description="Type of device; auto: the first available of cuda, mps, cpu.")
    ids: Annotated[tuple[Annotated[Int, Field(ge=0)], ...], Field(min_length=1)] | None = Field(
        default=None, description="Indices of the GPUs, e.g. [0]; several: a process for each; null: the visible ones."
    )
    strategy: Literal["auto", "ddp", "fsdp"] = Field(
        default="auto",
        description="What the processes share; ddp: the batch; fsdp (FSDP2): also weights, gradients and "
        "optimizer; auto: ddp.",
    )
    full_determinism: bool = Field(default=False, description="Whether to use deterministic GPU kernels only; slower.")

    def check(self, problems: Problems) -> None:
        if self.ids is not None and self.type not in ("auto", "cuda"):
            problems.add("ids", f"number GPUs, but type is {self.type}")
        if self.ids is not None and len(set(self.ids)) != len(self.ids):
            problems.add("ids", "name a GPU twice")
