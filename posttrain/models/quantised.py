"""Models whose linear layers have quantised weights, made by bitsandbytes and loaded by plain transformers.

    int8    LLM.int8(): one scale per row of a weight; inputs are quantised too, except for outliers (arXiv 2208.07339)
    int4    NF4 with double quantisation (QLoRA, arXiv 2305.14314)

LM heads, reward heads, embeddings and norms keep their own precision.
"""

import copy

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from posttrain.base.errors import ModelError
from posttrain.base.imports import need
from posttrain.config.options import Precision
from posttrain.models.families import backbone_of

NAMES: dict[Precision, str] = {"int8": "LLM.int8", "int4": "NF4 with double quantisation"}
CLASSES = ("Linear8bitLt", "Linear4bit")
# Outputs and inputs must be multiples of these: bitsandbytes' 4-bit kernels for CPUs with bfloat16 instructions refuse
# other shapes, even in plain transformers.
ROWS, COLUMNS = 32, 64


def method_of(config: PreTrainedConfig) -> str | None:
    """Return a saved model's quantisation method, such as `bitsandbytes`; None if its weights are not quantised."""
    stored = getattr(config, "quantization_config", None)
    if stored is None:
        return None
    return str(stored.get("quant_method") if isinstance(stored, dict) else stored.quant_method)


def refuse_training(config: PreTrainedConfig, path: str, lora: bool) -> None:
    """Raise ModelError for a model with quantised weights, except for LoRA on 4 bits."""
    if method_of(config) is None or (lora and config.quantization_config.get("load_in_4bit")):
        return
    raise ModelError(
        f"model {path}: its weights are quantised, and quantised weights cannot be trained: give the original model. "
        "LoRA on 4 bits is possible (model.lora)"
    )


def check_int8(device: torch.device) -> None:
    """Raise ModelError if PyTorch multiplies 8-bit integers wrongly on this machine; nothing else would show this."""
    if device.type != "cpu" or torch.backends.cpu.get_cpu_capability() != "AVX512":  # only its AVX512 code can be wrong
        return
    row = torch.full((1, COLUMNS), 127, dtype=torch.int8)
    if int(torch._int_mm(row, row.T)) != COLUMNS * 127**2:
        raise ModelError(
            "PyTorch computes wrong 8-bit matrix products when oneDNN is limited to fewer CPU instructions than "
            "PyTorch uses: unset ONEDNN_MAX_CPU_ISA, or also set ATEN_CPU_CAPABILITY=avx2"
        )


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the linear layers of the backbone, by their names in the model, in order."""
    inside = set(backbone_of(model).modules())
    return {
        name: module
        for name, module in model.named_modules()
        if module in inside and (type(module).__name__ in CLASSES or type(module) in (nn.Linear, Conv1D))
    }


def quantised(original: PreTrainedModel, to: Precision, dtype: torch.dtype) -> PreTrainedModel:
    """Return a copy of the model with quantised linear layers, on the same device. `dtype`: dtype of all other weights.

    Raises ModelError if the model has no layer to quantise, or if 8-bit products are wrong on this machine.
    """
    need("bitsandbytes", "quant", f"posttrain quantize --to {to}")
    if to == "int8":
        check_int8(original.device)
    layers = linear_layers(original)
    chosen = {name for name, layer in layers.items() if to == "int8" or _fits_4bit(*weight_of(layer).shape)}
    if not chosen:
        shapes = f"; 4 bits need multiples of {ROWS} outputs and {COLUMNS} inputs: use int8" if layers else ""
        raise ModelError(f"{type(original).__name__} has no linear layer that can be quantised{shapes}")
    linear = (name for name, module in original.named_modules() if isinstance(module, nn.Linear | Conv1D))
    kept = [name for name in linear if name not in chosen]
    int8 = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=kept)
    made = type(original).from_pretrained(
        None,
        config=copy.deepcopy(original.config),
        state_dict=original.state_dict(),
        dtype=dtype,
        quantization_config=int8 if to == "int8" else nf4(dtype, kept),
        device_map={"": original.device},
    )
    if original.can_generate():
        made.generation_config = original.generation_config
    return made.eval()


def nf4(dtype: torch.dtype, kept: list[str] | None = None) -> BitsAndBytesConfig:
    """Return the settings of NF4 with double quantisation, with computation in `dtype`. `kept`: names of layers that
    are not quantised; None: those that transformers excludes (the head).

    NF4 has a 4-bit code with a level for each equal share of a normal distribution, a scale for every 64 weights, and
    8-bit scales: 4.127 bits per weight (QLoRA, Dettmers et al., arXiv 2305.14314, section 3).
    """
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=kept,
    )


def _fits_4bit(rows: int, columns: int) -> bool:
    return rows % ROWS == 0 and columns % COLUMNS == 0


def _quantised_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    return {name: layer for name, layer in linear_layers(model).items() if type(layer).__name__ in CLASSES}


def weight_of(layer: nn.Module) -> Tensor:
    """Return a linear layer's weight (outputs, inputs), dequantised; GPT-2's layers store it transposed."""
    from transformers.integrations.bitsandbytes import dequantize_bnb_weight

    weight = layer.get_parameter("weight")
    if type(layer).__name__ in CLASSES:
        return dequantize_bnb_weight(weight, getattr(layer, "state", None))
    return weight.T if isinstance(layer, Conv1D) else weight


@torch.no_grad()
def weight_errors(original: PreTrainedModel, other: PreTrainedModel) -> dict[str, float]:
    """Return |W' - W| / |W| in the Frobenius norm for each quantised layer of `other`; W is the original's weight."""
    wholes = linear_layers(original)
    errors: dict[str, float] = {}
    for name, layer in _quantised_layers(other).items():
        whole = weight_of(wholes[name]).float()
        errors[name] = float((weight_of(layer).float() - whole).norm() / whole.norm().clamp_min(1e-30))
    return errors


def stored_bytes(model: PreTrainedModel) -> dict[str, int]:
    """Return the saved size in bytes of each quantised layer's weight, including its scales, by layer."""
    return {
        name: sum(tensor.nbytes for key, tensor in layer.state_dict().items() if key != "bias")
        for name, layer in _quantised_layers(model).items()
    }
