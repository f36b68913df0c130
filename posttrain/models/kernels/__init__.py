"""Triton kernels for NVIDIA GPUs, in place of operations that are memory-bound in PyTorch.

Each has an equivalent in PyTorch with the same values; tests compare the two through Triton's interpreter. A model that
is loaded for a GPU uses them if Triton can compile; `model.triton_kernels: false` switches all of them off.
"""

import torch
from torch import Tensor, nn

MARK = "_posttrain_triton"


def switch_on(model: nn.Module) -> None:
    """Use these kernels for the model's scores and generation."""
    setattr(model, MARK, True)


def are_on(model: nn.Module, factor: Tensor) -> bool:
    """Whether the kernels are used for a tensor like `factor`: not in float32 on a GPU, where cuBLAS is faster."""
    return getattr(model, MARK, False) and not (factor.is_cuda and factor.dtype == torch.float32)
