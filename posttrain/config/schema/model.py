"""The settings of a model: path, dtype, attention, adapters."""

from typing import Annotated, Literal

from pydantic import Field

from posttrain.base.words import model_name
from posttrain.config.schema.base import Float, FolderName, ModelPath, OnOff, Positive, Settings, Text

LORA_DROPOUT = 0.05  # the default

ModelDtype = Literal["auto", "float32", "bfloat16"]


class LoraConfig(Settings):
    """Low-rank adapters (Hu et al. 2021)."""

    r: Positive = Field(default=16, description="Rank of the adapters.")
    alpha: Annotated[Float, Field(gt=0)] = Field(
        default=32, description="Scale of the adapters: their update is multiplied by alpha / r."
    )
    dropout: Annotated[Float, Field(ge=0, lt=1)] = Field(
        default=LORA_DROPOUT, description="Dropout on the adapters' input; only sft reads it."
    )
    target_modules: Literal["auto", "all-linear"] | tuple[Text, ...] = Field(
        default="auto",
        description="Modules with adapters: auto (the family's attention), all-linear, or a list of names.",
    )
    modules_to_save: tuple[Text, ...] = Field(
        default=(), description="Names of modules that are trained and saved whole, e.g. embed_tokens and lm_head."
    )
    use_rslora: bool = Field(default=False, description="Whether to scale by alpha / sqrt(r) instead, for large ranks.")
    use_dora: bool = Field(default=False, description="Whether to train each weight's magnitude separately (DoRA).")


class ModelConfig(Settings):
    """A model to train."""

    path: ModelPath = Field(description="Hub id or folder of the model.")
    name: FolderName | None = Field(
        default=None, description="Name for folders; null: the last part of the path, or the run that saved the model."
    )
    revision: Text | None = Field(default=None, description="Branch, tag or commit on the hub.")
    dtype: ModelDtype = Field(
        default="auto", description="Dtype of the computation; trained weights have float32 master copies."
    )
    attention: Literal["auto", "packed", "eager", "sdpa", "flash_attention_2"] = Field(
        default="auto", description="Attention; auto: packed for proven families, otherwise one sequence per row."
    )
    lora: Annotated[LoraConfig | None, OnOff] = Field(
        default=None, description="Low-rank adapters; null: full fine-tuning."
    )
    new_tokens: tuple[Text, ...] = Field(
        default=(),
        description="Tokens to add to the tokenizer; their embeddings start at the mean; LoRA trains their rows too.",
    )
    load_in_4bit: bool = Field(
        default=False, description="Whether to load frozen weights in 4 bits (NF4): QLoRA; needs lora."
    )
    use_liger_kernel: bool = Field(
        default=False, description="Whether to use Liger's GPU kernels for norms and gated MLPs."
    )
    triton_kernels: bool = Field(
        default=True, description="Whether to use posttrain's GPU kernels for norms, gated MLPs, scores and generation."
    )
    trust_remote_code: bool = Field(default=False, description="Whether to run Python code that comes with the model.")
    allow_pickle: bool = Field(
        default=False, description="Whether to load pickled weights and adapters, which can run code."
    )

    @property
    def folder_name(self) -> str:
        """`name`, or a name derived from the path."""
        return self.name or model_name(self.path)
