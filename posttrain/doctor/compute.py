"""PyTorch, the GPU, and kernels that are compiled for it."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

from posttrain.base.words import in_units
from posttrain.doctor.checks import Broken, Found, version_of
from posttrain.doctor.machine import usable_cores

WIDTH = 512
CUDA_BUILD = "pip install --force-reinstall torch"  # PyPI's build for Linux


def torch_works() -> Found:
    """A matrix product, its speed with one and with all threads, and a backward that is the same to the bit twice."""
    version = version_of("torch")
    import torch

    torch.manual_seed(0)
    a, b = torch.randn(2, WIDTH, WIDTH).unbind()
    error = float((a @ b - (a.double() @ b.double())).abs().max() / WIDTH**0.5)
    if not error < 1e-4:
        raise Broken(f"{version}: a matrix product is wrong by {error:.1e}", "pip install --force-reinstall torch")
    _repeatable()
    threads, cores = torch.get_num_threads(), usable_cores()
    several = _speed(a, b)
    torch.set_num_threads(1)
    one = _speed(a, b)
    torch.set_num_threads(threads)
    detail = f"{version}: {threads} thread{'s' * (threads > 1)}, {several / 1e9:.0f} GFLOP/s"
    detail += f" ({several / one:.1f} times one thread)" if threads > 1 else ""
    detail += "; deterministic backward"
    if threads != cores:
        return Found(f"{detail}; {cores} cores are usable", "limited", f"export OMP_NUM_THREADS={cores}")
    return Found(detail)


def _speed(a, b) -> float:
    """Floating-point operations a second: the best of a few products."""
    import torch

    times = []
    for _ in range(8):
        began = time.perf_counter()
        torch.matmul(a, b)
        times.append(time.perf_counter() - began)
    return 2 * WIDTH**3 / min(times)


def _repeatable(device: str = "cpu") -> None:
    """The gradients of a small network with deterministic kernels, twice. Raises Broken if they differ in a bit."""
    import torch
    from torch.nn.functional import cross_entropy, embedding

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        tokens = torch.randint(64, (512,), device=device)
        table = torch.randn(64, 128, device=device, requires_grad=True)
        first, second = (
            torch.autograd.grad(cross_entropy(embedding(tokens, table) @ table.T, tokens.roll(1)), table)[0]
            for _ in range(2)
        )
    finally:
        torch.use_deterministic_algorithms(before)
    if not (first.isfinite().all() and torch.equal(first, second)):
        raise Broken(f"the same backward twice gives different gradients on {device}", "reinstall torch")


def gpu() -> Found:
    """The GPU that a run would take: its name, memory and driver, a product in bfloat16 and a backward."""
    import torch

    if torch.cuda.is_available():
        return _cuda()
    if torch.backends.mps.is_available():
        _product("mps")
        return Found("Apple GPU (MPS): a matrix product works")
    card = _driver()
    if card is None:
        return Found("none; runs compute on the CPU", "absent")
    if torch.version.cuda is None and torch.version.hip is None:
        install = CUDA_BUILD if sys.platform == "linux" else "see https://pytorch.org/get-started/locally"
        return Found(f"{card}, but torch {torch.__version__} is a build for CPUs", "broken", install)
    remedy = "check CUDA_VISIBLE_DEVICES, and that the driver is recent enough: nvidia-smi"
    return Found(f"{card}, but torch (CUDA {torch.version.cuda}) does not see it", "broken", remedy)


def _driver() -> str | None:
    """The first card and its driver, as nvidia-smi names them."""
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=20)
    lines = done.stdout.strip().splitlines()
    return f"{lines[0].replace(', ', ' (driver ')})" if done.returncode == 0 and lines else None


def _cuda() -> Found:
    import torch

    facts = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    _product("cuda")
    _repeatable("cuda")
    count = torch.cuda.device_count()
    detail = f"{_driver() or facts.name}, {in_units(free)} of {in_units(total)} free"
    detail += f", CUDA {torch.version.cuda or torch.version.hip}{f', {count} GPUs' if count > 1 else ''}"
    return Found(f"{detail}; a kernel works, deterministic backward")


def _product(device: str) -> None:
    """Raises Broken if a matrix product in bfloat16 differs from the CPU's by more than rounding."""
    import torch

    a, b = torch.randn(2, WIDTH, WIDTH).bfloat16().unbind()
    got = (a.to(device) @ b.to(device)).float().cpu()
    error = float((got - a.float() @ b.float()).abs().max() / WIDTH**0.5)
    if not error < 0.05:
        raise Broken(f"a matrix product on {device} is wrong by {error:.1e}", "update the driver, or reinstall torch")


def triton() -> Found:
    """posttrain's own kernel of a norm: on a GPU its values, elsewhere whether it compiles for an H100."""
    import torch

    from posttrain.models import flex

    on_gpu = torch.cuda.is_available()
    if why := flex.lacking():
        install = "pip install 'posttrain[gpu-dev]'" if "Triton" in why else "apt-get install gcc"
        return Found(f"{why}; kernels run as PyTorch's operations", "limited" if on_gpu else "absent", install)
    import triton

    return Found(f"{triton.__version__}: {_norm_on_gpu() if on_gpu else _norm_compiled()}")


def _norm_on_gpu() -> str:
    import torch

    from posttrain.models.kernels import layers
    from posttrain.models.lean import TORCH, Kernels

    x, weight = torch.randn(64, 1024, device="cuda").bfloat16(), torch.ones(1024, device="cuda").bfloat16()
    error = float((Kernels.of(layers).norm(x, weight, 1e-6) - TORCH.norm(x, weight, 1e-6)).abs().max())
    if not error < 0.05:
        raise Broken(f"a kernel differs from PyTorch by {error:.1e}", "model.triton_kernels: false")
    return "a kernel has PyTorch's values"


def _norm_compiled() -> str:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder  # else a cached kernel would hide a broken compiler
        os.environ.pop("TRITON_INTERPRET", None)
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from posttrain.models.kernels import layers

        kernel, constants = layers._rms_norm, {"ROWS": 4, "WIDTH": 1024}
        types = {"x": "*bf16", "weight": "*bf16", "y": "*bf16", "rstd": "*fp32", "eps": "fp32"}
        given = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
        made = triton.compile(ASTSource(kernel, given, constants), GPUTarget("cuda", 90, 32), {"num_warps": 4})
    return f"a kernel compiles for an H100 ({len(made.asm['cubin']):,} bytes)"


def flex_attention() -> Found:
    """FlexAttention over a pack against the dense mask: compiled on a GPU, as written elsewhere."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention as uncompiled
    from torch.nn.functional import scaled_dot_product_attention

    from posttrain.batch import Example, Node, pack
    from posttrain.models import flex
    from posttrain.models.attention import PackedMask

    device = "cuda" if torch.cuda.is_available() and flex.lacking() is None else "cpu"
    tree = Node(range(100), children=(Node(range(91)), Node(range(67))))
    [batch] = pack([Example((tree,), 0)], 1000)
    assert len(batch.tokens_T) == 2 * flex.BLOCK
    mask = PackedMask(batch.to(torch.device(device)))
    query, key, value = torch.randn(3, 1, 2, 2 * flex.BLOCK, 16, device=device).unbind()
    want = scaled_dot_product_attention(query, key, value, attn_mask=mask.dense(None), scale=0.25)
    if device == "cuda":
        query, key, value = (one.bfloat16() for one in (query, key, value))
        got = flex.attend(query, key, value, mask.blocks(None), 0.25, None, False).float()
    else:
        blocks: Any = mask.blocks(None)
        got = uncompiled(query, key, value, block_mask=blocks, scale=0.25)
    assert isinstance(got, torch.Tensor)
    error = float((got - want).abs().max())
    if not error < (0.05 if device == "cuda" else 1e-4):
        raise Broken(f"differs from attention under the dense mask by {error:.1e}", "model.attention: sdpa")
    return Found("compiled, as under the dense mask" if device == "cuda" else "as under the dense mask (not compiled)")
