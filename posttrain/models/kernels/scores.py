"""Log-probabilities and entropies computed from hidden states and the LM head, with logits only in registers.

A program computes the logits of a block of rows and words, and keeps of each row the largest logit m,
z = sum 2^(l - m) and s = sum 2^(l - m) (l - m), all float32. They are joined over the blocks of the vocabulary
(Milakov and Gimelshein, arXiv 1805.02867), so that

    logprob = l[target] - m - log2 z        entropy = log2 z - s / z

Logits are divided by ln 2, because the hardware has powers of 2; results are multiplied by it. A program that took
several blocks of words in turn would need more registers than there are. Backward recomputes the logits. Their
gradients are written to memory, a chunk of rows at a time and in the model's dtype. cuBLAS then multiplies them with
hidden states and weights at full speed and, unlike atomic additions, with a fixed order of sums.

Shapes: N rows, D hidden size, V vocabulary, S blocks of the vocabulary.
"""

# Type checkers do not know how Triton launches kernels: arguments differ from the kernels' parameters.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

# Block sizes of logits and of their sums, by the bytes of shared memory that they need. All GPUs with bfloat16 have
# enough for the first; with the second, an H200 takes two thirds of the time (docs/gpu.md).
BLOCKS: dict[int, dict[str, int]] = {
    64 << 10: {"ROWS": 128, "WORDS": 128, "INNER": 64, "num_warps": 8, "num_stages": 2},
    144 << 10: {"ROWS": 128, "WORDS": 256, "INNER": 64, "num_warps": 8, "num_stages": 3},
}
PARTS = 1 << 23  # elements of (S, N): more rows are scored a chunk at a time
LN2 = tl.constexpr(math.log(2))


@triton.jit
def _logits(
    hidden, weight, bias, row, word, size, words, dim,
    hidden_stride, weight_stride, scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Return a block of float32 logits times `scale`, (ROWS, WORDS), and the slope of the cap (1: no cap)."""
    inner = tl.arange(0, INNER)
    total = tl.zeros((ROWS, WORDS), tl.float32)
    for start in range(0, dim, INNER):
        column = start + inner
        h = tl.load(
            hidden + row[:, None].to(tl.int64) * hidden_stride + column[None, :],
            mask=(row < size)[:, None] & (column < dim)[None, :],
            other=0.0,
        )
        w = tl.load(
            weight + word[None, :].to(tl.int64) * weight_stride + column[:, None],
            mask=(word < words)[None, :] & (column < dim)[:, None],
            other=0.0,
        )
        if WIDE:
            h, w = h.to(tl.float32), w.to(tl.float32)
        total = tl.dot(h, w, total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias + word, mask=word < words, other=0.0).to(tl.float32)[None, :]
    slope = tl.full((ROWS, WORDS), 1.0, tl.float32)
    if HAS_CAP:
        capped = 2 / (1 + tl.exp(-2 * total / softcap)) - 1  # tanh
        total = softcap * capped
        slope = 1 - capped * capped
    return total * scale, slope


@triton.jit
def _forward(
    hidden, weight, bias, target, highest_SN, total_SN, along_SN, chosen_N,
    size, words, dim, hidden_stride, weight_stride, scale, softcap,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Compute m, z and s of ROWS rows over WORDS words, and the logits of those targets that are among the words."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.program_id(1)
    word = block * WORDS + tl.arange(0, WORDS)
    here = row < size
    logits, _ = _logits(
        hidden, weight, bias, row, word, size, words, dim, hidden_stride, weight_stride, scale, softcap,
        HAS_BIAS, HAS_CAP, PRECISION, WIDE, ROWS, WORDS, INNER,
    )  # fmt: skip
    logits = tl.where((word < words)[None, :], logits, -1e30)
    highest = tl.max(logits, 1)
    aim = (tl.load(target + row, mask=here, other=-1) - block * WORDS).to(tl.int32)
    is_aim = tl.arange(0, WORDS)[None, :] == aim[:, None]
    tl.store(chosen_N + row, tl.sum(tl.where(is_aim, logits, 0.0), 1), mask=here & (aim >= 0) & (aim < WORDS))
    below = logits - highest[:, None]
    p = tl.exp2(below)
    index = block * size + row
    tl.store(highest_SN + index, highest, mask=here)
    tl.store(total_SN + index, tl.sum(p, 1), mask=here)
    tl.store(along_SN + index, tl.sum(p * below, 1), mask=here)


@triton.jit
def _gradient(
    hidden, weight, bias, target, log_z_N, entropy_N, grad_logprob_N, grad_entropy_N, grad_logits,
    size, words, dim, hidden_stride, weight_stride, scale, softcap,
    HAS_LOGPROB: tl.constexpr, HAS_ENTROPY: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """Compute a block of the gradients with respect to h W^T + b, the logits before the cap and the temperature."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    here = row < size
    logits, slope = _logits(
        hidden, weight, bias, row, word, size, words, dim, hidden_stride, weight_stride, scale, softcap,
        HAS_BIAS, HAS_CAP, PRECISION, WIDE, ROWS, WORDS, INNER,
    )  # fmt: skip
    log_p = logits - tl.load(log_z_N + row, mask=here, other=0.0)[:, None] / LN2  # base 2
    p = tl.exp2(log_p)
    grad = tl.zeros((ROWS, WORDS), tl.float32)
    if HAS_ENTROPY:
        entropy = tl.load(entropy_N + row, mask=here, other=0.0)[:, None]
        grad -= p * tl.load(grad_entropy_N + row, mask=here, other=0.0)[:, None] * (log_p * LN2 + entropy)
    if HAS_LOGPROB:
        aim = tl.load(target + row, mask=here, other=-1)
        is_aim = (word[None, :] == aim[:, None]).to(tl.float32)
        grad += (is_aim - p) * tl.load(grad_logprob_N + row, mask=here, other=0.0)[:, None]
    grad = grad * (scale * LN2) * slope
    index = row[:, None].to(tl.int64) * words + word[None, :]
    tl.store(grad_logits + index, grad.to(grad_logits.dtype.element_ty), mask=here[:, None] & (word < words)[None, :])


def scores(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    temperature: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the log of the softmax's denominator, logprob, entropy, and 1 if the target is the mode: (N), float32.

    The softmax is that of cap(h W^T + b) / temperature, where the cap is c tanh(x / c).
    """
    hidden_ND, weight_VD = _rows(hidden_ND), _rows(weight_VD)
    block = block_on(hidden_ND.device)
    blocks = triton.cdiv(len(weight_VD), block["WORDS"])
    rows = max(1, PARTS // (blocks * block["ROWS"])) * block["ROWS"]
    chunks = zip(hidden_ND.split(rows), target_N.split(rows), strict=True)
    found = [_scores(hidden, weight_VD, bias_V, target, temperature, softcap, blocks) for hidden, target in chunks]
    return tuple(map(torch.cat, zip(*found, strict=True)))


def _scores(hidden_ND, weight_VD, bias_V, target_N, temperature, softcap, blocks) -> tuple[Tensor, ...]:
    size = len(hidden_ND)
    highest_SN, total_SN, along_SN = torch.empty(3, blocks, size, device=hidden_ND.device).unbind()
    chosen_N = torch.empty(size, device=hidden_ND.device)
    if size:
        _forward[triton.cdiv(size, block_on(hidden_ND.device)["ROWS"]), blocks](
            hidden_ND, weight_VD, bias_V, target_N, highest_SN, total_SN, along_SN, chosen_N,
            *_sizes(hidden_ND, weight_VD, temperature, softcap),
            **_constants(hidden_ND, bias_V, softcap),
        )  # fmt: skip
    highest_N = highest_SN.amax(0)
    apart_SN = highest_SN - highest_N
    shrink_SN = apart_SN.exp2()
    total_N = (shrink_SN * total_SN).sum(0)
    along_N = (shrink_SN * (along_SN + total_SN * apart_SN)).sum(0)
    log_total_N = total_N.log2()
    log_z_N = log_total_N + highest_N
    results = log_z_N, chosen_N - log_z_N, log_total_N - along_N / total_N
    return *(LN2.value * each for each in results), (chosen_N == highest_N).float()


def logits_gradient(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    log_z_N: Tensor,
    entropy_N: Tensor,
    grad_logprob_N: Tensor | None,
    grad_entropy_N: Tensor | None,
    temperature: float,
    softcap: float | None,
) -> Tensor:
    """Return the gradient with respect to h W^T + b, (N, V), in the dtype of the weights, from the gradients with
    respect to the outputs of `scores`."""
    hidden_ND, weight_VD = _rows(hidden_ND), _rows(weight_VD)
    # Kernels read contiguous numbers, but autograd's gradient of a sum is one expanded number.
    grads = [None if grad_N is None else grad_N.contiguous() for grad_N in (grad_logprob_N, grad_entropy_N)]
    grad_NV = weight_VD.new_empty(len(hidden_ND), len(weight_VD))
    block = block_on(hidden_ND.device)
    _gradient[triton.cdiv(len(hidden_ND), block["ROWS"]), triton.cdiv(len(weight_VD), block["WORDS"])](
        hidden_ND, weight_VD, bias_V, target_N, log_z_N, entropy_N, *grads, grad_NV,
        *_sizes(hidden_ND, weight_VD, temperature, softcap),
        HAS_LOGPROB=grad_logprob_N is not None, HAS_ENTROPY=grad_entropy_N is not None,
        **_constants(hidden_ND, bias_V, softcap),
    )  # fmt: skip
    return grad_NV


@functools.cache
def block_on(device: torch.device) -> dict[str, int]:
    """Return the largest of BLOCKS that fits the device, with an eighth more memory left for the kernel itself."""
    shared = torch.cuda.get_device_properties(device).shared_memory_per_block_optin if device.type == "cuda" else 0
    return BLOCKS[max((need for need in BLOCKS if 9 * need // 8 <= shared), default=min(BLOCKS))]


def _rows(x: Tensor) -> Tensor:
    """Return the tensor with contiguous rows."""
    return x if x.stride(1) == 1 else x.contiguous()


def _sizes(hidden_ND: Tensor, weight_VD: Tensor, temperature: float, softcap: float | None) -> tuple:
    strides = hidden_ND.stride(0), weight_VD.stride(0)
    return (len(hidden_ND), *weight_VD.shape, *strides, 1 / (LN2.value * temperature), float(softcap or 0.0))


def _constants(hidden_ND: Tensor, bias_V: Tensor | None, softcap: float | None) -> dict[str, Any]:
    wide, block = hidden_ND.dtype == torch.float32, block_on(hidden_ND.device)
    return {
        "HAS_BIAS": bias_V is not None,
        "HAS_CAP": softcap is not None,
        "PRECISION": "ieee" if wide else "tf32",  # no effect on 16-bit products
        "WIDE": knobs.runtime.interpret,  # Triton's interpreter cannot multiply bfloat16
        **block,
        **({"INNER": block["INNER"] // 2} if wide else {}),
    }
