"""Merges adapters into their base, and checks that the exported files reproduce the trained model."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from posttrain.base.errors import VitalSignError
from posttrain.base.memory import release_memory
from posttrain.export.source import Source
from posttrain.models.adapters import merged, with_adapter
from posttrain.models.families import is_adapted
from posttrain.models.load import check_embeddings, load_model, to_dtype
from posttrain.training.checks import ROUNDING, Noise

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Whole:
    """A model to write, in float32 with its adapter merged."""

    model: PreTrainedModel
    outputs: list[torch.Tensor]  # on each prompt before merging; the written files must reproduce them
    merging: float | None = None  # root mean square of the differences caused by merging (nats, or rewards)
    effect: float | None = None  # root mean square of the differences without the adapter (nats)


@torch.no_grad()
def outputs_of(model: torch.nn.Module, prompts: Sequence[Sequence[int]], reward: bool) -> list[torch.Tensor]:
    """The outputs of one call per prompt: the log-probabilities of all tokens except the first, or the reward."""
    outputs = []
    device = next(model.parameters()).device
    for prompt in prompts:
        ids_T = torch.tensor(prompt, device=device)
        logits = model(input_ids=ids_T[None], use_cache=False).logits[0].float()
        if not reward:
            logits = logits[:-1].log_softmax(-1).gather(1, ids_T[1:, None])
        outputs.append(logits.flatten())
    return outputs


def load_base(source: Source, device: torch.device) -> PreTrainedModel:
    """Load the model, or an adapter's base, in float32, dequantised, with the attention of plain transformers."""
    model = load_model(source.base, source.head, torch.float32, device, dequantised=True)
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    return model


def merge(
    base: PreTrainedModel, source: Source, prompts: Sequence[Sequence[int]], tokenizer: PreTrainedTokenizerBase
) -> Whole:
    """Merge the source into its base if it is an adapter. Raises VitalSignError if that changes more than rounding."""
    adapted = with_adapter(base, source.model).eval() if source.adapter else base
    check_embeddings(base, tokenizer, source.model.path)  # after loading the adapter, which may add embeddings
    want = outputs_of(adapted, prompts, source.reward)
    if not is_adapted(adapted):
        return Whole(base, want)
    effect = None
    if not source.reward:  # without its adapter, a reward model has a random head
        with adapted.disable_adapter():
            effect = _rms(_differences(outputs_of(adapted, prompts, False), want))
    whole = merged(adapted).eval()
    got = outputs_of(whole, prompts, source.reward)
    what = f"{source.model.path}: the check merged = adapter fails"
    return Whole(whole, want, check_equal(got, want, ROUNDING[torch.float32], what), effect)


def write_and_check(
    whole: Whole, folder: Path, source: Source, prompts: Sequence[Sequence[int]], dtype: torch.dtype, shard: str
) -> float:
    """Write the model's weights and config, load them with plain transformers, and check that they match the model.

    `shard` is the maximum size of a file. Returns the root mean square of the differences from the outputs before
    merging. Raises VitalSignError if a weight differs, or if outputs differ by more than the dtype's rounding explains.
    """
    model = whole.model
    to_dtype(model, dtype)
    release_memory()
    model.save_pretrained(folder, max_shard_size=shard)
    auto: Any = transformers.AutoModelForSequenceClassification if source.reward else transformers.AutoModelForCausalLM
    loaded = auto.from_pretrained(folder, dtype=dtype, use_safetensors=True).to(model.device).eval()
    want = model.state_dict()
    for name, tensor in loaded.state_dict().items():
        if name not in want or not torch.equal(tensor, want[name].to(tensor.dtype)):
            raise VitalSignError(f"{source.model.path}: the weight {name} is not in the written files, or has changed")
    got = outputs_of(loaded, prompts, source.reward)
    what = f"{source.model.path}: the written files fail the check in {str(dtype).removeprefix('torch.')}"
    return check_equal(got, whole.outputs, ROUNDING[dtype], what)


MERGING = "Either weights are too large for the dtype (try --dtype float32), or this type of adapter cannot be merged"


def check_equal(
    got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], limit: Noise, what: str, remedy: str = MERGING
) -> float:
    """The root mean square of the differences. Raises VitalSignError if they are larger than rounding explains."""
    difference = _differences(got, want)
    if excess := limit.excess(difference):
        raise VitalSignError(
            f"{what}: compared with the trained model, a log-probability or reward {excess}; nothing is exported. "
            f"{remedy}"
        )
    return _rms(difference)


def _differences(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(got)).double() - torch.cat(list(want)).double()


def _rms(difference: torch.Tensor) -> float:
    return float(difference.square().mean().sqrt())
