"""Triton kernels for NVIDIA GPUs, in place of operations that are memory-bound in PyTorch.

Each kernel has a PyTorch equivalent with the same values; tests compare the two through Triton's interpreter. A model
on a GPU uses the kernels if Triton can compile; `model.triton_kernels: false` switches all of them off.
"""
