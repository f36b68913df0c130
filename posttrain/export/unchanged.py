"""Exports of what is written already: an adapter for its base on the hub, and a quantised model."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.base.errors import ModelError, RunError
from posttrain.config import DevicesConfig, ModelConfig
from posttrain.data.prompts import end_of_turn
from posttrain.export.card import Written, origin, public
from posttrain.export.gate import Check
from posttrain.export.gate_table import TITLES, cells
from posttrain.export.merging import DTYPES
from posttrain.export.place import refuse_full_disk
from posttrain.export.source import QUANTISED, Source, adapters_of, chats
from posttrain.models.devices import take_device
from posttrain.models.load import load_model, load_tokenizer
from posttrain.models.untrusted import adapter_stops, check_adapter_weights
from posttrain.runs.files import load_json, save_json

COPIED = {".safetensors", ".json", ".jinja", ".txt", ".model"}  # of a quantised model: weights, config, tokenizer


class Adapter:
    """An adapter that is exported as it is, for its base on the hub."""

    failed: tuple[str, ...] = ()

    def __init__(self, source: Source, adapters: Sequence[ModelConfig] = (), base: str | None = None):
        """`adapters` are those that are folded into one, and `base` that one's; by default, those of the source."""
        self._source, self._adapters, self._base = source, adapters or [source.model], base or origin(source.base)
        if self._base is None:
            fold = ", or give --fold for an adapter of the original base" if len(adapters_of(source)[0]) > 1 else ""
            raise ModelError(
                f"--no-merge: the base of {source.model.path} is the folder {source.base.path}, which no one else "
                "has: leave out --no-merge, or put the base's hub id in adapter_config.json (base_model_name_or_path)"
                f"{fold}"
            )
        for adapter in self._adapters:
            check_adapter_weights(adapter.path, None, allow_pickle=False)
        self._tokenizer = load_tokenizer(source.model)

    def _write_weights(self, folder: Path) -> tuple[str, str]:
        """Write the adapter; returns its dtype and what was checked, in words."""
        place = Path(self._source.model.path)
        shutil.copy(place / "adapter_model.safetensors", folder)
        config = load_json(place / "adapter_config.json", links=True) | {"base_model_name_or_path": self._base}
        save_json(folder / "adapter_config.json", config)
        return "those of the adapter", ""

    def write(self, folder: Path, name: str) -> Written:
        dtype, check = self._write_weights(folder)
        self._tokenizer.save_pretrained(folder)
        chat, notes = chats(self._source, self._tokenizer), ()
        if not self._source.reward:
            end = end_of_turn(self._tokenizer) if chat else None
            own = [id for one in self._adapters for id in adapter_stops(one.path)]
            stops = [self._tokenizer.eos_token_id, *own, None if end is None else end[0]]
            ids = [id for id in dict.fromkeys(stops) if id is not None]
            save_json(folder / "generation_config.json", {"eos_token_id": ids})
            texts = ", ".join(f"`{self._tokenizer.convert_ids_to_tokens(id)}` ({id})" for id in ids)
            notes = (
                f"A completion ends with {texts}: the stop tokens in generation_config.json. PEFT does not read them, "
                "so pass them as below; requests to an engine that loads the adapter beside its base (vLLM) need them "
                "as `stop_token_ids`.",
            )
        return Written(dtype, check, notes, chat)


class Quantised:
    """A folder of `posttrain quantize`, which is copied; its gate is on the card."""

    failed: tuple[str, ...] = ()

    def __init__(self, source: Source, target: Path, devices: DevicesConfig):
        assert source.quantised is not None
        self._source, self._facts, self._place = source, source.quantised, Path(source.model.path)
        self._gate = gate_of(self._facts, self._place)
        refuse_full_disk(target, sum(path.stat().st_size for path in self._place.glob("*.safetensors")))
        load_model(source.model, source.head, DTYPES[self._facts["dtype"]], take_device(devices))
        self._tokenizer = load_tokenizer(source.model)

    def write(self, folder: Path, name: str) -> Written:
        for path in sorted(self._place.iterdir()):
            if path.is_file() and path.suffix in COPIED and path.name not in (QUANTISED, "export.json"):
                shutil.copy(path, folder)
        save_json(folder / QUANTISED, public(self._facts))
        kinds = f"{self._facts['method']} (bitsandbytes) in linear layers, {self._facts['dtype']} elsewhere"
        return Written(kinds, *self._gate, chats(self._source, self._tokenizer))


def gate_of(facts: dict[str, Any], folder: Path) -> tuple[str, tuple[str, ...]]:
    """The gate of a quantised model: a sentence, and its table. Raises RunError if its facts are damaged."""
    try:
        gate, name = facts["gate"], facts["model"]["name"]
        checks = [Check(**check) for check in gate["checks"]]
        passed, rows = gate["passed"], public(gate["rows"])
        lines = ["| " + " | ".join((*cells(check), public(check.of))) + " |" for check in checks]
        DTYPES[facts["dtype"]]
    except (KeyError, TypeError) as error:
        raise RunError(f"{folder / QUANTISED} is damaged ({error}): quantise the model again") from error
    sentence = f"Quantised from `{name}`; its gate (posttrain quantize, {rows}) is {'' if passed else 'not '}passed:"
    return sentence, ("\n".join([f"| {' | '.join((*TITLES, 'of'))} |", "|---" * (len(TITLES) + 1) + "|", *lines]),)
