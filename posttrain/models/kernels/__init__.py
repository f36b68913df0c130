"""Triton kernels for NVIDIA GPUs, in place of operations that are memory-bound in PyTorch.

Each has an equivalent in PyTorch with the same values; tests compare the two through Triton's interpreter. A model that
is loaded for a GPU uses them if Triton can compile; `model.triton_kernels: false` switches all of them off.
"""
