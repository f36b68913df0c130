"""A recipe's inputs: one model's settings, its run folder and device, and the objects built from them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.base.errors import ConfigError, DamagedError, ModelError, RankError, WeightsError
from posttrain.base.log import log
from posttrain.base.memory import reset_peak_memory, return_tensors_at_once
from posttrain.batch import Example, Pack, pack
from posttrain.config import DistillMethod, learning_rate
from posttrain.config.schema.model import LoraConfig, ModelConfig
from posttrain.config.schema.run import RunConfig
from posttrain.data import Prepared, longest_sequence, prepare_run
from posttrain.data.prompts import stop_faults
from posttrain.data.teacher import check_teacher, longest_fed, teacher_prompts
from posttrain.engines.protocol import stop_token_ids
from posttrain.models.adapters import BASE, START, add_stops, base_settings, is_adapter, with_adapter
from posttrain.models.attention import width_step
from posttrain.models.devices import compute_dtype, take_device
from posttrain.models.families import LEARNED_POSITIONS, base_of, check_positions, positions_of, set_eos_token_ids
from posttrain.models.graphs import PackGraphs, without_graphs
from posttrain.models.lean import enable_gradient_checkpointing, is_stochastic
from posttrain.models.load import Head, load_config, load_model, load_tokenizer, new_token_ids, takes_triton, to_dtype
from posttrain.models.lora import add_lora, continues, load_lora, set_start
from posttrain.models.matmul import fuse, place
from posttrain.models.quantised import refuse_training
from posttrain.models.sharding import shard
from posttrain.optim.adamw import AdamW
from posttrain.optim.variants import AdamW8bit, AdamWCPUOffload, Muon, ShardedAdamW
from posttrain.parallel.ranks import ALONE, Ranks
from posttrain.runs.checks import Finding
from posttrain.runs.finding import is_inside
from posttrain.runs.run import Run
from posttrain.scoring import ValueScorer
from posttrain.training.best import Watch

MANY_DROPPED = 0.1  # share of overlong rows dropped, above which a warning is logged


@dataclass(frozen=True, slots=True)
class Job:
    """One model to train. A resumed run continues from `checkpoint`.

    `gradient_checkpointing`, `keeps_engine` and `cuda_graphs` come from the memory estimate (posttrain/planning):
    whether backward recomputes each layer's activations, whether the engine keeps its keys and values between rollouts,
    and whether there is room for CUDA graphs. `watch` may end the run early. `router_aux_loss_coef` weighs the
    routers' load-balancing loss.
    """

    config: RunConfig
    model: ModelConfig
    run: Run
    device: torch.device
    dtype: torch.dtype
    tokenizer: PreTrainedTokenizerBase
    checkpoint: Path | None
    gradient_checkpointing: bool
    ranks: Ranks
    router_aux_loss_coef: float
    keeps_engine: bool = True
    cuda_graphs: bool = False
    watch: Watch | None = None

    @classmethod
    def start(
        cls,
        config: RunConfig,
        model: ModelConfig,
        run: Run,
        checkpoint: Path | None,
        gradient_checkpointing: bool,
        ranks: Ranks = ALONE,
    ) -> Job:
        """Seed every generator, choose the device, load the tokenizer."""
        random.seed(config.seed)
        np.random.seed(config.seed)
        torch.manual_seed(config.seed)
        device = take_device(config.devices)
        reset_peak_memory(device)
        dtype, tokenizer = compute_dtype(model, device), load_tokenizer(model)
        ranks = ranks.keeping_step(config.devices.strategy == "fsdp")
        if ranks.in_step:
            refuse_sharded(config)
        router = router_weight(config, model)
        return cls(config, model, run, device, dtype, tokenizer, checkpoint, gradient_checkpointing, ranks, router)

    def record(self, finding: Finding) -> None:
        """Record a check's finding in run.json."""
        self.run.record_check(finding)

    def data(self) -> Prepared:
        """The training and validation sets, tokenised or from the cache. Logs what was dropped.

        Raises RankError on every rank if one of them reads different data from the first.
        """
        with self.ranks.ahead(of_machine=True):
            prepared = data_of(self.config, self.model, self.tokenizer)
        read = {name: f"rows {content[:12]}" for name, content in prepared.contents.items()}
        rest = {"the order, the split and the limits of the same rows": prepared.fingerprint[:12]}
        if lines := self.ranks.differences(read) or self.ranks.differences(rest):
            raise RankError(
                "\n  ".join(["the ranks read different data:", *lines])
                + "\nCopy the same files and tokenizer to every machine, or read them from a shared folder"
            )
        resolved: dict[str, float] = {"training.learning_rate": learning_rate(self.config, self.model)}
        if self.router_aux_loss_coef:
            resolved["method.router_aux_loss_coef"] = self.router_aux_loss_coef
        if (longest := prepared.reports["train"].max_prompt_length) is not None:
            resolved["data.max_prompt_length"] = longest
        self.run.add_provenance({"dataset_fingerprint": prepared.fingerprint, "resolved": resolved})
        for report in prepared.reports.values():
            for line in report.lines():
                (log.warning if line in report.warnings else log.info)(line)
            if report.overlong_dropped > MANY_DROPPED * report.read:
                log.warning(
                    "%s: %s of %s rows are dropped because of their length: see data.max_length and data.overlong",
                    report.name, f"{report.overlong_dropped:,}", f"{report.read:,}",
                )  # fmt: skip
        return prepared

    def policy(self, head: Head) -> nn.Module:
        """The model to train, as published or from the checkpoint, in evaluation mode. Only trained weights require
        gradients.

        For full fine-tuning, weights are loaded in float32, so that the optimizer's master weights are exact;
        `optimizer` converts to `dtype`. Raises DamagedError if the checkpoint's weights are damaged, incomplete, or
        have the wrong shapes.
        """
        refuse_training(load_config(self.model), self.model.path, self.model.lora is not None)
        with self.ranks.ahead():
            policy: nn.Module = self._whole(head) if self.model.lora is None else self._adapted(self.model.lora, head)
        check_positions(base_of(policy).config, self.config.data.max_length)
        if head == "reward":
            set_pad_token(base_of(policy), self.tokenizer)
        else:
            self._settle_stops(base_of(policy))
        if self.device.type == "cuda" and self.config.training.gradient_checkpointing == "auto":
            how = "on" if self.gradient_checkpointing else "off"
            log.info("gradient checkpointing is %s, according to the memory estimate for a full pack", how)
        if self.gradient_checkpointing:
            enable_gradient_checkpointing(policy)
            return_tensors_at_once()
        self.distribute(policy)
        return policy.eval()

    def _settle_stops(self, model: PreTrainedModel) -> None:
        """Set the stop tokens, which the run samples with and saves with the model; warn about useless ones."""
        config, tokenizer = self.config, self.tokenizer
        turns = config.data.template != "none"
        known = stop_token_ids(model, tokenizer)
        stops = stop_token_ids(model, tokenizer, turns and self.stops_at_turns)
        if added := [repr(tokenizer.convert_ids_to_tokens(id)) for id in stops if id not in known]:
            log.info("stop tokens: added %s, which ends a turn in the chat template", ", ".join(added))
        for fault in stop_faults(tokenizer, stops, config.rollout.stop, turns):
            log.warning(fault)
        set_eos_token_ids(model, stops)

    def distribute(self, model: nn.Module) -> None:
        """Shard a loaded model over the ranks if the settings require it."""
        if not self.ranks.in_step:
            return
        if getattr(base_of(model).config, "quantization_config", None) is not None:
            raise ModelError(
                f"{base_of(model).name_or_path}: devices.strategy: fsdp cannot shard quantised weights: use "
                "devices.strategy: ddp, where every rank holds the whole base model, or load the model unquantised"
            )
        shard(model, self.ranks.size, self.device, self.dtype)

    @property
    def stops_at_turns(self) -> bool:
        """Whether the chat template's end of turn is a stop token; false for runs started by earlier versions."""
        return self.config.behavior_version >= 2

    def _whole(self, head: Head) -> PreTrainedModel:
        source = self.model if self.checkpoint is None else self.saved(self.checkpoint)
        try:
            return load_model(source, head, torch.float32, self.device, stay=self.offloads() or self.ranks.in_step)
        except WeightsError as error:
            if self.checkpoint is None:
                raise
            raise DamagedError(str(error)) from error

    def _adapted(self, lora: LoraConfig, head: Head) -> nn.Module:
        continued = continues(self.config, self.model)
        source = self._base(head, continued)
        base = load_model(source, head, self.dtype, self.device, stay=self.ranks.in_step)
        if self.checkpoint is not None:
            adapted = load_lora(base, self.checkpoint)
            if continued:
                add_stops(base, self.model)
        elif continued:
            adapted = with_adapter(base, self.model, trainable=True)
            adapted.peft_config["default"].base_model_name_or_path = base.name_or_path
        else:
            adapted = add_lora(base, lora, head, source.revision, new_token_ids(self.model))
        if lora.init != "default":
            whole = source.model_copy(update={"load_in_4bit": False})
            published = load_model(whole, head, self.dtype, torch.device("cpu")) if lora.init == "loftq" else None
            set_start(adapted, lora, published, resumed=self.checkpoint is not None)
        fuse(adapted)
        if continued and self.config.method.refers_to_itself:
            with_adapter(adapted, self.model, START)
        return adapted

    def _base(self, head: Head, continued: bool) -> ModelConfig:
        """The base model of the run's adapters: the configured model, or the model in `base/` of the run folder.

        If the configured model is an adapter that is trained further, the base is that adapter's base model. Any other
        adapter is merged into its base model, in the base model's dtype. For the model of an earlier stage, `base/` is
        a relative link, which remains valid when the whole run is moved.
        """
        folder = self.run.folder.resolve() / BASE
        if continued or not is_adapter(self.model):
            model = base_settings(self.model)
            base = Path(model.path)
            if not is_inside(base, self.run.folder):
                return model
            if not folder.exists():
                try:
                    folder.unlink(missing_ok=True)  # a broken link
                    folder.symlink_to(os.path.relpath(base.resolve(), folder.parent))
                except OSError as error:
                    no_links = "%s: this file system does not support links (%s): the adapters refer to %s directly"
                    log.info(no_links, folder, error.strerror, base)
                    return model
            return model.model_copy(update={"path": str(folder), "revision": None})
        if not folder.exists():
            whole = self.model.model_copy(update={"load_in_4bit": False, "use_liger_kernel": False})
            with torch.random.fork_rng(devices=[]):  # initial adapters must not depend on whether `base/` exists
                merged = load_model(whole, head, torch.float32, torch.device("cpu"), dequantised=True)
            if self.config.behavior_version >= 2:
                dtype = load_config(whole).dtype
                to_dtype(merged, dtype if isinstance(dtype, torch.dtype) else torch.float32)

            def save_base(temporary: Path) -> None:
                merged.save_pretrained(temporary)
                if self.model.new_tokens:  # a later stage compares its tokens with the base's
                    self.tokenizer.save_pretrained(temporary)

            self.run.save_model(folder, 0, save_base)
        return self.saved(folder)

    def optimizer(self, policy: nn.Module) -> AdamW:
        """Create the optimizer for the policy's trained weights, which converts the policy to `dtype` on `device`."""
        training = self.config.training
        settings: dict[str, Any] = {
            "betas": (training.adam_beta1, training.adam_beta2),
            "eps": training.adam_epsilon,
            "weight_decay": training.weight_decay,
            "max_grad_norm": training.max_grad_norm,
            "loraplus_lr_ratio": training.loraplus_lr_ratio,
            "ema_decay": training.ema_decay,
            "in_halves": takes_triton(self.model, self.device) and not self.ranks.in_step,
        }
        kind = {"adamw_8bit": AdamW8bit, "muon": Muon}.get(training.optimizer, AdamW)
        if self.ranks.in_step:
            kind = partial(ShardedAdamW, ranks=self.ranks)
        elif self.offloads():
            kind = partial(AdamWCPUOffload, device=self.device)
        optimizer = kind(policy, self.dtype, **settings)
        if not self.ranks.in_step:
            place(policy, bases=self.device.type == "cuda")
        masters = {optimizer.parameters[name]: master for name, master in optimizer.masters.items()}
        optimizer.graphs = self.capture(policy.model if isinstance(policy, ValueScorer) else policy, masters)
        return optimizer

    def capture(self, model: nn.Module, masters: Mapping[nn.Parameter, torch.Tensor]) -> PackGraphs | None:
        """Let CUDA graphs replay the model's passes over packs, if nothing rules it out."""
        why = without_graphs(self.config, base_of(model).config, self.dtype, self.device, self.ranks.size)
        if why is not None or not self.cuda_graphs:
            if self.device.type == "cuda" and masters:
                log.info("CUDA graphs are off: %s", why or "the GPU has no room for them")
            return None
        return PackGraphs(model, masters, eager_in_training=self.gradient_checkpointing and is_stochastic(model))

    def offloads(self) -> bool:
        """Whether optimizer state is kept in CPU memory and the model on a GPU. On a CPU, AdamW needs no offload."""
        return self.config.training.optimizer == "adamw_cpu_offload" and self.device.type == "cuda"

    def pack(self, examples: Sequence[Example], keep_last: bool = False) -> list[Pack]:
        """The packs of a batch, for all ranks together; on a GPU, padded to one of a few widths."""
        tokens, keep_last = self.config.training.tokens_per_pack, keep_last or self.feeds_last
        return pack(examples, tokens, keep_last, width_step(self.device, tokens), self.ranks.size)

    @property
    def feeds_last(self) -> bool:
        """Whether packs include each sequence's last token, which predicts nothing but counts in the routers' loss."""
        return self.router_aux_loss_coef > 0

    def pack_together(self, examples: Sequence[Example], keep_last: bool = False) -> list[Pack]:
        """The packs of examples that one rank processes: as few packs as possible."""
        tokens = self.config.training.tokens_per_pack
        return pack(examples, tokens, keep_last, width_step(self.device, tokens))

    def scores(self, packs: Sequence[Pack], of: Callable[[Pack], torch.Tensor]) -> list[torch.Tensor]:
        """One number per sequence (S) of each pack, on the device. Each rank computes the numbers of its own packs."""
        shapes = [(pack.num_sequences,) for pack in packs]
        return self.ranks.spread(packs, shapes, lambda pack: of(pack.to(self.device)), self.device)

    def saved(self, folder: Path) -> ModelConfig:
        """This model's settings with weights from a folder that posttrain wrote, which already has the new tokens."""
        return self.model.model_copy(update={"path": str(folder), "revision": None, "new_tokens": ()})


def router_weight(config: RunConfig, model: ModelConfig) -> float:
    """The weight of the routers' load-balancing loss for a model in a run, by default that of its config.json; 0: no
    such loss. Raises ConfigError if it is set for a model without experts."""
    setting, shape = config.method.router_aux_loss_coef, load_config(model)
    text = shape.get_text_config()
    is_mixture = hasattr(text, "output_router_logits")
    if setting and not is_mixture:
        raise ConfigError(
            f"method.router_aux_loss_coef is {setting}, but {shape.model_type} is not a mixture of experts whose "
            "router logits transformers returns: leave it out"
        )
    default = getattr(text, "router_aux_loss_coef", None) if is_mixture and config.behavior_version >= 2 else None
    return (default or 0.0) if setting is None else setting


def refuse_sharded(config: RunConfig) -> None:
    """Raise ConfigError for settings that need the whole model on every rank."""
    if config.training.optimizer != "adamw":
        raise ConfigError(
            f"training.optimizer: {config.training.optimizer} needs whole tensors, but devices.strategy: fsdp shards "
            "them: use adamw, whose state is sharded too, or devices.strategy: ddp"
        )
    if config.method.prompts_teacher:
        raise ConfigError(
            "if the teacher has prompts of its own, ranks differ in their number of teacher packs, but "
            "devices.strategy: fsdp needs equally many on every rank: use devices.strategy: ddp"
        )


def data_of(config: RunConfig, model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> Prepared:
    """The data of a run for one of its models. The model's positions limit the length of prompts to complete and, in a
    model with a table of them, of every example; otherwise a longer example is warned of."""
    try:
        shape = load_config(model)
    except ModelError:  # to look at the rows, a tokenizer is enough
        if config.samples:
            raise
        return prepare_run(config, tokenizer)
    positions, learned = positions_of(shape), shape.model_type in LEARNED_POSITIONS
    data = prepare_run(config, tokenizer, positions=positions, learned_positions=learned)
    if isinstance(config.method, DistillMethod):
        longest = longest_fed(config, positions)
        check_teacher(config, config.method, data, longest, teacher_prompts(config, tokenizer, config.method, longest))
    if positions is not None and (longest := longest_sequence(config, data)) > positions:
        log.warning(
            "the longest sequence has %s tokens, but %s was trained on %s positions (max_position_embeddings): beyond "
            "them its predictions are worse; data.max_length limits examples",
            f"{longest:,}", model.folder_name, f"{positions:,}",
        )  # fmt: skip
    return data


def set_pad_token(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Choose the pad token of a reward model, whose head reads the last token of a row that is not padding.

    Padding must therefore differ from the end of a completion. If the tokenizer has no other special token, the pad
    token is an id that no string produces, and the tokenizer is unchanged: in a byte-level vocabulary (such as GPT-2's)
    that of a byte that UTF-8 never uses, otherwise None.
    """
    special = [tokenizer.pad_token, *tokenizer.all_special_tokens]
    token = next((str(token) for token in special if token not in (None, tokenizer.eos_token)), None)
    if token is not None:
        tokenizer.pad_token = token
        model.config.pad_token_id = tokenizer.pad_token_id
        return
    vocabulary, unused = tokenizer.get_vocab(), map(chr, (0xC0, 0xC1, *range(0xF5, 0x100)))
    ids = (vocabulary[byte] for byte in unused if byte in vocabulary)
    model.config.pad_token_id = next((id for id in ids if tokenizer.decode([id]) == "\ufffd"), None)
