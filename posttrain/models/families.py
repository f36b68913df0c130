"""The facts of each model family, verified by tests/test_equivalence.py.

`packed`: the family's attention uses transformers' interface and depends only on positions, so that a pack gives the
same log-probabilities as one-by-one evaluation. Other families (with ALiBi, or with their own attention code), and
families not listed here, process packs with one sequence per row.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from posttrain.base.errors import ModelError
from posttrain.base.files import table_beside
from posttrain.models.attention import NAME as PACKED

if TYPE_CHECKING:
    from peft import PeftModel

TRITON = "_posttrain_triton"  # the attribute of a model that uses models/kernels


@dataclass(frozen=True, slots=True)
class Family:
    packed: bool
    lora_targets: tuple[str, ...]
    recurrent: bool = False  # some layers carry a state from token to token (models/lean.py)


UNKNOWN = Family(False, ())
FAMILIES = {  # by config.json's model_type
    kind: Family(row["packed"], tuple(row["lora_targets"]), row.get("recurrent", False))
    for row in table_beside(__file__, "families.yaml")
    for kind in row["types"]
}
LEARNED_POSITIONS = ("gpt2", "opt", "gpt_neo")  # these have a table of positions; other families compute any position


def is_adapted(model: nn.Module) -> TypeGuard[PeftModel]:
    """Whether the model is a PEFT model, without importing PEFT: that takes a second, and most runs do not need it."""
    return hasattr(model, "get_base_model")


def base_of(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a PEFT wrapper (with PEFT's layers in it), or the model itself."""
    base = model.get_base_model() if is_adapted(model) else model
    assert isinstance(base, PreTrainedModel)
    return base


def backbone_of(base: PreTrainedModel) -> nn.Module:
    """Return the model without its head."""
    return getattr(base, base.base_model_prefix)


def head_layer(model: nn.Module) -> nn.Linear:
    """Return the layer whose `weight` and `bias` give the logits with active adapters: PEFT's copy if the head is
    trained whole, PEFT's wrapper if some of its rows are trained."""
    head: Any = base_of(model).get_output_embeddings()
    if hasattr(head, "modules_to_save"):
        off = head.disable_adapters or not head.active_adapters
        return head.original_module if off else head.modules_to_save[head.active_adapters[0]]
    if trains_rows(head):
        head.bias = None  # PEFT's wrapper applies no bias (models/lora.py refuses heads that have one)
    return head


def trains_rows(end: nn.Module | None) -> bool:
    """Whether embeddings or an LM head are frozen except for some rows, which PEFT inserts at each use."""
    return hasattr(end, "token_adapter")


def is_packed(base: PreTrainedModel) -> bool:
    return base.config._attn_implementation == PACKED


def eos_token_ids(model: PreTrainedModel) -> list[int]:
    """Return the stop tokens in the model's generation_config.json."""
    ids = getattr(getattr(model, "generation_config", None), "eos_token_id", None)  # a classifier has no such config
    return [int(id) for id in (ids if isinstance(ids, list) else [ids]) if id is not None]


def set_eos_token_ids(model: PreTrainedModel, ids: Iterable[int]) -> None:
    """Set the stop tokens that are saved in generation_config.json, where transformers' `generate` reads them."""
    generation, ids = getattr(model, "generation_config", None), list(dict.fromkeys(ids))
    if generation is None or ids == eos_token_ids(model):
        return
    generation.eos_token_id = ids
    generation._from_model_config = False  # otherwise `generate` would derive it from config.json again
    try:
        generation.validate(strict=True)
    except ValueError:  # some published models have a temperature without do_sample, which cannot be saved
        generation.do_sample = True


def vocabulary_of(base: PreTrainedModel) -> int:
    """Return the number of token ids that have an embedding."""
    return base.get_input_embeddings().weight.shape[0]  # pyright: ignore


def positions_of(config: PreTrainedConfig) -> int | None:
    """Return the number of positions that the model has, or was trained on; None without a limit."""
    return getattr(config, "max_position_embeddings", None)


def head_size(text: PreTrainedConfig) -> int:
    """Return the dimensions of a head of attention; 0 if the configuration does not say."""
    heads = getattr(text, "num_attention_heads", 1)
    return getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // heads


def check_longest(config: PreTrainedConfig, longest: int) -> None:
    """Raise ModelError for a sequence of `longest` tokens if the model's table of positions is shorter."""
    limit = positions_of(config)
    if config.model_type in LEARNED_POSITIONS and limit is not None and longest > limit:
        raise ModelError(
            f"this model has {limit:,} positions, but the longest example has {longest:,} tokens: set data.max_length "
            f"to at most {limit}"
        )


def check_positions(config: PreTrainedConfig, max_length: int) -> None:
    """Raise ModelError for lengths at which the rotary embedding (`dynamic`, `longrope`) depends on the longest
    sequence of the batch.

    At these lengths transformers rotates all positions of a batch differently, so log-probabilities differ from
    one-by-one evaluation. Up to the length of the model's original training, both are plain rotary embeddings.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    for part in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if part.get("rope_type") in ("dynamic", "longrope"):
            original = part.get("original_max_position_embeddings") if part["rope_type"] == "longrope" else None
            limit = original or config.max_position_embeddings
            if max_length > limit:
                raise ModelError(
                    f"this model's positions ({part['rope_type']} RoPE) depend on the longest sequence of a batch "
                    f"beyond {limit} tokens: set data.max_length to at most {limit} (it is {max_length})"
                )


def use_triton(model: nn.Module) -> None:
    """Make the model use the kernels of models/kernels for scores and generation."""
    setattr(model, TRITON, True)


def uses_triton(model: nn.Module, factor: Tensor) -> bool:
    """Whether the kernels are used for a tensor like `factor`: not in float32 on a GPU, where cuBLAS is faster."""
    return getattr(model, TRITON, False) and not (factor.is_cuda and factor.dtype == torch.float32)


def logit_scale(config: PreTrainedConfig) -> float:
    """Return the factor of the logits: Cohere's logit_scale, the inverse of Granite's logits_scaling, or 1."""
    return getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)


def logit_softcap(config: PreTrainedConfig) -> float | None:
    """Return the cap of Gemma's tanh capping of the final logits, or None."""
    return getattr(config, "final_logit_softcapping", None)
