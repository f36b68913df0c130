"""Every setting of a run with its default and description. Does not import torch."""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from posttrain.config.schema.base import Conflicts, Settings, setting
from posttrain.config.schema.data import LABELLED_FORMATS, PAIR_FORMATS, DataConfig
from posttrain.config.schema.evaluation import METRICS, SAMPLING, EvaluationConfig, lower_is_better
from posttrain.config.schema.methods import Method, UnreadMethod
from posttrain.config.schema.model import ModelConfig
from posttrain.config.schema.rewards import Reward, check_rewards
from posttrain.config.schema.rollout import EnvironmentConfig, RolloutConfig, check_tools
from posttrain.config.schema.training import CheckpointConfig, DevicesConfig, TrackingConfig, TrainingConfig
from posttrain.config.schema.types import Folder, FolderName, Int, Text, is_name

OF_EPISODES = ("max_turns", "max_tool_calls", "max_tool_result", "rewritten_turns", "environment_workers")

# 1: runs from before the version was recorded. Code whose results have changed since then reads the run's version.
BEHAVIOR_VERSION: Literal[4] = 4


class RunConfig(Settings):
    """Every setting of a run."""

    name: FolderName | None = setting(None, "Name of the run folder; null: {method}-{model}-{timestamp}.")
    output_dir: Folder = setting("runs", "Folder that contains the run folders.")
    seed: Annotated[Int, Field(ge=0, lt=2**32)] = setting(0, "Random seed for shuffling, initialisation and dropout.")
    behavior_version: Literal[1, 2, 3, 4] = setting(
        BEHAVIOR_VERSION, "Version of the rules for reading data and settings; a run keeps the version it started with."
    )
    rewards: tuple[Reward, ...] = setting(
        (), "Rewards for completions, weighted and summed; only online methods train on them."
    )
    environments: tuple[EnvironmentConfig, ...] = setting(
        (), "Environments in which a model acts over several turns; only for online methods."
    )
    tools: tuple[Text, ...] = setting((), "Functions that a model may call, FILE.py:FUNCTION; only for online methods.")
    models: Annotated[tuple[ModelConfig, ...], Field(min_length=1)] = Field(
        description="Models to train, one after another; `model:` is the short form for one."
    )
    method: Method = Field(description="Training method and its settings.")
    data: DataConfig = Field(description="Data: sources, formats, templates and limits.")
    training: TrainingConfig = setting(TrainingConfig(), "The optimisation.")
    evaluation: EvaluationConfig = setting(EvaluationConfig(), "Evaluation during training.")
    checkpoint: CheckpointConfig = setting(CheckpointConfig(), "Checkpoints and the best model.")
    tracking: TrackingConfig = setting(TrackingConfig(), "Logging and trackers.")
    devices: DevicesConfig = setting(DevicesConfig(), "Devices to train on.")
    rollout: RolloutConfig = setting(RolloutConfig(), "Sampling of completions.")

    def check(self) -> Conflicts:
        folders = [model.folder_name for model in self.models]
        for index, (folder, model) in enumerate(zip(folders, self.models, strict=True)):
            path = f"models.{index}.path"
            if not is_name(folder):
                yield path, f"is {model.path!r}, whose last part cannot name a folder; give the model a name"
            if folder in folders[:index]:
                yield path, f"would use the same folder {folder!r} as an earlier model; give it a name"
            if model.load_in_4bit and model.lora is None:
                yield f"models.{index}.load_in_4bit", "freezes the weights: set model.lora, e.g. model.lora: true"
            if model.lora is not None and model.lora.init != "default":
                path, init = f"models.{index}.lora.init", model.lora.init
                if model.load_in_4bit and model.lora.is_subtracted:
                    yield path, f"is {init}, which changes weights that load_in_4bit rounds: use loftq, or leave it out"
                if init == "loftq" and not model.load_in_4bit:
                    yield path, "is loftq, which corrects the rounding of load_in_4bit: true: set it, or use pissa"
            if model.dtype == "float16" and self.devices.strategy == "fsdp":
                yield "devices.strategy", "is fsdp, which cannot scale the losses of float16: set ddp"
            if model.dtype == "float16" and self.training.optimizer == "adamw_cpu_offload":
                yield "training.optimizer", "is adamw_cpu_offload, which cannot scale float16's losses: set adamw_8bit"
            yield from self._check_trained_ends(index, model)
        if self.method.syncs_reference and any(model.lora is not None for model in self.models):
            yield "method.sync_ref_model", "mixes all weights, but with model.lora only an adapter is trained"
        if self.training.loraplus_lr_ratio != 1 and any(model.lora is None for model in self.models):
            yield "training.loraplus_lr_ratio", "is for LoRA's matrices, but a model trains all weights: set model.lora"
        if isinstance(self.method, UnreadMethod):
            return  # what fits it is known when it is imported
        yield from self._check_lengths()
        yield from self._check_online()
        yield from self._check_environments()
        yield from self._check_evaluation()

    def _check_trained_ends(self, index: int, model: ModelConfig) -> Conflicts:
        """Check `new_tokens` and `lora.modules_to_save`, and refuse settings that use the published weights instead."""
        new, saved, sharded = model.new_tokens, model.lora and model.lora.modules_to_save, "devices.strategy: fsdp"
        if len(set(new)) < len(new) or not all(token.strip() for token in new):
            yield f"models.{index}.new_tokens", "repeats a token or contains a blank one"
        refused = {
            "model.load_in_4bit: true": model.load_in_4bit,
            f"{sharded} and model.lora" if new else sharded: self.devices.strategy == "fsdp" and model.lora is not None,
            "rollout.engine: vllm, which loads the published model": self.samples and self.rollout.engine == "vllm",
        }
        name = "new_tokens" if new else "lora.modules_to_save"
        for other in (other for other, is_set in refused.items() if (new or saved) and is_set):
            yield f"models.{index}.{name}", f"cannot be combined with {other}"

    def unread(self) -> list[str]:
        """Warnings about settings that are not read. These may be meant for other stages or be overridden: no error."""
        method, training, lines = self.method, self.training, []
        adapters = [model.lora for model in self.models if model.lora is not None]
        if not method.dropout and any(lora.dropout and not lora.is_default("dropout") for lora in adapters):
            lines.append(f"model.lora.dropout is not read by {method.type}, which scores its policy with dropout off")
        warms_up = training.warmup_steps != 0 and not training.is_default("warmup_steps")
        if training.lr_scheduler_type == "constant" and warms_up:
            lines.append("training.warmup_steps is not read: constant has no warm-up, but constant_with_warmup does")
        return lines

    @property
    def _has_validation(self) -> bool:
        return self.data.validation is not None or bool(self.evaluation.datasets)

    @property
    def evaluates(self) -> bool:
        """Whether there is validation data or a suite, and evaluation is on."""
        return (self._has_validation or bool(self.evaluation.suites)) and self.evaluation.eval_steps > 0

    @property
    def _validates(self) -> bool:
        """Whether validation sets are evaluated."""
        return self._has_validation and self.evaluation.eval_steps > 0

    @property
    def samples(self) -> bool:
        """Whether completions are sampled, in training or in evaluation."""
        return self.method.samples_completions or self._rewarded

    @property
    def _rewarded(self) -> bool:
        return bool(self.rewards or self.environments) or any(dataset.rewards for dataset in self.evaluation.datasets)

    @property
    def best_metric(self) -> str | None:
        """The metric that selects the best model; None if none is kept."""
        if self.checkpoint.best_metric != "auto":
            return self.checkpoint.best_metric
        watched = self.method.head == "reward" or self.checkpoint.early_stopping_patience is not None
        measured = self.data.validation is not None and self.evaluates
        return f"eval_{self.method.headline}" if watched and measured else None

    def lower_is_better(self, metric: str) -> bool | None:
        """Whether a metric of an evaluation gets better as it falls; None if unknown. Runs of version 1 decide by
        whether the name ends in `loss`."""
        known, direction = lower_is_better(metric), self.checkpoint.best_direction
        if direction != "auto" and (known is None or metric == self.best_metric):
            return direction == "lower"
        if self.behavior_version < 2:
            return metric.endswith("loss")
        suites = "|".join(re.escape(Path(entry.suite).stem) for entry in self.evaluation.suites)
        if suites and (known is None or re.fullmatch(rf"eval_({suites})(_low|_high)?", metric)):
            return False  # suites measure scores
        return known

    def _check_measured(self, metric: str) -> Conflicts:
        """Refuse a metric that only other methods or settings measure. An unknown name may be the metric of a suite."""
        sets = ["eval_"] if self.data.validation is not None else []
        sets += ["eval_" if d.name == "validation" else f"eval_{d.name}_" for d in self.evaluation.datasets]
        method, completions = self.method, METRICS["of_completions"] if self.samples else ()
        loss = [] if method.samples_completions else ["loss", *method.measured]
        loss += [f"loss/{name}" for name in self.data.source_names] if method.type == "sft" else []
        loss += ["kl"] if method.joins_completions and method.kind != "pair" else []
        known = "|".join((*map(re.escape, loss), *(["aux_loss"] if loss else []), *completions))
        own_suites = any(":" in entry.suite or Path(entry.suite).suffix for entry in self.evaluation.suites)
        names = [f"{each}{name}" for each in sets for name in (*loss, *(["reward"] if completions else []))]
        if (
            not own_suites
            and lower_is_better(metric) is not None
            and not any(re.fullmatch(f"{re.escape(each)}({known})", metric) for each in sets)
        ):
            yield (
                "checkpoint.best_metric",
                f"is {metric}, which {method.type} does not measure with these settings; choose one of "
                + ", ".join([*names, *(f"eval_{entry.suite}" for entry in self.evaluation.suites)]),
            )

    @property
    def completion_length(self) -> int:
        """Maximum tokens sampled after a prompt of the data; 0 if the data has the completions."""
        return self.rollout.max_completion_length if self.method.kind == "prompt" else 0

    @property
    def longest_example(self) -> int:
        """Maximum tokens of an example, which a pack must have room for."""
        return self.data.max_length * (2 if self.method.joins_completions else 1)

    def _check_lengths(self) -> Conflicts:
        kind, method, format = self.method.kind, self.method.type, self.data.format
        pairs = kind == "pair"
        with_another = self.method.joins_completions and not pairs
        example = "a pair" if pairs else "an example with another completion" if with_another else "an example"
        if self.training.tokens_per_pack < self.longest_example:
            yield (
                "training.tokens_per_pack",
                f"is {self.training.tokens_per_pack}, but {example} may have {self.longest_example} tokens "
                f"(data.max_length = {self.data.max_length}) and is never split; raise it, or lower data.max_length",
            )
        if with_another and self.training.batch_size <= 1:
            yield (
                "training.batch_size",
                "is 1, but loss_type: kto estimates the KL from the completions of other examples of the batch; "
                "give 2 or more",
            )
        if pairs and format not in PAIR_FORMATS:
            known = ", ".join(sorted(PAIR_FORMATS))
            yield "data.format", f"is {format}, which has no pairs of completions; {method} needs one of {known}"
        if kind == "unpaired" and format not in LABELLED_FORMATS:
            known = "kto (prompt, completion, label), or auto"
            yield "data.format", f"is {format}, which has no labels; {method} needs {known}"
        if kind != "unpaired" and format == "kto":
            yield (
                "data.format",
                f"is kto, whose labels {method} does not read; to train on all completions alike set "
                "prompt_completion or messages",
            )
        if kind != "prompt" and format == "prompt":
            yield "data.format", f"is prompt, which has no completions for {method} to learn from"
        if self.method.type == "sft" and self.method.completion_only_loss and format == "text":
            yield "method.completion_only_loss", "is true, but data.format: text has no prompt and completion"

    def _check_online(self) -> Conflicts:
        method, rollout = self.method, self.rollout
        online = method.samples_completions
        if not self.samples:
            if not self.is_default("rollout"):
                yield (
                    "rollout",
                    f"applies only where completions are sampled: in online methods, and with {method.type} only for "
                    "evaluation with rewards",
                )
            return
        if not self.rewards and getattr(method, "use_successful_as_teacher", False):
            yield "rewards", "are needed by method.use_successful_as_teacher; give some, e.g. rewards: [{type: math}]"
        if not self.rewards and method.needs_rewards and not self.environments:
            yield "rewards", "is empty; give at least one, e.g. rewards: [{type: math}]"
        if method.head != "lm":
            given = "rewards" if self.rewards else "evaluation.datasets"
            yield given, "need completions, which a reward model does not generate; leave the rewards out"
        if not online and not self._validates:
            yield (
                "rewards",
                f"with {method.type} only score completions of validation prompts: set data.validation, e.g. "
                "{ratio: 0.05}, and evaluation.eval_steps above 0, or remove rewards",
            )
        if self._validates and not self._rewarded:
            yield (
                "rewards",
                f"are needed to evaluate {method.type} on validation prompts: give some, e.g. "
                "rewards: [{type: math}], or remove data.validation",
            )
        if getattr(method, "curriculum", None) is not None and self.data.mixing == "interleave":
            yield "method.curriculum", "cannot be combined with data.mixing: interleave, which has no epochs"
        yield from check_rewards(self.rewards)
        if online and rollout.temperature <= 0:
            yield "rollout.temperature", f"is 0: all completions of a prompt would be equal; {method.type} must sample"
        own = self.evaluation.max_completion_length
        lengths = {"rollout": rollout.max_completion_length if online or own is None else 0, "evaluation": own or 0}
        for section, length in lengths.items():
            if length >= self.data.max_length:
                yield (
                    f"{section}.max_completion_length",
                    f"is {length}, which leaves no room for a prompt in data.max_length = {self.data.max_length}",
                )
        minibatches, prompts = getattr(method, "num_minibatches", 1), self.training.batch_size
        if minibatches > prompts:
            yield "method.num_minibatches", f"is {minibatches}, but a step has only {prompts} prompts (batch_size)"

    @property
    def acts(self) -> bool:
        """Whether the model acts over several turns."""
        return bool(self.environments or self.tools)

    def _check_environments(self) -> Conflicts:
        if not self.acts:
            for field in OF_EPISODES:
                if not self.rollout.is_default(field):
                    yield f"rollout.{field}", "has no effect without environments or tools"
            of_sets = {f"evaluation.datasets.{n}.format": each for n, each in enumerate(self.evaluation.datasets)}
            for path, data in {"data.format": self.data, **of_sets}.items():
                if data.format == "episode":
                    yield path, "is episode, which needs environments that give the messages"
            if getattr(self.method, "advantage_level", "trajectory") == "turn":
                yield "method.advantage_level", "is turn, but without environments or tools there is one turn"
            if getattr(self.method, "num_trees", None) is not None:
                yield "method.num_trees", "is set, but without environments or tools nothing branches"
            return
        given = "environments" if self.environments else "tools"
        if not self.method.samples_completions:
            yield given, f"are for methods that sample completions, which {self.method.type} does not"
        elif self.method.reads_completions:
            yield given, "cannot be combined with completions of the data (method.on_policy_fraction below 1)"
        elif self.method.prompts_teacher:
            yield given, "cannot be combined with prompts of the teacher's own: episodes have a prompt of their own"
        if self.data.template == "none":
            yield given, "need a chat template, but data.template is none"
        yield from check_tools(self.environments, self.tools)
        if self.rollout.stop:
            yield "rollout.stop", f"cannot be combined with {given}: a reply ends with the template's end of turn"

    def _check_evaluation(self) -> Conflicts:
        checkpoint = self.checkpoint
        if checkpoint.best_metric not in ("auto", None) and not self.evaluates:
            yield (
                "checkpoint.best_metric",
                "needs an evaluation: set data.validation, e.g. {ratio: 0.05}, or evaluation.suites, and "
                "evaluation.eval_steps above 0; or set it to null",
            )
        best = self.best_metric
        if best is not None and self.lower_is_better(best) is None:
            yield (
                "checkpoint.best_metric",
                f"is {best}, which is not a metric of posttrain: set checkpoint.best_direction to higher or lower, or "
                "choose a known metric, e.g. eval_loss",
            )
        if best is not None and self.evaluates:
            yield from self._check_measured(best)
        if checkpoint.early_stopping_patience is not None and best is None:
            yield (
                "checkpoint.early_stopping_patience",
                "needs data.validation, e.g. {ratio: 0.05}, for the method's main metric, or checkpoint.best_metric",
            )
        if self.evaluation.num_batches is not None and not self._has_validation:
            yield "evaluation.num_batches", "has nothing to evaluate on: set data.validation, e.g. {ratio: 0.05}"
        evaluation, method, n = self.evaluation, self.method.type, self.evaluation.num_generations
        if evaluation.suites and self.method.head != "lm":
            path = "evaluation.suites"
            yield path, f"need a model that generates, but {method} trains one that scores: leave them out"
        for name in ("num_generations", *SAMPLING):
            if not (self.samples and self._validates) and not evaluation.is_default(name):
                yield (
                    f"evaluation.{name}",
                    "has no effect: it needs completions of validation prompts; set rewards and data.validation",
                )
        if n != 1 and evaluation.sampling(self.rollout).temperature <= 0:
            path = "evaluation.num_generations"
            yield path, f"is {n}, but with temperature 0 all completions of a prompt are the same"
        for index, dataset in enumerate(evaluation.datasets):
            if dataset.template == "chat" and self.data.template not in ("chat", "none"):
                yield (
                    f"evaluation.datasets.{index}.template",
                    f"is chat, the tokenizer's own template, which data.template: {self.data.template} replaces; save "
                    "the tokenizer's template to a file and give that file here",
                )


def learning_rate(config: RunConfig, model: ModelConfig) -> float:
    """The learning rate for this model: the setting, or the method's default for full fine-tuning or LoRA."""
    if config.training.learning_rate is not None:
        return config.training.learning_rate
    full, lora = config.method.learning_rates
    if config.behavior_version < 3 and config.method.type in ("dpo", "simpo", "kto"):
        lora = full
    return full if model.lora is None else lora
