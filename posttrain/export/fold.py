"""An adapter of a merged base, and those that were merged into that base, as one adapter of the original base."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, TaskType
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from posttrain.base.errors import ModelError
from posttrain.base.memory import release_memory
from posttrain.config import DevicesConfig, ModelConfig
from posttrain.export.card import origin
from posttrain.export.merging import LIMITS, compare, load_base, outputs_of
from posttrain.export.prompts import prompts_for
from posttrain.export.source import Source, adapters_of
from posttrain.export.unchanged import Adapter
from posttrain.models.adapters import SCORE, attach, base_settings, name_base, with_adapter
from posttrain.models.devices import take_device
from posttrain.models.families import base_of
from posttrain.models.load import load_config
from posttrain.models.untrusted import adapter_config

WEIGHTS, FACTORS = "adapter_model.safetensors", (".lora_A.weight", ".lora_B.weight")


class Folded(Adapter):
    """LoRA adapters of one another's merged bases as one: their factors side by side, each scaling in the first."""

    def __init__(self, source: Source, prompts: Path | None, devices: DevicesConfig, say: Callable[[str], None]):
        adapters, self.base = adapters_of(source)
        if len(adapters) == 1:
            raise ModelError(
                f"--fold: no adapter is known that was merged into {source.base.path}, the base of "
                f"{source.model.path}: name it by --base ADAPTER, or leave out --fold"
            )
        super().__init__(source, adapters, origin(self.base) or self.base.path)
        for adapter in adapters:
            _refuse_kinds(adapter)
        self._say, self._device = say, take_device(devices)
        trained = load_base(replace(source, given_base=None), self._device)
        self._prompts = prompts_for(prompts, source.config, trained, self._tokenizer)
        self._want = self._outputs(with_adapter(trained, source.model))
        say(f"compared  on {self._prompts.compared} (root mean squares)")

    def _outputs(self, model: torch.nn.Module) -> list[torch.Tensor]:
        release_memory()
        return outputs_of(model.eval(), self._prompts.tokens, self._source.reward)

    def _write_weights(self, folder: Path) -> tuple[str, str]:
        source, count = self._source, len(self._adapters)
        original = replace(source, given_base=self.base)
        adapted = self._together(original)
        last = load_file(Path(source.model.path) / WEIGHTS)
        head = {name: tensor for name, tensor in last.items() if source.reward and name.startswith(SCORE)}
        rank = _write(adapted, head, folder, self.base)
        together = self._outputs(adapted)
        del adapted
        folded = with_adapter(load_base(original, self._device), ModelConfig(path=str(folder)))
        got, what = self._outputs(folded), f"{source.model.path}: folded = trained fails"
        compare(got, together, LIMITS[torch.float32], what, "An adapter has a part that cannot be folded")
        # A merged base in half precision is itself rounded.
        dtype = load_config(base_settings(source.model)).dtype
        limit = LIMITS[dtype if isinstance(dtype, torch.dtype) and dtype in LIMITS else torch.float32]
        remedy = "Other adapters were merged into its base: name the last one by --base ADAPTER"
        difference = compare(got, self._want, limit, what, remedy)
        outputs, unit = ("rewards", "") if source.reward else ("log-probabilities", " nats")
        self._say(f"folded    {count} adapters into one of rank {rank}: differs by {difference:.2g}{unit}")
        return "float32", (
            f"It is {count} adapters folded into one. On the base, its {outputs} differ from those of the trained "
            f"model by {difference:.2g} (root mean square, {self._prompts.compared})."
        )

    def _together(self, original: Source) -> PeftModel:
        """The original base with all adapters at once, whose sum PEFT computes."""
        adapted = with_adapter(load_base(original, self._device), self._adapters[0])
        for number, adapter in enumerate(self._adapters[1:], start=2):
            _, differences = attach(adapted, adapter.path, f"adapter{number}")
            if differences:
                raise ModelError(f"--fold: {adapter.path} does not fit {self.base.path}: {differences}")
        adapted.set_adapter(list(adapted.peft_config)[-1])  # with a reward model's head
        adapted.base_model.set_adapter(list(adapted.peft_config))  # pyright: ignore[reportCallIssue]
        return adapted


def _write(adapted: PeftModel, tensors: dict[str, torch.Tensor], folder: Path, base: ModelConfig) -> int:
    """Write all adapters of a model, and these tensors, as one adapter of its base; returns the rank."""
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for key, module in adapted.named_modules():
        if isinstance(module, LoraLayer):
            own = [name for name in adapted.peft_config if name in module.lora_A]
            a_RI = torch.cat([cast(Any, module.lora_A[name]).weight * module.scaling[name] for name in own])
            factors[key] = a_RI, torch.cat([cast(Any, module.lora_B[name]).weight for name in own], dim=1)
    rank = max(len(a_RI) for a_RI, _ in factors.values())
    for key, (a_RI, b_OR) in factors.items():  # engines read one rank for all modules: zeros fill the others
        for end, factor in (("A", pad(a_RI, (0, 0, 0, rank - len(a_RI)))), ("B", pad(b_OR, (0, rank - len(a_RI))))):
            tensors[f"{key}.lora_{end}.weight"] = factor.detach().cpu().contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,  # a scaling of 1
        target_modules=sorted(key.removeprefix("base_model.model.") for key in factors),
        fan_in_fan_out=any(getattr(one, "fan_in_fan_out", False) for one in adapted.peft_config.values()),
        task_type=TaskType.CAUSAL_LM if base_of(adapted).can_generate() else TaskType.SEQ_CLS,
        base_model_name_or_path=origin(base) or base.path,
        revision=base.revision,
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    name_base(folder, base.path)
    return rank


def _refuse_kinds(adapter: ModelConfig) -> None:
    """Raise ModelError for an adapter that is more than LoRA's two matrices for each module."""
    place = Path(adapter.path)
    config = adapter_config(adapter.path) or {}
    names = load_file(place / WEIGHTS) if (place / WEIGHTS).is_file() else [WEIGHTS]
    others = [name for name in names if not name.endswith(FACTORS) and not name.startswith(SCORE)]
    if config.get("peft_type") != "LORA" or config.get("target_parameters") or others:
        raise ModelError(
            f"--fold: {adapter.path} is more than LoRA's two matrices for each module (DoRA, another kind of adapter, "
            f"saved modules){f': it has {min(others)}' if others else ''}; leave out --fold"
        )
