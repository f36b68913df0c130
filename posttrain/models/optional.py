"""Optional packages of a model: 4-bit weights by bitsandbytes, Liger's and flash-attn's GPU kernels."""

import torch
from transformers import BitsAndBytesConfig, PreTrainedModel

from posttrain.base.errors import ModelError
from posttrain.base.imports import need
from posttrain.config.schema.model import ModelConfig
from posttrain.models import flex
from posttrain.models.lean import TORCH, Kernels
from posttrain.models.quantised import nf4


def quantization(model: ModelConfig, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    """transformers' quantisation of linear layers: NF4 with double quantisation, or none."""
    if not model.load_in_4bit:
        return None
    need("bitsandbytes", "quant", "model.load_in_4bit")
    return nf4(dtype)


def keep_storage(loaded: PreTrainedModel) -> None:
    """Prevent bitsandbytes from converting 4-bit weights to another layout on the first forward on a CPU with bfloat16.

    That layout is for generation: it has no backward, and the frozen weights of a run must not change.
    """
    for module in loaded.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.__dict__["support_avx512bf16_for_cpu"] = False  # a plain attribute that nn.Module does not type


def chains_for(model: ModelConfig, device: torch.device) -> Kernels:
    """The element-wise chains: Liger's if set, else on a GPU our own in Triton, else PyTorch's.

    From Liger (arXiv 2410.10989) these are the norms and gated MLPs. Its fused cross-entropy is not used:
    posttrain.scoring never computes full logits.
    """
    own = TORCH
    if takes_triton(model, device):
        from posttrain.models.kernels import layers  # needs Triton, which comes with PyTorch for CUDA

        own = Kernels.of(layers)
    if not model.use_liger_kernel:
        return own
    if device.type != "cuda":
        raise ModelError(
            f"model.use_liger_kernel: its kernels are for GPUs, and this run computes on {device.type}: set it to false"
        )
    norm = need("liger_kernel.ops.rms_norm", "liger", "model.use_liger_kernel").LigerRMSNormFunction
    swiglu = need("liger_kernel.ops.swiglu", "liger", "model.use_liger_kernel").LigerSiLUMulFunction
    offset, casting, in_place = 0.0, "llama", False

    def liger_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return norm.apply(x, weight, eps, offset, casting, in_place)

    return Kernels(liger_norm, swiglu.apply, own.rotated, None)


def takes_triton(model: ModelConfig, device: torch.device) -> bool:
    """Whether a model on this device uses the kernels of models/kernels."""
    return model.triton_kernels and device.type == "cuda" and flex.lacking() is None


def check_attention(model: ModelConfig, device: torch.device) -> None:
    """Check that flash_attention_2 has its package and a GPU, with a clearer message than transformers'; warn if
    attention over packs on a GPU runs without FlexAttention."""
    if device.type == "cuda" and model.attention != "flash_attention_2":
        flex.announce()
    if model.attention == "flash_attention_2":
        need("flash_attn", "flash-attn", "model.attention: flash_attention_2")
        if device.type != "cuda":
            raise ModelError(
                f"model.attention: flash_attention_2 is for GPUs, and this run computes on {device.type}: set auto"
            )
