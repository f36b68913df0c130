"""Low-rank adapters by PEFT, with target modules chosen per family."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from posttrain.config.schema.model import LoraConfig
from posttrain.errors import DamagedError, ModelError
from posttrain.models.families import FAMILIES, backbone_of
from posttrain.models.load import Head, attach

if TYPE_CHECKING:
    from peft import PeftModel


def add_lora(model: PreTrainedModel, lora: LoraConfig, head: Head, revision: str | None = None) -> PeftModel:
    """`model` with trainable adapters and everything else frozen; a reward model's head is trained and saved, too.

    The adapters name the model as their base, at its `revision`. Raises ModelError if the target modules match nothing,
    or modules that cannot have adapters.
    """
    from peft import LoraConfig as PeftLoraConfig
    from peft import PeftModel, TaskType, get_peft_model

    targets = target_modules(model, lora)
    config = PeftLoraConfig(
        revision=revision,
        r=lora.r,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  (PEFT annotates int; the scale is a quotient)
        lora_dropout=lora.dropout,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        target_modules=targets,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        task_type=TaskType.CAUSAL_LM if head == "lm" else TaskType.SEQ_CLS,
    )
    # The adapters take the model's dtype; the optimizer holds their float32 masters.
    adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
    assert isinstance(adapted, PeftModel)
    return adapted


def load_lora(model: PreTrainedModel, folder: Path) -> PeftModel:
    """`model` with the adapters of a checkpoint, trainable; they name the model as their base.

    Raises DamagedError if they differ from their adapter_config.json.
    """
    file = folder / "adapter_model.safetensors"
    try:
        if not file.is_file():
            raise OSError("it is missing")
        adapted, differences = attach(model, str(folder), trainable=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise DamagedError(f"{file.name}: {error}") from error
    except RuntimeError as error:
        if "size mismatch" not in str(error):
            raise
        raise DamagedError(f"{file.name}: tensor shapes differ from those of adapter_config.json") from error
    if differences:
        raise DamagedError(f"{file.name}: {differences}")
    adapted.peft_config["default"].base_model_name_or_path = model.name_or_path
    return adapted


def target_modules(model: PreTrainedModel, lora: LoraConfig) -> list[str] | str:
    """Target modules for PEFT: the family's for `auto`, every linear layer but the head for `all-linear`, or a list."""
    if lora.target_modules == "all-linear":
        return "all-linear"
    candidates = linear_layers(model)
    if lora.target_modules == "auto":
        family = FAMILIES.get(model.config.model_type)
        return list(family.lora_targets) if family else candidates
    given = list(lora.target_modules)
    names = [name for name, _ in model.named_modules()]
    unmatched = [t for t in given if not any(name == t or name.endswith(f".{t}") for name in names)]
    if unmatched:
        raise ModelError(
            f"lora.target_modules: {', '.join(unmatched)} match no module of {model.config.model_type}; "
            f"its linear layers are {', '.join(candidates)}"
        )
    _refuse_ends(model, given)
    return given


def _refuse_ends(model: PreTrainedModel, given: list[str]) -> None:
    """Refuse adapters on the LM head, which is applied in chunks without them, and on embeddings tied to it."""
    head = model.get_output_embeddings()
    ends = {"the LM head": head}
    if head is not None and model.config.tie_word_embeddings:
        ends["embeddings that are the LM head's weights too"] = model.get_input_embeddings()
    for name, module in model.named_modules():
        what = next((what for what, end in ends.items() if end is module), None)
        if what and any(name == target or name.endswith(f".{target}") for target in given):
            raise ModelError(f"lora.target_modules: {name} cannot have adapters here: it is {what}; remove it")


def linear_layers(model: PreTrainedModel) -> list[str]:
    """The last parts of the names of the backbone's linear layers."""
    modules = backbone_of(model).named_modules()
    return sorted({name.rsplit(".", 1)[-1] for name, m in modules if isinstance(m, nn.Linear | Conv1D)})
