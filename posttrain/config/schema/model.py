"""The settings of a model: path, dtype, attention, adapters."""

from typing import Annotated, Literal

from pydantic import Field

from posttrain.base.words import model_name
from posttrain.config.schema.base import Conflicts, Settings, setting
from posttrain.config.schema.types import AboveZero, BelowOne, FastPissa, FolderName, ModelPath, OnOff, Positive, Text

ModelDtype = Literal["auto", "float32", "bfloat16", "float16"]


class LoraConfig(Settings):
    """Low-rank adapters (Hu et al. 2021)."""

    r: Positive = setting(16, "Rank of the adapters.")
    alpha: AboveZero = setting(32, "Scale of the adapters: their update is multiplied by alpha / r.")
    dropout: BelowOne = setting(0.05, "Dropout on the adapters' input; only sft reads it.")
    target_modules: Literal["auto", "all-linear"] | tuple[Text, ...] = setting(
        "auto", "Modules with adapters: auto (the family's attention), all-linear, or a list of names."
    )
    modules_to_save: tuple[Text, ...] = setting(
        (), "Names of modules that are trained and saved whole, e.g. embed_tokens and lm_head."
    )
    use_rslora: bool = setting(False, "Whether to scale by alpha / sqrt(r) instead, for large ranks.")
    use_dora: bool = setting(False, "Whether to train each weight's magnitude separately (DoRA).")
    init: Literal["default", "pissa", "olora", "loftq"] | FastPissa = setting(
        "default", "Start of the adapters: PEFT's, the weights' principal part, their QR, or 4-bit rounding errors."
    )

    def check(self) -> Conflicts:
        if self.init != "default" and self.use_dora:
            yield "init", f"is {self.init}, which cannot be combined with use_dora: its magnitudes scale whole weights"

    @property
    def is_subtracted(self) -> bool:
        """Whether the adapters' start is subtracted from the base's weights (PiSSA, OLoRA)."""
        return self.init not in ("default", "loftq")


class ModelConfig(Settings):
    """A model to train."""

    path: ModelPath = Field(description="Hub id or folder of the model, or a run, which means its final model.")
    name: FolderName | None = setting(
        None, "Name for folders; null: the last part of the path, or the run that saved the model."
    )
    revision: Text | None = setting(None, "Branch, tag or commit on the hub.")
    dtype: ModelDtype = setting("auto", "Dtype of the computation; trained weights have float32 master copies.")
    attention: Literal["auto", "packed", "eager", "sdpa", "flash_attention_2"] = setting(
        "auto", "Attention; auto: packed for proven families, otherwise one sequence per row."
    )
    lora: Annotated[LoraConfig | None, OnOff] = setting(None, "Low-rank adapters; null: full fine-tuning.")
    new_tokens: tuple[Text, ...] = setting(
        (), "Tokens to add to the tokenizer; their embeddings start at the mean; LoRA trains their rows too."
    )
    load_in_4bit: bool = setting(False, "Whether to load frozen weights in 4 bits (NF4): QLoRA; needs lora.")
    use_liger_kernel: bool = setting(False, "Whether to use Liger's GPU kernels for norms and gated MLPs.")
    triton_kernels: bool = setting(
        True, "Whether to use posttrain's GPU kernels for norms, gated MLPs, scores and generation."
    )
    trust_remote_code: bool = setting(False, "Whether to run Python code that comes with the model.")
    allow_pickle: bool = setting(False, "Whether to load pickled weights and adapters, which can run code.")

    @property
    def folder_name(self) -> str:
        """`name`, or a name derived from the path."""
        return self.name or model_name(self.path)
