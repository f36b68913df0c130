"""The settings of a model to train: what to load, how it computes, and its adapters."""

from typing import Annotated, Literal

from pydantic import Field

from posttrain.config.schema.base import Float, FolderName, OnOff, Place, Positive, Settings, Text
from posttrain.words import model_name

LORA_DROPOUT = 0.05  # the default


class LoraConfig(Settings):
    """Low-rank adapters (Hu et al. 2021)."""

    r: Positive = Field(default=16, description="Rank of the adapters.")
    alpha: Annotated[Float, Field(gt=0)] = Field(
        default=32, description="Scale: the update is multiplied by alpha / r."
    )
    dropout: Annotated[Float, Field(ge=0, lt=1)] = Field(
        default=LORA_DROPOUT, description="Dropout on the adapters' input, in sft."
    )
    target_modules: Literal["auto", "all-linear"] | tuple[Text, ...] = Field(
        default="auto", description="auto: the attention of the family; all-linear; or a list of module names."
    )
    use_rslora: bool = Field(default=False, description="Scale by alpha / sqrt(r) instead, for large ranks.")
    use_dora: bool = Field(default=False, description="Train each weight's magnitude apart from its direction.")


class ModelConfig(Settings):
    """A model to train."""

    path: Place = Field(description="Hub id or folder.")
    name: FolderName | None = Field(
        default=None,
        description="Folder name in the run folder; null: the last part of the path, or the run that saved the model.",
    )
    revision: Text | None = Field(default=None, description="Branch, tag or commit on the hub.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Of the computation; trained weights keep a float32 master copy."
    )
    attention: Literal["auto", "packed", "eager", "sdpa", "flash_attention_2"] = Field(
        default="auto", description="auto: packed where the family is proven, else one sequence a row."
    )
    lora: Annotated[LoraConfig | None, OnOff] = Field(
        default=None, description="Low-rank adapters; null: full fine-tuning."
    )
    load_in_4bit: bool = Field(default=False, description="Frozen weights in 4 bits (NF4) under lora: QLoRA.")
    use_liger_kernel: bool = Field(default=False, description="Liger's GPU kernels for norms and gated MLPs.")
    triton_kernels: bool = Field(
        default=True, description="Our own GPU kernels for norms, gated MLPs, scores and generation, where they apply."
    )
    trust_remote_code: bool = Field(default=False, description="Run Python code that comes with the model.")
    allow_pickle: bool = Field(default=False, description="Load pickled weights and adapters, which can run code.")

    @property
    def folder_name(self) -> str:
        """`name`, or else what the model at that path is called."""
        return self.name or model_name(self.path)
