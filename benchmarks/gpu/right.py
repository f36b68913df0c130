"""Part `right`: what must hold on every device, from masks to whole runs.

The oracles are those of tests/test_equivalence.py: models with sharp attention and a forest of trees
(benchmarks/families.py), one sequence at a time. The reference is computed on the CPU in float32. In bfloat16, the
error of a pack may be at most three times the error of plain transformers in bfloat16 on the same device. On an H200
the ratio was 0.6 to 2.3 for seven samples of Cohere's weights, whose gradients here are lost in rounding, and 0.8 to
1.1 for Qwen3's and Gemma 2's.
Whole runs are in runs.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.families import forest, make
from benchmarks.gpu import runs
from benchmarks.gpu.common import FLASH, Case, CheckError, Goal, Setup
from benchmarks.gpu.shapes import model_folder
from posttrain.batch import Example, Node, pack, sequences
from posttrain.config import ModelConfig
from posttrain.engines import EmbeddedEngine, Sampling
from posttrain.models.attention import PackedMask, packed_attention
from posttrain.models.families import FAMILIES, use_triton
from posttrain.models.graphs import padded
from posttrain.models.lean import TORCH, Kernels, lean
from posttrain.models.load import load_model
from posttrain.models.matmul import place
from posttrain.models.nodes import Paths
from posttrain.models.sharding import own_part, shard
from posttrain.optim.adamw import AdamW
from posttrain.scoring import Scorer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# In float32: nats of a log-probability, and shares of the largest gradient. A GPU sums in a different order.
EXACT = {"cpu": (1e-5, 1e-4), "cuda": (1e-3, 1e-3)}
HEADS = (64, 96, 128, 256)
KERNELS_OF = ("qwen3", "llama")
# Trees of packs: the length of a node, and its children.
SHAPES = {
    "a sequence": [[2048]],
    "a pair": [[1024, [512], [512]]],
    "a prompt with eight": [[256, *[[224]] * 8]],
    "rows": [[128]] * 16,
    "three levels": [[512, [512, [256], [300]], [512]], [130]],
}
GROUPS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
RMS_GOAL = Goal("rms", most=0.03)
Sides = tuple[Tensor, Tensor]  # log-probabilities, and all gradients


def cases(setup: Setup) -> Iterator[Case]:
    yield from runs.replayed(setup)
    for family in ("qwen3", "bloom") if setup.tiny else FAMILIES:
        for dtype in DTYPES:
            yield Case(f"packed = one by one, {family}, {dtype}", partial(packed_is_plain, setup, family, dtype))
    for size in HEADS[:1] if setup.tiny else HEADS:
        yield Case(f"Flex = dense, heads of {size}", partial(flex_is_dense, setup, size))
        yield Case(f"Flex = dense, backward, heads of {size}", partial(flex_backward, setup, size), ("CUDA",))
        for shape in SHAPES:
            name = f"FlashAttention 4 = dense, {shape}, heads of {size}"
            yield Case(name, partial(paths_are_dense, setup, shape, size), ("CUDA", FLASH))
    for family in KERNELS_OF:
        for dtype in DTYPES:
            name = f"Triton = PyTorch, {family}, {dtype}"
            yield Case(name, partial(kernels_change_nothing, setup, family, dtype), ("CUDA",))
    yield Case("masters in halves = whole masters", partial(halves_are_whole, setup), ("CUDA",))
    yield Case("engine = scorer, float32", partial(engine_is_scorer, setup))
    yield Case("engine = scorer, 0.6B, bfloat16", partial(engine_and_trainer, setup), (), (RMS_GOAL,))
    yield Case("graphs on = graphs off", partial(graphs_change_nothing, setup), ("CUDA",))
    for dtype in DTYPES:
        yield Case(f"sharded over one rank = whole, {dtype}", partial(sharded_is_whole, setup, dtype))
    yield from runs.cases(setup)


# --- packs ------------------------------------------------------------------------------------------------------------


def packed_is_plain(setup: Setup, family: str, dtype: str) -> dict[str, float]:
    examples = forest()
    [whole] = pack(examples, 1000)
    weight_N = torch.linspace(0.5, 1.5, len(whole.target_N))
    model = make(family).to(DTYPES[dtype]).float()
    truth = backward(model, one_by_one(model, examples), weight_N)
    model.to(setup.device, DTYPES[dtype])
    plain = backward(model, one_by_one(model, examples), weight_N) if dtype == "bfloat16" else truth
    model.set_attn_implementation("packed" if FAMILIES[family].packed else "eager")
    lean(model)
    got = backward(model, Scorer(model)(whole.to(setup.device)).logprob_N, weight_N)
    if dtype == "float32":
        errors = [float((a - b).abs().max()) for a, b in zip(got, truth, strict=True)]
        errors[1] /= float(truth[1].abs().max())
        limits = EXACT[setup.device.type]
    else:
        errors, own = ([rms(a - b) for a, b in zip(side, truth, strict=True)] for side in (got, plain))
        limits = [3 * error + 0.002 * rms(right) for error, right in zip(own, truth, strict=True)]
    for what, error, limit in zip(("log-probabilities", "gradients"), errors, limits, strict=True):
        if not error <= limit:
            raise CheckError(f"{what} differ by {error:.2e}, at most {limit:.2e}")
    return {"error": errors[0], "gradient_error": errors[1]}


def one_by_one(model, examples: list[Example]) -> Tensor:
    """Log-probabilities (N) by plain transformers, one sequence at a time, in the order of a pack's N axis."""
    out = []
    for ids, trained in (path for example in examples for tree in example.trees for path in sequences(tree)):
        tokens = torch.from_numpy(ids)[None].to(model.device)
        log_p = model(input_ids=tokens, use_cache=False).logits[0, :-1].float().log_softmax(-1)
        out.append(
            log_p.gather(1, tokens[0, 1:, None]).squeeze(1)[torch.from_numpy(trained[1:].copy()).to(model.device)]
        )
    return torch.cat(out)


def backward(model, logprob_N: Tensor, weight_N: Tensor) -> Sides:
    """The log-probabilities, and all gradients of their weighted sum in one vector, on the CPU in float32."""
    (logprob_N * weight_N.to(logprob_N)).sum().backward()
    grads = [own_part(p.grad).float().cpu().flatten() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return logprob_N.detach().float().cpu(), torch.cat(grads)


def rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def compared(dtype: str, right: Sides, found: Sides) -> list[float]:
    """The errors of log-probabilities and gradients relative to their root mean square."""
    errors = [rms(a - b) / rms(b) for a, b in zip(found, right, strict=True)]
    most = 1e-4 if dtype == "float32" else 0.03
    for what, error in zip(("log-probabilities", "gradients"), errors, strict=True):
        if not error <= most:
            raise CheckError(f"{what} differ by {error:.1%} (RMS), at most {most:.1%}")
    return errors


def kernels_change_nothing(setup: Setup, family: str, dtype: str) -> dict[str, float]:
    """Compare scores, gradients and sampled tokens by models/kernels and by PyTorch's operations on one device."""
    from posttrain.models.kernels import layers

    [whole] = pack(forest(), 1000)
    weight_N, found, sampled = torch.linspace(0.5, 1.5, len(whole.target_N)), [], []
    for chains in (TORCH, Kernels.of(layers)):
        model = make(family, use_sliding_window=False, layer_types=None, head_dim=16).to(setup.device, DTYPES[dtype])
        model.set_attn_implementation("packed")
        lean(model, chains)
        if chains is not TORCH:
            place(model, bases=True)
            use_triton(model)
        found.append(backward(model, Scorer(model)(whole.to(setup.device)).logprob_N, weight_N))
        groups = EmbeddedEngine(model).generate(prompts_for(model.config.vocab_size), SAMPLED)
        sampled.append([completion.tokens for group in groups for completion in group])
    errors = compared(dtype, *found)
    if dtype == "float32" and sampled[0] != sampled[1]:
        raise CheckError("other tokens are sampled")
    return {"error": errors[0], "gradient_error": errors[1]}


def halves_are_whole(setup: Setup) -> dict[str, float]:
    """Compare ten updates of masters in halves, by posttrain's kernel, with those of whole masters by torch's AdamW."""
    made, start = [], torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    for in_halves in (False, True):
        layer = torch.nn.Linear(1024, 1024, bias=False)
        layer.weight.data = start.clone()
        optimizer = AdamW(layer.to(setup.device), torch.bfloat16, weight_decay=0.1, in_halves=in_halves)
        for step in range(10):
            grad = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(step))
            optimizer.masters["weight"].grad = grad.to(setup.device)
            optimizer.step(1e-3)
        made.append((optimizer.values["weight"], layer.weight.detach()))
    (whole, _), (halved, weight) = made
    error = rms(halved - whole) / rms(whole)
    if not error <= 1e-6:
        raise CheckError(f"masters differ by {error:.1e} (RMS)")
    if not bool(((weight.float() - whole).abs() <= whole.abs() / 256 + 1e-6).all()):
        raise CheckError("weights are not the rounded masters")
    return {"error": error}


# --- attention --------------------------------------------------------------------------------------------------------


def attention_inputs(setup: Setup, size: int) -> tuple[PackedMask, list[Tensor]]:
    [whole] = pack(forest(), 256, pad_to=256)
    torch.manual_seed(0)
    qkv = [torch.randn(1, heads, 256, size).to(setup.device) for heads in (4, 2, 2)]
    return PackedMask(whole.to(setup.device)), qkv


def dense(mask: PackedMask, qkv: list[Tensor], window: int | None) -> Tensor:
    given = [tensor.float() for tensor in qkv]
    return torch.nn.functional.scaled_dot_product_attention(*given, mask.dense(window), enable_gqa=True)


def flex_is_dense(setup: Setup, size: int) -> dict[str, float]:
    """Compare FlexAttention, with the pack's blocks, with dense attention. If not compiled, it has no backward."""
    mask, qkv = attention_inputs(setup, size)
    real = slice(0, mask.num_tokens)
    worst = 0.0
    for window in (None, 5):
        got = flex_attention(*qkv, block_mask=mask.blocks(window), enable_gqa=True)
        worst = max(worst, float((got - dense(mask, qkv, window))[:, :, real].abs().max()))
    if not worst <= 1e-4:
        raise CheckError(f"outputs differ by {worst:.2e}")
    return {"error": worst}


def flex_backward(setup: Setup, size: int) -> dict[str, float]:
    """Compare what a layer calls on a GPU with dense attention, in bfloat16, forward and backward."""
    mask, qkv = attention_inputs(setup, size)
    given = [tensor.bfloat16().requires_grad_() for tensor in qkv]
    real, worst = slice(0, mask.num_tokens), 0.0
    for window in (None, 5):
        out, _ = packed_attention(torch.nn.Identity(), *given, None, sliding_window=window, packed=mask)
        got = out.transpose(1, 2)[:, :, real].float()
        want = dense(mask, given, window)[:, :, real]
        weight = torch.randn_like(want)
        sides = [(o, *torch.autograd.grad((o * weight).sum(), given)) for o in (got, want)]
        worst = max(worst, *(rms((a - b).float()) / rms(b.float()) for a, b in zip(*sides, strict=True)))
    if not worst <= 0.02:
        raise CheckError(f"outputs or gradients differ by {worst:.1%} (RMS)")
    return {"error": worst}


def paths_are_dense(setup: Setup, shape: str, size: int) -> dict[str, float]:
    """Compare attention over gathered paths with dense attention and with itself, in bfloat16, with gradients."""
    trees = [tree(nodes) for nodes in SHAPES[shape]]
    [whole] = pack([Example((each,), row) for row, each in enumerate(trees)], 1 << 14)
    mask = PackedMask(padded(whole.to(setup.device)))
    worst, paths, real = 0.0, Paths.of(mask.nodes, setup.device), slice(0, mask.num_tokens)
    torch.manual_seed(0)
    weight = torch.randn(1, 4, mask.num_tokens, size).to(setup.device)
    for window, key_heads in ((None, 2), (100, 2), (None, 4)):  # with as many, gradients of keys are written directly
        shapes = [(1, heads, len(mask.end_T), size) for heads in (4, key_heads, key_heads)]
        given = [torch.randn(shape).to(setup.device, torch.bfloat16).requires_grad_() for shape in shapes]
        outs = [paths.attend(*given, size**-0.5, window).float() for _ in range(2)] + [dense(mask, given, window)]
        outs = [out[:, :, real] for out in outs]
        ours, again, want = [(o, *torch.autograd.grad((o * weight).sum(), given)) for o in outs]
        if not all(map(torch.equal, ours, again)):
            raise CheckError("two passes differ")
        worst = max(worst, *(rms((a - b).float()) / rms(b.float()) for a, b in zip(ours, want, strict=True)))
    if not worst <= 0.02:
        raise CheckError(f"outputs or gradients differ by {worst:.1%} (RMS)")
    return {"error": worst}


def tree(nodes: list) -> Node:
    """A tree of a length and its children."""
    length, *children = nodes
    if not children:
        return Node([1] * (length + 1), trained=True)
    return Node([1] * length, children=tuple(tree(child) for child in children))


# --- the engine -------------------------------------------------------------------------------------------------------

SAMPLED = Sampling(temperature=0.8, max_completion_length=14, num_generations=3, seed=3)


def sharp_policy(setup: Setup):
    policy = make("qwen3", use_sliding_window=False, layer_types=None, head_dim=16).to(setup.device)
    policy.set_attn_implementation("packed")
    lean(policy)
    return policy


def prompts_for(vocabulary: int) -> list[list[int]]:
    torch.manual_seed(0)
    return [torch.randint(3, vocabulary, (length,)).tolist() for length in (5, 11, 1, 6)]


def differences(policy, sampling: Sampling) -> Tensor:
    """Log-probabilities of sampled tokens: the engine's minus the scorer's."""
    prompts = prompts_for(policy.config.vocab_size)
    engine = EmbeddedEngine(policy)
    groups, found = engine.generate(prompts, sampling), []
    engine.close()
    for prompt, group in zip(prompts, groups, strict=True):
        tree = Node(prompt, children=tuple(Node(completion.tokens, True) for completion in group))
        [one] = pack([Example((tree,), 0)], 1 << 20)
        with torch.no_grad():
            scored = Scorer(policy)(one.to(policy.device), sampling.temperature).logprob_N.cpu()
        found.append(torch.tensor([value for completion in group for value in completion.logprobs]) - scored)
    return torch.cat(found)


def engine_is_scorer(setup: Setup) -> dict[str, float]:
    error = float(differences(sharp_policy(setup), SAMPLED).abs().max())
    if not error <= EXACT[setup.device.type][0]:
        raise CheckError(f"log-probabilities differ by {error:.2e}")
    return {"error": error}


def engine_and_trainer(setup: Setup) -> dict[str, float]:
    config = ModelConfig(path=str(model_folder(setup, "0.6B")), dtype="bfloat16")
    policy = load_model(config, "lm", setup.dtype, setup.device)
    difference = differences(policy, replace(SAMPLED, temperature=1.0, max_completion_length=8 if setup.tiny else 128))
    if not math.isfinite(rms(difference)):
        raise CheckError("log-probabilities are not finite")
    return {"rms": rms(difference), "error": float(difference.abs().max())}


def graphs_change_nothing(setup: Setup) -> dict[str, float]:
    policy = sharp_policy(setup)
    prompts = prompts_for(policy.config.vocab_size)
    sides = [EmbeddedEngine(policy, static=static).generate(prompts, SAMPLED) for static in (True, False)]
    one, two = ([c for group in side for c in group] for side in sides)
    if [c.tokens for c in one] != [c.tokens for c in two]:
        raise CheckError("other tokens are sampled")
    logprobs = [torch.tensor([value for c in side for value in c.logprobs]) for side in (one, two)]
    return {"error": float((logprobs[0] - logprobs[1]).abs().max())}


# --- ranks ------------------------------------------------------------------------------------------------------------


def sharded_is_whole(setup: Setup, dtype: str) -> dict[str, float]:
    """Compare scores and gradients of FSDP2 on one rank (on a GPU, an NCCL group) with those of the unsharded model."""
    [whole] = pack(forest(), 1000)
    weight_N, found = torch.linspace(0.5, 1.5, len(whole.target_N)), []
    dist.init_process_group(GROUPS[setup.device.type], store=dist.HashStore(), rank=0, world_size=1)
    try:
        for sharded in (False, True):
            model = make("qwen3").to(setup.device, torch.float32 if sharded else DTYPES[dtype])
            model.set_attn_implementation("packed")
            lean(model)
            if sharded:
                shard(model, 1, setup.device, DTYPES[dtype])
            found.append(backward(model, Scorer(model)(whole.to(setup.device)).logprob_N, weight_N))
        total = torch.ones(3, device=setup.device)
        dist.all_reduce(total)
    finally:
        dist.destroy_process_group()
    errors = compared(dtype, *found)
    return {"error": errors[0], "gradient_error": errors[1]}
