"""Checks of the machine: cores, memory, folders, PyTorch, the GPU, and kernels that are compiled for it."""

import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from timeit import repeat
from typing import Any

from posttrain.base import system
from posttrain.base.files import put_file, put_folder, table_beside
from posttrain.base.imports import installing
from posttrain.base.words import counted, in_units
from posttrain.doctor.checks import Broken, Found, version_of
from posttrain.runs.finding import held
from posttrain.runs.folder import is_locked

LEAST_FREE_BYTES = 5_000_000_000  # below this a checkpoint or a model may not fit
SLOW_BYTES_PER_SECOND = 20e6
BLOCK, BLOCKS = 1 << 20, 64
# Files with a container's share of the cores, in versions 2 and 1 of Linux's control groups.
QUOTAS = (("/sys/fs/cgroup/cpu.max",), ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"))
# Script of a second process, which tries to write while the first one writes: locks within one process prove nothing.
RIVAL = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], timeout=0)
print(connection.execute("SELECT count(*) FROM t").fetchone()[0])
try:
    connection.execute("BEGIN IMMEDIATE")
    print("both write")
except sqlite3.OperationalError as error:
    print(error)
"""


def usable_cores() -> int:
    """Number of cores that this process may use: by its affinity and, in a container, the container's share."""
    available = system.usable_cores()
    for files in QUOTAS:
        try:
            quota, period, *_ = " ".join(Path(file).read_text() for file in files).split()
        except (OSError, ValueError):
            continue
        if quota not in ("max", "-1"):
            return max(1, min(available, round(int(quota) / int(period))))
    return available


def cores() -> Found:
    """Usable cores, and available memory."""
    from psutil import virtual_memory

    memory = virtual_memory()
    share = f"{in_units(memory.available)} of {in_units(memory.total)} of memory available"
    return Found(f"{usable_cores()} of {os.cpu_count()} cores usable, {share}")


def platform_limits(system: str = sys.platform) -> Found:
    """What this system lacks. Runs need none of it."""
    lacks = table_beside(__file__, "platforms.yaml").get(system)
    if lacks is None:
        return Found(f"{system}: not tested", "limited")
    return Found("; ".join(lacks), "limited") if lacks else Found("Linux: nothing is missing")


def run_folder(path: str) -> Found:
    """The disk of the runs: space, write speed, atomic writes, locks, SQLite. Leaves nothing behind."""
    with _scratch(path) as name:
        folder = Path(name)
        disk = _disk(folder)
        _complete_files(folder)
        locked = _locks(folder)
        _sqlite(folder / "rollouts.sqlite")
    if locked:
        return replace(disk, detail=f"{disk.detail}; renames, locks and SQLite work")
    fix = "run one process per run folder, or use another disk: posttrain doctor --output-dir"
    return Found(f"{disk.detail}; renames and SQLite work; no locks", "limited", fix)


def cache_folder(path: str) -> Found:
    """The disk of a cache: space, write speed, atomic writes."""
    with _scratch(path) as name:
        disk = _disk(Path(name))
        _complete_files(Path(name))
    return disk


def hub_cache() -> Found:
    """The disk that holds the hub cache: space, write speed, atomic writes."""
    from huggingface_hub import constants

    return cache_folder(constants.HF_HUB_CACHE)


def _scratch(path: str) -> tempfile.TemporaryDirectory[str]:
    """A new folder in the folder, or in the nearest existing one above it, in which it would be made."""
    wanted = Path(path).expanduser().absolute()
    parent = next(folder for folder in (wanted, *wanted.parents) if folder.exists())
    if not parent.is_dir():
        raise Broken(f"{parent} is a file, not a folder", "choose another folder")
    try:
        return tempfile.TemporaryDirectory(prefix=".posttrain-doctor-", dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        fix = f"choose another folder, or: chmod u+w {parent}"
        raise Broken(f"cannot write in {parent}: {error.strerror}", fix) from error


def _disk(folder: Path) -> Found:
    """The free space of `folder`, and the speed of writing and syncing data that cannot be compressed."""
    shown, free, block = folder.parent, shutil.disk_usage(folder).free, os.urandom(BLOCK)
    if free < 2 * BLOCK * BLOCKS:
        raise Broken(f"{shown}: {in_units(free)} free", "free some space, or choose another disk")
    began = time.perf_counter()
    with open(folder / "speed", "wb", buffering=0) as file:
        file.writelines([block] * BLOCKS)
        os.fsync(file.fileno())
    speed = BLOCK * BLOCKS / (time.perf_counter() - began)
    (folder / "speed").unlink()
    detail = f"{shown}: {in_units(free)} free, writes {in_units(round(speed))}/s"
    if free < LEAST_FREE_BYTES:
        return Found(detail, "limited", "free some space: `posttrain runs list` shows the size of each run")
    if speed < SLOW_BYTES_PER_SECOND:
        return Found(f"{detail}, which is slow", "limited", "choose a faster disk: saving will take long")
    return Found(detail)


def _complete_files(folder: Path) -> None:
    """Replace a file and a folder atomically. Raises Broken if either still has its old content."""
    for content in ("old", "new"):
        put_file(folder / "file", content)
        put_folder(folder / "folder", lambda target, content=content: put_file(target / "file", content))
    names = sorted(path.name for path in folder.iterdir())
    texts = [(folder / name).read_text() for name in ("file", "folder/file")]
    if texts != ["new", "new"] or names != ["file", "folder"]:
        raise Broken("a rename did not replace a file or a folder", "choose a local disk")


def _locks(folder: Path) -> bool:
    """Whether the file system has locks. Raises Broken if a lock does not keep others out."""
    with held([folder]):
        locked = is_locked(folder)
    if locked is False:
        raise Broken("a lock does not keep others out", "choose a local disk")
    return locked is not None


def _sqlite(path: Path) -> None:
    """Use a database like `rollouts.sqlite`. Raises Broken unless others can read, but not write, while one writes."""
    remedy = "choose a local disk: SQLite needs working locks and shared memory"
    try:
        with closing(sqlite3.connect(path, isolation_level=None)) as writer:
            [mode] = writer.execute("PRAGMA journal_mode = WAL").fetchone()
            writer.execute("CREATE TABLE t (x)")
            writer.execute("BEGIN IMMEDIATE")
            writer.execute("INSERT INTO t VALUES (1)")
            rival = subprocess.run([sys.executable, "-c", RIVAL, str(path)], capture_output=True, text=True, timeout=20)
            writer.execute("COMMIT")
    except sqlite3.Error as error:
        raise Broken(f"SQLite does not work there: {error}", remedy) from error
    if mode != "wal" or rival.stdout.splitlines() != ["0", "database is locked"]:
        lines = (rival.stdout + rival.stderr).strip().splitlines()
        raise Broken(f"SQLite's locks do not work there: {mode}, {lines[-1] if lines else 'no answer'}", remedy)


WIDTH = 512
CUDA_BUILD = "pip install --force-reinstall torch"  # PyPI's build for Linux


def torch_works() -> Found:
    """A matrix product, its speed with one and with all threads, and a backward pass run twice, equal bit for bit."""
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
    detail = f"{version}: {counted(threads, 'thread')}, {several / 1e9:.0f} GFLOP/s"
    detail += f" ({several / one:.1f} times one thread)" if threads > 1 else ""
    detail += "; deterministic backward"
    if threads != cores:
        return Found(f"{detail}; {cores} cores are usable", "limited", f"export OMP_NUM_THREADS={cores}")
    return Found(detail)


def _speed(a, b) -> float:
    """Floating-point operations per second, in the fastest of a few matrix products."""
    return 2 * WIDTH**3 / min(repeat(lambda: a @ b, number=1, repeat=8))


def _repeatable(device: str = "cpu") -> None:
    """Compute gradients of a small network twice with deterministic kernels. Raises Broken if they differ in a bit."""
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
        raise Broken(f"the same backward pass twice gives different gradients on {device}", "reinstall torch")


def gpu() -> Found:
    """The GPU that a run would use: name, memory and driver, a matrix product in bfloat16 and a backward pass."""
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
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    lines = done.stdout.strip().splitlines()
    return f"{lines[0].replace(', ', ' (driver ')})" if done.returncode == 0 and lines else None


def _cuda() -> Found:
    import torch

    from posttrain.models.devices import OLD_CARD, lacks_bfloat16

    facts = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    is_old = lacks_bfloat16()
    kernels = {f"sm_{facts.major}{minor}" for minor in range(facts.minor + 1)}
    if is_old and not kernels & {*torch.cuda.get_arch_list()}:
        name = f"{_driver() or facts.name}, but torch {torch.__version__} has no kernels for {max(kernels)}"
        return Found(name, "broken", "pip install torch --index-url https://download.pytorch.org/whl/cu126")
    _product("cuda")
    _repeatable("cuda")
    count = torch.cuda.device_count()
    detail = f"{_driver() or facts.name}, {in_units(free)} of {in_units(total)} free"
    detail += f", CUDA {torch.version.cuda or torch.version.hip}{f', {count} GPUs' if count > 1 else ''}"
    detail += "; a kernel works, deterministic backward"
    return Found(f"{detail}; it {OLD_CARD}", "limited", "model.dtype: float16") if is_old else Found(detail)


def _product(device: str) -> None:
    """Raise Broken if a matrix product in bfloat16 differs from the CPU's by more than rounding error."""
    import torch

    a, b = torch.randn(2, WIDTH, WIDTH).bfloat16().unbind()
    got = (a.to(device) @ b.to(device)).float().cpu()
    error = float((got - a.float() @ b.float()).abs().max() / WIDTH**0.5)
    if not error < 0.05:
        raise Broken(f"a matrix product on {device} is wrong by {error:.1e}", "update the driver, or reinstall torch")


def triton() -> Found:
    """Check posttrain's kernel for a norm: on a GPU, its values; without one, whether it compiles for an H100."""
    import torch

    from posttrain.models import attention

    on_gpu = torch.cuda.is_available()
    if why := attention.lacking_for_triton():
        install = installing("gpu-dev") if "Triton" in why else "apt-get install gcc"
        if "capability" in why:
            return Found(f"{why}; PyTorch's operations are used", "absent")
        return Found(f"{why}; PyTorch's operations are used", "limited" if on_gpu else "absent", install)
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
    return "a kernel agrees with PyTorch"


def _norm_compiled() -> str:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder  # otherwise, a cached kernel would hide a broken compiler
        os.environ.pop("TRITON_INTERPRET", None)
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from posttrain.models.kernels import layers

        kernel, constants = layers._rms_norm, {"ROWS": 4, "WIDTH": 1024}
        types = {"x": "*bf16", "weight": "*bf16", "y": "*bf16", "rstd": "*fp32", "eps": "fp32"}
        arguments = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
        compiled = triton.compile(ASTSource(kernel, arguments, constants), GPUTarget("cuda", 90, 32), {"num_warps": 4})
    return f"a kernel compiles for an H100 ({len(compiled.asm['cubin']):,} bytes)"


def flex_attention() -> Found:
    """Compare FlexAttention over a pack with attention under the dense mask: compiled only on a GPU."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention as uncompiled
    from torch.nn.functional import scaled_dot_product_attention

    from posttrain.batch import Example, Node, pack
    from posttrain.models import attention
    from posttrain.models.attention import PackedMask

    device = "cuda" if torch.cuda.is_available() and attention.lacking_for_triton() is None else "cpu"
    tree = Node(range(100), children=(Node(range(91)), Node(range(67))))
    [batch] = pack([Example((tree,), 0)], 1000)
    assert len(batch.tokens_T) == 2 * attention.BLOCK
    mask = PackedMask(batch.to(torch.device(device)))
    query, key, value = torch.randn(3, 1, 2, 2 * attention.BLOCK, 16, device=device).unbind()
    want = scaled_dot_product_attention(query, key, value, attn_mask=mask.dense(None), scale=0.25)
    if device == "cuda":
        query, key, value = query.bfloat16(), key.bfloat16(), value.bfloat16()
        got = attention.flex_attend(query, key, value, mask.blocks(None), 0.25, None, False).float()
    else:
        blocks: Any = mask.blocks(None)
        got = uncompiled(query, key, value, block_mask=blocks, scale=0.25)
    assert isinstance(got, torch.Tensor)
    error = float((got - want).abs().max())
    if not error < (0.05 if device == "cuda" else 1e-4):
        raise Broken(f"differs from attention under the dense mask by {error:.1e}", "model.attention: sdpa")
    return Found("agrees with the dense mask" + (", compiled" if device == "cuda" else " (not compiled)"))
