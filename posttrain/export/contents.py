"""Exports that are not merged: an adapter as it is, several adapters folded into one, or a quantised model."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from posttrain.base.errors import ModelError, RunError
from posttrain.base.memory import release_memory
from posttrain.base.words import hub_id_of
from posttrain.config import DevicesConfig, ModelConfig
from posttrain.data.prompts import end_of_turn
from posttrain.export.card import WrittenModel, public
from posttrain.export.gate import TITLES, Check, cells
from posttrain.export.merging import DTYPES, check_equal, load_base, outputs_of
from posttrain.export.rows import prompts_for
from posttrain.export.source import QUANTISED, Source, adapters_of, chats
from posttrain.export.targets import refuse_full_disk
from posttrain.models.adapters import SCORE, attach, base_settings, name_base, with_adapter
from posttrain.models.devices import take_device
from posttrain.models.families import base_of
from posttrain.models.files import adapter_config, adapter_stops, check_adapter_weights
from posttrain.models.load import load_config, load_model, load_tokenizer
from posttrain.runs.files import load_json, save_json
from posttrain.training.checks import ROUNDING

if TYPE_CHECKING:  # its import takes a second
    from peft import PeftModel

COPIED = {".safetensors", ".json", ".jinja", ".txt", ".model"}  # weights, config and tokenizer of a quantised model
WEIGHTS, FACTORS = "adapter_model.safetensors", (".lora_A.weight", ".lora_B.weight")


class Adapter:
    """An adapter that is exported unmerged, for its base on the hub."""

    failed: tuple[str, ...] = ()

    def __init__(self, source: Source, adapters: Sequence[ModelConfig] = (), base: str | None = None):
        """`adapters` become one adapter of `base`. By default, both are taken from `source`."""
        self._source, self._adapters = source, adapters or [source.model]
        self._base = base or hub_id_of(source.base.path)
        if self._base is None:
            fold = ", or give --fold for an adapter of the original base" if len(adapters_of(source)[0]) > 1 else ""
            raise ModelError(
                f"--no-merge: the base of {source.model.path} is the folder {source.base.path}, which nobody else "
                "has: leave out --no-merge, or put the base's hub id in adapter_config.json "
                f"(base_model_name_or_path){fold}"
            )
        for adapter in self._adapters:
            check_adapter_weights(adapter.path, None, allow_pickle=False)
        self._tokenizer = load_tokenizer(source.model)

    def _write_weights(self, folder: Path) -> tuple[str, str]:
        """Write the adapter. Returns its dtype, and the result of its check as a sentence."""
        source = Path(self._source.model.path)
        shutil.copy(source / WEIGHTS, folder)
        config = load_json(source / "adapter_config.json", links=True) | {"base_model_name_or_path": self._base}
        save_json(folder / "adapter_config.json", config)
        return "those of the adapter", ""

    def write(self, folder: Path, name: str) -> WrittenModel:
        dtype, check = self._write_weights(folder)
        self._tokenizer.save_pretrained(folder)
        chat, notes = chats(self._source, self._tokenizer), ()
        if not self._source.reward:
            end = end_of_turn(self._tokenizer) if chat else None
            own = [id for adapter in self._adapters for id in adapter_stops(adapter.path)]
            stops = [self._tokenizer.eos_token_id, *own, None if end is None else end[0]]
            ids = [id for id in dict.fromkeys(stops) if id is not None]
            save_json(folder / "generation_config.json", {"eos_token_id": ids})
            texts = ", ".join(f"`{self._tokenizer.convert_ids_to_tokens(id)}` ({id})" for id in ids)
            notes = (
                f"A completion ends with {texts}: the stop tokens in generation_config.json. PEFT does not read them, "
                "so pass them as shown below. If an engine such as vLLM loads the adapter on its base, requests must "
                "give them as `stop_token_ids`.",
            )
        return WrittenModel(dtype, check, notes, chat, merged=False)


class QuantisedCopy:
    """A copy of a folder written by `posttrain quantize`. The model card shows its gate."""

    failed: tuple[str, ...] = ()

    def __init__(self, source: Source, target: Path, devices: DevicesConfig):
        assert source.quantised is not None
        self._source, self._facts, self._folder = source, source.quantised, Path(source.model.path)
        try:  # the gate as a sentence and a table
            gate, model = self._facts["gate"], self._facts["model"]["name"]
            checks = [Check(**check) for check in gate["checks"]]
            passed, rows = gate["passed"], public(gate["rows"])
            lines = ["| " + " | ".join((*cells(check), public(check.of))) + " |" for check in checks]
            dtype = DTYPES[self._facts["dtype"]]
        except (KeyError, TypeError) as error:
            raise RunError(f"{self._folder / QUANTISED} is damaged ({error}): quantise the model again") from error
        told = f"its gate (posttrain quantize, {rows}) is {'' if passed else 'not '}passed:"
        table = [f"| {' | '.join((*TITLES, 'of'))} |", "|---" * (len(TITLES) + 1) + "|", *lines]
        self._gate = f"Quantised from `{model}`; {told}", ("\n".join(table),)
        refuse_full_disk(target, sum(path.stat().st_size for path in self._folder.glob("*.safetensors")))
        load_model(source.model, source.head, dtype, take_device(devices))
        self._tokenizer = load_tokenizer(source.model)

    def write(self, folder: Path, name: str) -> WrittenModel:
        for path in sorted(self._folder.iterdir()):
            if path.is_file() and path.suffix in COPIED and path.name not in (QUANTISED, "export.json"):
                shutil.copy(path, folder)
        save_json(folder / QUANTISED, public(self._facts))
        kinds = f"{self._facts['method']} (bitsandbytes) in linear layers, {self._facts['dtype']} elsewhere"
        return WrittenModel(kinds, *self._gate, chats(self._source, self._tokenizer))


class FoldedAdapters(Adapter):
    """Folds an adapter and the adapters merged into its base into one adapter of the original base: LoRA factors are
    concatenated; each adapter's scaling is multiplied into its A factor."""

    def __init__(self, source: Source, prompts: Path | None, devices: DevicesConfig, say: Callable[[str], None]):
        adapters, self.base = adapters_of(source)
        if len(adapters) == 1:
            raise ModelError(
                f"--fold: no adapter is known to be merged into {source.base.path}, the base of "
                f"{source.model.path}: give it with --base ADAPTER, or leave out --fold"
            )
        super().__init__(source, adapters, hub_id_of(self.base.path) or self.base.path)
        for adapter in adapters:
            weights, config = Path(adapter.path) / WEIGHTS, adapter_config(adapter.path) or {}
            names = load_file(weights) if weights.is_file() else [WEIGHTS]
            others = [name for name in names if not name.endswith(FACTORS) and not name.startswith(SCORE)]
            if config.get("peft_type") != "LORA" or config.get("target_parameters") or others:
                raise ModelError(
                    f"--fold: {adapter.path} has more than LoRA's two matrices for each module (DoRA, another adapter "
                    f"type, saved modules){f', such as {min(others)}' if others else ''}; leave out --fold"
                )
        self._say, self._device = say, take_device(devices)
        trained = load_base(replace(source, given_base=None), self._device)
        self._prompts, self._compared = prompts_for(prompts, source.config, trained, self._tokenizer)
        self._trained = self._outputs(with_adapter(trained, source.model))
        say(f"compared  on {self._compared} (root mean squares)")

    def _outputs(self, model: torch.nn.Module) -> list[torch.Tensor]:
        release_memory()
        return outputs_of(model.eval(), self._prompts, self._source.reward)

    def _write_weights(self, folder: Path) -> tuple[str, str]:
        source, count = self._source, len(self._adapters)
        original = replace(source, given_base=self.base)
        adapted = with_adapter(load_base(original, self._device), self._adapters[0])
        for number, adapter in enumerate(self._adapters[1:], start=2):
            _, differences = attach(adapted, adapter.path, f"adapter{number}")
            if differences:
                raise ModelError(f"--fold: {adapter.path} does not fit {self.base.path}: {differences}")
        adapted.set_adapter(list(adapted.peft_config)[-1])  # its reward head, if any, becomes active
        # PEFT adds the outputs of all active adapters
        adapted.base_model.set_adapter(list(adapted.peft_config))  # pyright: ignore[reportCallIssue]
        last = load_file(Path(source.model.path) / WEIGHTS)
        head = {name: tensor for name, tensor in last.items() if source.reward and name.startswith(SCORE)}
        rank = _write_folded(adapted, head, folder, self.base)
        want = self._outputs(adapted)
        del adapted
        folded = with_adapter(load_base(original, self._device), ModelConfig(path=str(folder)))
        got, what = self._outputs(folded), f"{source.model.path}: the check folded = trained fails"
        check_equal(got, want, ROUNDING[torch.float32], what, "An adapter has a part that cannot be folded")
        # If the merged base is saved in half precision, its weights are already rounded.
        dtype = load_config(base_settings(source.model)).dtype
        limit = ROUNDING[dtype if isinstance(dtype, torch.dtype) and dtype in ROUNDING else torch.float32]
        remedy = "Other adapters were merged into its base: give the last of them with --base ADAPTER"
        difference = check_equal(got, self._trained, limit, what, remedy)
        outputs, unit = ("rewards", "") if source.reward else ("log-probabilities", " nats")
        self._say(f"folded    {count} adapters into one of rank {rank}: differs by {difference:.2g}{unit}")
        return "float32", (
            f"This adapter is {count} adapters folded into one. On the base, its {outputs} differ from those of the "
            f"trained model by {difference:.2g} (root mean square, {self._compared})."
        )


def _write_folded(adapted: "PeftModel", tensors: dict[str, torch.Tensor], folder: Path, base: ModelConfig) -> int:
    """Write all adapters of a model, and `tensors`, as one adapter of its base. Returns the rank."""
    from peft import LoraConfig, TaskType
    from peft.tuners.lora import LoraLayer

    factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for key, module in adapted.named_modules():
        if isinstance(module, LoraLayer):
            own = [name for name in adapted.peft_config if name in module.lora_A]
            a_RI = torch.cat([cast(Any, module.lora_A[name]).weight * module.scaling[name] for name in own])
            factors[key] = a_RI, torch.cat([cast(Any, module.lora_B[name]).weight for name in own], dim=1)
    rank = max(len(a_RI) for a_RI, _ in factors.values())
    for key, (a_RI, b_OR) in factors.items():  # engines read one rank for all modules: pad lower ranks with zeros
        for end, factor in (("A", pad(a_RI, (0, 0, 0, rank - len(a_RI)))), ("B", pad(b_OR, (0, rank - len(a_RI))))):
            tensors[f"{key}.lora_{end}.weight"] = factor.detach().cpu().contiguous()
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,  # a scaling of 1
        target_modules=sorted(key.removeprefix("base_model.model.") for key in factors),
        fan_in_fan_out=any(getattr(config, "fan_in_fan_out", False) for config in adapted.peft_config.values()),
        task_type=TaskType.CAUSAL_LM if base_of(adapted).can_generate() else TaskType.SEQ_CLS,
        base_model_name_or_path=hub_id_of(base.path) or base.path,
        revision=base.revision,
        inference_mode=True,
    )
    config.save_pretrained(str(folder))
    name_base(folder, base.path)
    return rank
