"""Triton kernels against their paths in PyTorch, through Triton's interpreter; and compiled for a GPU without one."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_engines import PROMPTS, SAMPLED, assert_trainers, policy_of, tokens_of
from test_equivalence import assert_close_gradients, gradients

from benchmarks.families import forest, make
from benchmarks.gpu import tune
from benchmarks.gpu.common import Setup
from posttrain.batch import pack
from posttrain.config.schema.model import ModelConfig
from posttrain.engines import EmbeddedEngine
from posttrain.engines.attention import Decoding, Shape
from posttrain.engines.cache import Cache, Room
from posttrain.models import attention
from posttrain.models import lean as operations
from posttrain.models.attention import How
from posttrain.models.families import use_triton, uses_triton
from posttrain.models.lean import TORCH, Kernels, lean
from posttrain.models.load import chains_for, takes_triton
from posttrain.scoring import ChunkedScores, Scorer

triton = pytest.importorskip("triton", reason="kernels need Triton: pip install -e .[gpu-dev]")

from posttrain.models.kernels import decode, layers, scores  # noqa: E402

WITHIN = {torch.float32: 2e-6, torch.bfloat16: 1e-2}  # relative to a tensor's largest number
DTYPES = pytest.mark.parametrize("dtype", WITHIN)


@pytest.fixture(autouse=True)
def interpreter(request):
    """What all tests but the compiler's need."""
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if version < (3, 7) and request.function is not test_they_compile_for_a_gpu:
        pytest.skip("needs Triton 3.7: the interpreter of earlier ones does not take NumPy 2's arrays")


def assert_near(got, want, within: float) -> None:
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype and g.shape == w.shape
        error, largest = (g.double() - w.double()).abs().max().item(), w.double().abs().max().item()
        assert error <= within * largest, f"{error:.1e} beside {largest:.1e}"


@DTYPES
@pytest.mark.parametrize(
    "size, words, dim, bias, softcap, temperature",
    [(70, 333, 72, False, None, 1.0), (64, 256, 64, True, 5.0, 0.7), (1, 130, 40, True, None, 1.3)],
)
def test_scores_without_logits(monkeypatch, dtype, size, words, dim, bias, softcap, temperature):
    """All that scores give, and all gradients, over several blocks of the vocabulary."""
    small = {"ROWS": 64, "WORDS": 64, "INNER": 32, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(scores, "block_on", lambda device: small)
    torch.manual_seed(0)
    hidden, weight = torch.randn(size, dim).to(dtype), (torch.randn(words, dim) / 4).to(dtype)
    offset = torch.randn(words).to(dtype) if bias else None
    target, a, b = torch.randint(words, (size,)), torch.randn(size), torch.randn(size)
    mode = (hidden.float() @ weight.float().t() + (0 if offset is None else offset.float())).argmax(-1)
    target[::2] = mode[::2]
    inputs = [x.requires_grad_() for x in (hidden, weight, offset) if x is not None]

    def found(fused: bool, *of: int) -> list[torch.Tensor]:
        out = ChunkedScores.apply(hidden, weight, offset, target, temperature, softcap, fused)
        loss = torch.stack([(out[i] * (a, b)[i]).sum() for i in of]).sum()
        return [*out, *torch.autograd.grad(loss, inputs)]

    within = 5e-6 if dtype == torch.float32 else 2e-2
    for parts, of in ((1 << 23, (0, 1)), (1, (0,)), (1, (1,))):  # all rows at once, then a chunk at a time
        monkeypatch.setattr(scores, "PARTS", parts)
        got, want = found(True, *of), found(False, *of)
        assert_near(got[:3], want[:3], 5e-6)
        assert_near(got[3:], want[3:], within)
    assert want[2][::2].all() and (size == 1 or not want[2].all())


@pytest.mark.parametrize("of", [0, 1])
def test_gradients_of_plain_sums(of):
    """Autograd hands the gradient of a sum on as one number that is repeated without a place of its own."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(70, 32, requires_grad=True), torch.randn(70, 32, requires_grad=True)
    target = torch.randint(70, (70,))
    got, want = (
        torch.autograd.grad(
            ChunkedScores.apply(hidden, weight, None, target, 1.0, None, fused)[of].sum(), (hidden, weight)
        )
        for fused in (True, False)
    )
    assert_near(got, want, 5e-6)


def test_scores_of_nothing_and_of_what_is_no_number():
    weight, none = torch.randn(50, 8), torch.empty(0, dtype=torch.int64)
    assert [len(x) for x in scores.scores(torch.empty(0, 8), weight, None, none, 1.0, None)] == [0] * 4
    hidden = torch.randn(3, 8)
    hidden[1] = torch.nan
    log_z, logprob, *_ = scores.scores(hidden, weight, None, torch.zeros(3, dtype=torch.int64), 1.0, None)
    assert log_z.isnan().tolist() == logprob.isnan().tolist() == [False, True, False]


def laid(way: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A random tensor (..., heads, W) or (..., W): contiguous, part of a wider one, or with axes or heads turned."""
    heads = len(shape) > 3
    wider = (*shape[:-2], shape[-2] + 3, shape[-1]) if heads else (*shape[:-1], shape[-1] + 9)
    x = torch.randn(*(wider if way == "part" else shape)).to(dtype)
    if way == "part":
        return x[..., 2:-1, :] if heads else x[..., 5:-4]
    return {"whole": x, "turned": x.mT.clone().mT, "heads": x.transpose(1, -2).clone().transpose(1, -2)}[way]


WAYS = pytest.mark.parametrize("way", ["whole", "part", "turned", "heads"])


@DTYPES
@WAYS
@pytest.mark.parametrize("width", [64, 96, 5])
def test_norms(dtype, width, way):
    torch.manual_seed(0)
    x, grad = (laid(each, 1, 37, 4, width, dtype=dtype) for each in (way, "heads"))
    weight = torch.rand(width).to(dtype)
    want, got = operations.rms_norm(x, weight, 1e-6), layers.rms_norm(x, weight, 1e-6)
    assert_near(got, want, WITHIN[dtype])
    want = operations.rms_norm_gradients(x, weight, want[1], grad, True)
    assert_near(layers.rms_norm_gradients(x, weight, got[1], grad, True), want, WITHIN[dtype])
    assert layers.rms_norm_gradients(x, weight, got[1], grad, False)[1] is None


def test_sums_of_a_norms_weight_in_several_programs(monkeypatch):
    monkeypatch.setattr(layers, "ELEMENTS", 128)
    monkeypatch.setattr(layers, "PROGRAMS", 3)
    torch.manual_seed(0)
    x, grad, weight = torch.randn(50, 24), torch.randn(50, 24), torch.rand(24)
    _, rstd = operations.rms_norm(x, weight, 1e-6)
    want = operations.rms_norm_gradients(x, weight, rstd, grad, True)
    assert_near(layers.rms_norm_gradients(x, weight, rstd, grad, True), want, 2e-6)


@DTYPES
@WAYS
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("sign", [1, -1])
def test_rotations(dtype, sign, batch, way):
    torch.manual_seed(0)
    x, angle = laid(way, batch, 29, 3, 48, dtype=dtype), torch.randn(1, 29, 1, 24).repeat(1, 1, 1, 2)
    turns = angle.cos().to(dtype), angle.sin().to(dtype)
    assert_near([layers.rotate(x, *turns, sign)], [operations.rotate(x, *turns, sign)], WITHIN[dtype])


@DTYPES
@WAYS
@pytest.mark.parametrize("columns_each", [1024, 128])
def test_gated_mlps(dtype, columns_each, way, monkeypatch):
    monkeypatch.setattr(layers, "COLUMNS", columns_each)
    torch.manual_seed(0)
    gate, up, grad = (laid(each, 1, 6, 300, dtype=dtype) for each in (way, "part", "whole"))
    assert_near([layers.swiglu(gate, up)], [operations.swiglu(gate, up)], WITHIN[dtype])
    want = operations.swiglu_gradients(gate, up, grad.clone(), again=True)  # which takes the place of its argument
    assert_near(layers.swiglu_gradients(gate, up, grad.clone(), again=True), want, WITHIN[dtype])
    assert_near(layers.swiglu_gradients(gate, up, grad, again=False)[:2], want[:2], WITHIN[dtype])
    assert_near(operations.swiglu_gradients(gate, up, grad, again=False)[:2], want[:2], WITHIN[dtype])


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_complete_model(family):
    """Packed scores and all gradients of a model by these kernels: those of PyTorch's path."""
    [whole] = pack(forest(), 1000)
    weight_N = torch.randn(len(whole.target_N))
    found = []
    for chains in (TORCH, Kernels.of(layers)):
        model = make(family)
        model.set_attn_implementation("packed")
        lean(model, chains)
        if chains is not TORCH:
            use_triton(model)
        score = Scorer(model)(whole, temperature=0.7)
        (score.logprob_N * weight_N + 0.1 * score.entropy_N).sum().backward()
        with torch.no_grad():  # another way through every chain
            torch.testing.assert_close(Scorer(model)(whole, temperature=0.7).logprob_N, score.logprob_N)
        found.append((score, gradients(model)))
    (want, want_grad), (got, got_grad) = found
    torch.testing.assert_close(got.logprob_N, want.logprob_N, rtol=0, atol=1e-5)
    torch.testing.assert_close(got.entropy_N, want.entropy_N, rtol=0, atol=1e-5)
    assert_close_gradients(got_grad, want_grad)


@pytest.mark.parametrize(
    "size, heads, each, window, softcap, dtype, turned",
    [
        (64, 2, 2, None, None, torch.bfloat16, False),
        (96, 1, 3, None, None, torch.float32, True),
        (16, 2, 1, 30, None, torch.float32, True),
        (32, 1, 4, None, 20.0, torch.float32, False),
        (128, 1, 2, 70, None, torch.bfloat16, False),
    ],
)
def test_attention_of_new_tokens(monkeypatch, size, heads, each, window, softcap, dtype, turned):
    """Prompts and completions of any lengths, rows out of use, keys in either layout; in one part and in several."""
    monkeypatch.setattr("posttrain.engines.cache.SMALL_HEAD", 1000 if turned else 0)
    monkeypatch.setattr("posttrain.engines.cache.cache_dtype", lambda dtype, device: dtype)  # as on a GPU
    torch.manual_seed(0)
    lengths, ages, members = [40, 70, 3, 9], [5, 64, 80, 1], [2, 3, 1, 2]
    rows, live = 11, sum(members)  # and groups of an earlier call behind these
    cache, module = Cache(Room(12, 6, 4, 80, 100), still=True), torch.nn.Module()
    module.layer_idx = 0  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    layer = cache.layer(module, torch.zeros(1, heads, 1, size, dtype=dtype))
    for side in (layer.prompt_key, layer.prompt_value, layer.own_key, layer.own_value):
        side.normal_()
    group_R, member_R, column_R = torch.zeros(3, rows, dtype=torch.int64)
    row_GM = torch.zeros(5, 4, dtype=torch.int64)
    row = 0
    for group, count in enumerate(members):
        for member in range(count):
            group_R[row], member_R[row], column_R[row], row_GM[group, member] = group, member, ages[group] - 1, row
            row += 1
    query, key, value = (torch.randn(1, n * heads, rows, size).to(dtype) for n in (each, 1, 1))
    how = How(size**-0.5, 0.0, window, softcap)

    def attended(fused: bool) -> torch.Tensor:
        decoding = Decoding(
            cache, group_R, member_R, row_GM, column_R, torch.tensor([*lengths, 60]), torch.tensor([*ages, 50]),
            Shape(rows, 5, 4, 75, 90, even_prompts=False, even_ages=False), fused,
        )  # fmt: skip
        return decoding.attend(module, query, key, value, how)[:, :, :live]

    want = attended(False)
    for programs in (1, 264):
        monkeypatch.setattr(decode, "PROGRAMS", programs)
        assert_near([attended(True)], [want], WITHIN[dtype])


@DTYPES
@pytest.mark.parametrize(
    "size, heads, each, normed, turned, joint", [(64, 2, 3, True, False, True), (16, 1, 1, False, True, False)]
)
def test_new_tokens_enter_the_cache(monkeypatch, dtype, size, heads, each, normed, turned, joint):
    """One kernel gives the queries, keys and values that norms, rotations and indexing give one after another."""
    monkeypatch.setattr("posttrain.engines.cache.SMALL_HEAD", 1000 if turned else 0)
    monkeypatch.setattr("posttrain.engines.cache.cache_dtype", lambda dtype, device: dtype)
    torch.manual_seed(0)
    rows, module, column_R = 5, torch.nn.Module(), torch.tensor([0, 7, 3, 3, 1])
    module.layer_idx = 0  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    wide = torch.randn(1, rows, (each + 2) * heads * size).to(dtype)
    counts = [each * heads, heads, heads]
    new = [x.unflatten(-1, (-1, size)) for x in wide.split([count * size for count in counts], -1)]
    new = new if joint else [x.contiguous() for x in new]
    angle = torch.randn(1, rows, size // 2).repeat(1, 1, 2)
    turns, weights = (angle.cos().to(dtype), angle.sin().to(dtype)), torch.rand(2, size).to(dtype)
    norms, how = (*weights, 1e-6) if normed else None, How(size**-0.5, 0.0, None, None)

    def results(fused: bool) -> list[torch.Tensor]:
        cache = Cache(Room(6, 2, 5, 8, 9), still=True)
        for buffer in cache.buffers.of(0, torch.zeros(1, heads, 1, size, dtype=dtype)):
            buffer.zero_()
        zero = torch.zeros(rows, dtype=torch.int64)
        decoding = Decoding(
            cache, zero, torch.arange(rows), torch.arange(rows)[None], column_R, torch.tensor([4]), torch.tensor([8]),
            Shape(rows, 1, 5, 8, 9, even_prompts=False, even_ages=False), fused=True,
        )  # fmt: skip
        if fused:
            assert decoding.attend_new is not None
            out = decoding.attend_new(module, *new, *turns, norms, how)
        else:
            query, key, value = new
            if norms is not None:
                query, key = (layers.rms_norm(x, w, 1e-6)[0] for x, w in zip((query, key), weights, strict=True))
            cos, sin = (turn.unsqueeze(-2) for turn in turns)
            query, key = layers.rotate(query, cos, sin, 1), layers.rotate(key, cos, sin, 1)
            query, key, value = (x.transpose(1, 2) for x in (query, key, value))
            out = decoding.attend(module, query, key, value, how).transpose(1, 2).flatten(2)
        layer = cache.layers[0]
        return [out, layer.own_key[:rows], layer.own_value[:rows]]

    got, want = results(True), results(False)
    assert_near(got, want, WITHIN[dtype])
    assert torch.equal(got[2], want[2])


@pytest.mark.slow
def test_completions_by_kernels_are_the_trainers():
    """Static shapes, as a GPU has them: the same tokens, and log-probabilities that the trainer has."""
    policy = policy_of("qwen3", num_hidden_layers=1, layer_types=None)
    sampling, prompts = replace(SAMPLED, max_completion_length=6), PROMPTS[:3]
    want = EmbeddedEngine(policy).generate(prompts, sampling)
    lean(policy, Kernels.of(layers))
    use_triton(policy)
    got = EmbeddedEngine(policy, static=True).generate(prompts, sampling)
    assert tokens_of(got) == tokens_of(want)
    assert_trainers(policy, prompts, got, sampling.temperature)


@pytest.mark.slow
def test_tuning_runs_what_it_times(monkeypatch):
    """The functions of the kit's part `tune` with small sizes, without its clock."""
    done = []
    monkeypatch.setattr(tune, "median", lambda setup, work, times=1: done.append(work()) or 1.0)
    monkeypatch.setattr(tune, "bandwidth", lambda setup: 1.0)
    for name, value in {"TOKENS": 64, "WORDS": 300, "ROWS": 16, "COLUMNS": 8}.items():
        monkeypatch.setattr(tune, name, value)
    setup, block = Setup(torch.device("cpu"), "tiny", Path()), {"ROWS": 64, "WORDS": 64, "INNER": 32}
    before = scores.block_on
    tune.scores(setup, 48, block | {"num_warps": 4, "num_stages": 1})
    assert scores.block_on is before
    tune.decode(setup)
    (_, logprob_N, *_), gradient_NV, attended = done
    assert logprob_N.shape == (64,) and gradient_NV.shape == (8, 300) and attended.shape == (16, 8, 2, 128)


def test_which_models_take_them(monkeypatch):
    """Those on a GPU where Triton can compile, unless the setting is off."""
    gpu, cpu, model = torch.device("cuda", 0), torch.device("cpu"), ModelConfig(path="some")
    monkeypatch.setattr(attention, "lacking_for_triton", lambda: None)
    assert takes_triton(model, gpu) and chains_for(model, gpu) is not TORCH
    assert not takes_triton(model, cpu) and chains_for(model, cpu) is TORCH
    off = model.model_copy(update={"triton_kernels": False})
    assert not takes_triton(off, gpu) and chains_for(off, gpu) is TORCH
    there = torch.nn.Module()
    use_triton(there)
    for dtype, on_gpu, on in ((torch.bfloat16, True, True), (torch.float32, True, False), (torch.float32, False, True)):
        factor = SimpleNamespace(dtype=dtype, is_cuda=on_gpu)
        assert uses_triton(there, factor) is on  # pyright: ignore[reportArgumentType]
        assert not uses_triton(torch.nn.Module(), factor)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(attention, "lacking_for_triton", lambda: "Triton is not installed")
    assert takes_triton(model, gpu), "a plan for another machine"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not takes_triton(model, gpu) and chains_for(model, gpu) is TORCH


COMPILE = """
import os
import re
import subprocess
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from posttrain.models.kernels import adamw, decode, layers, scores  # noqa: E402

MULTIPLES = ("dim", "words", "hidden_stride", "weight_stride")  # of 16, as are addresses

def size(kernel, constants, num_warps=8, num_stages=2, **types):
    options = dict(num_warps=num_warps, num_stages=num_stages)
    constants = constants | {name: None for name, type in types.items() if type is None}
    given = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    sixteen = [name for name, type in given.items() if type[0] == "*" or name in MULTIPLES]
    alike = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in sixteen}
    made = triton.compile(ASTSource(kernel, given, constants, alike), GPUTarget("cuda", 90, 32), options)
    code = Path(os.environ["TRITON_CACHE_DIR"]) / "code.cubin"
    code.write_bytes(made.asm["cubin"])
    reader = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.check_output([reader, "--dump-resource-usage", code], text=True)
    print(kernel.__name__, len(made.asm["cubin"]), made.metadata.shared, re.search(r"STACK:(\\d+)", usage)[1])

half, wide, whole = "*bf16", "*fp32", "*i64"
head = dict(hidden=half, weight=half, bias=None, target=whole, scale="fp32", softcap="fp32")
for most, block in scores.BLOCKS.items():
    options = {name: block[name] for name in ("num_warps", "num_stages")}
    sizes = {name: block[name] for name in ("ROWS", "WORDS", "INNER")}
    constants = dict(HAS_BIAS=False, HAS_CAP=False, PRECISION="tf32", WIDE=False, **sizes)
    size(scores._forward, constants, **options, **head, highest_SN=wide, total_SN=wide, along_SN=wide, chosen_N=wide)
    size(scores._gradient, constants | dict(HAS_LOGPROB=True, HAS_ENTROPY=True), **options, **head, log_z_N=wide,
         entropy_N=wide, grad_logprob_N=wide, grad_entropy_N=wide, grad_logits=half)
row = dict(ROWS=4, WIDTH=1024)
size(layers._rms_norm, row, x=half, weight=half, y=half, rstd=wide, eps="fp32")
size(layers._rms_norm_gradients, row | dict(WEIGHT=True), x=half, weight=half, rstd=wide, grad_y=half, grad_x=half,
     grad_weight=wide)
size(layers._rotate, dict(ROWS=64, HALF=64), x=half, cos=half, sin=half, y=half)
size(layers._swiglu, dict(COLUMNS=1024), gate=half, up=half, y=half)
size(layers._swiglu_gradients, dict(COLUMNS=1024, AGAIN=True), gate=half, up=half, grad_y=half, grad_gate=half,
     grad_up=half, y=half)
size(decode._part, dict(WINDOWED=False, CAPPED=False, PRECISION="tf32", WIDE=False, QUERIES=16, COLUMNS=64, SIZE=128),
     query=half, key=half, value=half, row_HM=whole, count_H=whole, at_R=whole, out_SHKQd=wide, highest_SHKQ=wide,
     total_SHKQ=wide, scale="fp32", softcap="fp32")
size(decode._entered, dict(NORMED=True, EACH=2, HALF=64), num_warps=1, query=half, key=half, value=half, cos=half,
     sin=half, query_weight=half, key_weight=half, column_R=whole, turned=half, own_key=half, own_value=half,
     eps="fp32")
size(adamw._adamw, dict(BLOCK=adamw.BLOCK), places=whole, numbers=wide, tensor_B=whole, start_B=whole, beta1="fp32",
     beta2="fp32", eps="fp32")
size(decode._joined, dict(EACH=2, SIZE=128), group_R=whole, member_R=whole, prompt_out=wide, prompt_highest=wide,
     prompt_total=wide, own_out=wide, own_highest=wide, own_total=wide, result=half)
"""


@pytest.mark.slow
def test_they_compile_for_a_gpu(tmp_path):
    """To machine code of an H100 (sm_90), with no more shared memory than a block may have there (227 KB), and with all
    variables in registers."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    made = [line.split() for line in done.stdout.splitlines()]
    assert len(made) == 13
    for need, (_, _, shared, _) in zip([need for need in scores.BLOCKS for _ in range(2)], made, strict=False):
        assert int(shared) <= 9 * need // 8
    assert all(int(code) > 1000 and int(shared) <= 227 << 10 for _, code, shared, _ in made)
    assert all(int(stack) <= 16 for *_, stack in made), "too many variables are in memory"


def test_scores_that_no_kernel_has_are_computed_by_pytorch():
    """A model that uses the kernels gives the mean log-probability and the top entropy of one that does not."""
    [whole] = pack(forest(), 1000)
    model = make("qwen3")
    model.set_attn_implementation("packed")
    want = Scorer(model)(whole, top=5)
    use_triton(model)
    got = Scorer(model)(whole, top=5)
    assert want.mean_N is not None and got.mean_N is not None
    torch.testing.assert_close((got.mean_N, got.top_entropy_N), (want.mean_N, want.top_entropy_N), rtol=0, atol=1e-5)
