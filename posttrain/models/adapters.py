"""Saved adapters: detect an adapter, find its base model, and load it onto the base, unmerged or merged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import PreTrainedModel
from transformers.utils import cached_file

from posttrain.base.errors import WeightsError
from posttrain.base.files import sha256_of
from posttrain.config.schema.model import ModelConfig
from posttrain.models.families import base_of, eos_token_ids, set_eos_token_ids
from posttrain.models.files import adapter_config, adapter_stops, check_adapter_weights, clear_errors, read_json, some

if TYPE_CHECKING:  # importing it takes a second
    from peft import PeftModel

BASE = "base"  # the folder in a run folder with the base model of its adapters
START = "start"  # the name of the frozen copy of an adapter as it was when the run began
BASE_WEIGHTS = "base_weights.json"  # the file next to an adapter with the hash of the weights that it was trained on
SCORE = "base_model.model.score."  # prefix of a reward head's keys in an adapter


def is_adapter(model: ModelConfig) -> bool:
    """Whether the path is a folder with a PEFT adapter rather than a full model."""
    return saved_config(model) is not None


def base_settings(model: ModelConfig) -> ModelConfig:
    """Return the settings of an adapter's base model. The settings of any other model are returned unchanged.

    If the base is called `base` and the adapter has a folder of this name next to it, that folder is used: a run folder
    may have been moved with both.
    """
    adapter = saved_config(model)
    if adapter is None:
        return model
    path, beside = adapter["base_model_name_or_path"], Path(model.path).absolute().parent / BASE
    if Path(path).name == BASE and (beside / "config.json").is_file():
        path = str(beside)
    return model.model_copy(update={"path": path, "revision": adapter.get("revision") or model.revision})


def saved_config(model: ModelConfig) -> dict[str, Any] | None:
    """Return the content of adapter_config.json, or None if the model is not an adapter."""
    with clear_errors(model, "adapter_config.json"):
        return adapter_config(model.path)


def with_adapter(
    base: PreTrainedModel | PeftModel, model: ModelConfig, name: str = "default", trainable: bool = False
) -> PeftModel:
    """Load the adapter in the folder `model.path` onto `base`, unmerged: its layers are added to those of `base`.

    If `base` already has adapters, this one is added under `name`. The stop tokens in the generation_config.json of
    the adapter's folder are added to those of the base. Raises WeightsError if the adapter's tensors differ from those
    that its adapter_config.json describes for this base, or if it was trained on different weights.
    """
    check_adapter_weights(model.path, None, model.allow_pickle)
    _check_base(Path(model.path), str(base_of(base).name_or_path))
    with clear_errors(model, "adapter"):
        adapted, differences = attach(base, model.path, name, trainable)
    if differences:
        raise WeightsError(
            f"model {model.path}: {differences}; the adapter was made for another base model, or its keys were renamed"
        )
    add_stops(base_of(adapted), model)
    return adapted


def add_stops(base: PreTrainedModel, adapter: ModelConfig) -> None:
    """Add the stop tokens of an adapter's folder to those of its base."""
    set_eos_token_ids(base, [*eos_token_ids(base), *adapter_stops(adapter.path)])


def attach(
    base: PreTrainedModel | PeftModel, folder: str, name: str = "default", trainable: bool = False
) -> tuple[PeftModel, str]:
    """Attach the adapter of a folder to `base`. Also return a description of how the saved tensors differ from those in
    adapter_config.json, empty if they do not: PEFT leaves missing tensors at initial values and ignores unknown ones.

    Trainable adapters, and their frozen copy START, have the dtype of the base. The head of the other kind of model (a
    reward head if a language model is loaded, or the reverse) is not read. A reward model that is trained from a
    language model's adapter keeps its own head.
    """
    from peft import MODEL_TYPE_TO_PEFT_MODEL_MAPPING, PeftConfig, PeftModel, PeftType, TaskType
    from peft.mapping import PEFT_TYPE_TO_PREFIX_MAPPING
    from peft.utils import load_peft_weights, set_peft_model_state_dict

    config = PeftConfig.from_pretrained(folder)
    config.inference_mode = not trainable
    whole = base_of(base)
    generates = whole.can_generate()
    own, other = (TaskType.CAUSAL_LM, TaskType.SEQ_CLS) if generates else (TaskType.SEQ_CLS, TaskType.CAUSAL_LM)
    tensors = load_peft_weights(folder, "cpu", key_mapping=getattr(whole, "_checkpoint_conversion_mapping", {}))
    if config.task_type == other:  # the backbones have the same names
        config.task_type = own if trainable else None
        if trainable and own == TaskType.SEQ_CLS:
            tensors[f"{SCORE}weight"] = whole.get_submodule("score").get_parameter("weight").detach()
    casts = not trainable and name != START
    modules = (whole.get_input_embeddings(), whole.get_output_embeddings())
    ends = tuple(f"base_model.model.{name}." for name, module in whole.named_modules() if module in modules)
    rows = _embeddings_of(tensors, ends, modules[0], getattr(config, "trainable_token_indices", None))
    if rows not in (0, cast(Any, modules[0]).weight.shape[0]) and name == "default" and base is whole:
        whole.resize_token_embeddings(rows, mean_resizing=False)
    if isinstance(base, PeftModel):
        adapted = base
        adapted.add_adapter(name, config, autocast_adapter_dtype=casts)
    else:
        kind = MODEL_TYPE_TO_PEFT_MODEL_MAPPING.get(config.task_type or "", PeftModel)
        adapted = kind(base, config, name, autocast_adapter_dtype=casts)
    try:
        loaded = set_peft_model_state_dict(adapted, tensors, name)
    except KeyError as error:  # PEFT looks up the keys of modules that are saved whole
        return adapted, f"the adapter lacks {error.args[0]}"
    prefix = PEFT_TYPE_TO_PREFIX_MAPPING[PeftType(config.peft_type)]
    lacking = [key for key in loaded.missing_keys if prefix in key and f".{name}" in key]
    missing, unexpected = ({key.replace(f".{name}", "") for key in keys} for keys in (lacking, loaded.unexpected_keys))
    read = ("",) if generates else (f"base_model.model.{whole.base_model_prefix}.", SCORE)
    unexpected = {key for key in unexpected if key.startswith(read) and not (generates and SCORE in key)}
    ended = {key for key in unexpected if key.startswith(ends) and key in tensors}
    unexpected -= {key for key in ended if _is_twice(key, tensors)}
    parts = [
        f"the adapter lacks {some(missing)}, which its adapter_config.json describes" if missing else "",
        f"the adapter has {some(unexpected)}, which {type(whole).__name__} lacks" if unexpected else "",
    ]
    return adapted, " and ".join(part for part in parts if part)


def _embeddings_of(tensors: Mapping[str, torch.Tensor], ends: tuple[str, ...], embeddings: Any, trained: Any) -> int:
    """Return a lower bound of the vocabulary size that an adapter was trained with, or 0 if no tensor depends on it."""
    sizes = [0]
    for key, tensor in tensors.items():
        if key.startswith(ends) and key.endswith((".weight", "lora_embedding_A")) and "lora_A" not in key:
            sizes.append(tensor.shape[1] if key.endswith("lora_embedding_A") else tensor.shape[0])
    ids = [id for of in (trained.values() if isinstance(trained, dict) else [trained or []]) for id in of]
    return max(*sizes, max(ids) + 1 if ids and max(ids) >= len(embeddings.weight) else 0)


def _is_twice(key: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether an adapter has the same tensor under a second name, as PEFT saves tensors of a resized vocabulary."""
    same = (other for name, other in tensors.items() if name != key and other.shape == tensors[key].shape)
    return any(torch.equal(other, tensors[key]) for other in same)


def _check_base(adapter: Path, base: str) -> None:
    """Raise WeightsError if an adapter with the hash of its base's weights is loaded on different weights.

    A base into which another adapter is merged is not checked, because its weights are not in files.
    """
    file, folder = adapter / BASE_WEIGHTS, Path(base)
    if not file.is_file() or (folder / "adapter_config.json").is_file():
        return
    facts = read_json(file, str(adapter))
    if not folder.is_dir():
        folder = Path(str(cached_file(base, "config.json"))).parent
    hashes = {path.name: sha256_of(path) for path in folder.glob("*.safetensors")}
    if not isinstance(facts, dict) or facts.get("sha256") != _hash_of(hashes):
        raise WeightsError(
            f"model {adapter}: was trained on weights that differ from those of {base} (SHA-256 in {BASE_WEIGHTS}): "
            f"load it on the base model that it was trained on, in {BASE}/ of its run folder"
        )


def name_base(adapter: Path, base: str) -> None:
    """Write the hash of the base's weights next to an adapter, if posttrain wrote the base and its manifest."""
    manifest = Path(base) / "manifest.json"
    if manifest.is_file():
        files = read_json(manifest, base)["files"]
        facts = {"sha256": _hash_of({name: entry["sha256"] for name, entry in files.items()})}
        (adapter / BASE_WEIGHTS).write_text(json.dumps(facts), encoding="utf-8")


def _hash_of(hashes: Mapping[str, str]) -> str:
    """Return one hash of a model's weights, made from the SHA-256 of its files."""
    weights = sorted((name, value) for name, value in hashes.items() if name.endswith(".safetensors"))
    return hashlib.sha256(json.dumps(weights).encode()).hexdigest()


def merged(adapted: PeftModel) -> PreTrainedModel:
    """Merge the adapter into the weights of its base model, and return the base model.

    Embeddings and a tied LM head are untied if only one of them has an adapter or each has its own, because merging
    would change both.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = base_of(adapted)
    ends: list[Any] = [base.get_input_embeddings(), base.get_output_embeddings()]
    first, last = (cast(Any, end.get_base_layer() if isinstance(end, BaseTunerLayer) else end) for end in ends)
    shared = getattr(last, "weight", None) is first.weight
    if shared and any(isinstance(end, BaseTunerLayer) for end in ends):
        last.weight = torch.nn.Parameter(last.weight.detach().clone())
    whole = cast(PreTrainedModel, adapted.merge_and_unload())
    embeddings, head = (cast(Any, end) for end in (whole.get_input_embeddings(), whole.get_output_embeddings()))
    if shared and head.weight is not embeddings.weight:
        if getattr(adapted.peft_config["default"], "ensure_weight_tying", False):
            head.weight = embeddings.weight
        whole.config.tie_word_embeddings = head.weight is embeddings.weight
    return whole.requires_grad_(True)  # PEFT froze it; the merged model is fully trainable
